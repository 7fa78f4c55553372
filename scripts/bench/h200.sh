#!/usr/bin/env bash
# One GPU, under ten minutes: GPT-2 124M beside the bare step, 1.7B and Llama2-7B shapes.
# Usage: scripts/bench/h200.sh [OUT.json prefix]; commit the tables under scripts/bench/results/.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-scripts/bench/results/h200}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
measure() { # one process each: a preset's memory peak must not be another's
  timeout 240 python3 scripts/bench/step.py --preset "$1" --json "$out-$1.json" "${@:2}" ||
    echo "$1: failed with exit code $?"
}
measure gpt2-124m --blocks 6 --block-steps 10
measure 1.7b --blocks 6 --block-steps 3
measure llama2-7b --blocks 5 --block-steps 3 --moments bfloat16
