"""Settings of the pipeline: virtual stages, and when weights are gathered."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.core.axis import divisors_of
from jaxdist.core.parallel.pipeline import schedules
from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.simulation import Costs, simulate
from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit, balanced, cheapest
from jaxdist.runtime.formatting.numbers import percent
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Flow of microbatches through the stages of the `pipeline` axis (`pp` > 1)."""

    num_virtual_stages: int = setting(
        1,
        "virtual stages per stage (interleaving); more = smaller bubble, more messages; 0 = the "
        "number with the shortest estimated step",
        ge=0,
    )
    layers_per_stage: str = setting(
        "auto",
        "number of layers of each stage, or of each virtual stage in the order of the model, e.g. "
        "9,10,10,11; auto = equal numbers if possible, else the shortest ticks, head included",
    )
    gather: Literal["action", "step"] = setting(
        "action", "when fsdp weights are gathered: in every action, or once per step (more memory)"
    )

    def problems(self) -> list[str]:
        """Return an error message for each violated rule of this section."""
        text = self.layers_per_stage
        if text == "auto" or all(part.isdecimal() for part in text.split(",")):
            return []
        return [
            f"pipeline.layers_per_stage={text!r} is not a list of integers. Name the number of "
            "layers of each stage, e.g. 9,10,10,11, or auto."
        ]

    @property
    def depths(self) -> tuple[int, ...]:
        """Return the configured number of layers of each virtual stage; () = auto."""
        text = self.layers_per_stage
        return () if text == "auto" else tuple(map(int, text.split(",")))

    def choose_depths(
        self, num_layers: int, num_stages: int, num_microbatches: int, head: float
    ) -> tuple[int, ...]:
        """Return the number of layers of each virtual stage; `head` as in `balanced`."""
        if self.depths:
            return self.depths
        if self.num_virtual_stages:
            return balanced(num_layers, num_stages, self.num_virtual_stages, head)
        return cheapest(num_layers, num_stages, num_microbatches, head)

    def make_schedule(
        self, *, num_stages: int, rows: int, num_microbatches: int = 0, rows_per_example: int = 1
    ) -> Schedule:
        """Return the checked schedule; `num_microbatches` = 0 chooses by stages and rows."""
        count = num_microbatches or self.choose_microbatches(num_stages, rows, rows_per_example)
        return schedules.make_schedule("1f1b", num_stages, count, self.num_virtual_stages)

    def choose_microbatches(self, num_stages: int, rows: int, rows_per_example: int = 1) -> int:
        """Return the number of microbatches: the fewest of at least four per stage, else the most.

        It divides the examples of `rows`. With four per stage the bubble is below 20 %. Interleaved
        schedules prefer multiples of the number of stages, so that groups are full.
        """
        counts = divisors_of(rows // rows_per_example)
        if self.num_virtual_stages != 1:
            counts = [d for d in counts if d % num_stages == 0] or counts
        return min((d for d in counts if d >= 4 * num_stages), default=max(counts))


def describe(schedule: Schedule, rows: int, split: LayerSplit) -> str:
    """Return one line for the startup log: the schedule, its bubble and its activation stash."""
    report = simulate(schedule, Costs(depths=split.depths))
    m, v = schedule.num_microbatches, schedule.num_virtual_stages
    layers = f" × {v} virtual stages" if v > 1 else ""
    layers += f" of {min(split.depths)} to {split.slots} layers" if split.is_padded else ""
    return (
        f"pipeline: {schedule.name}, {schedule.num_stages} stages{layers}, {m} microbatches of "
        f"{rows // m} rows, bubble {percent(report.bubble)}, activations of at most "
        f"{max(report.peak_stash)} forwards saved, "
        f"{report.forward_permutes}+{report.backward_permutes} permutes"
    )
