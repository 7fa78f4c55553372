"""Does every device compute the same, and how fast do they add up over each axis of the mesh?"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdist.core.collectives import all_reduce
from jaxdist.hardware import gpu_of
from jaxdist.runtime.formatting.numbers import in_bytes, rate
from jaxdist.runtime.formatting.tables import few
from jaxdist.tools.doctor.findings import Finding, error, note, ok, warning

_REPEATS = 5
_SLOW = 0.75
"""Share of the usual speed below which a device or a group is named."""
_OF_THE_LINK = 0.3
"""Share of the link's figure that an all-reduce of 256 MiB must reach; NCCL reaches 0.5 to 0.9."""


# --- each device alone ----------------------------------------------------------------------------


def compute(devices: Sequence[jax.Device], size: int) -> list[dict[str, Any]]:
    """Products of [size, size] matrices on each device: median `seconds`, `digests` of the bits."""

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ x / size)
        return jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)

    start = np.sin(np.arange(size * size, dtype=np.float32)).reshape(size, size) * 8
    found = []
    for device in devices:
        x = jax.device_put(start, device)
        digests, seconds = [int(products(x))], []  # the first call compiles
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            digests.append(int(products(x)))
            seconds.append(time.perf_counter() - begin)
        found.append({"seconds": statistics.median(seconds), "digests": digests})
    return found


def check_compute(
    everyone: Sequence[Sequence[Mapping[str, Any]]], hosts: Sequence[str], *, simulated: bool
) -> list[Finding]:
    """Devices that give other bits than their neighbours, or need longer than the others.

    Bits are compared within a process: two processes may choose unlike kernels by timing them.
    `everyone` holds what `compute` gave and `hosts` their names, both by process id. Simulated
    devices share the CPU, so that their times say nothing.
    """
    times = {(i, j): d["seconds"] for i, ds in enumerate(everyone) for j, d in enumerate(ds)}
    usual_s = statistics.median(times.values())
    found = list(_wrong_bits(everyone, hosts))
    slow = [] if simulated else [place for place, s in times.items() if usual_s / s < _SLOW]
    found += [
        warning(
            "devices",
            f"device {j} of process {i} on {hosts[i]} needs {times[i, j] / usual_s:.1f} times as "
            "long as the others for the same products",
            "see its clocks, power and temperature in `nvidia-smi -q -d PERFORMANCE`",
        )
        for i, j in slow[:8]
    ]
    text = f"{len(times)} device(s) compute the same bits again and again"
    return found or [ok("devices", text, seconds=usual_s)]


def _wrong_bits(
    everyone: Sequence[Sequence[Mapping[str, Any]]], hosts: Sequence[str]
) -> Iterator[Finding]:
    for i, devices in enumerate(everyone):
        usual = Counter(digest for device in devices for digest in device["digests"])
        expected = usual.most_common(1)[0][0]
        for j, device in enumerate(devices):
            wrong = sum(digest != expected for digest in device["digests"])
            if wrong:
                yield error(
                    "devices",
                    f"device {j} of process {i} on {hosts[i]} computed other bits than the rest in "
                    f"{wrong} of {len(device['digests'])} equal products",
                    "take the device out of the job and have it tested (dcgmi diag -r 3)",
                )


