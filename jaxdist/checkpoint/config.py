"""Settings of checkpoints: when to save, how many to keep, how strictly to verify."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection
from typing import Literal

from jaxdist.runtime.storage import is_url
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Settings of saving, retention and verification."""

    save_interval_steps: int = setting(1000, "steps between saves; 0 = no saves by steps", ge=0)
    save_interval_minutes: float = setting(
        30.0, "minutes between saves, in addition to those by steps; 0 = no saves by time", ge=0
    )
    max_to_keep: int = setting(
        3,
        "number of newest checkpoints to keep, in addition to those that other settings keep, a "
        "save halfway between two, and one being written",
        ge=1,
    )
    keep_interval_steps: int = setting(
        0, "never delete checkpoints whose step is a multiple of this; 0 = none", ge=0
    )
    keep_best: str = setting(
        "none",
        "METRIC:N = also keep the N checkpoints with the best evaluation metric, e.g. loss:3 "
        "(the lowest) or accuracy:1 (the highest); none = no such checkpoints",
    )
    async_save: bool = setting(
        True,
        "write in the background, with a save halfway between two, so that a crash during a write "
        "loses at most one interval; false, or an interval of one step = wait for every save",
    )
    verify: Literal["full", "quick", "none"] = setting(
        "full",
        "full = check every file's CRC-32 before loading and every array's checksum after; quick = "
        "file sizes and small files before, checksums after; none = only the manifest",
    )

    export: Literal["none", "hf"] = setting(
        "none",
        "hf = after the last step, also write the weights in Hugging Face's format (of adapters: "
        "in PEFT's) to export/STEP in the run directory, as convert to-hf and to-peft do",
    )
    export_interval_steps: int = setting(
        0,
        "also export each saved checkpoint whose step is a multiple of this, in the background; a "
        "multiple of save_interval_steps; 0 = only the last one",
        ge=0,
    )
    local_dir: str = setting(
        "",
        "directory on each host's own disk for frequent saves between those of the run directory, "
        "e.g. /nvme/jaxdist or $TMPDIR/jaxdist; empty = none",
    )
    local_interval_steps: int = setting(
        0,
        "steps between saves to local_dir, which also follow 5 minutes after the last one; 0 = "
        "only these",
        ge=0,
    )
    neighbours: int = setting(
        1,
        "number of other hosts that keep a copy of each shard saved to local_dir, so that as many "
        "hosts may be lost; 0 = none",
        ge=0,
    )

    @property
    def in_background(self) -> bool:
        """Return whether training continues during a write: `async_save`, but not at interval 1."""
        # With an interval of one step, no extra save halfway is possible.
        return self.async_save and self.save_interval_steps != 1

    @property
    def exports_saves(self) -> bool:
        """Return whether checkpoints are exported during training."""
        return self.export != "none" and self.export_interval_steps > 0

    @property
    def best(self) -> tuple[str, int]:
        """Return the metric of `keep_best` and the number of checkpoints it keeps; 0 = none."""
        metric, _, count = self.keep_best.partition(":")
        return metric, int(count) if count.isdecimal() else 0

    def missing_best(self, metrics: Collection[str]) -> str:
        """Return an error message if no evaluation reports the metric of `keep_best`; else ""."""
        metric, count = self.best
        if not count or metric in metrics:
            return ""
        return (
            f"checkpoint.keep_best={self.keep_best} keeps nothing: evaluations of this run do not "
            f"report {metric}. Use one of {', '.join(metrics)}."
        )

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        errors = []
        if not re.fullmatch(r"none|[\w./-]+:[1-9][0-9]{0,8}", self.keep_best):
            errors.append(
                f"checkpoint.keep_best={self.keep_best!r} is not METRIC:N, an evaluation metric "
                "and a number from 1 on. Use e.g. loss:3 or accuracy:1, or none."
            )
        every, export_every = self.save_interval_steps, self.export_interval_steps
        if export_every and self.export == "none":
            errors.append(
                f"checkpoint.export_interval_steps={export_every} exports nothing, because "
                "checkpoint.export=none. Use checkpoint.export=hf, or an interval of 0."
            )
        if export_every and (not every or export_every % every):
            near = max(every, export_every // max(every, 1) * every)
            fix = f"Use {near}, or save_interval_steps={export_every}."
            errors.append(
                f"checkpoint.export_interval_steps={export_every} is not a multiple of "
                f"checkpoint.save_interval_steps={every}: only saved checkpoints are exported. "
                f"{fix if every else f'Use save_interval_steps={export_every}.'}"
            )
        if is_url(self.local_dir):
            errors.append(
                f"checkpoint.local_dir={self.local_dir} is a URL: local saves go to each host's "
                "own disk. Use e.g. /nvme/jaxdist; --run-dir may be a URL."
            )
        return errors
