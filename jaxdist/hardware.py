"""What is known of GPUs: memory, peaks, bandwidths, prices, each with its source; and `--gpus`.

Facts of the data sheet and price list only. What of them a program reaches is judged by whoever
estimates (`jaxdist.estimate`); what a GPU really has is asked of the GPU where there is one.

Peaks are dense: NVIDIA's headline numbers assume 2:4 sparsity and are twice these. "float32" is the
TF32 tensor-core peak where the GPU has one, because XLA multiplies float32 matrices in TF32 there
unless told otherwise. A GPU that lacks a type (bfloat16 on a T4) has no entry for it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.types import ConfigError

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU, as JAX counts devices.

    Attributes:
        name: what `--gpus` calls it.
        device_kind: pattern of the whole `jax.Device.device_kind` after the vendor's name.
        compute_capability: e.g. "9.0".
        num_sms: streaming multiprocessors.
        memory_bytes: what CUDA reports as total, a little below the data sheet's figure.
        peak_flops: dtype ("bfloat16", "float16", "float32", "float8") -> dense FLOP/s.
        memory_bandwidth: of the device memory, bytes/s.
        link_bandwidth: to GPUs of the same fast fabric, bytes/s per GPU and direction.
        network_bandwidth: to GPUs beyond it, bytes/s per GPU and direction.
        gpus_per_node: GPUs of one machine, where `--gpus` does not say.
        gpus_per_fabric: GPUs that fast links join; 0 = those of one machine.
        price_per_hour: of one GPU, on demand, USD.
        spot_price_per_hour: of one GPU that may be taken away at any time, USD.
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
    price_per_hour: float
    spot_price_per_hour: float

    @property
    def has_cudnn_attention(self) -> bool:
        """Whether cuDNN has fused attention for it (Ampere and later)."""
        return float(self.compute_capability) >= 8.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Some machines with GPUs of one kind."""

    gpu: Gpu
    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.num_nodes * self.gpus_per_node

    @property
    def gpus_per_fabric(self) -> int:
        """GPUs that fast links join."""
        return max(self.gpus_per_node, self.gpu.gpus_per_fabric)

    def __str__(self) -> str:
        return f"{self.gpu.name}:{self.num_nodes}x{self.gpus_per_node}"


def _peaks(bfloat16: float, float32: float, float8: float = 0.0) -> dict[str, float]:
    """TFLOP/s -> FLOP/s by dtype; float16 is as fast as bfloat16."""
    peaks = {"bfloat16": bfloat16, "float16": bfloat16, "float32": float32, "float8": float8}
    return {dtype: tflops * 1e12 for dtype, tflops in peaks.items() if tflops}


# Prices move; these are for a first comparison and every one can be overridden (--price).
# [aws]     EC2 list price, us-east-1, smallest instance with one such GPU, 2025.
# [lambda]  Lambda on-demand list price, 2025.
# [market]  middle of the specialised clouds' range, May 2026 (mercatus-ai.com/blog/
#           cloud-gpu-pricing: A100-80 1.10-1.50, H100 SXM 2.50-3.50, H200 3.50-4.50).
# [cw]      CoreWeave list price of a GB200 NVL72 instance with 4 GPUs, 42.00, 2025.
# Spot is half of on demand everywhere: surveys of 2026 say 40-70 % less (aiapiplaybook.com,
# "GPU Cloud Pricing 2026"), and it changes by the hour.

# H100 data sheet (SXM): 1,979 FP16/BF16, 989 TF32, 3,958 FP8, all sparse.
_HOPPER = _peaks(989.4, 494.7, 1978.9)
# H100 and H200 data sheets (NVL): 1,671 / 835 / 3,341, all sparse.
_HOPPER_NVL = _peaks(835.5, 417.5, 1670.5)
# A100 data sheet, 40 and 80 GB, SXM and PCIe alike: 312 / 156, dense.
_AMPERE = _peaks(312.0, 156.0)

