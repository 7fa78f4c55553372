"""Settings that several commands on a run share, in a module that imports no jax."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """The devices on which a command opens a run."""

    mesh: str = setting("auto", "mesh axes, e.g. fsdp=8; auto = one device")
    simulate: int = setting(
        0, "simulated CPU devices; 0 = the machine's own devices", ge=0, le=4096
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSettings(DeviceSettings):
    """A checkpoint of a run, a choice of raw or averaged weights, and the devices."""

    run: str = setting("", "run directory, or one of its checkpoints", required=True)
    step: int = setting(-1, "step of the checkpoint; -1 = the path's, or the newest valid", ge=-1)
    weights: Literal["auto", "ema", "raw"] = setting(
        "auto",
        "ema = moving average of the weights, raw = as trained, auto = the average if the run has "
        "one",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """Length, sampling and display of generated text."""

    max_new_tokens: int = setting(200, "largest number of tokens to add to each prompt", ge=1)
    temperature: float = setting(
        0.8, "sampling temperature; 0 = always the most likely token", ge=0
    )
    top_k: int = setting(0, "sample from the k most likely tokens only; 0 = all", ge=0)
    top_p: float = setting(
        1.0,
        "sample from the most likely tokens whose total probability reaches this; 1 = all",
        gt=0,
        le=1,
    )
    seed: int = setting(0, "seed of the sampling")
    stop_at_end: bool = setting(True, "stop at end-of-text and end-of-answer tokens")
    show_special: bool = setting(False, "also print special tokens, e.g. the end-of-turn token")
