#!/usr/bin/env bash
# Measures the speed-up of a drafter on your own prompts, compared with plain decoding, prompt lookup and a fixed tree.
#
#     bash examples/benchmark.sh prompts.jsonl [target] [drafter]
#
# Each line of the file is {"turns": ["a prompt"]}. OPTIONS replaces any option of `hf-falcon bench` below.
#
# Hardware: two CPU cores, or one GPU.
# Minutes: 3 for the demo's models on two CPU cores.
# Expected: a table of speed-ups in which all outputs of float32 are identical, and a report with a picture in
# runs/benchmark. With the demo's models `falcon` is above 1 and has the highest speed-up.
set -euo pipefail
: "${1:?a file of prompts}"

hf-falcon bench --data "$1" ${2:+--target "$2"} ${3:+--drafter "$3"} \
    --methods plain,prompt_lookup,falcon_static,falcon \
    --limit 10 --max_turns 1 --max_new_tokens 64 --dtype float32 --output runs/benchmark ${OPTIONS:-}
