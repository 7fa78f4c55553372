"""Settings of the optimizer, its learning rate and weight decay."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from jaxdist.core.types import setting


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer, its learning rate over the run, and weight decay."""

    optimizer: Literal["adamw", "sgd", "lion", "adafactor", "muon"] = setting(
        "adamw", "update rule; muon takes stacked matrices and leaves the rest to AdamW"
    )
    peak_lr: float = setting(3e-3, "learning rate at the end of warmup, before lr_scaling")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = setting(
        "cosine", "shape after warmup; wsd = stay at the peak, then decay linearly"
    )
    warmup_steps: int = setting(20, "steps of linear warmup; 0 = start at the peak")
    decay_steps: int = setting(
        0,
        "steps of the decay to min_lr_ratio; 0 = all after warmup (cosine, linear), or the last "
        "fifth of the run (wsd)",
    )
    min_lr_ratio: float = setting(0.1, "learning rate after the decay, as a share of the peak")
    lr_scaling: str = setting(
        "none",
        "change peak_lr with the batch: linear:N multiplies it by train.global_batch_size / N, "
        "sqrt:N by the square root of that; N is the batch for which peak_lr was chosen",
    )
    beta1: float = setting(0.9, "decay of the first moment (adamw, lion)")
    beta2: float = setting(0.95, "decay of the second moment (adamw), of the momentum (lion)")
    eps: float = setting(1e-8, "added to denominators (adamw, muon)")
    momentum: float = setting(0.9, "decay of the momentum (sgd, muon; 0.95 is usual for muon)")
    weight_decay: float = setting(
        0.1, "decoupled decay: each step takes lr * weight_decay of a parameter away"
    )
    decay_mask: Literal["matrices", "all"] = setting(
        "matrices", "what decays; matrices = no biases, no norm scales"
    )
    max_grad_norm: float = setting(1.0, "largest global norm of the gradient; 0 = no clipping")
    freeze: list[str] = setting(
        [],
        "parts of the model that stay as they are, e.g. embed or layers/attention: no update, no "
        "moments, no share in the gradient norm; names as `jaxdist convert inspect` prints them",
    )
    moment_dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "storage of momentum and first moments; second moments stay float32"
    )

    @property
    def elementwise(self) -> bool:
        """Whether an update of one element depends on that element alone."""
        return self.optimizer in ("adamw", "sgd", "lion")

    @property
    def moment_bytes(self) -> int:
        """Bytes of optimizer state per parameter; rows and columns of adafactor count as none."""
        momentum = {"float32": 4, "bfloat16": 2}[self.moment_dtype]
        # Muon's hidden matrices, nearly all of a model, have a momentum only.
        return {"adamw": momentum + 4, "adafactor": 0}.get(self.optimizer, momentum)

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        return [
            f"optim.{name}={getattr(self, name)} {rule}"
            for name, ok, rule in self._rules()
            if not ok
        ]

    def _rules(self) -> list[tuple[str, bool, str]]:
        def finite(value: float) -> bool:
            return math.isfinite(value)

        share = "must be at least 0 and below 1: it is the share of a moment that is kept. Try {}."
        return [
            (
                "peak_lr",
                finite(self.peak_lr) and self.peak_lr > 0,
                "must be above 0 and finite. Try 1e-3 for a small model, 3e-4 for a billion "
                "parameters.",
            ),
            ("warmup_steps", self.warmup_steps >= 0, "must be 0 or more steps. Use 0 for none."),
            (
                "decay_steps",
                self.decay_steps >= 0,
                "must be 0 or more steps. Use 0 for the rest of the run.",
            ),
            (
                "min_lr_ratio",
                0 <= self.min_lr_ratio <= 1,
                "must lie between 0 and 1: it is a share of peak_lr. Try 0.1.",
            ),
            (
                "lr_scaling",
                re.fullmatch(r"none|(linear|sqrt):[1-9]\d*", self.lr_scaling) is not None,
                "must be none, linear:N or sqrt:N. Use e.g. linear:256.",
            ),
            ("beta1", 0 <= self.beta1 < 1, share.format("0.9")),
            ("beta2", 0 <= self.beta2 < 1, share.format("0.95")),
            ("eps", finite(self.eps) and self.eps > 0, "must be above 0. Try 1e-8."),
            ("momentum", 0 <= self.momentum < 1, share.format("0.9")),
            (
                "weight_decay",
                finite(self.weight_decay) and self.weight_decay >= 0,
                "must be 0 or more. Use 0 for none.",
            ),
            (
                "max_grad_norm",
                finite(self.max_grad_norm) and self.max_grad_norm >= 0,
                "must be 0 or more. Use 0 for no clipping.",
            ),
        ]
