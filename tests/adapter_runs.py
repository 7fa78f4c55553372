"""Runs that train adapters, and PEFT's tensors of them."""

import dataclasses

import jax
import numpy as np

from jaxdist.config import RunConfig
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.data import DataConfig
from jaxdist.models.adapters import LoraConfig
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.models.huggingface.directory import read_model
from jaxdist.optim import OptimConfig

STEPS, RATE = 20, 3e-3


def adapter_run(
    path, *, rows, seq_len, mesh="dp=1", microbatches=0, virtual=1, lora=(), **sections
) -> RunConfig:
    """Return a float32 run of `STEPS` plain Adam steps from the model at `path`."""
    config = RunConfig(
        init_from=str(path),
        model=read_model(path),
        lora=LoraConfig(**{"rank": 4, "alpha": 8.0, "base_format": "float32", **dict(lora)}),
        mesh=MeshConfig(shape=mesh),
        train=TrainConfig(
            steps=STEPS, global_batch_size=rows, seq_len=seq_len, num_microbatches=microbatches
        ),
        optim=OptimConfig(
            peak_lr=RATE, schedule="constant", warmup_steps=0, weight_decay=0.0, eps=1e-4,
            max_grad_norm=0.0,
        ),
        precision=PrecisionConfig(compute_dtype="float32"),
        **{"data": DataConfig(tokenizer="bytes"), **sections},
    )  # fmt: skip
    pipeline = dataclasses.replace(config.pipeline, num_virtual_stages=virtual)
    return dataclasses.replace(config, pipeline=pipeline)


def named(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def peft_tensors(config, params) -> dict[str, np.ndarray]:
    """Return PEFT's tensors of the adapters in a tree of parameters."""
    flat = {f"params/{named(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    tensors = {}
    for module in peft_format.modules(config.model, config.lora):
        own = (name for name in flat if name.startswith(f"{module.array}/"))
        adapter = {name.rpartition("/")[2]: np.asarray(flat[name][module.layer]) for name in own}
        tensors |= module.to_peft(adapter)
    return tensors
