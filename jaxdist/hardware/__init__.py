"""Data sheets of GPUs: memory, peak rates, bandwidths and prices, with sources (`known.toml`)."""

from jaxdist.hardware.catalog import (
    GIB,
    GPUS,
    Cluster,
    Gpu,
    find_gpu,
    gpu_of,
    parse_gpus,
    peak_flops,
    read_hardware,
)
