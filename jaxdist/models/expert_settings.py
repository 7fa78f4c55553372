"""Settings of a decoder's experts, with their validation. Does not import Flax."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """The table `model.router`.

    Attributes:
        scores: function of the logits.
        norm_topk: divide the scores of a token's experts by their sum.
        scale: factor of the shares.
        groups: number of groups of adjacent experts; 1 = none.
        groups_per_token: number of groups whose experts a token may use: those with the highest
            sums of their two best scores.
        bias: add a bias per expert to the scores in the choice of experts, not in the shares.
        bias_rate: after each step, the bias rises by this for experts with fewer tokens of the
            global batch than the mean, and falls for those with more; 0 = constant.
        balance_loss: factor of the balance loss: num_experts × the sum over experts of the share
            of the tokens times the mean probability, which is 1 for equal loads; 0 = none.
        balance_scope: tokens of which the loss compares loads: of each row or the global batch.
        z_loss: factor of the squared log-partition function of the logits; 0 = none.
        capacity_factor: in training, an expert accepts this times equal loads of each row's tokens
            and drops later ones, whose output lacks this expert; 0 = none is dropped.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    bias: bool = False
    bias_rate: float = 0.001
    balance_loss: float = 0.01
    balance_scope: Literal["row", "batch"] = "row"
    z_loss: float = 0.0
    capacity_factor: float = 0.0


