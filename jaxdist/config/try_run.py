"""`--try`: the model of a config, scaled down to train within 90 s on two CPU cores."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxdist.config.run_config import RunConfig
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import EvalConfig, TrainConfig
from jaxdist.data.config import DataConfig
from jaxdist.models.scaled import scaled_model

_SEQ_LEN, _MAX_RANK = 128, 16
_LR = 3e-3
"""Peak learning rate of AdamW at this width; that of a config suits its own width."""


def scaled_down(run: RunConfig) -> RunConfig:
    """Return a small run of the same architecture on data that every machine has.

    Family, norm, positions, activation, ratio of query to key/value heads, ratio of the widths,
    modules with adapters and update rule are those of `run`. Mesh, batch, steps, AdamW's learning
    rate, data and precision are not.
    """
    is_text = run.model.reads == "text"
    steps = 100 if is_text else 60
    lr = _LR if run.optim.optimizer == "adamw" else run.optim.peak_lr
    seq_len = min(_SEQ_LEN, run.train.seq_len)
    return RunConfig(
        name=f"{run.name}-try",
        seed=run.seed,
        model=scaled_model(run.model, 256 if run.data.tokenizer == "bytes" else 1024, seq_len),
        lora=dataclasses.replace(run.lora, rank=min(run.lora.rank, _MAX_RANK), ranks=[]),
        mesh=MeshConfig(),
        train=TrainConfig(steps=steps, global_batch_size=8 if is_text else 32, seq_len=seq_len),
        optim=dataclasses.replace(
            run.optim, peak_lr=lr, warmup_steps=steps // 10, decay_steps=0, lr_scaling="none"
        ),
        precision=PrecisionConfig(),
        data=_small_data(run),
        eval=EvalConfig(interval_steps=0, final_max_batches=8),
    )


def describe(run: RunConfig, small: RunConfig) -> str:
    """Return one line about a small run and how it differs."""
    full: Any = run.model
    model: Any = small.model
    data = small.data
    if model.reads == "images":
        return f"--try: {run.name}, {small.train.steps} steps on generated images"
    tokenizer = data.tokenizer_name
    reason = f"a vocabulary of {full.vocab_size:,} would take longer"
    why = f", because {reason}" if full.vocab_size > model.vocab_size else ""
    return (
        f"--try: {run.name} with {model.num_layers} layers of width {model.d_model}, "
        f"{model.num_heads} heads and {model.kv_heads} key/value heads, {small.train.steps} steps "
        f"on Python's standard library; tokenizer {tokenizer} ({model.vocab_size:,} tokens){why}"
    )


def _small_data(run: RunConfig) -> DataConfig:
    if run.model.reads == "images":
        return DataConfig(sources=["jaxdist.data.pattern_images:make_rows"])
    return DataConfig(
        sources=["stdlib"], tokenizer="bytes" if run.data.tokenizer == "bytes" else "code"
    )