_KNOWN = (
    Gpu(
        name="t4",
        device_kind=r"T4",
        compute_capability="7.5",
        num_sms=40,  # NVIDIA Turing architecture white paper, T4: 2,560 cores of 64 each
        memory_bytes=int(14.56 * GIB),  # "Tesla T4, 14.56 GiB" in PyTorch's out-of-memory message
        # T4 data sheet: 65 mixed precision, 8.1 float32; Turing has neither bfloat16 nor TF32.
        peak_flops={"float16": 65.0e12, "float32": 8.1e12},
        memory_bandwidth=320e9,  # T4 data sheet: 320+ GB/s
        link_bandwidth=16e9,  # PCIe 3.0 × 16, 32 GB/s both ways (data sheet)
        network_bandwidth=1.56e9,  # EC2 g4dn.12xlarge: 50 Gbit/s for 4 GPUs
        gpus_per_node=4,
        price_per_hour=0.526,  # [aws] g4dn.xlarge
        spot_price_per_hour=0.263,
    ),
    Gpu(
        name="l4",
        device_kind=r"L4",
        compute_capability="8.9",
        num_sms=58,  # NVIDIA Ada architecture: AD104 as L4, 7,424 cores of 128 each
        memory_bytes=int(22.03 * GIB),  # PyTorch's out-of-memory message on an L4
        peak_flops=_peaks(121.0, 60.0, 242.5),  # L4 data sheet: 242 / 120 / 485, sparse
        memory_bandwidth=300e9,  # L4 data sheet
        link_bandwidth=32e9,  # PCIe 4.0 × 16, 64 GB/s both ways (data sheet)
        network_bandwidth=1.56e9,  # EC2 g6.48xlarge: 100 Gbit/s for 8 GPUs
        gpus_per_node=8,
        price_per_hour=0.805,  # [aws] g6.xlarge
        spot_price_per_hour=0.40,
    ),
    Gpu(
        name="a10g",
        device_kind=r"A10G",
        compute_capability="8.6",
        num_sms=80,  # cudaDeviceProp.multiProcessorCount; NVIDIA has no public figure
        memory_bytes=int(22.06 * GIB),  # PyTorch's out-of-memory message on an A10G
        peak_flops=_peaks(70.0, 35.0),  # A10G data sheet (AWS G5): dense; the A10 is another bin
        memory_bandwidth=600e9,  # A10G data sheet
        link_bandwidth=32e9,  # PCIe 4.0 × 16, 64 GB/s both ways
        network_bandwidth=1.56e9,  # EC2 g5.48xlarge: 100 Gbit/s for 8 GPUs
        gpus_per_node=8,
        price_per_hour=1.006,  # [aws] g5.xlarge
        spot_price_per_hour=0.50,
    ),
    Gpu(
        name="a100-40",
        device_kind=r"A100-(?:SXM4|PCIE)-40GB",
        compute_capability="8.0",
        num_sms=108,  # NVIDIA A100 white paper
        memory_bytes=42_298_834_944,  # deviceQuery on an A100-SXM4-40GB (bottlerocket#3873)
        peak_flops=_AMPERE,
        memory_bandwidth=1_555e9,  # A100 data sheet, 40 GB
        link_bandwidth=300e9,  # NVLink 3: 600 GB/s both ways (data sheet)
        network_bandwidth=25e9,  # DGX A100 data sheet: 8 × 200 Gbit/s for 8 GPUs
        gpus_per_node=8,
        price_per_hour=1.29,  # [lambda]
        spot_price_per_hour=0.645,
    ),
    Gpu(
        name="a100-80",
        device_kind=r"A100-(?:SXM4|PCIE)-80GB|A100 \d+GB PCIe",
        compute_capability="8.0",
        num_sms=108,
        memory_bytes=int(79.15 * GIB),  # PyTorch's out-of-memory message on an A100-SXM4-80GB
        peak_flops=_AMPERE,
        memory_bandwidth=2_039e9,  # A100 data sheet, 80 GB SXM
        link_bandwidth=300e9,
        network_bandwidth=25e9,
        gpus_per_node=8,
        price_per_hour=1.30,  # [market]
        spot_price_per_hour=0.65,
    ),
    Gpu(
        name="h100",
        device_kind=r"H100(?: SXM5)?(?: \d+GB)? HBM\d",
        compute_capability="9.0",
        num_sms=132,  # NVIDIA H100 white paper, SXM5
        memory_bytes=int(79.10 * GIB),  # PyTorch's out-of-memory message on an H100 80GB HBM3
        peak_flops=_HOPPER,
        memory_bandwidth=3_350e9,  # H100 data sheet, SXM
        link_bandwidth=450e9,  # NVLink 4: 900 GB/s both ways (data sheet)
        network_bandwidth=50e9,  # DGX H100 data sheet: 8 × 400 Gbit/s for 8 GPUs
        gpus_per_node=8,
        price_per_hour=3.00,  # [market]
        spot_price_per_hour=1.50,
    ),
    Gpu(
        name="h100-pcie",
        device_kind=r"H100 PCIe",
        compute_capability="9.0",
        num_sms=114,  # NVIDIA H100 white paper, PCIe
        memory_bytes=int(79.10 * GIB),
        peak_flops=_peaks(756.5, 378.0, 1513.0),  # H100 data sheet (2022), PCIe: twice, sparse
        memory_bandwidth=2_000e9,  # the same
        link_bandwidth=64e9,  # PCIe 5.0 × 16, 128 GB/s both ways (data sheet)
        network_bandwidth=25e9,  # one 400 Gbit/s adapter for 2 GPUs, NVIDIA-certified layout
        gpus_per_node=8,
        price_per_hour=2.49,  # [lambda]
        spot_price_per_hour=1.245,
    ),
    Gpu(
        name="h100-nvl",
        device_kind=r"H100 NVL",
        compute_capability="9.0",
        num_sms=132,
        memory_bytes=int(93.1 * GIB),  # 94 GB (data sheet), less what the driver keeps
        peak_flops=_HOPPER_NVL,
        memory_bandwidth=3_900e9,  # H100 data sheet, NVL
        link_bandwidth=64e9,  # beyond the bridged pair: PCIe 5.0 × 16
        network_bandwidth=25e9,
        gpus_per_node=8,
        price_per_hour=2.75,  # between H100 PCIe and SXM; no list price found
        spot_price_per_hour=1.375,
    ),
    Gpu(
        name="h200",
        device_kind=r"H200",
        compute_capability="9.0",
        num_sms=132,
        memory_bytes=int(139.8 * GIB),  # PyTorch's out-of-memory message on an H200
        peak_flops=_HOPPER,  # H200 data sheet, SXM: as H100 SXM
        memory_bandwidth=4_800e9,  # H200 data sheet
        link_bandwidth=450e9,
        network_bandwidth=50e9,  # DGX H200 data sheet: 8 × 400 Gbit/s for 8 GPUs
        gpus_per_node=8,
        price_per_hour=4.00,  # [market]
        spot_price_per_hour=2.00,
    ),
    Gpu(
        name="h200-nvl",
        device_kind=r"H200 NVL",
        compute_capability="9.0",
        num_sms=132,
        memory_bytes=int(139.8 * GIB),
        peak_flops=_HOPPER_NVL,
        memory_bandwidth=4_800e9,
        link_bandwidth=225e9,  # 4-way NVLink bridge, 450 GB/s both ways shared (data sheet: 900)
        network_bandwidth=25e9,
        gpus_per_node=4,
        price_per_hour=3.75,  # a little below H200 SXM; no list price found
        spot_price_per_hour=1.875,
    ),
    Gpu(
        name="b200",
        device_kind=r"B200",
        compute_capability="10.0",
        num_sms=148,  # device query (pytorch/ao#4002)
        memory_bytes=int(178.35 * GIB),  # the same
        # HGX data sheet (2024), 8 GPUs, sparse: 36 PFLOP/s FP16/BF16, 18 TF32, 72 FP8.
        peak_flops=_peaks(2250.0, 1125.0, 4500.0),
        memory_bandwidth=7_672e9,  # bus width × clock (pytorch/ao#4002); data sheet: 8 TB/s
        link_bandwidth=900e9,  # NVLink 5: 1.8 TB/s both ways (data sheet)
        network_bandwidth=50e9,  # DGX B200 data sheet: 8 × 400 Gbit/s for 8 GPUs
        gpus_per_node=8,
        price_per_hour=4.99,  # [lambda]
        spot_price_per_hour=2.495,
    ),
    Gpu(
        name="gb200",
        device_kind=r"GB200",
        compute_capability="10.0",
        num_sms=152,  # cudaDeviceProp.multiProcessorCount; NVIDIA has no public figure
        memory_bytes=int(184.0 * GIB),  # 186 GB × 72 = 13.4 TB (NVL72 data sheet), driver's view
        # GB200 NVL72 data sheet, 72 GPUs, sparse: 360 PFLOP/s FP16/BF16, 180 TF32, 720 FP8.
        peak_flops=_peaks(2500.0, 1250.0, 5000.0),
        memory_bandwidth=8_000e9,  # NVL72 data sheet: 576 TB/s over 72 GPUs
        link_bandwidth=900e9,
        network_bandwidth=50e9,  # one 400 Gbit/s adapter per GPU (DGX GB200 data sheet)
        gpus_per_node=4,
        gpus_per_fabric=72,  # NVLink joins the whole rack
        price_per_hour=10.50,  # [cw]
        spot_price_per_hour=5.25,
    ),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _KNOWN}
