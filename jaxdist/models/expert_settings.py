"""Settings of a decoder's experts, with their validation. Does not import Flax."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """A mixture of experts in place of each MLP; `mlp_dim` is the width of one expert."""

    num_experts: int = setting(
        0, "experts of each layer, of mlp_dim each (Mixtral 8, Qwen 3 MoE 128); 0 = one MLP", ge=0
    )
    experts_per_token: int = setting(
        2, "experts that process each token (Mixtral 2, Qwen 3 MoE 8)", ge=1
    )
    norm_topk: bool = setting(
        True, "divide the router's probabilities of a token's experts by their sum"
    )
    shared_expert_dim: int = setting(
        0,
        "width of an MLP that processes every token too; 0 = none",
        ge=0,
        le=2**24,
    )
    shared_expert_gate: bool = setting(
        False, "multiply the shared MLP's output by a sigmoid of the token (Qwen 2 MoE)"
    )
    balance_loss: float = setting(
        0.01,
        "factor of the balance loss: num_experts × the sum over experts of the share of the "
        "tokens times the mean probability, which is 1 for equal loads; 0 = none",
        ge=0,
    )
    balance_scope: Literal["row", "batch"] = setting(
        "row",
        "tokens of which the balance loss compares loads: row = of each row, batch = of the global "
        "batch, which lets experts specialize; with microbatches or pipeline stages, batch adds a "
        "forward pass to each step",
    )
    router_z_loss: float = setting(
        0.0, "factor of the squared log-partition function of the router's logits; 0 = none", ge=0
    )

    @property
    def active_experts(self) -> float:
        """Share of the experts that process a token; 1 without experts."""
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0

    def expert_conflicts(self, *, objective: str, matmul_dtype: str) -> list[str]:
        """Return conflicts with the objective and the number formats of a run."""
        if not self.num_experts:
            return []
        problems = []
        if objective != "cross_entropy":
            problems.append(
                f"objective.kind={objective} with model.num_experts={self.num_experts}: the "
                "balance loss is defined for text only. Use objective.kind=cross_entropy."
            )
        if matmul_dtype != "auto":
            problems.append(
                f"precision.matmul_dtype={matmul_dtype} with model.num_experts={self.num_experts}: "
                "products of experts are not computed in 8 bits. Use auto."
            )
        return problems

    def expert_problems(self, bias: Sequence[str]) -> list[str]:
        """Return the errors between settings of experts."""
        if not self.num_experts:
            return [
                f"model.shared_expert_dim={self.shared_expert_dim} without model.num_experts. "
                "Set it, or use model.mlp_dim."
            ] * bool(self.shared_expert_dim)
        problems = []
        if self.shared_expert_gate and not self.shared_expert_dim:
            problems.append(
                "model.shared_expert_gate without a shared MLP. Set model.shared_expert_dim."
            )
        if self.experts_per_token > self.num_experts:
            problems.append(
                f"model.experts_per_token={self.experts_per_token} is larger than "
                f"num_experts={self.num_experts}. Use {self.num_experts} or less."
            )
        if "mlp" in bias:
            problems.append(
                f"model.num_experts={self.num_experts} with 'mlp' in model.bias: experts have no "
                "biases. Remove 'mlp' from model.bias."
            )
        return problems
