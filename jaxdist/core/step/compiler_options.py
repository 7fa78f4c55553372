"""Compiler options of the train step on GPUs, and a check that the compiler accepts them.

An option is listed here only if it improves the compiled program
(`scripts/bench/results/gpu_program.md`). `XLA_FLAGS` take precedence. CPUs use no options.
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

from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState
from jaxdist.core.step_plan import StepPlan
from jaxdist.runtime.backend import memory_fraction, xla_flag_names
from jaxdist.runtime.formatting.numbers import in_bytes

log = logging.getLogger("jaxdist")

MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
"""Memory limit of XLA's scheduler, in percent of its default."""

OVERLAPS = "xla_gpu_experimental_parallel_collective_overlap_limit"
MERGED_PRODUCTS = "xla_gpu_dot_merger_threshold_mb"
"""Merge products that share an operand up to this size."""

NO_ZEROS = "xla_gpu_enable_dus_accumulator_zero_init_elimination"
"""Do not zero buffers that a loop overwrites completely, slice by slice."""

_OWN_SHARE = 0.8  # of GPU memory: XLA's default in GetSchedulerMemoryLimit
_MOST_PERCENT = 10_000  # fits in the compiler's int32; higher values would have no effect
_SCRATCH = 0.02  # of GPU memory: scratch of cuDNN, which the compiler does not count


class CompilerOption(NamedTuple):
    """A compiler option and the reason for it."""

    name: str
    value: int | bool
    why: str

    def describe(self) -> str:
        """Format the option, its value and the reason as one line for the startup log."""
        return f"compiler option {self.name}={str(self.value).lower()}: {self.why}"


def choose_options(
    plan: StepPlan, layout: Layout, make_state: Callable[[], TrainState]
) -> tuple[CompilerOption, ...]:
    """Return the compiler options of a train step, () on CPUs; log those that are rejected."""
    if plan.platform != "gpu":
        return ()
    candidates = [
        CompilerOption(NO_ZEROS, True, "buffers for saved activations are not zeroed first")
    ]
    if layout.size(PIPELINE) > 1:
        why = "exchanges between stages may overlap with collectives of the layers"
        candidates.append(CompilerOption(OVERLAPS, 4, why))
        if plan.max_row_chunks > 1:
            why = "products of row chunks stay separate, and overlap with collectives of others"
            candidates.append(CompilerOption(MERGED_PRODUCTS, 0, why))
    if plan.memory_bytes:
        limit = memory_limit(plan.memory_bytes, memory_fraction(), argument_bytes(make_state()))
        candidates += [limit] if limit else []
    in_flags = xla_flag_names()
    options = [option for option in candidates if option.name not in in_flags]
    own = layout.mesh.local_devices or [layout.mesh.devices.flat[0]]
    refused = _refused(own[0], tuple((option.name, option.value) for option in options))
    for name, reason in refused.items():
        log.warning("the compiler rejects option %s, which is left out: %s", name, reason)
    return tuple(option for option in options if option.name not in refused)


def memory_limit(memory_bytes: int, fraction: float, arguments: int) -> CompilerOption | None:
    """Return the memory limit for XLA's scheduler; None if no memory is left for the program.

    By default XLA limits a schedule to 0.8 of the memory. If a step needs more, fewer collectives
    overlap with compute. The process may use `fraction`; `arguments` are bytes on one GPU.
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
    """Return the bytes of the train state on one device, including its part in host memory."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


@functools.lru_cache(maxsize=16)
def _refused(device: Any, options: tuple[tuple[str, int], ...]) -> Mapping[str, str]:
    """Return the compiler's error message for each option that it rejects on this device."""
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
