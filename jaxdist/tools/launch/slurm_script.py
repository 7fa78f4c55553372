"""One SLURM job as a readable batch script: what is asked for, its rules, its text.

The script does what SLURM leaves to its jobs. It passes the signal that comes ahead of the time
limit on to every process. When they have ended it decides whether the job is done, is queued again,
or ends. It goes by the exit code that process 0 writes to a file, because srun's own is the highest
of all tasks. A job that its user has cancelled is never queued again.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One job; fields are the flags of the command, `args` what the program gets.

    With `min_nodes` SLURM may give as few nodes, and the job is elastic: `nodes` are the most. Of
    what it gives, the job uses the largest of `node_counts` (ascending; empty: all it gives).
    """

    args: list[str]
    name: str = "jaxdist"
    nodes: int = 1
    min_nodes: int = 0
    node_counts: tuple[int, ...] = ()
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


def batch_script(plan: BatchPlan) -> str:
    """The whole script."""
    parts = [_header(plan), _preamble(plan), _choice_of_nodes(plan), _run(plan), _NEXT]
    return "\n".join([line for part in parts for line in part] + [""])


def _header(plan: BatchPlan) -> list[str]:
    tasks, cpus = plan.tasks_per_node, ""
    if plan.min_nodes:
        # Where tasks are named, SLURM counts them for the fewest nodes and gives no more than these
        # need: an elastic job asks for their CPUs instead, and names them at srun.
        cpus = str(tasks * max(1, plan.cpus_per_task)) if tasks > 1 else ""
    options = {
        "job-name": plan.name,
        "nodes": f"{plan.min_nodes}-{plan.nodes}" if plan.min_nodes else plan.nodes,
        "ntasks-per-node": "" if plan.min_nodes else tasks,
        "mincpus": cpus,
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
        "export JAXDIST_EXIT_CODE_FILE=$state/exit-code-$attempt",
        "export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun 22.05 does not inherit it",
        "",
    ]


def _choice_of_nodes(plan: BatchPlan) -> list[str]:
    """Of an elastic job: how many of the nodes that SLURM gives take part."""
    if not plan.node_counts:
        return []
    counts = " ".join(map(str, plan.node_counts))
    return [
        "# Numbers of nodes with which a mesh is legal: what SLURM gives beyond one stays idle.",
        "nodes=0",
        f"for count in {counts}; do",
        '    if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$count; fi',
        "done",
        'if [ "$nodes" -eq 0 ]; then',
        '    echo "slurm: $SLURM_JOB_NUM_NODES nodes given, no mesh is legal for them:" \\',
        f'        "at least {plan.node_counts[0]} are needed"',
        "    exit 2",
        'elif [ "$nodes" -lt "$SLURM_JOB_NUM_NODES" ]; then',
        '    echo "slurm: $SLURM_JOB_NUM_NODES nodes given, no mesh is legal for them:" \\',
        '        "using $nodes"',
        "fi",
        "",
    ]


def _run(plan: BatchPlan) -> list[str]:
    program = plan.program or f"{shlex.quote(plan.python)} -m jaxdist.train"
    srun = ["srun", "--kill-on-bad-exit=1", "--wait=60"]
    if plan.min_nodes:
        nodes = "nodes" if plan.node_counts else "SLURM_JOB_NUM_NODES"
        srun += [f'--nodes="${nodes}"', f"--ntasks-per-node={plan.tasks_per_node}"]
    if plan.container.endswith(".sif"):
        program = f"apptainer exec --nv {shlex.quote(plan.container)} {program}"
    elif plan.container:
        mount = '"$PWD:$PWD"'
        srun += [f"--container-image={shlex.quote(plan.container)}", f"--container-mounts={mount}"]
        srun += ['--container-workdir="$PWD"']
    words = [program, '--run-dir="$run_dir"', *_flags(plan.args)]
    return [
        "newest_checkpoint() {",
        '    (cd "$run_dir/checkpoints" 2>/dev/null && ls -d [0-9]*/manifest.json 2>/dev/null) |',
        "        cut -d / -f 1 | sort -n | tail -n 1  # a checkpoint without its manifest is none",
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


_NEXT = """\
# Process 0 writes its exit code after the last save; srun's is the highest of all tasks.
job_code=$(cat "$JAXDIST_EXIT_CODE_FILE" 2>/dev/null || echo "none")
after=$(newest_checkpoint)
echo "slurm: attempt $attempt ended: exit code $job_code, srun $code, signal ${notice:-none}," \\
    "checkpoint ${after:-none}"
case $job_code in
    0) touch "$state/done"; exit 0 ;;
    2) exit 2 ;;                   # bad configuration: a restart would not repair it
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
