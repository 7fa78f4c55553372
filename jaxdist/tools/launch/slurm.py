"""`python -m jaxdist.launch slurm`: write, and with `--submit` submit, a batch script (`batch`)."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist import runtime
from jaxdist.core.settings import read_settings, setting
from jaxdist.tools.launch.legal_sizes import read_sizes
from jaxdist.tools.launch.membership import LegalSizes, Range, legal_nodes
from jaxdist.tools.launch.slurm_script import BatchPlan, batch_script


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """What to ask SLURM for, and what to run."""

    name: str = setting("jaxdist", "job name")
    nodes: str = setting(
        "1",
        "nodes, N or MIN-MAX; a range makes the job elastic: it runs on the most nodes of those "
        "that SLURM gives with which a mesh is legal (--mesh names that of MAX)",
    )
    gpus_per_node: int = setting(0, "GPUs of a node; 0 = a CPU job")
    tasks_per_node: int = setting(1, "processes of a node; 1 = one with all GPUs")
    cpus_per_task: int = setting(0, "CPU cores of a process; 0 = SLURM's default")
    time: str = setting("", "limit, e.g. 24:00:00; the job queues itself again when it is reached")
    mem: str = setting("", "memory of a node, e.g. 512G")
    partition: str = setting("", "SLURM's --partition")
    account: str = setting("", "SLURM's --account")
    qos: str = setting("", "SLURM's --qos")
    constraint: str = setting("", "SLURM's --constraint")
    signal_s: int = setting(180, "seconds ahead of the limit at which the run saves and stops")
    max_requeues: int = setting(50, "times that the job queues itself again")
    max_crashes: int = setting(3, "crashes in a row without a new checkpoint")
    run_dir: str = setting("", "run directory on a shared disk; empty = runs/NAME-JOBID")
    module: tuple[str, ...] = setting((), "module load ...")
    setup: tuple[str, ...] = setting((), "a line of shell before the run")
    sbatch: tuple[str, ...] = setting((), "a further #SBATCH option")
    container: str = setting("", "an image: FILE.sif for apptainer, else pyxis")
    python: str = setting("python", "interpreter on the nodes")
    program: str = setting("", "another program instead of jaxdist.train")
    script: str = setting("", "file to write; empty = NAME.sbatch")
    submit: bool = setting(False, "hand the script to sbatch")
    dry_run: bool = setting(False, "print the script and write nothing")
    arguments: list[str] = setting([], "arguments of jaxdist.train, in every process")


SUMMARY = """\
Write a SLURM batch script for a training run.

    python -m jaxdist.launch slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 -- --config run.toml
"""


def main(argv: Sequence[str]) -> int:
    """Write the script; print, keep or submit it."""
    config = read_settings(
        SlurmConfig, argv, command="jaxdist.launch slurm", summary=SUMMARY, rest="arguments"
    )
    args = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    rest = args.pop("arguments")
    script_path, submit, dry_run = (args.pop(name) for name in ("script", "submit", "dry_run"))
    plan = _read_plan(args, rest)
    if isinstance(plan, int):
        return plan
    for remark in plan.remarks():
        print(f"warning: {remark}", file=sys.stderr)
    text = batch_script(plan)
    if dry_run:
        print(text, end="")
        return runtime.EXIT_OK
    path = Path(script_path or f"{plan.name}.sbatch")
    path.write_text(text)
    path.chmod(0o755)
    if not submit:
        print(f"wrote {path}; submit it with: sbatch {path}")
        return runtime.EXIT_OK
    return _submit(path)


def _read_plan(args: dict[str, Any], rest: list[str]) -> BatchPlan | int:
    """Flags to a plan without problems; or the exit code, all of them said."""
    problems = []
    try:
        args |= _read_nodes(args["nodes"])
    except ValueError as error:
        problems.append(str(error))
        args |= {"min_nodes": 0, "nodes": 1}
    is_elastic = bool(args["min_nodes"]) and not args["program"]
    if is_elastic and not any(word.startswith("--mesh.elastic") for word in rest):
        rest.append("--mesh.elastic=true")
    args["modules"] = args.pop("module")
    plan = BatchPlan(args=rest, **args)
    problems += plan.problems()
    sizes = read_sizes(rest) if is_elastic else LegalSizes()  # told before anyone waits for nodes
    if not problems and isinstance(sizes, LegalSizes) and sizes.legal is not None:
        plan, problems = _with_legal_nodes(plan, sizes)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return runtime.EXIT_CONFIG
    return sizes if isinstance(sizes, int) else plan


def _with_legal_nodes(plan: BatchPlan, sizes: LegalSizes) -> tuple[BatchPlan, list[str]]:
    """The plan for the numbers of nodes on which a mesh is legal, or what is wrong with all."""
    hidden = [option for option in plan.sbatch if re.match(r"--(gpus|gres=.*gpu)", option)]
    if hidden and not sizes.simulate and not plan.gpus_per_node:
        return plan, [
            f"--sbatch={hidden[0]} without --gpus-per-node: how many devices a node of --nodes "
            f"{plan.min_nodes}-{plan.nodes} has is not known. Give --gpus-per-node."
        ]
    tasks = plan.tasks_per_node
    devices = sizes.simulate or plan.gpus_per_node // tasks or 1
    asked = Range(minimum=plan.min_nodes, maximum=plan.nodes)
    counts = legal_nodes(sizes, asked, tasks, devices)
    if not counts:
        return plan, [_never_legal(plan, sizes, tasks * devices)]
    if (counts[0], counts[-1]) != (asked.minimum, asked.maximum):
        print(
            f"warning: of --nodes {asked.minimum}-{asked.maximum}, meshes are legal with "
            f"{_listed(counts)} only: SLURM is asked for {counts[0]}-{counts[-1]}.",
            file=sys.stderr,
        )
    least, most = counts[0], counts[-1]  # what is given beyond would be paid for in vain
    return dataclasses.replace(plan, min_nodes=least, nodes=most, node_counts=tuple(counts)), []


def _never_legal(plan: BatchPlan, sizes: LegalSizes, each: int) -> str:
    legal = sizes.legal or ()
    counts = [count // each for count in legal if count % each == 0]
    fix = "Change --gpus-per-node, --tasks-per-node or the mesh so that nodes make one of these."
    if counts:
        fix = f"Use a range with one of these numbers of nodes: {_listed(counts)}."
    return (
        f"--nodes {plan.min_nodes}-{plan.nodes} with {each} devices on each never makes a legal "
        f"job: model, batch and mesh are legal with {_listed(legal)} devices. {fix}"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _read_nodes(text: str) -> dict[str, int]:
    """`8`, or `4-8` as SLURM writes a range, or `4:8` as the launcher does."""
    if re.fullmatch(r"-?\d+", text):
        return {"min_nodes": 0, "nodes": int(text)}
    found = Range.parse("nodes", re.sub(r"(?<=\d)-", ":", text, count=1))
    return {"min_nodes": found.minimum, "nodes": found.maximum}


def _submit(path: Path) -> int:
    try:
        done = subprocess.run(["sbatch", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        print(f"sbatch is not on this machine: copy {path} to a login node.", file=sys.stderr)
        return runtime.EXIT_CONFIG
    print(done.stdout.strip() or done.stderr.strip())
    return runtime.EXIT_OK if done.returncode == 0 else runtime.EXIT_FAILURE