_CHOICES = {"scores": ("softmax", "sigmoid"), "balance_scope": ("row", "batch")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """A mixture of experts in place of MLPs; `mlp_dim` is the width of one expert."""

    num_experts: int = setting(
        0, "number of experts per layer, of width mlp_dim (Mixtral 8); 0 = one MLP", ge=0
    )
    experts_per_token: int = setting(
        2, "number of experts that process each token (Mixtral 2, Qwen 3 MoE 8)", ge=1
    )
    shared_expert_dim: int = setting(
        0,
        "hidden width of a shared MLP that also processes every token; 0 = none",
        ge=0,
        le=2**24,
    )
    shared_expert_gate: bool = setting(
        False, "multiply the shared MLP's output by a sigmoid gate (Qwen 2 MoE)"
    )
    dense_layers: list[int] = setting(
        [],
        "indices of layers with an MLP of dense_mlp_dim, not experts (DeepSeek-V3: 0,1,2; "
        "0,2,4,... for experts in every second layer)",
    )
    dense_mlp_dim: int = setting(
        0, "hidden width of the MLP of the dense_layers; 0 without these", ge=0, le=2**24
    )
    router: dict[str, Any] = setting(
        {},
        "table of the router: scores (softmax, or sigmoid as in DeepSeek-V3), norm_topk = divide a "
        "token's scores by their sum (true), scale of the shares (1), groups of adjacent experts "
        "and groups_per_token (1), bias = add one per expert in the choice (false) with bias_rate "
        "(0.001), balance_loss (0.01), balance_scope (row, or batch = the global batch), z_loss "
        "(0), capacity_factor (0 = drop no token), e.g. {balance_loss = 0.001}; "
        "docs/parallelism.md describes them",
    )

    @functools.cached_property
    def routing(self) -> Router:
        """The settings of `router`, with defaults."""
        return Router(**self.router)

    @property
    def active_experts(self) -> float:
        """Share of the experts that process a token; 1 without experts."""
        return self.experts_per_token / self.num_experts if self.num_experts else 1.0

    def expert_conflicts(self, matmul_dtype: str) -> list[str]:
        """Return error messages for conflicts with the number formats of a run."""
        if not self.num_experts or matmul_dtype == "auto":
            return []
        return [
            f"precision.matmul_dtype={matmul_dtype} with model.num_experts={self.num_experts}: "
            "products of experts have no such format. Use auto."
        ]

    def expert_problems(
        self, bias: Sequence[str], num_layers: int, full_attention_every: int
    ) -> list[str]:
        """Return error messages for invalid MoE settings and combinations of them."""
        dense, width = self.dense_layers, self.dense_mlp_dim
        if dense and not self.num_experts:
            return [f"model.dense_layers={dense} without model.num_experts. Set it."]
        if not self.num_experts:
            return [
                f"model.shared_expert_dim={self.shared_expert_dim} without model.num_experts. "
                "Set it, or use model.mlp_dim."
            ] * bool(self.shared_expert_dim) + [
                "model.bias has 'router' without model.num_experts. Set it, or remove 'router'."
            ] * ("router" in bias)
        problems = []
        if bool(dense) != bool(width):
            problems.append(
                f"model.dense_layers={dense} with dense_mlp_dim={width}: these layers need a "
                "width, and only they have it. Set both."
            )
        if wrong := [i for i in dense if not 0 <= i < num_layers or dense.count(i) > 1]:
            problems.append(
                f"model.dense_layers has {', '.join(map(str, wrong))}: layers are 0 to "
                f"{num_layers - 1}. Name each dense one once."
            )
        elif len(dense) == num_layers:
            problems.append(
                f"model.dense_layers names all layers of num_layers={num_layers}: none has the "
                f"experts of model.num_experts={self.num_experts}. Omit a layer."
            )
        if dense and full_attention_every:
            problems.append(
                f"model.full_attention_every={full_attention_every} with model.dense_layers="
                f"{dense}: layers of both kinds are not supported. Omit one of them."
            )
        if self.shared_expert_gate and not self.shared_expert_dim:
            problems.append(
                "model.shared_expert_gate without a shared MLP. Set model.shared_expert_dim."
            )
        if self.experts_per_token > self.num_experts:
            problems.append(
                f"model.experts_per_token={self.experts_per_token} is larger than "
                f"num_experts={self.num_experts}. Use {self.num_experts} or less."
            )
        return problems + self._router_problems()

    def _router_problems(self) -> list[str]:
        defaults, problems = vars(Router()), []
        for name, value in self.router.items():
            key = f"model.router.{name}={value!r}"
            default = defaults.get(name)
            if default is None:
                problems.append(f"{key} is unknown. The router has {', '.join(defaults)}.")
            elif name in _CHOICES:
                if value not in _CHOICES[name]:
                    problems.append(f"{key}: use {' or '.join(_CHOICES[name])}.")
            elif isinstance(default, bool):
                problems += [] if isinstance(value, bool) else [f"{key}: use true or false."]
            elif isinstance(default, int):
                if type(value) is not int or value < 1:
                    problems.append(f"{key}: use a whole number of 1 or more.")
            elif type(value) not in (int, float) or not 0 <= value < math.inf:
                problems.append(f"{key}: use a number of 0 or more.")
        if problems:
            return problems
        routing, count, per_token = self.routing, self.num_experts, self.experts_per_token
        size, rest = divmod(count, routing.groups)
        if routing.groups > 1 and (rest or size < 2):
            problems.append(
                f"model.router.groups={routing.groups} with model.num_experts={count}: each group "
                "needs the same number of experts, at least 2. Use a divisor of num_experts."
            )
        elif routing.groups_per_token > routing.groups:
            problems.append(
                f"model.router.groups_per_token={routing.groups_per_token} is larger than "
                f"groups={routing.groups}. Use {routing.groups} or less."
            )
        elif routing.groups_per_token * size < per_token <= count:
            problems.append(
                f"model.router.groups_per_token={routing.groups_per_token}: these groups have "
                f"{routing.groups_per_token * size} experts, fewer than "
                f"experts_per_token={per_token}. Use {-(-per_token // size)}."
            )
        return problems


def repeated_block(sparse: Sequence[bool]) -> tuple[int, tuple[bool, ...]]:
    """Return a number of first dense layers, and the shortest block that repeats after them.

    `sparse` has for each layer, and the block for each of its layers, whether it is not dense.
    """
    count, dense = len(sparse), sparse.index(True) if True in sparse else 0
    size, first = min(
        (size, first)
        for first in range(dense + 1)
        for size in range(1, count - first + 1)
        if (count - first) % size == 0
        and all(sparse[i] == sparse[i + size] for i in range(first, count - size))
    )
    return first, tuple(sparse[first : first + size])
