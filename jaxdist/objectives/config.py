"""Settings of the objective."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.core.types import Objective
from jaxdist.objectives.preference import COMPARED, Preference
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The function that training minimizes."""

    kind: Literal["cross_entropy", "dpo", "ipo", "kto", "orpo", "simpo"] = setting(
        "cross_entropy",
        "cross_entropy = of the next token, or of the class of an image; dpo, ipo, orpo and simpo "
        "learn from data.records=preference, kto from data.records=labeled (docs/fine-tuning.md)",
    )
    beta: float = setting(
        0.1,
        "strength of preferences: the factor of the log-probability ratios (dpo, kto, simpo) or of "
        "the odds ratio term (orpo); in ipo the target margin is 1/(2 beta). The authors of SimPO "
        "use 2 to 2.5",
        gt=0,
    )
    margin: float = setting(0.5, "target reward margin of simpo", ge=0)
    reference: Literal["auto", "adapter_off", "precomputed"] = setting(
        "auto",
        "values of the model that dpo, ipo and kto compare with: adapter_off = each step computes "
        "them with the frozen weights (lora.rank); precomputed = each start computes them for all "
        "rows with the weights it begins with, or reads them from the cache; auto = adapter_off if "
        "there are adapters",
    )

    def precomputes(self, *, has_adapters: bool) -> bool:
        """Return whether rows contain the reference's values."""
        if self.kind not in COMPARED:
            return False
        return self.reference == "precomputed" or (self.reference == "auto" and not has_adapters)

    def make(self, *, has_adapters: bool) -> Objective | None:
        """Return the objective that replaces the model's own; None = cross-entropy."""
        if self.kind == "cross_entropy":
            return None
        return Preference(
            self.kind, self.beta, self.margin, self.precomputes(has_adapters=has_adapters)
        )

    def run_problems(self, *, records: str, reads: str, has_adapters: bool) -> list[str]:
        """Return violated rules; `reads` is what the model reads: "text" or "images"."""
        needed = "labeled" if self.kind == "kto" else "preference"
        if self.kind == "cross_entropy":
            if records not in ("preference", "labeled"):
                return []
            kinds = "kto" if records == "labeled" else "dpo, ipo, orpo or simpo"
            return [
                f"data.records={records} with objective.kind=cross_entropy, which learns from "
                f"single texts. Set objective.kind to {kinds}."
            ]
        problems = []
        if reads != "text":
            problems.append(
                f"objective.kind={self.kind} with a model of {reads}: it compares texts. Use a "
                "decoder, or objective.kind=cross_entropy."
            )
        elif records != needed:
            problems.append(
                f"objective.kind={self.kind} with data.records={records}. "
                f"Set data.records={needed}."
            )
        if self.reference == "adapter_off" and not has_adapters:
            problems.append(
                "objective.reference=adapter_off without adapters. Set lora.rank, or use "
                "precomputed."
            )
        return problems
