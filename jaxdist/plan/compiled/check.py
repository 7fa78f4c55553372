"""Compile the train step with the real XLA:GPU compiler, for a description of GPUs.

Kernels are not autotuned, so memory is within a few percent and times are meaningless. The memory
of the CUDA context, NCCL and CUDA graphs is not included.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.axes import row_axes
from jaxdist.hardware import Cluster
from jaxdist.plan.compiled.collectives import Collective
from jaxdist.runtime.formatting.numbers import in_bytes, percent
from jaxdist.settings import write_toml

INSTALL = "pip install -c constraints.txt -e '.[plan]'"
"""Command that installs the compiler; it needs no GPU, driver or CUDA installation."""

_PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
_SYNCHRONOUS_BYTES = 64 * 2**20
_DETAIL_LINES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledMemory:
    """Bytes that one device needs for the step, by class.

    Attributes:
        argument_bytes: the state and the batch, except arguments in host memory.
        alias_bytes: outputs that reuse the buffers of donated arguments.
        workspace_bytes: scratch of cuDNN attention, which the compiler does not count.
        host_bytes: activations in host memory.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    workspace_bytes: int
    host_bytes: int

    @property
    def total_bytes(self) -> int:
        """Argument + output − alias + temporary + workspace: the bytes that must fit."""
        new = self.output_bytes - self.alias_bytes
        return self.argument_bytes + new + self.temporary_bytes + self.workspace_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One of the largest temporary buffers; arrays of `shapes` share it, largest first."""

    bytes: int
    shapes: tuple[str, ...]
    op_name: str


@dataclasses.dataclass(frozen=True)
class Remark:
    """A notable fact of the compiled program or of the compiler's log."""

    kind: Literal[
        "rematerialization", "memory", "synchronous", "reduction dtype", "attention", "offload"
    ]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The compiled train step of one device.

    Attributes:
        branch_shares: share of ticks in which a pipeline stage takes each branch
            (`simulation.branch_shares`); {} without a pipeline.
        program: HLO text after all compiler passes.
        attention: "cudnn", else "xla" if the model reads text, else "".
        offload: why the program must not run with activations in host memory.
    """

    memory: CompiledMemory
    buffers: tuple[Buffer, ...]
    collectives: tuple[Collective, ...]
    branch_shares: dict[str, float]
    program: str
    attention: str
    remarks: tuple[Remark, ...]
    offload: tuple[str, ...]
    compile_s: float
    versions: dict[str, str]
    target: str

    def runs(self, collective: Collective) -> float:
        """Return how often the busiest stage executes a collective in one step."""
        scopes = re.findall(r"pipeline_(\w+)/", collective.op_name)
        if not collective.in_branch or not scopes:
            return float(collective.count)
        return collective.count * self.branch_shares.get(scopes[-1], 1.0)

    def wire_bytes(self) -> dict[tuple[str, str], float]:
        """Return (kind, "axis+axis") -> bytes per step that a device of the busiest stage sends."""
        totals: dict[tuple[str, str], float] = {}
        for c in self.collectives:
            key = (c.kind, "+".join(c.axes))
            totals[key] = totals.get(key, 0.0) + self.runs(c) * c.wire_bytes
        return totals


@dataclasses.dataclass(frozen=True, kw_only=True)
class NotCompiled:
    """The reason why the step was not compiled, and a fix; "refused": invalid settings or mesh."""

    kind: Literal["missing", "refused", "failed", "timeout"]
    reason: str
    fix: str
    details: str = ""


def missing_compiler() -> NotCompiled | None:
    """Return why the compiler is unavailable, or None if it is available; starts no process."""
    try:
        jax, plugin, _ = map(importlib.metadata.version, ("jax", *_PACKAGES))
    except importlib.metadata.PackageNotFoundError as error:
        return NotCompiled(
            kind="missing",
            reason="the XLA:GPU compiler is not installed (the extra `plan`)",
            fix=f"Install it: {INSTALL}. It needs no GPU.",
            details=str(error),
        )
    if jax != plugin:
        return NotCompiled(
            kind="missing",
            reason=f"the compiler belongs to jax {plugin}, the program uses jax {jax}",
            fix=f"Install the matching one: pip install jax-cuda13-plugin=={jax} "
            f"jax-cuda13-pjrt=={jax}.",
        )
    return None


def compile_step(
    config: RunConfig, mesh: MeshSpec, cluster: Cluster, *, timeout_s: float = 300.0
) -> CompiledStep | NotCompiled:
    """Compile a run's train step for GPUs of another machine; a failure is returned, not raised.

    The mesh and the simulated devices in `config` are ignored. Takes seconds to a minute on one
    core and about 1 GB of memory; several can run concurrently.
    """
    if cluster.num_gpus != mesh.num_devices:
        return NotCompiled(
            kind="refused",
            reason=f"mesh {mesh} needs {mesh.num_devices} GPUs, {cluster} has {cluster.num_gpus}",
            fix="Name as many GPUs as the mesh needs.",
        )
    if (missing := missing_compiler()) is not None:
        return missing
    config = dataclasses.replace(
        config, simulate=0, mesh=dataclasses.replace(config.mesh, shape=str(mesh))
    )
    request = {
        "config": write_toml(config),
        "gpu": dataclasses.asdict(cluster.gpu),
        "num_nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
    }
    command = [sys.executable, "-m", "jaxdist.tools.compiler"]
    return _interpret(*_ask(command, request, timeout_s), timeout_s)


def _ask(
    command: Sequence[str], request: dict[str, Any], timeout_s: float
) -> tuple[int | None, str, str]:
    """Return the compiler process's exit code (None = timeout), its output and its log."""
    package = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])),
        # The platform "cuda" would load a driver, which a topology description does not need.
        "JAX_PLATFORMS": "cpu",
        # A step compiled for absent devices cannot be cached.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "1",
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,  # so that killing it also ends its children
    )
    try:
        answer, log = process.communicate(json.dumps(request), timeout=timeout_s)
        return process.returncode, answer, log
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        answer, log = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, answer, log


