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
from jaxdist.tools.launch.kubernetes_manifest import CONFIG_PATH, URL, take_config_file
from jaxdist.tools.launch.legal_sizes import read_sizes
from jaxdist.tools.launch.yaml_writer import BlockText, write_yaml

COMMAND = "jaxdist.launch skypilot"
SUMMARY = """\
Write a SkyPilot task file for a training run.

    python -m jaxdist.launch skypilot --nodes 2 --gpus H100:8 --volume runs:/runs \\
        -- --config llama3_8b
    python -m jaxdist.launch skypilot --nodes 2 --gpus H100:8 --run-dir s3://bucket/runs/a \\
        -- --config llama3_8b
"""
_FIRST_NODE = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
_COMMENTS = {
    "name": "A training job of jaxdist, for: sky jobs launch FILE",
    "volumes": "All nodes see it, and it outlives them: checkpoints are there.",
}
_RECOVERY = {
    "volume": (
        "The launcher below restarts what fails. SkyPilot replaces lost nodes, and starts again\n"
        f"what was asked to leave and saved ({runtime.EXIT_PREEMPTED})."
    ),
    "url": (
        "SkyPilot restarts what fails, replaces lost nodes, and starts again what was asked to\n"
        f"leave and saved ({runtime.EXIT_PREEMPTED})."
    ),
}
"""Comments: with a volume a launcher keeps its logs there; it keeps none in a bucket."""


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
    volume: str = setting("", "NAME:/PATH, a volume for the run directory")
    run_dir: str = setting(
        "", "run directory as a URL (s3://BUCKET/PATH, gs://BUCKET/PATH), in place of a volume"
    )
    setup: tuple[str, ...] = setting((), "shell command to run before the first start")
    max_restarts: int = setting(
        3, "restarts without a new checkpoint; of a run in a bucket: restarts in all", ge=0
    )
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
        if bool(self.volume) == bool(self.run_dir):
            yield (
                f"--volume {self.volume!r} and --run-dir {self.run_dir!r}: checkpoints are in one "
                "of them. Give --volume NAME:/PATH or --run-dir s3://BUCKET/PATH."
            )
        if self.run_dir and not re.fullmatch(URL, self.run_dir):
            yield (
                f"--run-dir {self.run_dir} is no URL of a kind that is known. Use "
                "s3://BUCKET/PATH or gs://BUCKET/PATH, or --volume NAME:/PATH."
            )
        if value_of(self.arguments, "run_dir") is not None:
            yield "--run-dir stands after --, where it has no place. Give it before, or a --volume."


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
    is_stored = bool(config.run_dir)
    arguments, file = take_config_file(config.arguments)
    config = dataclasses.replace(config, arguments=arguments)
    resources = {
        "accelerators": config.gpus,
        "infra": config.infra,
        "image_id": f"docker:{config.image}" if config.image else "",
        "use_spot": config.spot,
        "job_recovery": {
            "max_restarts_on_errors": config.max_restarts if is_stored else 0,
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
        "run": BlockText(
            _train(config) if is_stored else _launch(config, PurePosixPath(path) / config.name)
        ),
    }
    unused = [*([] if config.setup else ["setup"]), *([] if file else ["file_mounts"])]
    unused += ["volumes"] * is_stored
    comments = {**_COMMENTS, "job_recovery": _RECOVERY["url" if is_stored else "volume"]}
    return write_yaml({k: v for k, v in task.items() if k not in unused}, comments)


def _train(config: SkyPilotConfig) -> str:
    """Shell on every node: one process each, told where it stands as a launcher would."""
    places = {
        "JAXDIST_COORDINATOR_ADDRESS": f'"{_FIRST_NODE}:{DEFAULT_PORT}"',
        "JAXDIST_NUM_PROCESSES": str(config.nodes),
        "JAXDIST_PROCESS_ID": '"$SKYPILOT_NODE_RANK"',
        "JAXDIST_NUM_HOSTS": str(config.nodes),
        "JAXDIST_NUM_LOCAL_PROCESSES": "1",
        "JAXDIST_LOCAL_PROCESS_ID": "0",
    }
    lines = [f"export {name}={value}" for name, value in places.items()]
    command = [config.python, "-m", "jaxdist.train", f"--run-dir={config.run_dir}"]
    return "\n".join([*lines, f"exec {shlex.join([*command, *config.arguments])}", ""])


def _launch(config: SkyPilotConfig, run_dir: PurePosixPath) -> str:
    """Shell on every node: one launcher each, which meet at the first node."""
    flags = [f"--max-restarts={config.max_restarts}", "--nproc-per-node=1"]
    meet = []
    if config.nodes > 1:
        meet = [
            f"--nnodes={config.nodes}",
            '--node-rank="$SKYPILOT_NODE_RANK"',
            f'--coordinator-address="{_FIRST_NODE}:{DEFAULT_PORT}"',
        ]
    lines = [
        f"exec {shlex.quote(config.python)} -m jaxdist.launch",
        *flags,
        *meet,
        f"--run-dir={shlex.quote(str(run_dir))}",
        shlex.join(["--", *config.arguments]),
    ]
    return " \\\n  ".join(lines) + "\n"
