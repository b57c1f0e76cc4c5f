#!/usr/bin/env bash
# Trains the shipped drafter of SmolLM2-135M-Instruct again, and for longer, on one GPU, in pieces of under ten minutes.
#
#     bash examples/train_on_gpu.sh runs/gpu tokens.safetensors [more token files]
#
# After an interruption the same command resumes from the last checkpoint. If you have a machine for ten minutes at a
# time, ONE_PIECE=1 ends after each piece: run it again until it says that the drafter is done.
#
# The token files hold the target's own responses (`hf-falcon prepare`, see train_a_drafter.sh). The steps are for data
# of 253 tokens a sample, so 64 * 253 = 16,200 tokens a step:
#
#     5,000 steps = 81 million tokens presented, then 1,200 steps = 19 million, 100 million together.
#
# In half an hour that is 56,000 tokens a second; `tokens_per_second` in the log shows whether a GPU reaches it. A file
# of 1.36 million tokens is seen 74 times, and more data is better than more epochs. FIRST_STEPS and SECOND_STEPS replace
# the steps, OPTIONS any option below. A trial run of some minutes on a CPU, stopped after every step:
#
#     FIRST_STEPS=2 SECOND_STEPS=2 \
#         OPTIONS="--max_minutes 0 --per_device_train_batch_size 2 --eval_samples 2 --final_tau_prompts 0" \
#         bash examples/train_on_gpu.sh runs/rehearsal tokens.safetensors
#
# Hardware: one GPU.
# Minutes: 30 at the speed above.
# Expected: a drafter in runs/gpu/second. Not yet run on a GPU: rates and steps are chosen, not measured.
set -euo pipefail
out=${1:?the folder of the run}
data=("${@:2}")
: "${data:?a token file}"

train() { # stage, steps, further options
    local folder=$out/$1
    until finished "$folder" "$2"; do
        hf-falcon train --data "${data[@]}" --output_dir "$folder" --max_steps "$2" --max_minutes 9 --bf16 \
            --per_device_train_batch_size 64 --block_size 1 --num_lstm_layers 0 \
            --draft_vocab_size 8192 --distillation_weight 1 --lr_scheduler_type cosine --eval_passes 3 \
            --logging_steps 50 --save_steps 500 --save_total_limit 2 --seed 1 "${@:3}" ${OPTIONS:-}
        if [ -n "${ONE_PIECE:-}" ]; then
            echo "A piece of $folder is done: run the same command again."
            exit
        fi
    done
}

finished() { # folder, steps
    [ -f "$1/trainer_state.json" ] &&
        python -c 'import json, sys; sys.exit(json.load(open(sys.argv[1]))["global_step"] < int(sys.argv[2]))' \
            "$1/trainer_state.json" "$2"
}

train first "${FIRST_STEPS:-5000}" --learning_rate 1e-3 --warmup_steps 100
train second "${SECOND_STEPS:-1200}" --init_from "$out/first" --unroll_passes 3 --learning_rate 5e-4 --warmup_steps 30
echo "The drafter is done: $out/second"
