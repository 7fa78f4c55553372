"""What is known of GPUs: memory, peaks, bandwidths, prices, each with its source; and `--gpus`.

Facts of the data sheet and price list only (`known.toml`). What of them a program reaches is judged
by whoever estimates (`jaxdist.plan.estimate`); what a GPU really has is asked of the GPU where
there is one.

    gpu     what a GPU and a cluster are
    files   GPUs described in TOML
    known   those of `known.toml`, and a user's own
    asked   `--gpus h100:8x8`
"""

from jaxdist.plan.hardware.catalog import GPUS, find_gpu, gpu_of, peak_flops, read_hardware
from jaxdist.plan.hardware.gpu import GIB, Cluster, Gpu
from jaxdist.plan.hardware.request import parse_gpus

__all__ = [
    "GIB",
    "GPUS",
    "Cluster",
    "Gpu",
    "find_gpu",
    "gpu_of",
    "parse_gpus",
    "peak_flops",
    "read_hardware",
]
