"""Contenders of `versus.py` in JAX: `versus_jax.py ours JOB.json` or `versus_jax.py bare JOB.json`.

`ours` is the compiled step of a run, as `step.py` builds it; `bare` is the hand-written `bare.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported

import bare
import jax
import numpy as np
import step
from versus_pipe import serve

from jaxdist.run.setup import assemble


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], float]]:
    """Build the contender that the command names."""
    dims = ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "mlp_dim")
    shape = bare.Shape(*(job[name] for name in dims), job["seq_len"])
    options = argparse.Namespace(documents=0, moments="float32", matmul_dtype="auto")
    config = step.run_config(shape, job["batch_size"], "none", options)
    names = ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
    optim = {"peak_lr": job["learning_rate"], **{name: job[name] for name in names}}
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, **optim))
    parts = assemble(config, jax.devices()[:1])
    batches = [batch_of(rows, parts.step.batch_sharding) for rows in job["batches"]]
    if sys.argv[1] == "ours":
        contender: Any = step.Ours(parts, batches)
        parameters = parts.num_params
    else:
        contender = step.Bare(shape, parts, batches)
        parameters = sum(leaf.size for leaf in jax.tree.leaves(contender.state[0]))

    def run(steps: int) -> float:
        contender.run(steps)
        return contender.loss()

    versions = {"python": sys.version.split()[0], "jax": jax.__version__}
    versions["jaxlib"] = jax.lib.__version__
    return {"parameters": parameters, "versions": versions, "threads": job["cores"]}, run


def batch_of(rows: list[list[int]], sharding: Any) -> dict[str, Any]:
    """Split rows [batch, seq+1] into `tokens` and `targets`, int32 [batch, seq], equal weights."""
    tokens = np.array(rows, np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch["weights"] = np.ones(batch["tokens"].shape, np.float32)
    return jax.device_put(batch, sharding)


if __name__ == "__main__":
    serve(start)
