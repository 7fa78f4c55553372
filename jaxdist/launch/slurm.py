"""`python -m jaxdist.launch slurm`: write, and with `--submit` submit, a readable batch script.

The script does what SLURM leaves to its jobs: it passes the signal that comes ahead of the time
limit on to every process, and decides by process 0's own verdict - not by srun's exit code, which
is the highest of all tasks - whether the job is done, wants to be queued again, or must end. It
never queues again a job that its user has cancelled.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxdist import runtime
from jaxdist.launch.elastic import Range

_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One job; fields are the flags of the command, `args` what the program gets.

    With `min_nodes` SLURM may give as few nodes, and the job is elastic: `nodes` are the most.
    """

    args: list[str]
    name: str = "jaxdist"
    nodes: int = 1
    min_nodes: int = 0
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    cpus_per_task: int = 0
    time: str = ""
    mem: str = ""
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    signal_s: int = 180
    max_requeues: int = 50
    max_crashes: int = 3
    run_dir: str = ""
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    sbatch: tuple[str, ...] = ()
    container: str = ""
    python: str = "python"
    program: str = ""

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        for name, least in (
            ("nodes", 1),
            ("gpus_per_node", 0),
            ("tasks_per_node", 1),
            ("cpus_per_task", 0),
            ("max_requeues", 0),
            ("max_crashes", 0),
        ):
            value = getattr(self, name)
            if value < least:
                flag = name.replace("_", "-")
                found.append(f"--{flag} {value} is too small. Use a whole number ≥ {least}.")
        if not _TIME.fullmatch(self.time):
            found.append(
                f"--time {self.time!r} is not a time limit. Use minutes, HH:MM:SS or D-HH:MM:SS, "
                "e.g. --time 24:00:00."
            )
        if self.signal_s < 60:
            found.append(
                f"--signal-s {self.signal_s} is too short: SLURM checks its limits every 30 s. "
                "Use at least 60, twice the time that a save takes."
            )
        if self.tasks_per_node > 1 and self.gpus_per_node % self.tasks_per_node:
            found.append(
                f"--tasks-per-node {self.tasks_per_node} cannot share --gpus-per-node "
                f"{self.gpus_per_node} equally. Use 1, or a divisor of {self.gpus_per_node}."
            )
        if not re.fullmatch(r"[\w.-]+", self.name):
            found.append(f"--name {self.name!r} is not a job name. Use letters, digits, . _ and -.")
        return found

    def remarks(self) -> list[str]:
        """What is allowed and yet likely to be slow."""
        per_node = self.gpus_per_node
        found = re.search(r"(?:^|[ =,])(?:tp|tensor)=(\d+)", " ".join(self.args))
        if found is None or not per_node:
            return []
        tensor = int(found.group(1))
        if tensor <= per_node and per_node % tensor == 0:
            return []
        return [
            f"the tensor axis ({tensor}) crosses nodes of {per_node} GPUs: every layer would wait "
            f"for the network between nodes. Use tp ≤ {per_node} that divides it, and pp or fsdp "
            "across nodes."
        ]


def main(argv: Sequence[str]) -> int:
    """Write the script; print, keep or submit it."""
    own, rest = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1 :]
    args = vars(_parser().parse_args(own))
    try:
        args |= _read_nodes(args["nodes"])
    except ValueError as error:
        print(error, file=sys.stderr)
        return runtime.EXIT_CONFIG
    given = any(word.startswith("--mesh.elastic") for word in rest)
    if args["min_nodes"] and not args["program"] and not given:
        rest.append("--mesh.elastic=true")
    script_path, submit, dry_run = (args.pop(name) for name in ("script", "submit", "dry_run"))
    for name in ("modules", "setup", "sbatch"):
        args[name] = tuple(args[name])
    plan = BatchPlan(args=rest, **args)
    problems = plan.problems()
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return runtime.EXIT_CONFIG
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


def _read_nodes(text: str) -> dict[str, int]:
    """`8`, or `4-8` as SLURM writes a range, or `4:8` as the launcher does."""
    if re.fullmatch(r"-?\d+", text):
        return {"min_nodes": 0, "nodes": int(text)}
    found = Range.parse("nodes", re.sub(r"(?<=\d)-", ":", text, count=1))
    return {"min_nodes": found.least, "nodes": found.most}


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
        help="(default 1); a range makes the job elastic: it runs on as many as SLURM gives",
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


def batch_script(plan: BatchPlan) -> str:
    """The whole script."""
    return "\n".join([*_header(plan), *_preamble(plan), *_run(plan), *_VERDICT, ""])


