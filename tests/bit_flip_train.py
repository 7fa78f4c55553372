"""`jaxdist.train` in which a bit flips: `FLIP=place:step` names a device of the mesh and a moment.

For launchers: `--program "python tests/bit_flip_train.py"`. The flip befalls the memory of that one
device after that step of the first attempt, as a bad cell or a broken link would bring it about.
"""

import dataclasses
import os

import jax
from test_resilience_sdc import flipped

from jaxdist import runtime, train
from jaxdist.run.monitoring.monitor import Monitor

PLACE, STEP = map(int, os.environ["FLIP"].split(":"))
real = Monitor.track_compiles


def damaged(self, function, name=None):
    inner, done = real(self, function, name), []

    def step(state, *rest):
        state, metrics = inner(state, *rest)
        done.append(None)
        if len(done) == STEP:
            params = dict(state.params)
            params["head"] = jax.tree.map(lambda x: flipped(x, PLACE, bit=3), params["head"])
            state = dataclasses.replace(state, params=params)
        return state, metrics

    step.seconds, step.compile = 0.0, inner.compile  # as a tracker has them
    return step


if __name__ == "__main__":
    Monitor.track_compiles = damaged
    runtime.run_command(train.main)
