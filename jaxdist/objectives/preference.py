"""Preference tuning: DPO, IPO, KTO, ORPO, SimPO, and reward models.

Log-probabilities are sums over a row's completion; IPO, ORPO and SimPO divide them by its tokens,
as TRL 1.16 does. Sources:

    dpo    Rafailov et al. 2023, "Direct Preference Optimization", equation 7
    ipo    Azar et al. 2023, "A General Theoretical Paradigm ...", equation 17
    kto    Ethayarajh et al. 2024, "KTO", equations 7 and 8, as a mean over all examples
    orpo   Hong et al. 2024, "ORPO", equations 6 and 7
    simpo  Meng et al. 2024, "SimPO", equation 6
    reward Ouyang et al. 2022, "Training language models to follow instructions ...", equation 1;
           as TRL's RewardTrainer without margin and centering

Deviations: KTO's baseline is a mean over the global batch, so that it is the same on every mesh,
and compares each prompt with the completion of the previous record of the data. ORPO's likelihood
term is the mean over the tokens of each chosen completion, without the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jaxdist.core.collective_order import after
from jaxdist.core.step.row_logps import row_logps
from jaxdist.core.types import MISMATCHED, REFERENCE, Array, Batch, Context, Sums, TokenHead
from jaxdist.objectives.cross_entropy import real_rows

COMPARED = ("dpo", "ipo", "kto")
"""Kinds that compare the model with a reference."""

PAIRED = ("dpo", "ipo", "orpo", "simpo")
"""Kinds here whose examples are two adjacent rows: the chosen completion, then the rejected one."""

BASELINE = "baseline"
"""Field that KTO adds to a batch, float32 [batch]."""


def mismatched(batch: Batch) -> Batch:
    """Return the batch [rows, ...] with another record's completion in each row."""
    names = ("tokens", "targets", "weights")
    return {**batch, **{name: batch[f"{MISMATCHED}{name}"] for name in names}}


