"""Check a compiled step that moves activations to host memory between forward and backward.

Backward visits the layers in reverse, so it must read the last layer of a stack on the host first.
The XLA:GPU compilers of jax 0.10.2 and 0.11.0 record the order of forward for the read, which gives
wrong gradients without an error (openxla/xla#46231). Some others drop the placement silently.
"""

from __future__ import annotations

import re
from typing import Any

from jaxdist.plan.compiled.hlo import parse

ON_HOST = "S(5)"
"""Layout suffix of arrays in pinned host memory."""

_STRIDE = re.compile(r'"dynamic_slice_config":\{[^}]*"byte_stride":"(-?\d+)"')


def offload_problems(compiled: Any) -> list[str]:
    """Return why a compiled step must not run with activations in host memory; [] = it may."""
    fix = "Use --train.remat full, or another version of jax (0.11.1 or newer)."
    if not compiled.memory_analysis().host_temp_size_in_bytes:
        return [f"the compiler keeps on the GPU the activations that train.remat offloads. {fix}"]
    if wrong := forward_reads(compiled.as_text()):
        return [
            f"the compiled backward pass reads {', '.join(wrong)} in host memory in the order of "
            f"the forward pass, so gradients would be wrong. {fix}"
        ]
    return []


def forward_reads(program: str) -> list[str]:
    """Return the stacks in host memory that loops read first layer first, as HLO types."""
    wrong = set()
    for instructions in parse(program).computations.values():
        stacks = {
            one.name: one.type
            for one in instructions
            if one.opcode == "parameter" and ON_HOST in one.type
        }
        for one in instructions:
            source = one.operands.split(",")[0].strip().lstrip("%")
            stride = _STRIDE.search(one.attributes)
            if one.opcode == "dynamic-slice" and source in stacks and stride and int(stride[1]) > 0:
                wrong.add(stacks[source].split("{")[0])
    return sorted(wrong)
