#!/usr/bin/env bash
# Trains the drafters that `hf-falcon bench` compares with for SmolLM2-135M-Instruct: on the same tokens, with the same
# trainer, steps and learning rate as the first stage of the shipped drafter.
#
#     bash examples/train_peers.sh runs/peers tokens.safetensors [more token files]
#     hf-falcon bench --data mt_bench humaneval gsm8k --methods plain,eagle_like,medusa_like,falcon \
#         --eagle_like runs/peers/eagle_like --medusa_like runs/peers/medusa_like
#
# The token files hold the target's own responses (`hf-falcon prepare`, see train_a_drafter.sh). After an
# interruption the same command resumes from the last checkpoint. OPTIONS replaces any option below; a trial run of two
# steps, with a small token file:
#
#     OPTIONS="--max_steps 2 --per_device_train_batch_size 2" \
#         bash examples/train_peers.sh runs/rehearsal few_tokens.safetensors
# Hardware: one CPU thread, and 1.2 kB of disk a token for the target's features, which both trainings share.
# Minutes: some 45 each.
# Expected: two drafters in runs/peers; docs/benchmarks.md has their tau.
set -euo pipefail
out=${1:?the folder of the run}
data=("${@:2}")
: "${data:?a token file}"

train() { # name, further options
    hf-falcon train --data "${data[@]}" --features_dir "$out/features" --output_dir "$out/$1" --num_lstm_layers 0 \
        --draft_vocab_size 8192 --bf16 --per_device_train_batch_size 8 --max_steps 2800 --learning_rate 8e-4 \
        --warmup_steps 100 --lr_scheduler_type cosine --distillation_weight 1 --seed 1 --save_total_limit 2 "${@:2}" \
        ${OPTIONS:-}
}

# One token a pass from a linear layer, causal; no unrolled passes.
train eagle_like --block_size 1
# Four heads on the newest feature, one pass; a static tree.
train medusa_like --architecture medusa_like --block_size 4
