"""Settings of `jaxdist plan`: the settings of training, and settings of its own."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from jaxdist.config import RunConfig
from jaxdist.config.command_line import ALIASES
from jaxdist.hardware import GPUS, Cluster, Gpu, parse_gpus, read_hardware
from jaxdist.hardware.catalog import DISK_BYTES_PER_S
from jaxdist.plan.estimate.cost import FAILURES_PER_1000_GPU_DAYS, STORAGE_BYTES_PER_S, Limits
from jaxdist.runtime.storage import read_url
from jaxdist.settings import ConfigError, Removed, problems_of, read_with_origins, setting

COMMAND = "jaxdist.plan"
_MOST_CELLS = 4096
"""Largest product of stages and microbatches in a diagram."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(RunConfig):
    """A run's settings, and the GPUs and limits to plan for."""

    gpus: str = setting(
        "",
        "GPUs to plan for: h100:64, h100:8x8 (nodes x GPUs of each), or several after commas; "
        f"known: {', '.join(GPUS)}",
    )
    hardware: str = setting(
        "",
        'TOML file with a table for each GPU type of yours: [our-h100], like = "h100" and values '
        "that differ, e.g. memory_gib = 94, price_per_hour = 1.9; or, without like, all that are "
        "required",
    )
    tokens: float = setting(
        0.0, "tokens (or images) of the complete run, e.g. 1e12; 0 = those of train.steps", ge=0
    )
    deadline: str = setting(
        "", "longest duration of the run, e.g. 14d, 36h or 2w, for advice on GPUs; empty = none"
    )
    budget: float = setting(0.0, "highest cost of the run in USD; 0 = no limit", ge=0)
    price: float = setting(-1.0, "USD per GPU-hour on demand; -1 = that of the GPU type", ge=-1)
    spot_price: float = setting(
        -1.0, "USD per spot GPU-hour; -1 = that of the GPU type, scaled like price", ge=-1
    )
    preemptions_per_day: float = setting(2.0, "spot preemptions per day of the job", ge=0)
    failures_per_day: float = setting(
        -1.0,
        "failures per day that stop the job; -1 = by the number of GPUs "
        f"({FAILURES_PER_1000_GPU_DAYS:.2f} per 1,000 GPUs, Llama 3's training)",
        ge=-1,
    )
    storage_gb_per_s: float = setting(
        2.0,
        "GB/s that each node writes to storage; all nodes together at most "
        f"{STORAGE_BYTES_PER_S / 1e9:,.0f}",
        gt=0,
    )
    disk_gb_per_s: float = setting(
        DISK_BYTES_PER_S / 1e9,
        "GB/s that the local disk of a node reads and writes at the same time, in all, for "
        "train.offload_optimizer=disk:/DIR; scripts/bench/offload_disk.py measures it",
        gt=0,
    )
    restart_s: float = setting(
        -1.0,
        "seconds from a failure to the next attempt's first step; -1 = estimated",
        ge=-1,
    )
    compile: bool = setting(
        True, "check the plan with the GPU compiler, if the extra `plan` is installed"
    )
    compile_timeout_s: float = setting(300.0, "timeout of one compilation in seconds", gt=0)
    top: int = setting(6, "largest number of meshes to show", ge=1)
    json: bool = setting(False, "print one JSON object instead of text")
    show_schedule: bool = setting(
        False, "print diagrams of all pipeline schedules (--stages, --microbatches), and stop"
    )
    stages: int = setting(4, "pipeline stages in the diagrams of --show-schedule", ge=1)
    microbatches: int = setting(8, "microbatches in the diagrams of --show-schedule", ge=1)
    virtual_stages: int = setting(
        2, "virtual stages of each stage in the diagrams, for schedules that have them", ge=1
    )

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        **RunConfig.REMOVED,
        "html": Removed("", "Use the text, or --json for plots of your own."),
    }

    @property
    def limits(self) -> Limits:
        """Limits on days and money of the run; 0 = no limit."""
        return Limits(days=_days(self.deadline) or 0.0, money=self.budget)

    def problems(self) -> list[str]:
        """Return an error message for each violated rule of the planner's own settings."""
        problems = [
            f"{name}={getattr(self, name)} must be 0 or more, or -1 for the default."
            for name in ("price", "spot_price", "failures_per_day", "restart_s")
            if -1 < getattr(self, name) < 0
        ]
        if _days(self.deadline) is None:
            problems.append(
                f"deadline={self.deadline!r} is not a duration. Use a number above 0 with its "
                "unit: 2w, 14d or 36h."
            )
        if self.show_schedule and self.stages * self.microbatches > _MOST_CELLS:
            problems.append(
                f"--stages {self.stages} --microbatches {self.microbatches} is too large to draw. "
                f"Use sizes whose product is at most {_MOST_CELLS}."
            )
        if not self.gpus and not self.show_schedule:
            problems.append(
                "no GPUs were named. Use --gpus h100:8, or --gpus h100:8x8 for 8 nodes of 8."
            )
        return problems


_DAYS = {"w": 7.0, "d": 1.0, "h": 1 / 24}


def _days(text: str) -> float | None:
    if not text:
        return 0.0
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([wdh]?)", text.strip().lower())
    return None if match is None else float(match[1]) * _DAYS[match[2] or "d"] or None


def read_plan(
    argv: Sequence[str], summary: str = "", values: Mapping[str, Any] | None = None
) -> tuple[PlanConfig, str]:
    """Return the planner's settings, and the mesh of flags or `values` ("" = search the best).

    The mesh of a config file is ignored, and data need not exist. `values` are set from Python.
    """
    config, origins = read_with_origins(
        PlanConfig,
        argv,
        command=COMMAND,
        summary=summary,
        aliases=ALIASES,
        check_rules=False,
        values=values,
        read_url=read_url,
    )
    elsewhere = dataclasses.replace(
        config.run,
        run_dir="",
        resume="auto",
        init_from="",
        simulate=0,
        mesh=dataclasses.replace(config.mesh, shape="auto"),
    )
    rules = [] if config.show_schedule else problems_of(elsewhere)
    problems = problems_of(config, deep=False) + [
        rule for rule in rules if not rule.startswith("data.")
    ]
    if problems:
        raise ConfigError(problems, heading=COMMAND)
    mesh_is_flag = (
        origins.get("mesh.shape", "").startswith(("flag", "keyword"))
        and config.mesh.shape != "auto"
    )
    return config, config.mesh.shape if mesh_is_flag else ""


def clusters_of(config: PlanConfig) -> list[Cluster]:
    """Return the clusters to plan for, with prices and disks of the settings."""
    try:
        clusters = parse_gpus(config.gpus, read_gpus(config))
    except ConfigError as error:
        raise ConfigError(error.problems, heading=COMMAND) from None
    rate = 1e9 * config.disk_gb_per_s
    priced = []
    for cluster in clusters:
        gpu = cluster.gpu
        price = gpu.price_per_hour if config.price < 0 else config.price
        # If the user gives only a list price, scale the spot price by the same factor.
        spot = gpu.spot_price_per_hour * (price / gpu.price_per_hour if gpu.price_per_hour else 1.0)
        spot = spot if config.spot_price < 0 else config.spot_price
        gpu = dataclasses.replace(gpu, price_per_hour=price, spot_price_per_hour=spot)
        priced.append(dataclasses.replace(cluster, gpu=gpu, disk_bytes_per_s=rate))
    return priced


def read_gpus(config: PlanConfig) -> dict[str, Gpu]:
    """Return name -> GPU of the catalog, and of the file of `hardware` if it is set."""
    return read_hardware(config.hardware) if config.hardware else dict(GPUS)
