"""Settings of the optimizer, its learning rate and weight decay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from jaxdist.settings import setting

_INT8_BYTES = 1 + 4 / 256
"""Bytes per value in 8 bits: a code, and a float32 scale per block (`optim/int8.py`)."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning rate over the run, and weight decay."""

    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = setting(
        "adamw", "update rule; muon updates the matrices of the layers, AdamW everything else"
    )
    peak_lr: float = setting(3e-3, "learning rate at the end of warmup, before lr_scaling", gt=0)
    schedule: Literal["cosine", "linear", "wsd", "constant"] = setting(
        "cosine", "learning rate after warmup; wsd = stay at the peak, then decay linearly"
    )
    warmup_steps: int = setting(20, "steps of linear warmup; 0 = start at the peak", ge=0)
    decay_steps: int = setting(
        0,
        "steps of the decay to min_lr_ratio; 0 = all after warmup (cosine, linear), or the last "
        "fifth of the run (wsd)",
        ge=0,
    )
    min_lr_ratio: float = setting(
        0.1, "learning rate after the decay, as a share of the peak", ge=0, le=1
    )
    lr_scaling: str = setting(
        "none",
        "change peak_lr with the batch: linear:N multiplies it by train.global_batch_size / N, "
        "sqrt:N by the square root of that; N is the batch for which peak_lr was chosen. With "
        "train.batch_schedule, the batch of each step counts",
    )
    beta1: float = setting(
        0.9, "decay of AdamW's first moment; share of the momentum in lion's update", ge=0, lt=1
    )
    beta2: float = setting(
        0.95, "decay of AdamW's second moment, or of lion's momentum", ge=0, lt=1
    )
    eps: float = setting(1e-8, "epsilon, added to the denominators of updates (adamw, muon)", gt=0)
    momentum: float = setting(
        0.9, "decay of the momentum (sgd, muon; 0.95 is usual for muon)", ge=0, lt=1
    )
    weight_decay: float = setting(
        0.1,
        "decoupled weight decay: each step subtracts lr * weight_decay * parameter, except for "
        "vectors such as biases and norm scales",
        ge=0,
    )
    max_grad_norm: float = setting(
        1.0, "global norm to which larger gradients are scaled down; 0 = no clipping", ge=0
    )
    freeze: list[str] = setting(
        [],
        "parts of the model that are not trained, e.g. embed or layers/attention: no update, no "
        "moments, not in the gradient norm; names as `jaxdist convert inspect` prints them",
    )
    groups: list[str] = setting(
        [],
        "parameters with a factor of the learning rate or a weight decay of their own, "
        "PATTERN:lr=FACTOR:weight_decay=VALUE, e.g. embed:lr=0.1 or */bias:weight_decay=0; names "
        "as in freeze, with * and ?; the first match applies",
    )
    moment_dtype: Literal["float32", "bfloat16", "int8"] = setting(
        "float32",
        "storage of momentum and first moments; bfloat16 keeps second moments in float32, int8 "
        "stores both in 8 bits with a scale per 256 values, except for parameters of fewer than "
        "4096 values per layer (not with adafactor)",
    )
    ema_decay: float = setting(
        0.0,
        "decay per step of an exponential moving average (EMA) of the weights, e.g. 0.999; "
        "evaluation, generate and exports use the average; 0 = no average",
        ge=0,
        lt=1,
    )

    @property
    def rule_dtype(self) -> str:
        """Dtype of momentum and first moments, before they are stored in 8 bits."""
        return "float32" if self.moment_dtype == "int8" else self.moment_dtype

    @property
    def unit(self) -> Literal["element", "layer"]:
        """The smallest part of a model whose update depends on no other part."""
        is_elementwise = self.optimizer in ("adamw", "sgd", "lion")
        return "element" if is_elementwise and self.moment_dtype != "int8" else "layer"

    @property
    def second_moment_bytes(self) -> float:
        """Bytes per parameter of AdamW's second moments."""
        return _INT8_BYTES if self.moment_dtype == "int8" else 4.0

    @property
    def moment_bytes(self) -> float:
        """Bytes of moments per parameter; with Muon of hidden matrices, with Adafactor about 0."""
        momentum = {"float32": 4.0, "bfloat16": 2.0, "int8": _INT8_BYTES}[self.moment_dtype]
        both = momentum + self.second_moment_bytes
        return {"adamw": both, "adafactor": 0.0}.get(self.optimizer, momentum)

    @property
    def copies(self) -> dict[str, float]:
        """Name of each parameter group besides the model's -> decay per step; {} without EMA."""
        return {"ema": self.ema_decay} if self.ema_decay else {}

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        problems = []
        if not re.fullmatch(r"none|(linear|sqrt):[1-9]\d*", self.lr_scaling):
            problems.append(
                f"optim.lr_scaling={self.lr_scaling} must be none, linear:N or sqrt:N. Use e.g. "
                "linear:256."
            )
        if self.optimizer == "adafactor" and self.moment_dtype == "int8":
            problems.append(
                "optim.moment_dtype='int8' with optim.optimizer='adafactor': its factored moments "
                "are small and stay in float32. Leave out optim.moment_dtype, or use adamw, lion, "
                "sgd or muon."
            )
        return problems
