"""Data sheets of GPUs: memory, peak rates, bandwidths and prices, with sources (`known.toml`).

gpu         records of a GPU type and of a cluster
catalog     GPUs of `known.toml` and of a user's TOML file, by name or by `--gpus`
"""

from jaxdist.hardware.catalog import (
    GPUS,
    find_gpu,
    gpu_of,
    parse_gpus,
    peak_flops,
    read_hardware,
)
from jaxdist.hardware.gpu import GIB, Cluster, Gpu
