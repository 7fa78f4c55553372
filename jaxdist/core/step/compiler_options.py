"""Compiler options of the train step on GPUs, and a check that the compiler accepts them.

An option is listed here if the compiled program gains by it
(`scripts/bench/results/gpu_program.md`). `XLA_FLAGS` has priority. CPU programs have none.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState
from jaxdist.core.step_plan import StepPlan
from jaxdist.runtime.backend import memory_fraction, xla_flag_names
from jaxdist.runtime.formatting.numbers import in_bytes

log = logging.getLogger("jaxdist")

MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
"""Percent of XLA's own limit of a schedule: 0.8 of the GPU's memory less the arguments."""

NO_ZEROS = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
"""Skips zeroing memory that a loop then fills slice by slice."""

_OWN_SHARE = 0.8  # of the memory, in XLA's GetSchedulerMemoryLimit
_MOST_PERCENT = 10_000  # an int32 to the compiler; more is as good as no limit
_SCRATCH = 0.02  # of the memory: cuDNN's scratch, which the compiler counts as none


class CompilerOption(NamedTuple):
    """One option of the compiler, and the reason for it."""

    name: str
    value: int | bool
    why: str

    def describe(self) -> str:
        """Return one line for the start of a run."""
        return f"compiler option {self.name}={str(self.value).lower()}: {self.why}"


def choose_options(
    plan: StepPlan, layout: Layout, make_state: Callable[[], TrainState]
) -> tuple[CompilerOption, ...]:
    """Return the options of a train step on this layout that its compiler accepts; none on CPUs.

    Rejected options are logged. `make_state` returns shapes, dtypes and shardings of the state.
    """
    if not plan.avoids_zeroed_buffers:
        return ()
    candidates = [
        CompilerOption(NO_ZEROS, True, "buffers for saved activations are not zeroed first")
    ]
    if plan.memory_bytes:
        limit = memory_limit(plan.memory_bytes, memory_fraction(), argument_bytes(make_state()))
        candidates += [limit] if limit else []
    in_flags = xla_flag_names()
    options = [option for option in candidates if option.name not in in_flags]
    own = layout.mesh.local_devices or [layout.mesh.devices.flat[0]]
    refused = _refused(own[0], tuple((option.name, option.value) for option in options))
    for name, reason in refused.items():
        log.warning("compiler option %s is left out: %s", name, reason)
    return tuple(option for option in options if option.name not in refused)


def memory_limit(memory_bytes: int, fraction: float, arguments: int) -> CompilerOption | None:
    """Return the option for the memory of XLA's schedule; None if XLA has nothing to scale.

    By default XLA schedules for 0.8 of the memory. A step that needs more is compiled with fewer
    collectives that overlap with compute. The process takes `fraction` of `memory_bytes`; the
    program's `arguments` are bytes on one GPU.
    """
    room = _OWN_SHARE * memory_bytes - arguments
    usable = (fraction - _SCRATCH) * memory_bytes - arguments
    if room <= 0 or usable <= 0:
        return None
    total = (fraction - _SCRATCH) * memory_bytes
    return CompilerOption(
        MEMORY_LIMIT,
        min(math.floor(100 * usable / room), _MOST_PERCENT),
        f"the schedule may use {in_bytes(total)} of each GPU, as this run may",
    )


def argument_bytes(state: TrainState) -> int:
    """Return the bytes of one device's part of the train state, including host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


@functools.lru_cache(maxsize=16)
def _refused(device: Any, options: tuple[tuple[str, int], ...]) -> Mapping[str, str]:
    """Return the options that the compiler of this device rejects -> its message."""
    program = jax.jit(lambda x: x + 1).lower(
        jax.ShapeDtypeStruct((), jnp.int32, sharding=SingleDeviceSharding(device))
    )
    refused = {}
    for name, value in options:
        try:
            program.compile(compiler_options={name: str(value)})
        except jax.errors.JaxRuntimeError as error:
            refused[name] = str(error).splitlines()[0]
    return refused