"""Every GPU known here, by the name that `--gpus` takes."""

_ALIASES = {
    "a100": "a100-80",
    "a100-40gb": "a100-40",
    "a100-80gb": "a100-80",
    "h100-sxm": "h100",
    "h200-sxm": "h200",
}


def gpu_of(device_kind: str) -> Gpu | None:
    """The GPU that a `jax.Device.device_kind` such as "NVIDIA H100 80GB HBM3" names.

    The whole name must match, so that an L40S is no L4 and a MIG slice ("... MIG 1g.10gb") is no
    whole GPU; None when it is not known.
    """
    kind = re.sub(r"^((NVIDIA|Tesla)\s+)*", "", device_kind.strip())
    return next((gpu for gpu in _KNOWN if re.fullmatch(gpu.device_kind, kind)), None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device for dense products in `dtype`, or None when not known."""
    gpu = gpu_of(device_kind)
    return None if gpu is None else gpu.peak_flops.get(dtype)


def parse_gpus(text: str, known: Mapping[str, Gpu] = GPUS) -> list[Cluster]:
    """Read `--gpus`: `h100:64`, `h100:8x8` (nodes × GPUs per node), or several after commas.

    `h100` alone is one GPU. A number above a node's GPUs takes full nodes.

    Raises:
        ConfigError: with every problem of the text.
    """
    clusters, problems = [], []
    for part in text.split(","):
        try:
            clusters.append(_parse_cluster(part.strip(), known))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return clusters


def _parse_cluster(text: str, known: Mapping[str, Gpu]) -> Cluster:
    name, _, count = text.partition(":")
    gpu = find_gpu(name, known)
    match = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", count.strip() or "1")
    if match is None:
        raise ConfigError(
            [
                f"gpus {text!r}: {count!r} is not a number of GPUs. Use e.g. {name}:64, or "
                f"{name}:8x8 for 8 nodes of 8 GPUs."
            ]
        )
    if match[2]:
        return Cluster(gpu=gpu, num_nodes=int(match[1]), gpus_per_node=int(match[2]))
    number, per_node = int(match[1]), gpu.gpus_per_node
    if number > per_node and number % per_node:
        low = number // per_node * per_node
        raise ConfigError(
            [
                f"gpus {text!r}: {number} GPUs do not fill nodes of {per_node}. Use "
                f"{name}:{low} or {name}:{low + per_node}, or say the nodes: {name}:NODESxGPUS."
            ]
        )
    nodes = max(1, number // per_node)
    return Cluster(gpu=gpu, num_nodes=nodes, gpus_per_node=number // nodes)


def find_gpu(name: str, known: Mapping[str, Gpu] = GPUS) -> Gpu:
    """The GPU of a name as users write it.

    Raises:
        ConfigError: there is none of this name.
    """
    key = name.strip().lower().replace("_", "-")
    key = _ALIASES.get(key, key)
    if key in known:
        return known[key]
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(
        [
            f"gpus: {name!r} is not known. {hint}Known: {', '.join(known)}. Describe others in a "
            "TOML file and name it with --hardware."
        ]
    )


# --- one's own hardware --------------------------------------------------------------------------

_FILE_KEYS = {
    "like": "",
    "compute_capability": "compute_capability",
    "num_sms": "num_sms",
    "memory_gib": "memory_bytes",
    "peak_tflops": "peak_flops",
    "memory_gb_per_s": "memory_bandwidth",
    "link_gb_per_s": "link_bandwidth",
    "network_gb_per_s": "network_bandwidth",
    "gpus_per_node": "gpus_per_node",
    "gpus_per_fabric": "gpus_per_fabric",
    "price_per_hour": "price_per_hour",
    "spot_price_per_hour": "spot_price_per_hour",
}
"""Key of the file -> field of `Gpu`."""

_SCALES: dict[str, float] = {
    "memory_gib": GIB,
    "memory_gb_per_s": 1e9,
    "link_gb_per_s": 1e9,
    "network_gb_per_s": 1e9,
}


def read_hardware(path: str | Path) -> dict[str, Gpu]:
    """One's own GPUs from a TOML file, beside the known ones.

    A table per GPU; with `like` it starts from a known one and says what differs:

        [our-h100]
        like = "h100"
        network_gb_per_s = 12.5
        price_per_hour = 1.9

    Without `like` every key of the table must be there but `gpus_per_fabric`; `peak_tflops` is a
    table by dtype.

    Raises:
        ConfigError: the file cannot be read, or with every problem found in it.
    """
    try:
        tables = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"hardware {str(path)!r} cannot be read: {error}."]) from error
    found: dict[str, Gpu] = {}
    problems: list[str] = []
    for name, table in tables.items():
        key, bad = name.lower().replace("_", "-"), _table_problems(name, table)
        if bad:
            problems += bad
        else:
            found[key] = _gpu_from(key, table)
    if problems:
        raise ConfigError([f"hardware {str(path)!r}: {line}" for line in problems])
    return {**GPUS, **found}


def _table_problems(name: str, table: Any) -> list[str]:
    if not isinstance(table, dict):
        return [f"{name} is not a table. Write [{name}] and its keys below."]
    problems = [
        f"[{name}] {key} is unknown. Use {', '.join(_FILE_KEYS)}."
        for key in table
        if key not in _FILE_KEYS
    ]
    if "like" in table:
        if str(table["like"]).lower() not in {**GPUS, **_ALIASES}:
            problems.append(f"[{name}] like={table['like']!r} is not one of {', '.join(GPUS)}.")
    else:
        missing = [key for key in _FILE_KEYS if key not in (*table, "like", "gpus_per_fabric")]
        if missing:
            problems.append(
                f"[{name}] lacks {', '.join(missing)}. Give them, or start from a known GPU: "
                'like = "h100".'
            )
    return problems + [
        problem
        for key, value in table.items()
        if key in _FILE_KEYS and (problem := _value_problem(name, key, value))
    ]


def _value_problem(name: str, key: str, value: Any) -> str:
    if key == "like":
        return ""
    if key == "compute_capability":
        good = re.fullmatch(r"\d+\.\d", str(value)) is not None
        return "" if good else f'[{name}] {key}={value!r} is not like "9.0".'
    if key == "peak_tflops":
        dtypes = ("bfloat16", "float16", "float32", "float8")
        entries = value.items() if isinstance(value, dict) else []
        if entries and all(k in dtypes and _is_number(v) and v > 0 for k, v in entries):
            return ""
        return f"[{name}] {key} must be a table of TFLOP/s by {', '.join(dtypes)}."
    whole = key in ("num_sms", "gpus_per_node", "gpus_per_fabric")
    lowest = 0 if key in ("gpus_per_fabric", "price_per_hour", "spot_price_per_hour") else 1e-9
    if not _is_number(value) or value < lowest or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        above = "0 or more" if lowest == 0 else "above 0"
        return f"[{name}] {key}={value!r} must be a {kind} {above}."
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _gpu_from(name: str, table: Mapping[str, Any]) -> Gpu:
    fields: dict[str, Any] = {"name": name}
    for key, value in table.items():
        if key == "peak_tflops":
            fields["peak_flops"] = {dtype: tflops * 1e12 for dtype, tflops in value.items()}
        elif key != "like":
            scaled = value * _SCALES[key] if key in _SCALES else value
            fields[_FILE_KEYS[key]] = int(scaled) if key == "memory_gib" else scaled
    fields["compute_capability"] = str(fields.get("compute_capability", ""))
    if "like" in table:
        fields = {k: v for k, v in fields.items() if v != ""}
        return dataclasses.replace(find_gpu(str(table["like"])), **fields)
    # No device calls itself this: only the planner knows it.
    return Gpu(device_kind=re.escape(name), **fields)
