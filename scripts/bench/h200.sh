#!/usr/bin/env bash
# Measure one GPU in about ten minutes: numeric checks, GPT-2 124M next to the bare step, 1.7B and
# Llama2-7B shapes, 1.7B on rows packed from 4 documents (one call of cuDNN's kernel a layer) and 20
# (five calls) and with products in 8 bits. Last, the hops of a ring with an 8B row of 16,384 tokens
# on one GPU, next to one call for the complete row.
# Usage: scripts/bench/h200.sh [OUT.json prefix] [NAME...]
# Each number is written when it is measured. A second start continues: complete files are kept, and
# compiled programs are cached. Names select measurements. Commit the tables under
# scripts/bench/results/.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-scripts/bench/results/h200}
selected=" ${*:2} "
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
limited() { # NAME SECONDS SCRIPT ARGUMENT...: one process each, for a memory peak of its own
  if [ "$selected" != "  " ] && [[ $selected != *" $1 "* ]]; then return; fi
  local began=$SECONDS code=0
  timeout "$2" python3 "scripts/bench/$3" --json "$out-$1.json" "${@:4}" || code=$?
  echo "$1: exit code $code after $((SECONDS - began)) s"
}
limited 1.7b 100 step.py --preset 1.7b --blocks 6 --block-steps 3
limited llama2-7b 100 step.py --preset llama2-7b --blocks 5 --block-steps 3 --moments bfloat16
limited gpt2-124m 100 step.py --preset gpt2-124m --blocks 6 --block-steps 10
limited 1.7b-packed4 100 step.py --preset 1.7b --blocks 4 --block-steps 3 --documents 4
limited ring 60 ring_kernel.py
limited checks 600 gpu_checks.py
limited 1.7b-packed20 100 step.py --preset 1.7b --blocks 4 --block-steps 3 --documents 20
limited 1.7b-fp8 240 step.py --preset 1.7b --blocks 4 --block-steps 3 --matmul-dtype fp8
