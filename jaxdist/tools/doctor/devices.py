"""Check what devices compute, and time an all-reduce over each mesh axis."""

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
"""Share of the median speed below which a device or group is reported."""
_OF_THE_LINK = 0.3
"""Share of the link bandwidth that an all-reduce must reach; NCCL has 0.5 to 0.9."""


def compute(devices: Sequence[jax.Device], size: int) -> list[dict[str, Any]]:
    """Multiply [size, size] matrices; return median `seconds` and `digests` of each device."""

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ x / size)
        return jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)

    start = np.sin(np.arange(size * size, dtype=np.float32)).reshape(size, size) * 8
    results = []
    for device in devices:
        x = jax.device_put(start, device)
        digests, seconds = [int(products(x))], []  # the first call compiles
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            digests.append(int(products(x)))
            seconds.append(time.perf_counter() - begin)
        results.append({"seconds": statistics.median(seconds), "digests": digests})
    return results


def check_operations(everyone: Sequence[Sequence[str]], hosts: Sequence[str]) -> list[Finding]:
    """Return an error per wrong operation of each process in `everyone`; if none, an "ok"."""
    results = [
        error(
            "operations",
            f"process {process} on {hosts[process]}: {line}",
            "install another version of jax or of the driver, or leave the GPU out",
        )
        for process, lines in enumerate(everyone)
        for line in lines
    ]
    return results or [ok("operations", "elementary operations agree with numpy")]


def row_counts_that_change_bits(device: jax.Device) -> list[int]:
    """Return which of 2, 8, 64 and 512 rows give a product's first row other bits than 1 row.

    A server that computes other batches than training then returns slightly other values
    (TransformerEngine#2986).
    """
    rng = np.random.default_rng(0)
    x, w = (jax.device_put(rng.standard_normal((512, 1024)), device) for _ in range(2))
    x, w = x.astype(jnp.bfloat16), w.T.astype(jnp.bfloat16)
    product = jax.jit(lambda x, w: (x @ w)[0].astype(jnp.float32))
    alone = np.asarray(product(x[:1], w))
    counts = (2, 8, 64, 512)
    return [n for n in counts if not np.array_equal(np.asarray(product(x[:n], w)), alone)]


def check_compute(
    everyone: Sequence[Sequence[Mapping[str, Any]]], hosts: Sequence[str], *, simulated: bool
) -> list[Finding]:
    """Return findings on devices with other bits or longer times than others; if none, "ok".

    `everyone` holds the results of `compute`, `hosts` the host names, by process id. Bits are
    compared within a process, because autotuning may choose different kernels in two processes.
    Times of simulated devices are not compared.
    """
    times = {(i, j): d["seconds"] for i, ds in enumerate(everyone) for j, d in enumerate(ds)}
    median_s = statistics.median(times.values())
    results = list(_wrong_bits(everyone, hosts))
    slow = [] if simulated else [key for key, s in times.items() if median_s / s < _SLOW]
    results += [
        warning(
            "devices",
            f"device {j} of process {i} on {hosts[i]} needs {times[i, j] / median_s:.1f} times as "
            "long as the others for the same matrix products",
            "check its clocks, power and temperature with `nvidia-smi -q -d PERFORMANCE`",
        )
        for i, j in slow[:8]
    ]
    text = f"{len(times)} device(s) compute the same bits repeatedly"
    return results or [ok("devices", text, seconds=median_s)]


def _wrong_bits(
    everyone: Sequence[Sequence[Mapping[str, Any]]], hosts: Sequence[str]
) -> Iterator[Finding]:
    for i, devices in enumerate(everyone):
        counts = Counter(digest for device in devices for digest in device["digests"])
        expected = counts.most_common(1)[0][0]
        for j, device in enumerate(devices):
            wrong = sum(digest != expected for digest in device["digests"])
            if wrong:
                yield error(
                    "devices",
                    f"device {j} of process {i} on {hosts[i]} computed different bits in {wrong} "
                    f"of {len(device['digests'])} equal products",
                    "remove the device from the job and test it (dcgmi diag -r 3)",
                )


@dataclasses.dataclass(frozen=True)
class DeviceGroup:
    """Devices, as (process, index in the process), that reduce together over an axis.

    `seconds` is the time of one all-reduce in the slowest process; `right`: the sum was correct on
    every device.
    """

    members: tuple[tuple[int, int], ...]
    seconds: float
    right: bool


