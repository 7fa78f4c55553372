"""The device mesh: number of devices per axis, and the notation `dp=4,tp=4`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdist.core.axis import Axis, divisors_of
from jaxdist.core.parallel import axes
from jaxdist.settings import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

MAX_DEVICES = 1_000_000
"""More devices than any cluster has."""

_MOST_MESHES = 10_000

_OPEN = -1
"""Size of an axis that takes all remaining devices, until `MeshSpec.resolve`."""


@dataclasses.dataclass(frozen=True, init=False)
class MeshSpec:
    """Sizes of the mesh axes, -1 = unresolved: `MeshSpec(data=2, tensor=4)["tensor"]`."""

    _sizes: tuple[tuple[str, int], ...]

    def __init__(self, **sizes: int):
        unknown = set(sizes) - set(axes.names())
        if unknown:
            raise TypeError(f"no mesh axis {', '.join(sorted(unknown))}; axes: {axes.names()}")
        ordered = tuple((name, sizes.get(name, 1)) for name in axes.names())
        object.__setattr__(self, "_sizes", ordered)

    @classmethod
    def over(cls, axis: Axis, size: int) -> MeshSpec:
        """Return the mesh with `size` devices on one axis, and 1 on all others."""
        return cls(**{axis.name: size})

    @classmethod
    def of(cls, mesh: Mesh) -> MeshSpec:
        """Return the axis sizes of a `jax.sharding.Mesh`."""
        return cls(**{name: mesh.shape.get(name, 1) for name in axes.names()})

    @classmethod
    def parse(cls, text: str, num_devices: int | None = None) -> MeshSpec:
        """Parse `dp=2,tp=4`: short or long axis names; `-1` takes the remaining devices.

        Unnamed axes have size 1. Without `num_devices`, -1 stays. Raises `ConfigError`.
        """
        sizes, problems = _read_sizes(text)
        unknown = [name for name, size in sizes.items() if size == _OPEN]
        if len(unknown) > 1:
            names = " and ".join(axes.by_name()[name].short for name in unknown)
            problems.append(
                f"mesh {text!r} sets {names} to -1: only one axis can take the devices left over. "
                "Give all but one a size."
            )
        if (total := math.prod(size for size in sizes.values() if size != _OPEN)) > MAX_DEVICES:
            problems.append(
                f"mesh {text!r} needs {total} devices. Use a mesh of at most {MAX_DEVICES}."
            )
        if problems:
            raise ConfigError(problems)
        spec = cls(**sizes)
        return spec if num_devices is None else spec.resolve(num_devices)

    @property
    def is_open(self) -> bool:
        """Return True if an axis has the unresolved size `-1`."""
        return any(size == _OPEN for _, size in self._sizes)

    def resolve(self, num_devices: int) -> MeshSpec:
        """Replace -1 by `num_devices` / other sizes; raise `ConfigError` if that is no integer."""
        if not self.is_open:
            return self
        rest = math.prod(size for _, size in self._sizes if size != _OPEN)
        if num_devices % rest:
            raise ConfigError(
                f"mesh {str(self)!r}: the sizes given multiply to {rest}, which does not "
                f"divide the {in_devices(num_devices)} that are available. Choose sizes whose "
                f"product divides {num_devices}."
            )
        return self.replace(
            **{name: num_devices // rest for name, size in self._sizes if size == _OPEN}
        )

    def replace(self, **sizes: int) -> MeshSpec:
        """Return a copy of the mesh with different sizes for some axes."""
        return MeshSpec(**{**self.sizes, **sizes})

    def __getitem__(self, axis: Axis | str) -> int:
        return self.sizes[axis if isinstance(axis, str) else axis.name]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Return axis name -> size, in mesh order."""
        return dict(self._sizes)

    @functools.cached_property
    def used(self) -> tuple[Axis, ...]:
        """Return the axes of another size than 1 (also -1, unresolved), in mesh order."""
        return tuple(axis for axis in axes.AXES if self[axis] != 1)

    @property
    def num_devices(self) -> int:
        """Return the number of devices; raises `ConfigError` if an axis is unresolved."""
        if self.is_open:
            raise ConfigError(
                f"mesh {self} has -1 and the number of devices is not known here. Write the size "
                "of each axis."
            )
        return math.prod(size for _, size in self._sizes)

    @functools.cached_property
    def num_replicas(self) -> int:
        """Return the number of replicas, which process different rows of a batch."""
        return math.prod(self[axis] for axis in axes.AXES if axis.splits_rows)

    def __str__(self) -> str:
        named = ",".join(f"{axis.short}={self[axis]}" for axis in self.used)
        return named or f"{_rows_axis().short}=1"

    def __repr__(self) -> str:
        return f"MeshSpec({self})"

    def build(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Build the mesh from devices (default: all devices of this job)."""
        import jax
        import numpy as np
        from jax.sharding import AxisType, Mesh

        devices = list(jax.devices()) if devices is None else list(devices)
        self.check_device_count(len(devices))
        names, shape = self.sizes.keys(), tuple(self.sizes.values())
        # `Auto` is explicit because jax.make_mesh defaults to `Explicit`. A plain reshape keeps the
        # order of jax.devices(), in which the GPUs of one host are neighbors.
        grid = np.asarray(devices, dtype=object).reshape(shape)
        return Mesh(grid, tuple(names), axis_types=(AxisType.Auto,) * len(names))

    def check_device_count(self, num_devices: int) -> None:
        """Raise `ConfigError` unless the mesh has exactly `num_devices` devices."""
        if self.num_devices == num_devices:
            return
        rows = _rows_axis()
        fix = f"--simulate {self.num_devices} to try it on CPU"
        if self.num_devices < num_devices:
            fix = "CUDA_VISIBLE_DEVICES to hide the rest"
        if num_devices % (self.num_devices // self[rows]) == 0:
            fix = f"{rows.short}=-1 to use all devices, or {fix}"
        raise ConfigError(
            f"mesh {self} needs {in_devices(self.num_devices)}, {num_devices} "
            f"{'is' if num_devices == 1 else 'are'} available. Set {fix}."
        )


def in_devices(count: int) -> str:
    """Format a device count: `1 device`, `8 devices`."""
    return f"{count} device{'' if count == 1 else 's'}"


def notation() -> str:
    """Describe the mesh notation for help texts and errors: each axis with its purpose."""
    return ", ".join(f"{axis.short} = {axis.help}" for axis in axes.AXES)


def factorisations(num_devices: int, *, without: Sequence[Axis] = ()) -> list[MeshSpec]:
    """Return at most `_MOST_MESHES` meshes of `num_devices` that do not use the axes `without`."""
    names = [axis.name for axis in axes.AXES if axis not in without]

    def sizes(left: int, count: int) -> Iterator[tuple[int, ...]]:
        if count == 1:
            yield (left,)
            return
        for size in divisors_of(left):
            for rest in sizes(left // size, count - 1):
                yield (size, *rest)

    first = itertools.islice(sizes(num_devices, len(names)), _MOST_MESHES)
    return [MeshSpec(**dict(zip(names, each, strict=True))) for each in first]


def nearest(spec: MeshSpec, candidates: Sequence[MeshSpec], count: int = 3) -> list[MeshSpec]:
    """Return up to `count` candidates closest to `spec` by the sum of |log2| ratios of axes."""

    def distance(other: MeshSpec) -> float:
        return sum(abs(math.log2(spec[axis] / other[axis])) for axis in axes.AXES)

    return sorted(candidates, key=lambda other: (distance(other), str(other)))[:count]


def shrink(
    requested: MeshSpec, num_devices: int, is_legal: Callable[[MeshSpec], bool]
) -> MeshSpec | None:
    """Return the largest legal mesh with at most `num_devices` devices; None if there is none.

    `num_devices` is smaller than the size of `requested`. Axes that cannot shrink keep their size.
    For equal device counts, axes with fast interconnect keep their size if possible. Otherwise they
    get the next larger size, so that no device holds more of the state, else the next smaller one.
    """
    for count in range(num_devices // fixed_devices(requested), 0, -1):
        for spec in _with_shrunk(requested, count):
            if is_legal(spec):
                return spec
    return None


def shrunk_sizes(requested: MeshSpec, is_legal: Callable[[MeshSpec], bool]) -> list[int]:
    """Return the device counts below `requested` that `shrink` can use without idle devices."""
    fixed = fixed_devices(requested)
    fewer = range(1, requested.num_devices // fixed)
    return [n * fixed for n in fewer if any(map(is_legal, _with_shrunk(requested, n)))]


def fixed_devices(requested: MeshSpec) -> int:
    """Return the product of the sizes of axes that cannot shrink; elastic jobs use multiples."""
    return math.prod(requested[axis] for axis in axes.AXES if not axis.shrinks)


def _with_shrunk(requested: MeshSpec, count: int) -> Iterator[MeshSpec]:
    """Yield meshes whose shrinkable axes multiply to `count`, in the preference of `shrink`."""
    slowest, *others = (axis for axis in axes.AXES if axis.shrinks)

    def fill(sizes: Mapping[str, int], left: int, todo: Sequence[Axis]) -> Iterator[MeshSpec]:
        if not todo:
            yield requested.replace(**sizes, **{slowest.name: left})
            return
        *rest, axis = todo
        before = requested[axis]
        preferred = lambda size: (size != before, size < before, abs(size - before))
        for size in sorted(divisors_of(left), key=preferred):
            yield from fill({**sizes, axis.name: size}, left // size, rest)

    yield from fill({}, count, others)


def _rows_axis() -> Axis:
    return next(axis for axis in axes.AXES if axis.splits_rows)


def _read_sizes(text: str) -> tuple[dict[str, int], list[str]]:
    by_name = axes.by_name()
    sizes: dict[str, int] = {}
    problems: list[str] = []
    stripped = text.strip()
    if stripped in ("", "1"):
        return sizes, problems
    if (count := stripped.count(",") + 1) > 2 * len(by_name):
        problems.append(
            f"mesh {text[:60]!r}... names {count} axes: there are {len(axes.names())}. Use "
            f"{notation()}; e.g. --mesh dp=2,tp=4."
        )
        return sizes, problems
    for part in stripped.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in by_name:
            problems.append(
                f"mesh {text!r}: axis {name!r} is unknown. Use {notation()}; e.g. --mesh dp=2,tp=4."
            )
            continue
        axis = by_name[name].name
        if axis in sizes:
            problems.append(f"mesh {text!r} names {name} twice. Give each axis one size.")
            continue
        if not re.fullmatch(r"-1|0*[1-9][0-9]{0,6}", value):
            problems.append(
                f"mesh {text!r}: {name}={value or '(nothing)'} is not a size. "
                "Use a whole number from 1 to 9999999, or -1 for the remaining devices."
            )
            continue
        sizes[axis] = int(value)
    return sizes, problems
