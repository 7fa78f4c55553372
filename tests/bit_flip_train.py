"""Run `jaxdist.train` with a bit flip; `FLIP=position:step` selects device and step.

For launchers: `--program "python tests/bit_flip_train.py"`. After that step of the first attempt,
one bit in the memory of that device flips. A defective memory cell or link has the same effect.
"""

import dataclasses
import os

import jax
import numpy as np

from jaxdist import runtime, train
from jaxdist.run.monitoring.monitor import Monitor


def flipped(x: jax.Array, position: int, element: int = 3, bit: int = 0) -> jax.Array:
    """Flip one bit of an array in one device's memory; `position`: index of the mesh's device."""
    device = x.sharding.mesh.devices.flat[position]
    parts = []
    for shard in x.addressable_shards:
        part = np.array(shard.data)
        if shard.device == device:
            words = part.reshape(-1).view(f"u{part.dtype.itemsize}")
            words[element % words.size] ^= words.dtype.type(1 << bit)
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def flips_a_bit(track_compiles, position, at, bit):
    """Return `Monitor.track_compiles` whose steps flip a bit of the head after step `at`."""
    done = []

    def damaged(self, tracker):
        inner = track_compiles(self, tracker)

        def step(state, *rest):
            state, metrics = inner(state, *rest)
            done.append(None)
            if len(done) == at:
                params = dict(state.params)
                params["head"] = jax.tree.map(
                    lambda x: flipped(x, position, bit=bit), params["head"]
                )
                state = dataclasses.replace(state, params=params)
            return state, metrics

        step.seconds, step.compile = 0.0, inner.compile  # as a tracker has
        return step

    return damaged


if __name__ == "__main__":
    position, at = map(int, os.environ["FLIP"].split(":"))
    Monitor.track_compiles = flips_a_bit(Monitor.track_compiles, position, at, bit=3)
    runtime.run_command(train.main)
