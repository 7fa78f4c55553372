"""Records of GPUs and clusters, and the GPUs of `known.toml` and of a user's TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.runtime.storage import locate
from jaxdist.settings import Bounds, ConfigError
from jaxdist.settings.schema import BadValueError, read_value

GIB = 2**30

HOST_BYTES_PER_S = 10e9
"""Between a GPU and its host, each way: PCIe 4.0, with all GPUs of a node copying concurrently."""

DISK_BYTES_PER_S = 3e9
"""Bytes per second that a node's local NVMe disk reads and writes at the same time, in all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU type, as JAX counts devices.

    Attributes:
        device_kind: pattern for the complete `jax.Device.device_kind` without the vendor.
        memory_bytes: total that CUDA reports, slightly below the data sheet.
        peak_flops: dtype ("bfloat16", "float16", "float32", "float8", "float4") -> dense FLOP/s.
        memory_bandwidth: of the device memory, bytes/s.
        link_bandwidth: to GPUs on the same fast links, bytes/s per GPU and direction.
        network_bandwidth: to other GPUs, bytes/s per GPU and direction.
        gpus_per_fabric: number of GPUs joined by fast links; 0 = all GPUs of a machine.
        power_w: power limit in watts; 0 = unknown.
        max_clock: maximum clock relative to the boost clock at which peak rates are specified.
        price_per_hour, spot_price_per_hour: of one GPU, USD; spot GPUs are preemptible.
    """

    name: str
    device_kind: str
    compute_capability: str
    num_sms: int
    memory_bytes: int
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    gpus_per_node: int
    gpus_per_fabric: int = 0
    power_w: float = 0.0
    max_clock: float = 1.0
    price_per_hour: float
    spot_price_per_hour: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes with GPUs of one type, and a local disk each."""

    gpu: Gpu
    num_nodes: int
    gpus_per_node: int
    disk_bytes_per_s: float = DISK_BYTES_PER_S

    @classmethod
    def of(cls, gpu: Gpu, num_gpus: int) -> Cluster:
        """Return the fewest nodes, of `gpu.gpus_per_node` at most, that divide the GPUs equally."""
        nodes = math.ceil(num_gpus / gpu.gpus_per_node)
        while num_gpus % nodes:
            nodes += 1
        return cls(gpu=gpu, num_nodes=nodes, gpus_per_node=num_gpus // nodes)

    def resized(self, num_gpus: int) -> Cluster:
        """Return a cluster with another number of these GPUs; of several nodes, none grows."""
        per_node = self.gpus_per_node if self.num_nodes > 1 else self.gpu.gpus_per_node
        other = Cluster.of(dataclasses.replace(self.gpu, gpus_per_node=per_node), num_gpus)
        return dataclasses.replace(other, disk_bytes_per_s=self.disk_bytes_per_s)

    @property
    def num_gpus(self) -> int:
        """Total number of GPUs."""
        return self.num_nodes * self.gpus_per_node

    @property
    def gpus_per_fabric(self) -> int:
        """Number of GPUs joined by fast links."""
        return max(self.gpus_per_node, self.gpu.gpus_per_fabric)

    def __str__(self) -> str:
        return f"{self.gpu.name}:{self.num_nodes}x{self.gpus_per_node}"


_ALIASES = {
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "a6000": "rtx-a6000",
}


class _Key(NamedTuple):
    """A key of a table: field of `Gpu`, type, factor to the field's unit, allowed values."""

    field: str
    type: type = float
    unit: float = 1
    bounds: Bounds = Bounds(gt=0)


_KEYS = {
    "like": _Key("", str),
    "compute_capability": _Key("compute_capability", str),
    "num_sms": _Key("num_sms", int),
    "memory_gib": _Key("memory_bytes", unit=GIB),
    "memory_gb_per_s": _Key("memory_bandwidth", unit=1e9),
    "link_gb_per_s": _Key("link_bandwidth", unit=1e9),
    "network_gb_per_s": _Key("network_bandwidth", unit=1e9),
    "gpus_per_node": _Key("gpus_per_node", int),
    "gpus_per_fabric": _Key("gpus_per_fabric", int, bounds=Bounds(ge=0)),
    "power_w": _Key("power_w", bounds=Bounds(ge=0)),
    "max_clock": _Key("max_clock"),
    "price_per_hour": _Key("price_per_hour", bounds=Bounds(ge=0)),
    "spot_price_per_hour": _Key("spot_price_per_hour", bounds=Bounds(ge=0)),
    "peak_tflops": _Key("peak_flops", dict, 1e12),
}
_OPTIONAL = ("like", "gpus_per_fabric", "power_w", "max_clock")
_DTYPES = ("bfloat16", "float16", "float32", "float8", "float4")


def read_tables(
    tables: Mapping[str, Any], catalog: Mapping[str, Gpu]
) -> tuple[dict[str, Gpu], list[str]]:
    """Return name -> GPU of the tables of a TOML file, and error messages for invalid tables."""
    gpus: dict[str, Gpu] = {}
    problems: list[str] = []
    for name, table in tables.items():
        key = name.lower().replace("_", "-")
        if not isinstance(table, dict):
            problems.append(f"{name} is not a table. Write [{name}] and its keys below.")
            continue
        try:
            gpus[key] = _gpu_from(key, table, {**catalog, **gpus})
        except ConfigError as error:
            problems += [f"[{name}] {problem}" for problem in error.problems]
    return gpus, problems


def _gpu_from(name: str, table: Mapping[str, Any], catalog: Mapping[str, Gpu]) -> Gpu:
    like = str(table.get("like", "")).lower()
    like = _ALIASES.get(like, like)
    problems, fields = [], dict[str, Any]()
    if "like" in table and like not in catalog:
        problems.append(f"like={table['like']!r} is not one of {', '.join(catalog)}.")
    missing = [key for key in _KEYS if key not in (*table, *_OPTIONAL)]
    if missing and "like" not in table:
        problems.append(
            f'lacks {", ".join(missing)}. Give them, or start from a known GPU: like = "h100".'
        )
    for key, value in table.items():
        if key not in _KEYS:
            problems.append(f"{key} is unknown. Use {', '.join(_KEYS)}.")
            continue
        try:
            fields[_KEYS[key].field] = _value_of(_KEYS[key], value)
        except BadValueError as error:
            problems.append(f"{key}={value!r} {error}. See jaxdist/hardware/known.toml.")
    if problems:
        raise ConfigError(problems)
    fields.pop("", None)
    if "memory_bytes" in fields:
        fields["memory_bytes"] = int(fields["memory_bytes"])
    if like:
        if "peak_flops" in fields:  # a different chip, so the inherited power limit does not apply
            fields = {"power_w": 0.0, "max_clock": 1.0, **fields}
        return dataclasses.replace(catalog[like], name=name, **fields)
    # Only the planner uses the GPU: `gpu_of` does not search it.
    return Gpu(name=name, device_kind=re.escape(name), **fields)


def _value_of(key: _Key, value: Any) -> Any:
    if key.type is dict:
        table = value if isinstance(value, dict) else {}
        if "float32" not in table or not set(table) <= set(_DTYPES):
            dtypes = ", ".join(_DTYPES)
            raise BadValueError(f"must be a table of TFLOP/s: float32, and any of {dtypes}")
        return {dtype: _value_of(_Key("", float, key.unit), rate) for dtype, rate in table.items()}
    number = read_value(value, key.type)
    if key.type is str:
        return number
    if not key.bounds.allow(number):
        raise BadValueError(f"must be a number {key.bounds}")
    return number * key.unit


def _read_catalog() -> dict[str, Gpu]:
    text = Path(__file__).with_name("known.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    kinds = {name: table.pop("device_kind") for name, table in tables.items()}
    gpus, problems = read_tables(tables, {})
    assert not problems, problems
    return {name: dataclasses.replace(gpu, device_kind=kinds[name]) for name, gpu in gpus.items()}


GPUS: dict[str, Gpu] = _read_catalog()
"""GPUs of the catalog, by their name in `--gpus`."""


def gpu_of(device_kind: str) -> Gpu | None:
    """Return the GPU of a complete `jax.Device.device_kind`, or of a name in `GPUS`; else None."""
    kind = re.sub(r"^((NVIDIA|Tesla)\s+)*", "", device_kind.strip())
    gpus = (gpu for gpu in GPUS.values() if re.fullmatch(gpu.device_kind, kind))
    return GPUS.get(device_kind) or next(gpus, None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Return one device's dense peak FLOP/s in `dtype`; None if it is not in the catalog."""
    gpu = gpu_of(device_kind)
    return None if gpu is None else gpu.peak_flops.get(dtype)


def find_gpu(name: str, catalog: Mapping[str, Gpu] = GPUS) -> Gpu:
    """Return the GPU with a name or alias; raise `ConfigError` if there is none."""
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in catalog:
        return catalog[key]
    near = difflib.get_close_matches(key, catalog, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"gpus: {name!r} is not known. {hint}Known: {', '.join(catalog)}. Describe others in a "
        "TOML file and name it with --hardware."
    )


def read_hardware(path: str | Path) -> dict[str, Gpu]:
    """Return name -> GPU of the catalog, and of the tables of a user's TOML file.

    A table with `like` copies a listed GPU, or an earlier table, and overrides some keys. Others
    must have every key of `known.toml` except `device_kind`, `gpus_per_fabric`, `power_w` and
    `max_clock`. Raises `ConfigError` with all problems of the file.
    """
    try:
        tables = tomllib.loads(locate(Path(path).expanduser()).read().decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"hardware {str(path)!r} cannot be read: {error}. Name a TOML file with a table per "
            "GPU, as in jaxdist/hardware/known.toml, without device_kind."
        ) from error
    gpus, problems = read_tables(tables, GPUS)
    if problems:
        raise ConfigError([f"hardware {str(path)!r}: {line}" for line in problems])
    return {**GPUS, **gpus}


def parse_gpus(text: str, catalog: Mapping[str, Gpu] = GPUS) -> list[Cluster]:
    """Return the clusters of `--gpus`: `h100:64`, `h100:8x8` (nodes × GPUs per node), or a list.

    `h100` means one GPU; commas separate clusters. Without `x`, more GPUs than a node has must fill
    nodes. Raises `ConfigError` with all problems.
    """
    clusters, problems = [], []
    for part in text.split(","):
        try:
            clusters.append(_parse_cluster(part.strip(), catalog))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return clusters


def _parse_cluster(text: str, catalog: Mapping[str, Gpu]) -> Cluster:
    name, _, count = text.partition(":")
    gpu = find_gpu(name, catalog)
    match = re.fullmatch(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?", count.strip() or "1")
    if match is None:
        raise ConfigError(
            f"gpus {text!r}: {count!r} is no number of GPUs up to 999999. Use e.g. {name}:64, or "
            f"{name}:8x8 for 8 nodes of 8 GPUs."
        )
    if match[2]:
        return Cluster(gpu=gpu, num_nodes=int(match[1]), gpus_per_node=int(match[2]))
    number, per_node = int(match[1]), gpu.gpus_per_node
    if number > per_node and number % per_node:
        low = number // per_node * per_node
        raise ConfigError(
            f"gpus {text!r}: {number} GPUs do not fill nodes of {per_node}. Use "
            f"{name}:{low} or {name}:{low + per_node}, or give the nodes: {name}:NODESxGPUS."
        )
    return Cluster.of(gpu, number)
