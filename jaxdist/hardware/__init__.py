"""Data sheets of GPUs: memory, peak rates, bandwidths and prices, each with its source.

Only facts of data sheets and price lists (`known.toml`). `plan.estimate` has the share of them that
a program reaches.

    gpu         records of a GPU and of a cluster
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
