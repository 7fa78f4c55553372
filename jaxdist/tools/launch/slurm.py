"""`python -m jaxdist.launch slurm`: write, and with `--submit` submit, a batch script (`batch`)."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist import runtime
from jaxdist.tools.launch.legal_sizes import read_sizes
from jaxdist.tools.launch.membership import LegalSizes, Range, legal_nodes
from jaxdist.tools.launch.slurm_script import BatchPlan, batch_script


def main(argv: Sequence[str]) -> int:
    """Write the script; print, keep or submit it."""
    own, rest = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    args = vars(_parser().parse_args(own))
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
    for name in ("modules", "setup", "sbatch"):
        args[name] = tuple(args[name])
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdist.launch slurm",
        description="Write a SLURM batch script for a training run.",
        epilog="What stands after -- goes to jaxdist.train in every process.",
    )
    add = parser.add_argument
    add("--name", default="jaxdist", help="job name (default jaxdist)")
    add(
        "--nodes",
        default="1",
        metavar="N|MIN-MAX",
        help="(default 1); a range makes the job elastic: it runs on the most nodes of those that "
        "SLURM gives with which a mesh is legal (--mesh names that of MAX)",
    )
    add("--gpus-per-node", type=int, default=0, help="0: a CPU job (default)")
    add("--tasks-per-node", type=int, default=1, help="1: one process with all GPUs (default)")
    add("--cpus-per-task", type=int, default=0, help="0: SLURM's default")
    add("--time", default="", help="limit, e.g. 24:00:00; the job queues itself again at its end")
    add("--mem", default="", help="memory per node, e.g. 512G")
    add("--partition", default="")
    add("--account", default="")
    add("--qos", default="")
    add("--constraint", default="")
    add("--signal-s", type=int, default=180, help="seconds ahead of the limit to save (180)")
    add("--max-requeues", type=int, default=50, help="(default 50)")
    add("--max-crashes", type=int, default=3, help="in a row without a new checkpoint (default 3)")
    add("--run-dir", default="", help="on a shared disk (default runs/NAME-JOBID)")
    add("--module", dest="modules", action="append", default=[], help="module load ...; repeatable")
    add("--setup", action="append", default=[], help="a line of shell before the run; repeatable")
    add("--sbatch", action="append", default=[], help="a further #SBATCH option; repeatable")
    add("--container", default="", help="an image: FILE.sif for apptainer, else pyxis")
    add("--python", default="python", help="interpreter on the nodes (default python)")
    add("--program", default="", help="another program instead of jaxdist.train")
    add("--script", default="", help="where to write (default NAME.sbatch)")
    add("--submit", action="store_true", help="hand it to sbatch")
    add("--dry-run", action="store_true", help="print it, write nothing")
    return parser
