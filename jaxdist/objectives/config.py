"""Settings of the objective."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np

from jaxdist.core.types import TEACHER_LOGPS, TEACHER_TOKENS, Objective
from jaxdist.objectives.distillation import NUM_TOKENS, Distillation
from jaxdist.objectives.preference import COMPARED, PAIRED, Preference, Reward
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The function that training minimizes."""

    kind: Literal[
        "cross_entropy",
        "dpo",
        "ipo",
        "kto",
        "orpo",
        "simpo",
        "reward",
        "distill",
        "distill_reverse",
    ] = setting(
        "cross_entropy",
        "cross_entropy = of the next token, or of the class of an image or text; dpo, ipo, orpo, "
        "simpo, and reward (a reward model, model.num_labels=1) need data.records=preference; kto "
        "needs data.records=labeled; distill and distill_reverse = forward and reverse KL "
        "divergence from the predictions of objective.teacher (docs/fine-tuning.md)",
    )
    beta: float = setting(
        0.0,
        "strength of preferences: the factor of the log-probability ratios (dpo, kto, simpo) or of "
        "the odds ratio term (orpo); in ipo the target margin is 1/(2 beta). The authors of SimPO "
        "use 2 to 2.5. With a teacher, the inverse temperature. 0 = 0.1, with a teacher 1",
        ge=0,
    )
    margin: float = setting(0.5, "target reward margin of simpo", ge=0)
    desirable_weight: float = setting(
        1.0,
        "factor of the losses of desirable completions in kto. If their number is not that of "
        "undesirable ones, set the factors so that number times factor is 1 to 4/3 times as much "
        "as for undesirable ones",
        gt=0,
    )
    undesirable_weight: float = setting(
        1.0, "factor of the losses of undesirable completions in kto", gt=0
    )
    reference: Literal["auto", "adapter_off", "precomputed"] = setting(
        "auto",
        "source of the reference model's log-probabilities in dpo, ipo and kto: adapter_off = each "
        "step computes them with the frozen weights (lora.rank); precomputed = each start computes "
        "them for all rows with the run's initial weights, or reads them from the cache; auto = "
        "adapter_off if there are adapters, else precomputed",
    )
    teacher: str = setting(
        "",
        "the model to learn from in distill and distill_reverse, with the same vocabulary: the "
        "path or URL of a run, a checkpoint in it or a Hugging Face model directory, or "
        "ORG/NAME[@REVISION] on the hub",
    )

    @property
    def strength(self) -> float:
        """Return beta, or its default for this kind if it is 0."""
        return self.beta or (1.0 if self.distills else 0.1)

    @property
    def label_weights(self) -> tuple[float, float]:
        """Return the factors of kto's losses: desirable, undesirable."""
        return self.desirable_weight, self.undesirable_weight

    @property
    def distills(self) -> bool:
        """Return whether training learns from the predictions of `teacher`."""
        return self.kind in ("distill", "distill_reverse")

    def precomputes(self, *, has_adapters: bool) -> bool:
        """Return whether rows contain precomputed log-probabilities of the reference model."""
        if self.kind not in COMPARED:
            return False
        return self.reference == "precomputed" or (self.reference == "auto" and not has_adapters)

    def make(self, *, has_adapters: bool) -> Objective | None:
        """Return the objective of this kind; None for cross_entropy, which is the model's own."""
        if self.kind == "cross_entropy":
            return None
        if self.kind == "reward":
            return Reward()
        if self.distills:
            return Distillation(self.kind == "distill_reverse", self.strength)
        precomputed = self.precomputes(has_adapters=has_adapters)
        return Preference(self.kind, self.strength, self.margin, precomputed, self.label_weights)

    def added_fields(self, seq_len: int, vocab_size: int) -> dict[str, tuple[Any, Any]]:
        """Return name -> (shape of a row, dtype) of fields that a teacher adds; {} without one."""
        if not self.distills:
            return {}
        count = min(NUM_TOKENS, vocab_size)
        return {
            TEACHER_TOKENS: ((seq_len, count), np.dtype(np.int32)),
            TEACHER_LOGPS: ((seq_len, count + 1), np.dtype(np.float32)),
        }

    def run_problems(
        self, *, records: str, reads: str, num_labels: int, has_adapters: bool
    ) -> list[str]:
        """Return error messages for conflicts with a run; `reads` is that of its model."""
        problems = []
        if bool(self.teacher) != self.distills:
            fix = "Name the model to learn from" if self.distills else "Leave it out"
            problems.append(
                f"objective.teacher={self.teacher!r} with objective.kind={self.kind}. {fix}."
            )
        if self.kind != "kto" and self.label_weights != (1.0, 1.0):
            problems.append(
                f"objective.desirable_weight={self.desirable_weight:g} and "
                f"objective.undesirable_weight={self.undesirable_weight:g} with "
                f"objective.kind={self.kind}: only kto uses them. Use kto, or leave them out."
            )
        classifies = self.kind == "cross_entropy" and (num_labels > 1 or records == "text_label")
        labels = max(2, num_labels) if classifies else int(self.kind == "reward")
        if num_labels != labels:
            fix = "the number of classes" if classifies else str(labels)
            problems.append(
                f"model.num_labels={num_labels} with objective.kind={self.kind} and "
                f"data.records={records}. Set model.num_labels to {fix}."
            )
        needed = "text_label" if classifies else "labeled" if self.kind == "kto" else "preference"
        if self.distills or (self.kind == "cross_entropy" and not classifies):
            if records in ("preference", "labeled"):
                kinds = "kto" if records == "labeled" else "dpo, ipo, orpo, simpo or reward"
                problems.append(
                    f"data.records={records} with objective.kind={self.kind}, which learns from "
                    f"single texts. Set objective.kind to {kinds}."
                )
        elif records != needed:
            problems.append(
                f"objective.kind={self.kind} with model.num_labels={num_labels} and "
                f"data.records={records}. Set data.records={needed}."
            )
        compares = self.kind in (*COMPARED, *PAIRED)
        if (compares or self.distills) and reads != "text":
            problems.append(
                f"objective.kind={self.kind} needs a model that reads text. Use a decoder, or "
                "objective.kind=cross_entropy."
            )
        if compares and self.reference == "adapter_off" and not has_adapters:
            problems.append(
                "objective.reference=adapter_off without adapters. Set lora.rank, or use "
                "precomputed."
            )
        return problems
