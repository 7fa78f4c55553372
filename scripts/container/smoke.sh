#!/usr/bin/env bash
# What must hold inside the image; build.sh runs it there, as the user of the image.
set -euo pipefail

[ "$(id -u)" != 0 ] || { echo "smoke: this is root"; exit 1; }
for place in /opt/jaxdist /opt/python; do
    [ ! -w "$place" ] || { echo "smoke: $place can be written"; exit 1; }
done

# Every package has the version of the lock file and finds those that it needs.
python -m pip check
python "$(dirname "$0")/locked.py" /opt/jaxdist/constraints.txt

# A run of twelve steps, continued to sixteen, and text from it; with SMOKE=short, four steps.
work=$(mktemp -d)
export JAX_PLATFORMS=cpu JAXDIST_CACHE=$work/cache
train() {
    python -m jaxdist.train --run-dir "$work/run" --model.d-model 16 --model.num-heads 2 \
        --model.num-layers 1 --model.mlp-dim 32 --data.tokenizer bytes --train.seq-len 16 \
        --train.global-batch-size 4 --train.steps "$1" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
if [ "${SMOKE:-}" = short ]; then
    wanted=4
    train 4
else
    wanted=16
    train 12
    train 16
    python -m jaxdist.generate "$work/run" --prompt 'def ' >"$work/text" 2>&1 || { cat "$work/text"; exit 1; }
fi
steps=$(ls "$work/run/checkpoints" | sort -n | tail -n 1)
[ "$steps" = "$wanted" ] || { echo "smoke: the newest checkpoint is of step $steps"; exit 1; }
rm -r "$work"
echo "smoke: trained to step $steps as user $(id -u)"
