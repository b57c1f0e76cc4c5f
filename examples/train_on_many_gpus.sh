#!/usr/bin/env bash
# Trains a drafter for your own target on eight GPUs: first the target's responses, then the drafter.
#
#     bash examples/train_on_many_gpus.sh runs/many your/target dialogues.json
#
# Each command resumes after an interruption. accelerate_8_gpus.yaml sets the number of processes. A step sees
# 8 * 8 = 64 samples; with another number of processes, change --per_device_train_batch_size to keep that. Use --fsdp for
# a drafter whose optimiser does not fit on one GPU. PREPARE_OPTIONS and TRAIN_OPTIONS replace any option below.
#
# A trial run on two CPU processes:
#
#     LAUNCH="torchrun --nproc_per_node 2" TRAIN_OPTIONS="--bf16 false --max_steps 4" \
#         bash examples/train_on_many_gpus.sh runs/rehearsal your/target few_dialogues.json
#
# Hardware: eight GPUs of one machine. Run on CPU processes only, not yet on GPUs.
# Minutes: printed by `hf-falcon train --plan` with the same arguments.
# Expected: a drafter in runs/many/drafter; training.png there shows its loss falling.
set -euo pipefail
out=${1:?the folder of the run}
target=${2:?a target}
data=${3:?dialogues}
launch=${LAUNCH:-accelerate launch --config_file $(dirname "$0")/accelerate_8_gpus.yaml}
mkdir -p "$out"

$launch -m hf_falcon prepare --target "$target" --data "$data" --output "$out/tokens.safetensors" --batch_size 64 \
    ${PREPARE_OPTIONS:-}

$launch -m hf_falcon train --target "$target" --data "$out/tokens.safetensors" --output_dir "$out/drafter" \
    --block_size 1 --num_lstm_layers 0 --bf16 --per_device_train_batch_size 8 --learning_rate 1e-4 \
    --warmup_steps 200 --lr_scheduler_type cosine --distillation_weight 1 --num_train_epochs 4 --logging_steps 50 \
    --save_steps 1000 --save_total_limit 2 ${TRAIN_OPTIONS:-}
