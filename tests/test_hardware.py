"""GPUs: names, `--gpus`, custom ones in a file, and errors with the fix."""

import pytest
from refusals import refused

from jaxdist.hardware import GPUS, find_gpu, gpu_of, parse_gpus, read_hardware


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100", ["h100:1x1"]),
        ("h100:4", ["h100:1x4"]),
        ("h100:64", ["h100:8x8"]),
        ("H100:8x8", ["h100:8x8"]),
        ("h100:2x4", ["h100:2x4"]),
        ("gb200:72", ["gb200:18x4"]),
        ("h100:64, a100:64", ["h100:8x8", "a100-80:8x8"]),
        ("l4:3", ["l4:1x3"]),
    ],
)
def test_gpu_arguments_are_parsed(text, expected):
    assert [str(cluster) for cluster in parse_gpus(text)] == expected


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("h101:8", ["'h101'", "mean h100", "Known: t4,"]),
        ("h100:12", ["12 GPUs", "nodes of 8", "h100:8 or h100:16"]),
        ("h100:0", ["'0'", "number of GPUs"]),
        ("h100:8x", ["'8x'", "number of GPUs"]),
        ("", ["''", "not known"]),
    ],
)
def test_bad_gpu_arguments_are_rejected_with_a_fix(text, facts):
    with refused(*facts):
        parse_gpus(text)


def test_rack_scale_links_connect_nodes():
    (cluster,) = parse_gpus("gb200:72")
    assert (cluster.gpus_per_node, cluster.gpus_per_fabric) == (4, 72)
    (cluster,) = parse_gpus("h100:64")
    assert cluster.gpus_per_fabric == 8


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_gpu_figures_are_plausible(gpu):
    """A wrong power of ten or a bit instead of a byte would fail."""
    assert 14e9 < gpu.memory_bytes < 290e9
    assert 8e12 <= gpu.peak_flops["float32"] < 2e15
    # Operations that one byte from memory must supply: tens to hundreds on every tensor-core GPU.
    best = max(gpu.peak_flops.get(d, 0.0) for d in ("bfloat16", "float16"))
    # Only the H20 lost matrix units but no bandwidth.
    assert (35 if gpu.name == "h20" else 75) < best / gpu.memory_bandwidth < 500
    assert 0.4e-12 < gpu.power_w / best < 5e-12
    assert gpu.network_bandwidth <= gpu.link_bandwidth < gpu.memory_bandwidth
    assert 0 < gpu.spot_price_per_hour < gpu.price_per_hour < 15


def test_gpu_is_identified_by_device_name():
    assert gpu_of("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert gpu_of("Tesla T4") is GPUS["t4"]
    assert gpu_of("NVIDIA H200 NVL") is GPUS["h200-nvl"]
    assert gpu_of("NVIDIA B300 SXM6 AC") is GPUS["b300"]
    assert gpu_of("NVIDIA GH200 480GB") is GPUS["gh200"]
    assert gpu_of("NVIDIA L40S") is GPUS["l40s"] and gpu_of("NVIDIA L40") is GPUS["l40"]
    assert gpu_of("NVIDIA A10") is GPUS["a10"] and gpu_of("NVIDIA A10G") is GPUS["a10g"]
    assert gpu_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb") is None


OWN = """
[our-h100]
like = "h100"
network_gb_per_s = 12.5
price_per_hour = 1.9

[Prototype]
compute_capability = "9.0"
num_sms = 100
memory_gib = 64
peak_tflops = { bfloat16 = 500, float32 = 250 }
memory_gb_per_s = 2000
link_gb_per_s = 200
network_gb_per_s = 25
gpus_per_node = 4
price_per_hour = 1.0
spot_price_per_hour = 0.5
"""


def test_custom_hardware_extends_a_listed_gpu_or_defines_all_fields(tmp_path):
    file = tmp_path / "hardware.toml"
    file.write_text(OWN)
    catalogue = read_hardware(file)
    ours, prototype = find_gpu("our-h100", catalogue), find_gpu("prototype", catalogue)
    assert (ours.network_bandwidth, ours.price_per_hour) == (12.5e9, 1.9)
    assert ours.memory_bytes == GPUS["h100"].memory_bytes
    assert ours.power_w == GPUS["h100"].power_w and prototype.power_w == 0
    assert prototype.memory_bytes == 64 * 2**30
    assert prototype.peak_flops == {"bfloat16": 500e12, "float32": 250e12}
    assert [str(c) for c in parse_gpus("our-h100:16,prototype:8", catalogue)] == [
        "our-h100:2x8",
        "prototype:2x4",
    ]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[x]\nnum_sms = 3", ["compute_capability, memory_gib"]),
        ('[x]\nlike = "h100"\nmemory = 3', ["memory is unknown", "like,"]),
        ('[x]\nlike = "h100"\nmemory_gib = -3', ["memory_gib=-3", "above 0"]),
        ('[x]\nlike = "h100"\nnum_sms = 1.5', ["num_sms=1.5", "whole number"]),
        ('[x]\nlike = "h100"\npeak_tflops = 3', ["a table", "bfloat16"]),
        ('[x]\nlike = "h100"\npeak_tflops = { bfloat16 = 3 }', ["[x] peak_tflops", "float32"]),
        ('[x]\nlike = "h100"\ncompute_capability = 9', ["compute_capability=9"]),
        ('[x]\nlike = "h1"', ["like='h1'", "t4"]),
        ("x = 3", ["x is not a table"]),
        ("[x", ["hardware.toml", "end of document"]),
    ],
)
def test_bad_hardware_files_are_rejected_with_a_fix(tmp_path, text, facts):
    file = tmp_path / "hardware.toml"
    file.write_text(text)
    with refused(*facts):
        read_hardware(file)
