"""What is known of GPUs: memory, peak rates, bandwidths and prices, each with its source.

Only facts of data sheets and price lists (`known.toml`). `plan.estimate` says what share of them a
program reaches.

    gpu         what a GPU and a cluster are
    toml_files  GPUs described in TOML
    catalog     those of `known.toml`, and a user's own
    request     `--gpus h100:8x8`
"""

from jaxdist.hardware.catalog import GPUS, find_gpu, gpu_of, peak_flops, read_hardware
from jaxdist.hardware.gpu import GIB, Cluster, Gpu
from jaxdist.hardware.request import parse_gpus
