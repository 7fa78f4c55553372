"""`python -m jaxdist.launch skypilot`: write a task file for SkyPilot's managed jobs."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxdist import runtime
from jaxdist.core.settings import ConfigError, read_settings, setting, value_of
from jaxdist.runtime.cluster_environment import DEFAULT_PORT
from jaxdist.tools.launch.kubernetes_manifest import CONFIG_PATH, take_config_file
from jaxdist.tools.launch.legal_sizes import read_sizes
from jaxdist.tools.launch.yaml_writer import BlockText, write_yaml

COMMAND = "jaxdist.launch skypilot"
SUMMARY = """\
Write a SkyPilot task file for a training run.

    python -m jaxdist.launch skypilot --nodes 2 --gpus H100:8 --volume runs:/runs \\
        -- --config llama3_8b
"""
_COMMENTS = {
    "name": "A training job of jaxdist, for: sky jobs launch FILE",
    "job_recovery": (
        "The launcher below restarts what fails. SkyPilot replaces lost nodes, and starts again\n"
        f"what was asked to leave and saved ({runtime.EXIT_PREEMPTED})."
    ),
    "volumes": "All nodes see it, and it outlives them: checkpoints are there.",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SkyPilotConfig:
    """What to ask SkyPilot for, and what to run."""

    name: str = setting("jaxdist", "name of the job")
    nodes: int = setting(1, "nodes", ge=1)
    gpus: str = setting("", "GPUs per node, TYPE:COUNT, e.g. H100:8", required=True)
    infra: str = setting(
        "", "cloud or cluster, e.g. k8s/CONTEXT; empty = the cheapest that has the GPUs"
    )
    image: str = setting("", "container image with jaxdist in it; empty = install it in --setup")
    spot: bool = setting(False, "use spot instances")
    volume: str = setting("", "NAME:/PATH, a volume for the run directory", required=True)
    setup: tuple[str, ...] = setting((), "shell command to run before the first start")
    max_restarts: int = setting(3, "restarts without a new checkpoint", ge=0)
    python: str = setting("python", "interpreter on the nodes")
    script: str = setting("", "file to write; empty = NAME.sky.yaml")
    dry_run: bool = setting(False, "print the task and write nothing")
    arguments: list[str] = setting([], "arguments of jaxdist.train, in every process")

    def problems(self) -> Iterator[str]:
        """Every violated rule beyond the bounds of each setting."""
        if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", self.name):
            yield f"--name {self.name!r} is not a job name. Use lower-case letters, digits and -."
        if self.gpus and not re.fullmatch(r"[A-Za-z][\w.-]*:[1-9][0-9]*", self.gpus):
            yield f"--gpus {self.gpus!r} is not TYPE:COUNT. Use e.g. --gpus H100:8."
        if self.volume and not re.fullmatch("[a-z0-9][a-z0-9-]*:/[^:]+", self.volume):
            yield f"--volume {self.volume!r} is not NAME:/PATH. Use e.g. --volume runs:/runs."
        if value_of(self.arguments, "run_dir") is not None:
            yield "--run-dir after -- is one too many: it is NAME in --volume. Leave it out."


def main(argv: Sequence[str]) -> int:
    """Write the task file, or print it.

    Raises:
        ConfigError: every problem of the flags.
    """
    config = read_settings(SkyPilotConfig, argv, command=COMMAND, summary=SUMMARY, rest="arguments")
    found = read_sizes(config.arguments)  # refused before anyone pays for nodes
    if isinstance(found, int):
        return found
    text = task_text(config)
    if config.dry_run:
        print(text, end="")
        return runtime.EXIT_OK
    path = Path(config.script or f"{config.name}.sky.yaml")
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(
            f"--script {path} cannot be written ({error.strerror}). Name another file."
        ) from None
    print(f"wrote {path}; start it with: sky jobs launch {path}")
    return runtime.EXIT_OK


def task_text(config: SkyPilotConfig) -> str:
    """The whole task file."""
    volume, _, path = config.volume.partition(":")
    arguments, file = take_config_file(config.arguments)
    config = dataclasses.replace(config, arguments=arguments)
    resources = {
        "accelerators": config.gpus,
        "infra": config.infra,
        "image_id": f"docker:{config.image}" if config.image else "",
        "use_spot": config.spot,
        "job_recovery": {
            "max_restarts_on_errors": 0,
            "recover_on_exit_codes": [runtime.EXIT_PREEMPTED],
        },
    }
    task: dict[str, Any] = {
        "name": config.name,
        "num_nodes": config.nodes,
        "resources": {name: value for name, value in resources.items() if value != ""},
        "volumes": {path: volume},
        "file_mounts": {CONFIG_PATH: str(file)},
        "setup": BlockText("\n".join(config.setup) + "\n"),
        "run": BlockText(_run(config, PurePosixPath(path) / config.name)),
    }
    unused = [*([] if config.setup else ["setup"]), *([] if file else ["file_mounts"])]
    return write_yaml({k: v for k, v in task.items() if k not in unused}, _COMMENTS)


def _run(config: SkyPilotConfig, run_dir: PurePosixPath) -> str:
    """Shell on every node: one launcher each, which meet at the first node."""
    flags = [f"--max-restarts={config.max_restarts}", "--nproc-per-node=1"]
    meet = []
    if config.nodes > 1:
        meet = [
            f"--nnodes={config.nodes}",
            '--node-rank="$SKYPILOT_NODE_RANK"',
            f'--coordinator-address="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{DEFAULT_PORT}"',
        ]
    lines = [
        f"exec {shlex.quote(config.python)} -m jaxdist.launch",
        *flags,
        *meet,
        f"--run-dir={shlex.quote(str(run_dir))}",
        shlex.join(["--", *config.arguments]),
    ]
    return " \\\n  ".join(lines) + "\n"