def _interpret(
    code: int | None, answer: str, log: str, timeout_s: float
) -> CompiledStep | NotCompiled:
    details = "\n".join(log.splitlines()[-_DETAIL_LINES:])
    if code is None:
        return NotCompiled(
            kind="timeout",
            reason=f"the compilation timed out after {timeout_s:g} s",
            fix="Raise --compile-timeout-s, or use the estimate.",
            details=details,
        )
    try:
        facts = json.loads(answer)
    except json.JSONDecodeError:
        return NotCompiled(
            kind="failed",
            reason=f"the compiler failed: {_last_error(log, code)}",
            fix="Use the estimate. The details hold the compiler's output.",
            details=details,
        )
    if "refused" in facts:
        return NotCompiled(
            kind="refused",
            reason="; ".join(facts["refused"]),
            fix="Change the settings or the mesh.",
        )
    return _read(facts, log)


def _last_error(log: str, code: int) -> str:
    if code < 0:
        return f"it was killed by signal {-code} (out of memory?)"
    lines = [line for line in log.splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return lines[-1][:300] if lines else f"exit code {code}"


def _read(facts: dict[str, Any], log: str) -> CompiledStep:
    kinds: dict[str, Any] = {"buffers": Buffer, "collectives": Collective}
    lists: dict[str, Any] = {
        name: tuple(
            kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in record.items()})
            for record in facts[name]
        )
        for name, kind in kinds.items()
    }
    memory = CompiledMemory(**facts["memory"])
    step = CompiledStep(
        **{**facts, **lists, "memory": memory, "offload": tuple(facts["offload"]), "remarks": ()}
    )
    return dataclasses.replace(step, remarks=(*_log_remarks(log), *_step_remarks(step)))


def _log_remarks(log: str) -> Iterator[Remark]:
    rematerialized = re.findall(r"Involuntary full rematerialization.*?(%[\w.\-]+)", log)
    if rematerialized:
        yield Remark(
            "rematerialization",
            f"the partitioner gathers {len(rematerialized)} arrays completely because it found "
            f"no cheaper resharding ({', '.join(rematerialized[:3])}). This "
            "affects only models whose tensor parallelism is left to XLA.",
        )
    limits = re.findall(r"[Cc]an't reduce memory use below ([\d.]+\s?\w+)", log)
    if limits:
        yield Remark(
            "memory",
            f"before buffer assignment the compiler aimed at {limits[-1]} and could not reach it "
            "by recomputing. It compiles anyway, so check the total.",
        )


def _step_remarks(step: CompiledStep) -> Iterator[Remark]:
    """Yield remarks on offload, exposed large collectives, narrow sums and unfused attention."""
    yield from (Remark("offload", problem) for problem in step.offload)
    sends = lambda c: step.runs(c) * c.wire_bytes
    large = [c for c in step.collectives if c.bytes >= _SYNCHRONOUS_BYTES]
    if waited := [c for c in large if not c.overlapped]:
        total, sent = sum(map(sends, waited)), sum(step.wire_bytes().values())
        worst = max(waited, key=sends)
        yield Remark(
            "synchronous",
            f"{len(waited)} collectives above {in_bytes(_SYNCHRONOUS_BYTES)} overlap with nothing, "
            f"{percent(total / sent, 0)} of what a step sends ({in_bytes(total)}); the largest is "
            f"{worst.kind} over {'+'.join(worst.axes)} of {in_bytes(worst.bytes)}.",
        )
    narrow: dict[str, set[str]] = {}
    for c in step.collectives:
        if c.kind in ("all-reduce", "reduce-scatter") and set(row_axes()) & set(c.axes):
            for dtype in set(c.dtypes) & {"bf16", "f16"}:
                narrow.setdefault(dtype, set()).add("+".join(c.axes))
    for dtype, axes in narrow.items():
        yield Remark(
            "reduction dtype",
            f"gradients are summed in {dtype} over {', '.join(sorted(axes))} "
            "(precision.reduce_dtype).",
        )
    if step.attention == "xla":
        yield Remark(
            "attention",
            "attention is not cuDNN's fused kernel: its scores pass through memory, block by block "
            "or in one piece.",
        )
