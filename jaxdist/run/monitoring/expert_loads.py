"""Statistics of the experts of each layer, and a warning for experts without tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

_NAMED = 8  # experts that a warning names


class ExpertLoads:
    """Adds up the tokens of each expert between two reports."""

    def __init__(self, event: Callable[..., None], plot: Callable[..., None]):
        self._event, self._plot = event, plot
        self._counts: Any = 0.0
        self._sums: dict[str, Any] = {}
        self._weight = 0.0
        self._num_steps = 0
        self._unused: set[tuple[int, int]] = set()

    def add(self, sums: Mapping[str, Any], weight: float) -> None:
        """Add a step: `expert_tokens` [layers, experts], means × weight [layers]."""
        sums = dict(sums)
        self._counts = self._counts + np.asarray(sums.pop("expert_tokens"), np.float64)
        self._weight += weight
        self._num_steps += 1
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + np.asarray(value, np.float64)

    def report(self, step: int) -> None:
        """Write one event and one point for each layer; warn once about each unused expert."""
        if not self._num_steps or not np.sum(self._counts):
            return
        loads = self._counts / self._counts.mean(1, keepdims=True)
        fields = {
            "largest_load": loads.max(1),
            "smallest_load": loads.min(1),
            "unused_experts": (loads == 0).sum(1),
        }
        for name, value in self._sums.items():
            if name != "trained_tokens":
                fields[name] = value / max(self._weight, 1e-20)
        lists = {name: value.tolist() for name, value in fields.items()}
        self._event("experts", quiet=True, step=step, num_steps=self._num_steps, **lists)
        points = {
            f"experts/{name}/{i:03d}": x for name, xs in lists.items() for i, x in enumerate(xs)
        }
        self._plot(step, points)
        unused = set(zip(*(index.tolist() for index in np.nonzero(loads == 0)), strict=True))
        if new := sorted(unused - self._unused):
            named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in new[:_NAMED])
            more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            self._event(
                "collapsed_experts",
                step=step,
                experts=[list(pair) for pair in new],
                level=logging.WARNING,
                message=f"no token reached these experts in {self._num_steps} steps: {named}{more}"
                ". Raise balance_loss in model.router, or lower the learning rate.",
            )
        self._unused |= unused
        self._counts, self._sums, self._weight, self._num_steps = 0.0, {}, 0.0, 0
