"""`python -m jaxdist.launch slurm`: write, and with `--submit` submit, a batch script."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist import runtime
from jaxdist.settings import ConfigError, problems_of, read_settings, value_of
from jaxdist.tools.launch.membership import LegalSizes, Range, legal_nodes, read_sizes
from jaxdist.tools.launch.slurm_script import Nodes, SlurmConfig, batch_script

COMMAND = "jaxdist.launch slurm"
SUMMARY = """\
Write a SLURM batch script for a training run.

    python -m jaxdist.launch slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 -- --config run.toml
"""


def main(argv: Sequence[str]) -> int:
    """Check the arguments; print, write or submit the batch script; return the exit code."""
    config = read_settings(
        SlurmConfig, argv, command=COMMAND, summary=SUMMARY, rest="arguments", check_rules=False
    )
    problems, sizes, arguments = problems_of(config), LegalSizes(), config.arguments
    try:
        nodes = Nodes.parse(config.nodes)
    except ValueError:  # listed in `problems`
        nodes = Nodes(most=1)
    if not config.program and (nodes.least or not problems):
        if nodes.least and value_of(arguments, "mesh.elastic") is None:
            arguments = [*arguments, "--mesh.elastic=true"]
        result = read_sizes(arguments)  # reject bad arguments before anyone waits for nodes
        if isinstance(result, int) and not problems:
            return result
        sizes = LegalSizes() if isinstance(result, int) else result
    config = dataclasses.replace(config, arguments=arguments)
    if not problems and nodes.least and sizes.legal is not None:
        nodes, problems = _with_legal_nodes(config, nodes, sizes)
    if problems:
        raise ConfigError(problems, heading=COMMAND)
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    return deliver(config, batch_script(config, nodes))


def deliver(config: SlurmConfig, text: str) -> int:
    """Print, write or submit a script; return 0, 1 if sbatch rejects it, 2 without sbatch."""
    if config.dry_run:
        print(text, end="")
        return runtime.EXIT_OK
    path = Path(config.script or f"{config.name}.sbatch")
    try:
        path.write_text(text)
        path.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"--script {path} cannot be written ({error.strerror}). Name another file."
        ) from None
    if not config.submit:
        print(f"wrote {path}; submit it with: sbatch {path}")
        return runtime.EXIT_OK
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        print(f"sbatch is not installed here: copy {path} to a login node.", file=sys.stderr)
        return runtime.EXIT_CONFIG
    print(done.stdout.strip() or done.stderr.strip())
    return runtime.EXIT_OK if done.returncode == 0 else runtime.EXIT_FAILURE


def _with_legal_nodes(
    config: SlurmConfig, nodes: Nodes, sizes: LegalSizes
) -> tuple[Nodes, list[str]]:
    """Return the numbers of nodes for which the program has a legal mesh, and problems."""
    hidden = [option for option in config.sbatch if re.match(r"--(gpus|gres=.*gpu)", option)]
    if hidden and not sizes.simulate and not config.gpus_per_node:
        return nodes, [
            f"--sbatch={hidden[0]} without --gpus-per-node: the number of devices per node of "
            f"--nodes {config.nodes} is unknown. Set --gpus-per-node."
        ]
    tasks = config.tasks_per_node
    devices = sizes.simulate or config.gpus_per_node // tasks or 1
    requested = Range(minimum=nodes.least, maximum=nodes.most)
    counts = legal_nodes(sizes, requested, tasks, devices)
    if not counts:
        return nodes, [_no_legal_nodes(config, sizes, tasks * devices)]
    least, most = counts[0], counts[-1]  # nodes beyond `most` would be idle
    if (least, most) != (nodes.least, nodes.most):
        print(
            f"warning: of --nodes {config.nodes}, only {_join(counts)} have a legal mesh: the "
            f"script requests {least}-{most}.",
            file=sys.stderr,
        )
    return Nodes(most=most, least=least, legal=tuple(counts)), []


def _no_legal_nodes(config: SlurmConfig, sizes: LegalSizes, each: int) -> str:
    legal = sizes.legal or ()
    counts = [count // each for count in legal if count % each == 0]
    fix = "Change --gpus-per-node, --tasks-per-node or the mesh."
    if counts:
        fix = f"Use a range with one of these numbers of nodes: {_join(counts)}."
    return (
        f"--nodes {config.nodes} with {each} devices each allows no legal job: model, batch and "
        f"mesh are legal on {_join(legal)} devices. {fix}"
    )


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
