"""Contender of `versus.py`: MaxText's own model, optimizer and train step, jitted as in MaxText.

    --rival "MaxText=PYTHON:scripts/bench/versus_maxtext.py scan_layers=False"

Arguments with `=` are MaxText settings that override the ones below. The environment of PYTHON
needs MaxText (tested with the wheel of 0.2.5) and its dependencies. Its loop, data and checkpoints
are not used.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported

import jax
import maxtext
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils
from versus_pipe import serve

NUM_STEPS = 1_000_000  # length of the schedule: so long that the rate stays at its peak


def settings(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job as MaxText settings."""
    return {
        "run_name": "versus",
        "base_output_directory": tempfile.gettempdir(),
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "enable_checkpointing": False,
        "enable_goodput_recording": False,
        "log_config": False,
        "dataset_type": "synthetic",
        "packing": False,
        "decoder_block": "llama2",
        "base_num_decoder_layers": job["num_layers"],
        "base_emb_dim": job["d_model"],
        "base_mlp_dim": job["mlp_dim"],
        "base_num_query_heads": job["num_heads"],
        "base_num_kv_heads": job["num_kv_heads"],
        "head_dim": job["d_model"] // job["num_heads"],
        "vocab_size": job["vocab_size"],
        "max_target_length": job["seq_len"],
        "per_device_batch_size": job["batch_size"],
        "normalization_layer_epsilon": job["norm_eps"],
        "rope_max_timescale": int(job["rope_theta"]),
        "logits_via_embedding": False,
        "attention": "dot_product",
        "remat_policy": "none",
        "dtype": "float32",
        "weight_dtype": "float32",
        "grad_dtype": "float32",
        "learning_rate": job["learning_rate"],
        "warmup_steps_fraction": 0.0,
        "steps": NUM_STEPS,
        "learning_rate_schedule_steps": NUM_STEPS,
        "adam_b1": job["beta1"],
        "adam_b2": job["beta2"],
        "adam_eps": job["eps"],
        "adam_weight_decay": job["weight_decay"],
        "gradient_clipping_threshold": job["max_grad_norm"],
        "jax_cache_dir": "",
    }


def start(job: dict[str, Any]) -> tuple[dict[str, Any], Callable[[int], float]]:
    """Build model, optimizer and step as MaxText's `train_loop` does."""
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    overrides = [word for word in sys.argv[1:-1] if "=" in word]
    words = [f"{name}={value}" for name, value in settings(job).items()]
    config = pyconfig.initialize([sys.argv[0], str(base), *words, *overrides])
    _, _, shardings, _, mesh, *_, module = train_utils.setup_train_loop(config, None)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module.model, nnx.Param)))
    graph, state = nnx.split(module)
    of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
    step, _ = train_utils.jit_train_and_eval_step(
        config, graph, mesh, state, shardings, train.train_step, params_shardings=of_params
    )
    split = sharding.get_input_data_sharding(config, mesh)
    batches = itertools.cycle(jax.device_put(batch_of(rows), split) for rows in job["batches"])

    def run(steps: int) -> float:
        nonlocal state
        with jax.set_mesh(mesh), train.logical_axis_rules(config.logical_axis_rules):
            for _ in range(steps):
                state, metrics = step(state, next(batches))
            return float(metrics["scalar"]["learning/loss"])

    versions = {name: importlib.metadata.version(name) for name in ("maxtext", "jax", "jaxlib")}
    versions = {"python": sys.version.split()[0], **versions}
    return {"parameters": parameters, "versions": versions, "threads": job["cores"]}, run


def batch_of(rows: list[list[int]]) -> dict[str, np.ndarray]:
    """Convert rows [batch, seq+1] to MaxText's int32 [batch, seq] arrays, one document per row."""
    tokens = np.array(rows, np.int32)
    shape = (len(tokens), tokens.shape[1] - 1)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    for name in ("inputs", "targets"):
        batch[f"{name}_position"] = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
        batch[f"{name}_segmentation"] = np.ones(shape, np.int32)
    return batch


if __name__ == "__main__":
    serve(start)
