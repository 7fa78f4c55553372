"""Settings of the train step and of evaluation."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Literal

from jaxdist.core.step.shapes import BatchStage, samples_before, schedule_problems, stages_of
from jaxdist.core.types import LAYER_INPUT
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and shape of one step."""

    steps: int = setting(320, "optimizer steps of the complete run", ge=1)
    epochs: float = setting(
        0.0,
        "length of the run in passes over the training rows, e.g. 3 or 0.5; the start "
        "converts it to a number of steps, rounded up, in place of train.steps; 0 = train.steps",
        ge=0,
    )
    global_batch_size: int = setting(
        16, "rows of one optimizer step over all devices", ge=1, le=2**31
    )
    seq_len: int = setting(128, "number of tokens in a row (text only)", ge=1, le=2**31)
    batch_schedule: list[str] = setting(
        [],
        "rows of a step that change during the run, as STEP:ROWS: the size after this many steps, "
        "or TOKENStokens:ROWS, e.g. 0:64,1000:128,2e9tokens:256. It begins at 0 and ends with "
        "train.global_batch_size, the largest. The learning rate remains a function of the step; "
        "with optim.lr_scaling its factor follows the rows of the step. Smaller batches have as "
        "few microbatches as leave them no larger",
    )
    seq_schedule: list[str] = setting(
        [],
        "tokens of a row that change during the run, as STEP:TOKENS, e.g. 0:256,1000:512,4000:1024 "
        "(or after a number of tokens, as in batch_schedule). It begins at 0 and ends with "
        "train.seq_len, the largest, which all others divide. Shorter rows are equal parts of a "
        "row: a step has as many more of them, so its tokens and learning rate do not change",
    )
    num_microbatches: int = setting(
        0,
        "parts into which a replica's rows are cut: their gradients are accumulated, and with "
        "pp > 1 they flow through the stages; 0 = 1, with pp > 1 about four per stage",
        ge=0,
        le=100_000,
    )
    remat: str = setting(
        "auto",
        "activations that the backward pass recomputes: none, dots (keep matrix products), full "
        "(keep only block inputs), names:A,B (keep only these: qkv, attention, attention_out, "
        "mlp_hidden, mlp_out), offload:A,B (keep only these, in host memory; also layer_input); "
        "auto = none on CPU (stages: dots); on GPUs the fastest that fits by the estimate: none, "
        "dots, full, names: with qkv, attention or attention_out, or offload: with layer_input or "
        "attention",
    )
    loss_chunk_tokens: int = setting(
        0,
        "tokens per chunk of the loss, whose logits are in memory together; 0 = as many as make "
        "the head fast and take little memory on this device",
        ge=0,
    )
    z_loss: float = setting(
        0.0,
        "factor of the mean squared log-partition function of the head, which training adds to the "
        "loss (part of aux_loss); 1e-4 keeps logits small",
        ge=0,
    )
    label_smoothing: float = setting(
        0.0,
        "share of the target probability that training spreads evenly over all classes; its "
        "effect is reported in aux_loss, and loss remains the plain cross-entropy",
        ge=0,
        lt=1,
    )
    offload_optimizer: str = setting(
        "none",
        "where optimizer moments are kept: none = in device memory; host = in host memory; "
        "disk:/DIR = in files of a local disk; with host or disk, layers are updated in groups",
        switch=("none", "host"),
    )

    @property
    def offload(self) -> Literal["none", "host", "disk"]:
        """Return where optimizer moments are between steps: "none" (devices), "host" or "disk"."""
        return self.offload_optimizer.partition(":")[0]  # type: ignore[return-value]  # checked

    @property
    def offload_directory(self) -> str:
        """Return /DIR if `offload_optimizer` is disk:/DIR, else ""."""
        return self.offload_optimizer.partition(":")[2]

    @functools.cached_property
    def stages(self) -> list[BatchStage]:
        """Return the stages of `batch_schedule` and `seq_schedule`; a single one without them."""
        return stages_of(
            self.batch_schedule, self.seq_schedule, self.global_batch_size, self.seq_len
        )

    def samples_before(self, num_steps: int) -> int:
        """Return the number of samples, rows of `seq_len` tokens, in the first steps of the run."""
        return samples_before(self.stages, num_steps)

    def in_stage(self, stage: BatchStage) -> TrainConfig:
        """Return the settings of one stage, with microbatches no larger than at full size."""
        rows = stage.batch_size * (self.seq_len // stage.seq_len)
        count = -(-self.num_microbatches * stage.batch_size // self.global_batch_size)
        while count and rows % count:
            count += 1
        return dataclasses.replace(
            self,
            global_batch_size=rows,
            seq_len=stage.seq_len,
            num_microbatches=count,
            batch_schedule=[],
            seq_schedule=[],
        )

    @property
    def accumulation(self) -> int:
        """Return the number of microbatches of a step without pipeline stages."""
        return self.num_microbatches or 1

    def problems(self) -> list[str]:
        """Return an error message for each violated rule of this section."""
        problems = schedule_problems(
            self.batch_schedule, self.seq_schedule, self.global_batch_size, self.seq_len
        )
        if not re.fullmatch("none|host|disk:/.*", self.offload_optimizer):
            problems.append(
                f"train.offload_optimizer={self.offload_optimizer!r} is not none, host or "
                "disk:/DIR. Use one of these; /DIR is an existing directory of a local disk, e.g. "
                "disk:/nvme."
            )
        kind, _, names = self.remat.partition(":")
        usable = REMAT_NAMES + (LAYER_INPUT,) * (kind == "offload")
        if not re.fullmatch("auto|none|dots|full|(names|offload):.+", self.remat):
            problems.append(
                f"train.remat={self.remat!r} is unknown. Use auto, none, dots, full, names:A,B or "
                "offload:A,B."
            )
        elif unknown := [n for n in names.split(",") if n and n not in usable]:
            problems.append(
                f"train.remat={self.remat!r}: {kind} cannot select {', '.join(unknown)}. "
                f"Use names from {', '.join(usable)}."
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Interval and size of evaluation."""

    interval_steps: int = setting(
        100, "steps between evaluations; 0 = only after the last step", ge=0
    )
    max_batches: int = setting(
        20,
        "maximum number of batches of each held-out set in evaluations before the last, spread "
        "over the set; 0 = every row once",
        ge=0,
    )
    final_max_batches: int = setting(
        0, "maximum number of batches of each set in the last evaluation; 0 = every row once", ge=0
    )
    patience: int = setting(
        0,
        "end the run after this many evaluations in a row without a new lowest loss; 0 = never",
        ge=0,
    )
    global_batch_size: int = setting(
        0, "rows of an evaluation batch; 0 = train.global_batch_size", ge=0
    )
    sample: Literal["end", "always", "none"] = setting(
        "end",
        "when a language model, trained by one process, writes a short text to the log and to "
        "metrics.jsonl: end = after the last of at least 100 steps, always = at each evaluation, "
        "none = never",
    )
    tasks: list[str] = setting(
        [],
        "tasks of the lm-evaluation-harness in each evaluation of the run, e.g. hellaswag,arc_easy "
        "(the extra `eval`); jaxdist.evaluate --tasks evaluates a checkpoint",
    )
    task_folder: str = setting("", "folder with your own task files of the lm-evaluation-harness")
    task_limit: int = setting(0, "maximum number of questions of each task; 0 = all", ge=0)

    def problems(self) -> list[str]:
        """Return an error message for each violated rule of this section."""
        if not self.tasks and (self.task_folder or self.task_limit):
            return ["eval.task_folder and eval.task_limit are for tasks. Set eval.tasks."]
        if not self.patience or self.interval_steps:
            return []
        return [
            f"eval.patience={self.patience} with eval.interval_steps=0: nothing is evaluated "
            "during the run. Set eval.interval_steps."
        ]


REMAT_NAMES = ("qkv", "attention", "attention_out", "mlp_hidden", "mlp_out")
"""Names that models may pass to `checkpoint_name`, selected by `train.remat`."""
