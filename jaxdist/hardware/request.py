"""What `--gpus` asks for: kinds of GPU and how many."""

from __future__ import annotations

import re
from collections.abc import Mapping

from jaxdist.hardware.catalog import GPUS, find_gpu
from jaxdist.hardware.gpu import Cluster, Gpu
from jaxdist.settings import ConfigError


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
    match = re.fullmatch(r"([1-9][0-9]{0,5})(?:x([1-9][0-9]{0,5}))?", count.strip() or "1")
    if match is None:
        raise ConfigError(
            f"gpus {text!r}: {count!r} is not a number of GPUs. Use e.g. {name}:64, or "
            f"{name}:8x8 for 8 nodes of 8 GPUs."
        )
    if match[2]:
        return Cluster(gpu=gpu, num_nodes=int(match[1]), gpus_per_node=int(match[2]))
    number, per_node = int(match[1]), gpu.gpus_per_node
    if number > per_node and number % per_node:
        low = number // per_node * per_node
        raise ConfigError(
            f"gpus {text!r}: {number} GPUs do not fill nodes of {per_node}. Use "
            f"{name}:{low} or {name}:{low + per_node}, or say the nodes: {name}:NODESxGPUS."
        )
    return Cluster.of(gpu, number)
