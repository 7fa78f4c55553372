"""The `runtime` section of a run: how its processes join."""

from __future__ import annotations

import dataclasses
import re

from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Settings with which a process joins its job."""

    coordinator_address: str = setting(
        "", "host:port at which process 0 listens; empty: from the environment"
    )
    num_processes: int = setting(
        0,
        "processes in the job; 0 = from the environment; 1 = ignore the environment and run alone",
        ge=0,
    )
    process_id: int = setting(-1, "index of this process, from 0; -1: from the environment", ge=-1)
    join_timeout_s: int = setting(300, "seconds to wait for all processes to join", ge=1)
    heartbeat_timeout_s: int = setting(
        30, "seconds without a heartbeat after which a process counts as dead", ge=1
    )

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; lower bounds are checked elsewhere."""
        errors = []
        explicit = (bool(self.coordinator_address), self.num_processes > 0, self.process_id >= 0)
        if self.num_processes != 1 and not all(explicit) and any(explicit):
            errors.append(
                f"runtime.coordinator_address={self.coordinator_address!r}, "
                f"num_processes={self.num_processes} and process_id={self.process_id} must be "
                "set together. Give all three, or none to read the environment."
            )
        elif all(explicit) and self.process_id >= self.num_processes:
            errors.append(
                f"runtime.process_id={self.process_id} is not in a job of "
                f"{self.num_processes} processes. Use 0 to {self.num_processes - 1}."
            )
        if self.coordinator_address and not is_address(self.coordinator_address):
            errors.append(
                f"runtime.coordinator_address={self.coordinator_address!r} is not host:port. "
                "Use e.g. node001:29400, with a port from 1 to 65535."
            )
        return errors


def is_address(text: str) -> bool:
    """Return whether a text is host:port; an IPv6 host needs brackets."""
    match = re.fullmatch(r"(\[[^\]]+\]|[^:]+):([0-9]{1,5})", text)
    return match is not None and 1 <= int(match[2]) <= 65535