def _header(plan: BatchPlan) -> list[str]:
    options = {
        "job-name": plan.name,
        "nodes": f"{plan.min_nodes}-{plan.nodes}" if plan.min_nodes else plan.nodes,
        "ntasks-per-node": plan.tasks_per_node,
        "gpus-per-node": plan.gpus_per_node or "",
        "cpus-per-task": plan.cpus_per_task or "",
        "mem": plan.mem,
        "time": plan.time,
        "partition": plan.partition,
        "account": plan.account,
        "qos": plan.qos,
        "constraint": plan.constraint,
        "output": "%x-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{plan.signal_s}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value != ""]
    return ["#!/bin/bash", *lines, "#SBATCH --requeue", *(f"#SBATCH {x}" for x in plan.sbatch), ""]


def _preamble(plan: BatchPlan) -> list[str]:
    run_dir = shlex.quote(plan.run_dir) if plan.run_dir else "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID"
    return [
        *(f"module load {shlex.quote(name)}" for name in plan.modules),
        *plan.setup,
        "",
        "set -u",
        "ulimit -c 0                       # an abort must not fill the disk with core files",
        "attempt=${SLURM_RESTART_COUNT:-0} # 0 the first time",
        f"max_requeues={plan.max_requeues}",
        f"max_crashes={plan.max_crashes}                     # in a row without a new checkpoint",
        f"run_dir={run_dir}",
        "state=$run_dir/slurm/$SLURM_JOB_ID",
        'mkdir -p "$state"',
        'if [ -e "$state/done" ]; then     # SLURM 24.11 may start a finished job again',
        '    echo "slurm: nothing left to do"',
        "    exit 0",
        "fi",
        "export JAXDIST_VERDICT_FILE=$state/verdict-$attempt",
        "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun 22.05 does not inherit it",
        "",
    ]


def _run(plan: BatchPlan) -> list[str]:
    program = plan.program or f"{shlex.quote(plan.python)} -m jaxdist.train"
    srun = ["srun", "--kill-on-bad-exit=1", "--wait=60"]
    if plan.min_nodes:  # SLURM counts tasks for the fewest nodes, and has given what it has
        count = f"$((SLURM_JOB_NUM_NODES * {plan.tasks_per_node}))"
        srun += ['--nodes="$SLURM_JOB_NUM_NODES"', f'--ntasks="{count}"']
    if plan.container.endswith(".sif"):
        program = f"apptainer exec --nv {shlex.quote(plan.container)} {program}"
    elif plan.container:
        mount = '"$PWD:$PWD"'
        srun += [f"--container-image={shlex.quote(plan.container)}", f"--container-mounts={mount}"]
        srun += ['--container-workdir="$PWD"']
    words = [program, '--run-dir="$run_dir"', *_flags(plan.args)]
    return [
        "newest_checkpoint() {",
        "    ls \"$run_dir/checkpoints\" 2>/dev/null | grep -E '^[0-9]+$' | sort -n | tail -n 1",
        "}",
        "before=$(newest_checkpoint)",
        "",
        "# USR1: the time limit is near. Every process is told; they save and leave with 75.",
        "# TERM: SLURM has told them already (scancel, preemption, requeue, a lost node).",
        "notice= srun_pid=",
        'trap \'notice=USR1; [ -n "$srun_pid" ] && kill -USR1 "$srun_pid"\' USR1',
        "trap 'notice=${notice:-TERM}' TERM",
        "",
        " ".join(srun) + " \\",
        "    " + " \\\n        ".join(words) + " &",
        "srun_pid=$!",
        "while :; do                        # a trapped signal ends a wait, not srun",
        '    wait "$srun_pid"; code=$?',
        '    kill -0 "$srun_pid" 2>/dev/null || break',
        "done",
        "",
    ]


def _flags(args: list[str]) -> list[str]:
    """Quoted words, a flag and its value in one line."""
    lines: list[str] = []
    for word in map(shlex.quote, args):
        if lines and not word.startswith("-"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


_VERDICT = """\
# Process 0 writes its exit code after the last save; srun's is the highest of all tasks.
verdict=$(cat "$JAXDIST_VERDICT_FILE" 2>/dev/null || echo "none")
after=$(newest_checkpoint)
echo "slurm: attempt $attempt ended: verdict $verdict, srun $code, signal ${notice:-none}," \\
    "checkpoint ${after:-none}"
case $verdict in
    0) touch "$state/done"; exit 0 ;;
    2) exit 2 ;;                   # bad configuration: a restart cannot heal it
    75) rm -f "$state/crashes" ;;  # saved: go on
    *)
        crashes=$(cat "$state/crashes" 2>/dev/null || echo 0)
        if [ "${after:-none}" != "${before:-none}" ]; then crashes=0; fi
        echo $((crashes + 1)) >"$state/crashes"
        if [ "$crashes" -ge "$max_crashes" ]; then
            echo "slurm: $((crashes + 1)) crashes without a new checkpoint: giving up"
            exit $((code ? code : 1))
        fi
        ;;
esac

# After a TERM alone SLURM itself queues the job again where it should; asking would bring a
# cancelled job back. Only the time limit is ours to answer.
reason=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%r)
if [ "$notice" = TERM ] && [ "$reason" != TimeLimit ]; then
    echo "slurm: ended by SLURM (${reason:-no reason given})"
    exit 75
fi
if [ "$attempt" -ge "$max_requeues" ]; then
    echo "slurm: queued again $attempt times already: giving up"
    exit 75
fi
echo "slurm: queueing again from checkpoint ${after:-none}"
trap 'exit 75' TERM
if scontrol requeue "$SLURM_JOB_ID"; then
    sleep 120 &                    # SLURM ends this script
    wait
fi
exit 75""".splitlines()