@dataclasses.dataclass(frozen=True)
class Preference:
    """Objective of preference tuning; see the module docstring.

    With `is_precomputed`, rows contain the reference model's log-probabilities. `label_weights`
    are the factors of KTO's losses of desirable and undesirable completions.
    """

    kind: str
    beta: float
    margin: float = 0.5
    is_precomputed: bool = False
    label_weights: tuple[float, float] = (1.0, 1.0)

    unit: ClassVar[str] = "examples"

    @property
    def rows_per_example(self) -> int:
        """Return 2 for pairs, else 1."""
        return 2 if self.kind in PAIRED else 1

    @property
    def extra_forwards(self) -> int:
        """Return the number of forward passes of a step besides the differentiated one."""
        baseline = int(self.kind == "kto")
        references = (self.kind in COMPARED) * (1 + baseline)
        return baseline + (0 if self.is_precomputed else references)

    def prepare(self, batch: Batch, logps: Callable[..., Array]) -> Batch:
        """Return the global batch [rows, ...] with the fields that the loss needs.

        They are the reference model's log-probabilities (dpo, ipo, kto) and the baseline of KTO.
        `logps` maps a batch to the log-probabilities of its rows, float32 [rows].
        """
        if self.kind not in COMPARED:
            return batch
        if not self.is_precomputed:
            batch = {**batch, REFERENCE: logps(batch, adapters=False)}
        if self.kind != "kto":
            return batch
        others, precomputed = mismatched(batch), batch.get(f"{MISMATCHED}{REFERENCE}")
        reference = logps(others, adapters=False) if precomputed is None else precomputed
        ratios = logps(others) - reference
        # No sum over devices may run beside a forward pass: see `core/collective_order.py`.
        is_real = jnp.any(after(batch["weights"], [ratios]) > 0, axis=1)
        mean = jnp.sum(jnp.where(is_real, ratios, 0.0)) / jnp.maximum(1, jnp.sum(is_real))
        baseline = jnp.maximum(mean, 0.0)
        return {**batch, BASELINE: jnp.broadcast_to(baseline, ratios.shape)}

    def __call__(self, output: TokenHead, batch: Batch, context: Context) -> Sums:
        """Return the loss and the metrics, summed over the examples of this device's rows."""
        logps = row_logps(output, batch, context)
        is_learned = (batch["weights"] > 0).astype(jnp.float32)
        tokens = context.sum(jnp.sum(is_learned, axis=1), "seq")
        if self.kind == "kto":
            return self._kto(logps, tokens, batch)
        # Padding of the last evaluation batch has no tokens.
        counts = (tokens[::2] > 0) & (tokens[1::2] > 0)
        lengths = jnp.maximum(tokens, 1.0)
        ratios = logps - batch[REFERENCE] if REFERENCE in batch else logps
        losses = self._pair_losses(ratios, logps / lengths, lengths)
        rewards = self.beta * (logps / lengths if self.kind in ("orpo", "simpo") else ratios)
        total = lambda x: jnp.sum(jnp.where(counts, x, 0.0))
        return {
            "loss": total(losses),
            "weight": total(1.0),
            "correct": total((rewards[::2] > rewards[1::2]).astype(jnp.float32)),
            "reward_chosen": total(rewards[::2]),
            "reward_rejected": total(rewards[1::2]),
            "reward_margin": total(rewards[::2] - rewards[1::2]),
            "logps_chosen": total(logps[::2]),
            "logps_rejected": total(logps[1::2]),
        }

    def _pair_losses(self, ratios: Array, means: Array, lengths: Array) -> Array:
        """Return the loss of each pair, float32 [batch / 2].

        `ratios` to the reference, `means` of log-probabilities over tokens and `lengths` in tokens
        are float32 [batch].
        """
        difference = lambda x: x[::2] - x[1::2]
        if self.kind == "dpo":
            return -jax.nn.log_sigmoid(self.beta * difference(ratios))
        if self.kind == "ipo":
            return jnp.square(difference(ratios / lengths) - 1 / (2 * self.beta))
        if self.kind == "simpo":
            return -jax.nn.log_sigmoid(self.beta * difference(means) - self.margin)
        # 1 - exp(x) of a mean log-probability x; x = 0 would make the odds infinite.
        log_odds = means - jnp.log(-jnp.expm1(jnp.minimum(means, -1e-7)))
        return -means[::2] - self.beta * jax.nn.log_sigmoid(difference(log_odds))

    def _kto(self, logps: Array, tokens: Array, batch: Batch) -> Sums:
        """Return loss and metrics of KTO; `logps` and `tokens` (counts) are float32 [batch]."""
        ratios, baseline = logps - batch[REFERENCE], batch[BASELINE]
        is_desirable = batch["labels"] > 0
        sign = jnp.where(is_desirable, 1.0, -1.0)
        # 1 - σ(x) = σ(-x)
        losses = jax.nn.sigmoid(-self.beta * sign * (ratios - baseline))
        losses *= jnp.where(is_desirable, *self.label_weights)
        rewards = self.beta * ratios
        total = lambda x: jnp.sum(jnp.where(tokens > 0, x, 0.0))
        return {
            "loss": total(losses),
            "weight": total(1.0),
            "correct": total((sign * (ratios - baseline) > 0).astype(jnp.float32)),
            "reward": total(rewards),
            "signed_reward": total(sign * rewards),
            "kl": total(baseline),
            "logps": total(logps),
        }


@dataclasses.dataclass(frozen=True)
class Reward:
    """Objective of a reward model; each pair is two adjacent rows, the chosen one first."""

    unit: ClassVar[str] = "examples"
    rows_per_example: ClassVar[int] = 2

    def __call__(self, output: Float[Array, "batch 1"], batch: Batch, context: Context) -> Sums:
        """Return the loss and the metrics, summed over the pairs of this device's rows."""
        chosen, rejected = output[::2, 0], output[1::2, 0]
        margin = chosen - rejected
        # Padding of the last evaluation batch has no tokens.
        is_real = real_rows(batch, context)[::2]
        total = lambda x: jnp.sum(x * is_real)
        return {
            "loss": total(-jax.nn.log_sigmoid(margin)),
            "weight": total(1.0),
            "correct": total((margin > 0).astype(jnp.float32)),
            "reward_chosen": total(chosen),
            "reward_rejected": total(rejected),
            "reward_margin": total(margin),
        }