def time_axes(mesh: Mesh, num_bytes: int) -> dict[str, dict[str, tuple[float, bool]]]:
    """Return axis -> index of a group (text) -> (seconds of an all-reduce, is the sum correct).

    The result contains the groups of this process. Collective: all processes time the groups in the
    same order, to avoid deadlocks.
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
    """Yield (axis, devices [groups, size]) for each axis of size > 1."""
    for position, axis in enumerate(mesh.axis_names):
        size = mesh.devices.shape[position]
        if size > 1:
            yield axis, np.moveaxis(mesh.devices, position, -1).reshape(-1, size)


def _time_all_reduce(members: Any, num_bytes: int) -> tuple[float, bool]:
    """Return (median seconds, correctness) of an all-reduce over `members` [size].

    Each device contributes float32 [1, num_bytes / 4].
    """
    size = len(members)
    mesh = Mesh(members, ("group",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("group"))
    width = max(1, num_bytes // 4)

    def part(index: Any) -> np.ndarray:
        # Integers: their sum is exact in any order.
        return np.full((1, width), (index[0].start or 0) + 1, np.float32)

    x = jax.make_array_from_callback((size, width), sharding, part)
    reduce: Callable[[jax.Array], jax.Array] = jax.jit(
        jax.shard_map(
            lambda x: all_reduce(x, "group"),
            mesh=mesh,
            in_specs=PartitionSpec("group"),
            out_specs=PartitionSpec(),
        )
    )
    total = jax.block_until_ready(reduce(x))  # compiles, and connects the group
    seconds = []
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        total = jax.block_until_ready(reduce(x))
        seconds.append(time.perf_counter() - begin)
    expected = size * (size + 1) / 2
    right = all(bool((np.asarray(s.data) == expected).all()) for s in total.addressable_shards)
    return statistics.median(seconds), right


def groups_of(
    mesh: Mesh, everyone: Sequence[Mapping[str, Mapping[str, Sequence[Any]]]]
) -> dict[str, list[DeviceGroup]]:
    """Return axis -> groups of devices with their times, by `time_axes` of every process."""
    num_seen: Counter[int] = Counter()  # devices of each process
    positions = {}
    for device in sorted(mesh.devices.flat, key=lambda d: d.id):
        positions[device.id] = (device.process_index, num_seen[device.process_index])
        num_seen[device.process_index] += 1
    measured: dict[tuple[str, str], list[Sequence[Any]]] = {}
    for one in everyone:
        for axis, by_index in one.items():
            for index, result in by_index.items():
                measured.setdefault((axis, index), []).append(result)
    groups: dict[str, list[DeviceGroup]] = {}
    for axis, rows in _rows(mesh):
        groups[axis] = []
        for number, members in enumerate(rows):
            times = measured[axis, str(number)]
            groups[axis].append(
                DeviceGroup(
                    tuple(positions[device.id] for device in members),
                    max(float(seconds) for seconds, _ in times),
                    all(right for _, right in times),
                )
            )
    return groups


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
    """Return findings: bandwidth of an axis, wrong groups, up to four slow ones, slow links.

    `num_bytes` are per device, `hosts` by process id; `moves` describes the data that a run
    exchanges over the axis.
    """
    size = len(groups[0].members)
    # Bytes of a ring on each link; `nccl-tests` calls the rate bus bandwidth.
    wire = 2 * num_bytes * (size - 1) / size
    speeds = [wire / group.seconds for group in groups]
    check = f"all-reduce {axis}"
    results = [
        error(
            check,
            f"an all-reduce over {_names(group, hosts)} returned a wrong sum",
            "remove these devices from the job: they corrupt data in transfers",
        )
        for group in groups
        if not group.right
    ]
    typical = statistics.median(speeds) if len(groups) > 2 else max(speeds)
    numbers: dict[str, Any] = {
        "bytes_per_s": statistics.median(speeds),
        "slowest_bytes_per_s": min(speeds),
        "groups": [
            {"members": [list(member) for member in group.members], "bytes_per_s": speed}
            for group, speed in zip(groups, speeds, strict=True)
        ],
    }
    text = (
        f"{len(groups)} group(s) of {size}: {rate(statistics.median(speeds))} bus bandwidth, "
        f"{in_bytes(num_bytes)} per device" + (f"; a run moves {moves}" if moves else "")
    )
    if simulated:
        return [*results, ok(check, text + " (through CPU memory)", **numbers)]
    by_name = {_names(g, hosts): speed for g, speed in zip(groups, speeds, strict=True)}
    slow = sorted((speed, name) for name, speed in by_name.items() if speed < _SLOW * typical)
    results += [
        warning(
            check,
            f"{name}: all-reduces reach {rate(speed)}, those of other groups {rate(typical)}",
            "every step waits for them: check their links (nvidia-smi nvlink --status, ibstat), or "
            "leave them out",
        )
        for speed, name in slow[:4]
    ]
    link = 0.0  # bytes per second of the link between the members
    if gpu := gpu_of(device_kind):
        is_one_host = len({hosts[process] for process, _ in groups[0].members}) == 1
        link = gpu.link_bandwidth if is_one_host else gpu.network_bandwidth
    if link and typical < _OF_THE_LINK * link:
        results.append(
            warning(
                check,
                f"all-reduces reach {rate(typical)}; the links of {device_kind} carry {rate(link)}",
                "check NCCL's choices with NCCL_DEBUG=INFO: it should use peer access, NVLink, "
                "InfiniBand and GPUDirect",
            )
        )
    return [(note if results else ok)(check, text, **numbers), *results]


def _names(group: DeviceGroup, hosts: Sequence[str]) -> str:
    """Return a group as text: `devices 0,1 of process 0 on a, device 3 of process 1 on b`."""
    by_process: dict[int, list[int]] = {}
    for process, device in group.members:
        by_process.setdefault(process, []).append(device)
    parts = [
        f"{'device' if len(ids) == 1 else 'devices'} {','.join(map(str, ids))} of process "
        f"{process} on {hosts[process]}"
        for process, ids in by_process.items()
    ]
    return few(parts, 4)
