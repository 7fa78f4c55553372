#!/usr/bin/env bash
# One GPU, under ten minutes: GPT-2 124M beside the bare step, 1.7B and Llama2-7B shapes, and 1.7B
# on rows packed from 4 documents (one call of cuDNN's kernel a layer) and 20 (five calls), and with
# products in 8 bits. Last, a ring's steps of an 8B row of 16,384 tokens on one GPU, beside one call
# for the whole row.
# Usage: scripts/bench/h200.sh [OUT.json prefix]; commit the tables under scripts/bench/results/.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-scripts/bench/results/h200}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
measure() { # one process each: a preset's memory peak must not be another's
  timeout 105 python3 scripts/bench/step.py --preset "$2" --json "$out-$1.json" "${@:3}" ||
    echo "$1: failed with exit code $?"
}
measure gpt2-124m gpt2-124m --blocks 6 --block-steps 10
measure 1.7b 1.7b --blocks 6 --block-steps 3
measure 1.7b-packed4 1.7b --blocks 4 --block-steps 3 --documents 4
measure 1.7b-packed20 1.7b --blocks 4 --block-steps 3 --documents 20
measure 1.7b-fp8 1.7b --blocks 4 --block-steps 3 --matmul-dtype fp8
measure llama2-7b llama2-7b --blocks 5 --block-steps 3 --moments bfloat16
timeout 70 python3 scripts/bench/ring_kernel.py --json "$out-ring.json" ||
  echo "ring: failed with exit code $?"