# --- devices together -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """Devices that an axis joins.

    Attributes:
        members: (process, index of the device in it).
        seconds: of one all-reduce, the slowest process's.
        right: the sum was the sum, everywhere.
    """

    members: tuple[tuple[int, int], ...]
    seconds: float
    right: bool


def time_axes(mesh: Mesh, num_bytes: int) -> dict[str, dict[str, tuple[float, bool]]]:
    """Axis -> group -> (seconds of an all-reduce, whether the sum was right), for own groups.

    Every process of the job must call it. Groups are taken in one order by all, so that two
    processes never wait for each other in two groups.
    """
    own = jax.process_index()
    return {
        axis: {
            str(index): _time_all_reduce(members, num_bytes)
            for index, members in enumerate(rows)
            if any(device.process_index == own for device in members)
        }
        for axis, rows in _rows(mesh)
    }


def _rows(mesh: Mesh) -> Iterator[tuple[str, np.ndarray]]:
    """(axis, devices of its groups, a row each [groups, size]) of every axis in use."""
    for position, axis in enumerate(mesh.axis_names):
        size = mesh.devices.shape[position]
        if size > 1:
            yield axis, np.moveaxis(mesh.devices, position, -1).reshape(-1, size)


def _time_all_reduce(members: Any, num_bytes: int) -> tuple[float, bool]:
    """(median seconds, whether the sum was right) of an all-reduce over `members` [size].

    Each gives float32 [1, num_bytes / 4].
    """
    size = len(members)
    mesh = Mesh(members, ("group",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("group"))
    width = max(1, num_bytes // 4)

    def part(index: Any) -> np.ndarray:
        # Whole numbers: their sum is exact in any order.
        return np.full((1, width), (index[0].start or 0) + 1, np.float32)

    x = jax.make_array_from_callback((size, width), sharding, part)
    add_up: Callable[[jax.Array], jax.Array] = jax.jit(
        jax.shard_map(
            lambda x: all_reduce(x, "group"),
            mesh=mesh,
            in_specs=PartitionSpec("group"),
            out_specs=PartitionSpec(),
        )
    )
    total = jax.block_until_ready(add_up(x))  # compiles, and connects the group
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        total = jax.block_until_ready(add_up(x))
        seconds.append(time.perf_counter() - begin)
    expected = size * (size + 1) / 2
    right = all(bool((np.asarray(s.data) == expected).all()) for s in total.addressable_shards)
    return statistics.median(seconds), right


def groups_of(
    mesh: Mesh, everyone: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]
) -> dict[str, list[DeviceGroup]]:
    """Axis -> its groups, from what `time_axes` gave in every process."""
    num_seen: Counter[int] = Counter()  # devices of each process
    place = {}
    for device in sorted(mesh.devices.flat, key=lambda d: d.id):
        place[device.id] = (device.process_index, num_seen[device.process_index])
        num_seen[device.process_index] += 1
    found: dict[str, list[DeviceGroup]] = {}
    for axis, rows in _rows(mesh):
        found[axis] = []
        for index, members in enumerate(rows):
            said = [s[axis][str(index)] for s in everyone if str(index) in s.get(axis, {})]
            found[axis].append(
                DeviceGroup(
                    tuple(place[device.id] for device in members),
                    max(float(seconds) for seconds, _ in said),
                    all(right for _, right in said),
                )
            )
    return found


def check_axis(
    axis: str,
    groups: Sequence[DeviceGroup],
    *,
    num_bytes: int,
    hosts: Sequence[str],
    simulated: bool,
    device_kind: str = "",
    moves: str = "",
) -> list[Finding]:
    """Groups of an axis whose sums of `num_bytes` per device are wrong or slow.

    `hosts` are by process id; `moves` says what a run exchanges over the axis.
    """
    size = len(groups[0].members)
    # What a ring puts on each link; `nccl-tests` calls it bus bandwidth.
    wire = 2 * num_bytes * (size - 1) / size
    speeds = [wire / group.seconds for group in groups]
    check = f"all-reduce {axis}"
    found = [
        error(
            check,
            f"the sum over {_names(group, hosts)} is wrong",
            "take these devices out of the job: data is damaged between them",
        )
        for group in groups
        if not group.right
    ]
    usual = statistics.median(speeds) if len(groups) > 2 else max(speeds)
    numbers: dict[str, Any] = {
        "bytes_per_s": statistics.median(speeds),
        "slowest_bytes_per_s": min(speeds),
        "groups": [
            {"members": [list(member) for member in group.members], "bytes_per_s": speed}
            for group, speed in zip(groups, speeds, strict=True)
        ],
    }
    text = (
        f"{len(groups)} group(s) of {size}: {rate(statistics.median(speeds))} bus, "
        f"{in_bytes(num_bytes)} a device" + (f"; a run moves {moves}" if moves else "")
    )
    if simulated:
        return [*found, ok(check, text + " (through the CPU's memory)", **numbers)]
    by_name = {_names(g, hosts): speed for g, speed in zip(groups, speeds, strict=True)}
    found += _slow_groups(check, by_name, usual)
    link = _link(groups[0], hosts, device_kind)
    if link and usual < _OF_THE_LINK * link:
        found.append(
            warning(
                check,
                f"{rate(usual)}, where the links of {device_kind} carry {rate(link)}",
                "see what NCCL chose with NCCL_DEBUG=INFO: peer access, NVLink, InfiniBand and "
                "GPUDirect should be in use",
            )
        )
    return [ok(check, text, **numbers) if not found else note(check, text, **numbers), *found]


def _slow_groups(check: str, speeds: Mapping[str, float], usual: float) -> list[Finding]:
    """The slowest groups, up to four, of speeds in bytes/s by the groups' names."""
    slow = sorted((speed, name) for name, speed in speeds.items() if speed < _SLOW * usual)
    return [
        warning(
            check,
            f"{name}: {rate(speed)}, where other groups have {rate(usual)}",
            "every step waits for them: look at their links (nvidia-smi nvlink --status, "
            "ibstat), or leave them out",
        )
        for speed, name in slow[:4]
    ]


def _link(group: DeviceGroup, hosts: Sequence[str], device_kind: str) -> float:
    """Bytes per second of the link that joins the group; 0 where it is not known."""
    gpu = gpu_of(device_kind)
    if gpu is None:
        return 0.0
    inside = len({hosts[process] for process, _ in group.members}) == 1
    return gpu.link_bandwidth if inside else gpu.network_bandwidth


def _names(group: DeviceGroup, hosts: Sequence[str]) -> str:
    """`devices 0,1 of process 0 on a, device 3 of process 1 on b`."""
    by_process: dict[int, list[int]] = {}
    for process, device in group.members:
        by_process.setdefault(process, []).append(device)
    shown = [
        f"{'device' if len(ids) == 1 else 'devices'} {','.join(map(str, ids))} of process "
        f"{process} on {hosts[process]}"
        for process, ids in by_process.items()
    ]
    return few(shown, 4)
