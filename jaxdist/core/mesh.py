"""The device mesh: its four named axes, the `dp=4,tp=4,pp=4` notation, and the only device count.

Axes are ordered from the slowest interconnect to the fastest, so `tensor` stays inside a node:

    pipeline (pp)  stages of layers           data (dp)    replicas
    fsdp           sharded replicas           tensor (tp)  splits of one layer
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jaxdist.core.types import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

AXES = ("pipeline", "data", "fsdp", "tensor")
"""Mesh axes, slow to fast interconnect."""

BATCH_AXES = ("data", "fsdp")
"""Axes over which the rows of a batch are split."""

_SHORT = {"pp": "pipeline", "dp": "data", "fsdp": "fsdp", "tp": "tensor"}
_SHORT_OF = {long: short for short, long in _SHORT.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
    """Sizes of the mesh axes, each at least 1."""

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def parse(cls, text: str, num_devices: int | None = None) -> MeshSpec:
        """Read `dp=2,tp=4`; short (`pp dp fsdp tp`) or long names, `-1` for the devices left over.

        Args:
            text: comma-separated `name=size`; axes not named have size 1; "" or "1" is one device.
            num_devices: visible devices; needed only to resolve `-1`.

        Raises:
            ConfigError: with every problem of the text, not only the first.
        """
        sizes, problems = _read_sizes(text)
        unknown = [axis for axis, size in sizes.items() if size == -1]
        if len(unknown) > 1:
            names = " and ".join(_SHORT_OF[axis] for axis in unknown)
            problems.append(
                f"mesh {text!r} sets {names} to -1: only one axis can take the devices left over. "
                "Give all but one a size."
            )
        elif unknown and not problems:
            rest = math.prod(size for size in sizes.values() if size != -1)
            if num_devices is None:
                raise ConfigError(
                    [f"mesh {text!r} has -1 but the number of devices is not known here."]
                )
            if num_devices % rest:
                problems.append(
                    f"mesh {text!r}: the sizes given multiply to {rest}, which does not divide the "
                    f"{num_devices} visible devices. Choose sizes whose product divides "
                    f"{num_devices}."
                )
            else:
                sizes[unknown[0]] = num_devices // rest
        if problems:
            raise ConfigError(problems)
        return cls(**sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, in mesh order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_devices(self) -> int:
        """Devices that the mesh takes."""
        return math.prod(self.sizes.values())

    @property
    def num_replicas(self) -> int:
        """Parts into which the rows of a batch are split (data × fsdp)."""
        return self.data * self.fsdp

    def __str__(self) -> str:
        named = [f"{_SHORT_OF[axis]}={size}" for axis, size in self.sizes.items() if size > 1]
        return ",".join(named) or "dp=1"

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Lay the mesh over devices (default: all of this job's).

        Raises:
            ConfigError: the mesh needs another number of devices than there are.
        """
        import jax
        import numpy as np
        from jax.sharding import AxisType, Mesh

        devices = list(jax.devices()) if devices is None else list(devices)
        self.check_device_count(len(devices))
        shape = tuple(self.sizes.values())
        # Auto is named because jax.make_mesh now defaults to Explicit; the plain reshape keeps
        # jax.devices() order, in which the GPUs of one host are neighbours.
        grid = np.asarray(devices, dtype=object).reshape(shape)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def check_device_count(self, num_devices: int) -> None:
        """Raise `ConfigError` unless the mesh takes exactly `num_devices`."""
        if self.num_devices == num_devices:
            return
        fix = f"--simulate {self.num_devices} to try it on CPU"
        if self.num_devices < num_devices:
            fix = "dp=-1 to use them all, or CUDA_VISIBLE_DEVICES to hide the rest"
        elif num_devices % max(1, self.num_devices // self.data) == 0:
            fix = f"dp=-1 to use what is there, or {fix}"
        raise ConfigError(
            [f"mesh {self} needs {self.num_devices} devices, {num_devices} are visible. Set {fix}."]
        )


def spec_of(mesh: Mesh) -> MeshSpec:
    """The sizes of a built mesh."""
    return MeshSpec(**{axis: mesh.shape.get(axis, 1) for axis in AXES})


def factorisations(num_devices: int, *, pipeline: bool = True) -> list[MeshSpec]:
    """Every mesh of exactly `num_devices` devices."""
    specs = []
    for pp in _divisors(num_devices) if pipeline else [1]:
        for dp in _divisors(num_devices // pp):
            for fsdp in _divisors(num_devices // pp // dp):
                tp = num_devices // pp // dp // fsdp
                specs.append(MeshSpec(pipeline=pp, data=dp, fsdp=fsdp, tensor=tp))
    return specs


def nearest(spec: MeshSpec, candidates: Sequence[MeshSpec], count: int = 3) -> list[MeshSpec]:
    """The `count` candidates closest to `spec`, by the sum of |log2| ratios of their axes."""

    def distance(other: MeshSpec) -> float:
        return sum(abs(math.log2(spec.sizes[a] / other.sizes[a])) for a in AXES)

    return sorted(candidates, key=lambda other: (distance(other), str(other)))[:count]


def shrink(
    asked: MeshSpec, num_devices: int, is_legal: Callable[[MeshSpec], bool]
) -> MeshSpec | None:
    """The legal mesh for at most `num_devices`, fewer than `asked` takes; None without one.

    Pipeline and tensor stay as asked. Data × fsdp use as many devices as they legally can; among
    equals fsdp is the size asked for, else the next larger one, so that no device holds more of
    the state, else the next smaller one.

    Args:
        asked: the mesh for all devices.
        num_devices: devices that are there.
        is_legal: whether model and batch allow a mesh.
    """
    num_replicas = num_devices // (asked.pipeline * asked.tensor)
    for count in range(num_replicas, 0, -1):
        for spec in _with_replicas(asked, count):
            if is_legal(spec):
                return spec
    return None


def shrunk_sizes(asked: MeshSpec, is_legal: Callable[[MeshSpec], bool]) -> list[int]:
    """Device counts below that of `asked` of which `shrink` would use every device."""
    fewer = range(1, asked.num_replicas)
    counts = [n for n in fewer if any(map(is_legal, _with_replicas(asked, n)))]
    return [n * asked.pipeline * asked.tensor for n in counts]


def _with_replicas(asked: MeshSpec, count: int) -> Iterator[MeshSpec]:
    """Meshes with data × fsdp = `count`, in the order of preference that `shrink` states."""
    preferred = lambda size: (size != asked.fsdp, size < asked.fsdp, abs(size - asked.fsdp))
    for fsdp in sorted(_divisors(count), key=preferred):
        yield dataclasses.replace(asked, data=count // fsdp, fsdp=fsdp)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _read_sizes(text: str) -> tuple[dict[str, int], list[str]]:
    sizes: dict[str, int] = {}
    problems: list[str] = []
    stripped = text.strip()
    if stripped in ("", "1"):
        return sizes, problems
    for part in stripped.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        axis = _SHORT.get(name, name)
        if axis not in AXES:
            problems.append(
                f"mesh {text!r}: axis {name!r} is unknown. Use dp, fsdp, tp or pp "
                "(data, fsdp, tensor, pipeline), e.g. --mesh dp=2,tp=4."
            )
            continue
        if axis in sizes:
            problems.append(f"mesh {text!r} names {name} twice. Give each axis one size.")
            continue
        if not re.fullmatch(r"-1|0*[1-9][0-9]*", value):
            problems.append(
                f"mesh {text!r}: {name}={value or '(nothing)'} is not a size. "
                "Use a whole number ≥ 1, or -1 for the devices left over."
            )
            continue
        sizes[axis] = int(value)
    return sizes, problems
