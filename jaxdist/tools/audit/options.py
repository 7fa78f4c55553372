"""What `jaxdist audit` is asked: a run's settings, as training takes them, and how deep to look."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from jaxdist.config import RunConfig
from jaxdist.config.command_line import ALIASES
from jaxdist.runtime.storage import read_url
from jaxdist.settings import ConfigError, Removed, problems_of, read_with_origins, setting

COMMAND = "jaxdist.audit"

NUM_DEVICES = 8
"""Simulated devices where neither --mesh nor --simulate says how many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditConfig(RunConfig):
    """A run's settings and what to look at."""

    deep: bool = setting(
        False,
        "also run one step on simulated devices, and compare its loss and every gradient with one "
        "device's; slow for large models",
    )
    json: bool = setting(False, "print one JSON object instead of text")

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        **RunConfig.REMOVED,
        "compiled": Removed(False, "Use scripts/bench/audit_sound.py, which compiles steps too."),
    }

    @property
    def num_devices(self) -> int:
        """Devices to simulate: those of the mesh, or of --simulate."""
        spec = self.mesh.spec
        if spec is None or spec.is_open:
            return self.simulate or NUM_DEVICES
        return spec.num_devices


def read_audit(argv: Sequence[str], summary: str = "") -> AuditConfig:
    """The question. Data need not exist here.

    Raises:
        ConfigError: every problem of the settings.
    """
    config, _ = read_with_origins(
        AuditConfig,
        argv,
        command=COMMAND,
        summary=summary,
        aliases=ALIASES,
        check_rules=False,
        read_url=read_url,
    )
    elsewhere = dataclasses.replace(config.run, run_dir="", resume="auto", init_from="", simulate=0)
    problems = [rule for rule in problems_of(elsewhere) if not rule.startswith("data.")]
    if problems:
        raise ConfigError(problems, asked=COMMAND)
    return config
