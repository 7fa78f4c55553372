"""Peak rates of known GPUs: the denominator of the MFU. What is not listed has no MFU.

All figures are dense (NVIDIA's headline numbers assume 2:4 sparsity and are twice these), for one
device as JAX counts them, in TFLOP/s. "float32" is the TF32 tensor-core peak where the GPU has
one, because XLA multiplies float32 matrices in TF32 there unless told otherwise; on a T4 it is the
plain float32 peak. A GPU that lacks a type (bfloat16 on a T4) has no entry for it.
"""

from __future__ import annotations

import re

_HOPPER_SXM = {"bfloat16": 989.4, "float16": 989.4, "float32": 494.7}
_HOPPER_NVL = {"bfloat16": 835.5, "float16": 835.5, "float32": 417.5}
_A100 = {"bfloat16": 312.0, "float16": 312.0, "float32": 156.0}

PEAK_TFLOPS: tuple[tuple[str, dict[str, float]], ...] = (
    # NVIDIA GB200 NVL72 data sheet: 360 PFLOP/s FP16/BF16 and 180 TF32, sparse, over 72 GPUs.
    (r"GB200", {"bfloat16": 2500.0, "float16": 2500.0, "float32": 1250.0}),
    # NVIDIA HGX data sheet (2024), HGX B200: 36 PFLOP/s FP16/BF16, 18 TF32, sparse, over 8 GPUs.
    (r"B200", {"bfloat16": 2250.0, "float16": 2250.0, "float32": 1125.0}),
    # NVIDIA H200 data sheet: NVL 1,671 / 835 sparse, SXM 1,979 / 989 sparse.
    (r"H200 NVL", _HOPPER_NVL),
    (r"H200", _HOPPER_SXM),
    # NVIDIA H100 data sheet: NVL 1,671 / 835, PCIe 1,513 / 756, SXM 1,979 / 989, all sparse.
    (r"H100 NVL", _HOPPER_NVL),
    (r"H100 PCIe", {"bfloat16": 756.5, "float16": 756.5, "float32": 378.0}),
    (r"H100(?: SXM5)?(?: \d+GB)? HBM\d", _HOPPER_SXM),
    # NVIDIA A100 data sheet, 40 and 80 GB, SXM and PCIe alike: 312 / 156 dense.
    (r"A100-(?:SXM4|PCIE)-\d+GB|A100 \d+GB PCIe", _A100),
    # NVIDIA A10G data sheet (for AWS G5): 70 / 35 dense; the plain A10 is another chip bin.
    (r"A10G", {"bfloat16": 70.0, "float16": 70.0, "float32": 35.0}),
    # NVIDIA L4 data sheet: 242 FP16/BF16 and 120 TF32, sparse.
    (r"L4", {"bfloat16": 121.0, "float16": 121.0, "float32": 60.0}),
    # NVIDIA T4 data sheet: 65 mixed precision (float16), 8.1 float32; Turing has no bfloat16.
    (r"T4", {"float16": 65.0, "float32": 8.1}),
)
"""(pattern of `device_kind` after the vendor, TFLOP/s by compute dtype); first match wins."""


def peak_flops(device_kind: str, compute_dtype: str) -> float | None:
    """Peak FLOP/s of one device for dense products in `compute_dtype`, or None when not known.

    Args:
        device_kind: `jax.Device.device_kind`, e.g. "NVIDIA H100 80GB HBM3". The whole name must
            match, so that an L40S is no L4 and a MIG slice ("... MIG 1g.10gb") is no whole GPU.
        compute_dtype: "bfloat16", "float16" or "float32".
    """
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", device_kind.strip())
    name = re.sub(r"^(NVIDIA|Tesla)\s+", "", name)
    for pattern, by_dtype in PEAK_TFLOPS:
        if re.fullmatch(pattern, name):
            tflops = by_dtype.get(compute_dtype)
            return None if tflops is None else tflops * 1e12
    return None
