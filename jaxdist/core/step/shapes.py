"""Stages of a run: batch size and length of rows as functions of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

_ITEM = re.compile(r"(\d{1,15}|\d{1,15}(?:\.\d{1,15})?(?:e\d{1,2})?tokens):(\d{1,10})")


class BatchStage(NamedTuple):
    """Steps whose batches have the same shape.

    A sample is a row of `train.seq_len` tokens. A stage with shorter rows divides each sample into
    several rows, so the tokens of a step depend on `batch_size` alone.

    Attributes:
        first_step, first_sample: number of steps and of samples before the stage.
        batch_size: samples of a step.
        seq_len: tokens of a row; divides `train.seq_len`.
    """

    first_step: int
    first_sample: int
    batch_size: int
    seq_len: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return (samples of a step, tokens of a row)."""
        return self.batch_size, self.seq_len


def stages_of(
    batches: Sequence[str], lengths: Sequence[str], batch_size: int, seq_len: int
) -> list[BatchStage]:
    """Return the stages of the schedules of batch sizes and lengths; see `TrainConfig`."""
    stages = _of_batches(batches, seq_len) or [BatchStage(0, 0, batch_size, seq_len)]
    starts = _starts(stages, lengths, seq_len) or [(0, seq_len)]
    steps = {stage.first_step for stage in stages} | {step for step, _ in starts}
    return [
        BatchStage(
            step,
            samples_before(stages, step),
            stage_at(stages, step).batch_size,
            [length for first, length in starts if first <= step][-1],
        )
        for step in sorted(steps)
    ]


def stage_at(stages: Sequence[BatchStage], num_steps: int) -> BatchStage:
    """Return the stage of the step that follows `num_steps` steps."""
    return [stage for stage in stages if stage.first_step <= num_steps][-1]


def samples_before(stages: Sequence[BatchStage], num_steps: int) -> int:
    """Return the number of samples in the first `num_steps` steps."""
    last = stage_at(stages, num_steps)
    return last.first_sample + (num_steps - last.first_step) * last.batch_size


def steps_for(stages: Sequence[BatchStage], num_samples: int) -> int:
    """Return the smallest number of steps with at least `num_samples` samples."""
    last = [stage for stage in stages if stage.first_sample < max(1, num_samples)][-1]
    return last.first_step + -(-(num_samples - last.first_sample) // last.batch_size)


def schedule_problems(
    batches: Sequence[str], lengths: Sequence[str], batch_size: int, seq_len: int
) -> list[str]:
    """Return error messages for invalid schedules of batch sizes and lengths."""
    problems = []
    for name, items, total, most in (
        ("train.batch_schedule", batches, "train.global_batch_size", batch_size),
        ("train.seq_schedule", lengths, "train.seq_len", seq_len),
    ):
        text, less = f"{name}={','.join(items)}", max(1, most // 2)
        if not all(map(_ITEM.fullmatch, items)):
            problems.append(
                f"{text} has an item that is neither STEP:NUMBER nor TOKENStokens:NUMBER. Use "
                f"e.g. 0:{less},1000:{most} or 0:{less},1e9tokens:{most}."
            )
            continue
        values = [value for _, value in map(_parse, items)]
        if items and not re.match("0(tokens)?:", items[0]):
            problems.append(f"{text} does not begin at step 0. Use e.g. 0:{less},{items[0]}.")
        if items and not (min(values) > 0 and max(values) == values[-1] == most):
            problems.append(
                f"{text} must end with its largest number, which is {total}={most}, and have no 0. "
                f"Set {total}={max(values)}, and end with it."
            )
        elif items is lengths and (odd := [n for n in values if seq_len % n]):
            problems.append(
                f"{text}: {odd[0]} does not divide train.seq_len={seq_len}, and shorter rows are "
                "equal parts of a row. Use divisors."
            )
    if problems:
        return problems
    counted = _of_batches(batches, seq_len) or [BatchStage(0, 0, batch_size, seq_len)]
    firsts = {
        "train.batch_schedule": [stage.first_step for stage in counted],
        "train.seq_schedule": [step for step, _ in _starts(counted, lengths, seq_len)],
    }
    return [
        f"{name} has stages that begin after {', '.join(map(str, steps))} steps. Sort them, and "
        "give each stage a step."
        for name, steps in firsts.items()
        if sorted({*steps}) != steps
    ]


def _of_batches(batches: Sequence[str], seq_len: int) -> list[BatchStage]:
    stages: list[BatchStage] = []
    for at, rows in map(_parse, batches):
        step = _step(stages, at, seq_len) if stages else 0
        sample = samples_before(stages, step) if stages else 0
        stages.append(BatchStage(step, sample, rows, seq_len))
    return stages


def _starts(
    stages: Sequence[BatchStage], lengths: Sequence[str], seq_len: int
) -> list[tuple[int, int]]:
    """Return (number of steps before it, length) for each item of a schedule of lengths."""
    return [(_step(stages, at, seq_len), length) for at, length in map(_parse, lengths)]


def _parse(item: str) -> tuple[str, int]:
    at, _, value = item.partition(":")
    return at, int(value)


def _step(stages: Sequence[BatchStage], at: str, seq_len: int) -> int:
    """Return the number of steps before the first step after `at`, "STEP" or "TOKENStokens"."""
    if not at.endswith("tokens"):
        return int(at)
    return steps_for(stages, math.ceil(float(at.removesuffix("tokens")) / seq_len))
