"""Run `jaxdist.train` with a bit flip; `FLIP=position:step` selects device and step.

For launchers: `--program "python tests/bit_flip_train.py"`. After that step of the first attempt,
one bit in the memory of that device flips. A defective memory cell or link has the same effect.
"""

import dataclasses
import os

import jax
from test_resilience_sdc import flipped

from jaxdist import runtime, train
from jaxdist.run.monitoring.monitor import Monitor

POSITION, STEP = map(int, os.environ["FLIP"].split(":"))
real = Monitor.track_compiles


def damaged(self, function, name=None):
    inner, done = real(self, function, name), []

    def step(state, *rest):
        state, metrics = inner(state, *rest)
        done.append(None)
        if len(done) == STEP:
            params = dict(state.params)
            params["head"] = jax.tree.map(lambda x: flipped(x, POSITION, bit=3), params["head"])
            state = dataclasses.replace(state, params=params)
        return state, metrics

    step.seconds, step.compile = 0.0, inner.compile  # as a tracker has
    return step


if __name__ == "__main__":
    Monitor.track_compiles = damaged
    runtime.run_command(train.main)
