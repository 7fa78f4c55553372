"""`python -m jaxdist.launch slurm`: write, and with `--submit` submit, a readable batch script.

The script forwards the signal before the time limit to every process. After they have ended, it
finishes the job, requeues it or fails. It uses the exit code that process 0 writes to a file,
because srun returns the highest code of all tasks. A job that its user has cancelled is never
requeued.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist import runtime
from jaxdist.checkpoint import manifest
from jaxdist.runtime.storage import file_system_problem, is_url
from jaxdist.settings import ConfigError, read_settings, setting, value_of
from jaxdist.settings.schema import flag_of
from jaxdist.tools.launch import run_of
from jaxdist.tools.launch.membership import LegalSizes, Range, legal_nodes, read_sizes

COMMAND = "jaxdist.launch slurm"
SUMMARY = """\
Write a SLURM batch script for a training run.

    python -m jaxdist.launch slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 -- --config run.toml
"""

_PASSED_ON = ("mem", "time", "partition", "account", "qos", "constraint")
_ONE_LINE = ("run_dir", "module", "sbatch", "container", "mount", "python", "program", *_PASSED_ON)
_TIME = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,7})(?::([0-9]{2}))?(?::([0-9]{2}))?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nodes:
    """Number of nodes of a job.

    `most` is the maximum, `least` the minimum of an elastic job; 0 = not elastic. `legal` are the
    numbers of nodes with a legal mesh, ascending; () = all. The job uses the largest that fits its
    allocation.
    """

    most: int
    least: int = 0
    legal: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Return the numbers in `8`, `4-8` (SLURM) or `4:8` (launcher); else raise ValueError."""
        text = re.sub(r"(?<=\d)-", ":", text, count=1)
        nodes = Range.parse("nodes", text)
        return cls(most=nodes.maximum, least=nodes.minimum if ":" in text else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayTask:
    """Run directory and program arguments of one task of a job array."""

    run_dir: str
    arguments: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """Resources of the job and the training command."""

    name: str = setting("jaxdist", "job name")
    nodes: str = setting(
        "1",
        "nodes, N or MIN-MAX; a range makes the job elastic: it uses the largest number of the "
        "allocated nodes that has a legal mesh (--mesh is the mesh for MAX)",
    )
    gpus_per_node: int = setting(0, "GPUs per node; 0 = a CPU job", ge=0)
    tasks_per_node: int = setting(1, "processes per node; 1 = one with all GPUs", ge=1)
    cpus_per_task: int = setting(0, "CPU cores per process; 0 = SLURM's default", ge=0)
    time: str = setting(
        "", "time limit, e.g. 24:00:00; the job saves and requeues itself before it", required=True
    )
    mem: str = setting("", "memory per node, e.g. 512G; empty = SLURM's default")
    partition: str = setting("", "SLURM's --partition")
    account: str = setting("", "SLURM's --account")
    qos: str = setting("", "SLURM's --qos")
    constraint: str = setting("", "SLURM's --constraint")
    signal_s: int = setting(
        180,
        "seconds before the time limit at which the run saves and stops: use twice the save time",
        ge=60,  # SLURM checks its limits every 30 s
    )
    max_requeues: int = setting(50, "number of requeues (also SLURM's) that ends the job", ge=0)
    max_restarts: int = setting(
        3, "maximum restarts after failures in a row without a new checkpoint", ge=0
    )
    run_dir: str = setting("", "run directory on a shared disk; empty = runs/NAME-JOBID")
    module: tuple[str, ...] = setting((), "environment module to load, as in `module load NAME`")
    setup: tuple[str, ...] = setting((), "shell command to run before training")
    sbatch: tuple[str, ...] = setting((), "another #SBATCH option")
    container: str = setting(
        "",
        "container image: FILE.sif runs with apptainer, a directory DIR/ with ch-run, "
        "others with pyxis",
    )
    mount: tuple[str, ...] = setting(
        (), "path to mount in the container, in addition to the working and the run directory"
    )
    python: str = setting(
        "", "Python interpreter on the nodes; empty = the current one, or python in a container"
    )
    program: str = setting("", "program to run instead of jaxdist.train")
    script: str = setting("", "file to write; empty = NAME.sbatch")
    submit: bool = setting(False, "submit the script with sbatch")
    dry_run: bool = setting(False, "print the script and write nothing")
    arguments: list[str] = setting([], "arguments of the program, in every process")

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        problems = []
        try:
            Nodes.parse(self.nodes)
        except ValueError as error:
            problems.append(str(error))
        limit = limit_s(self.time)
        if self.time and not limit:  # else it is missing
            problems.append(
                f"--time {self.time!r} is not a time limit. Use minutes, HH:MM:SS or D-HH:MM:SS, "
                "e.g. --time 24:00:00."
            )
        elif 0 < limit < 2 * self.signal_s:
            problems.append(
                f"--time {self.time} is {limit} s, and the run stops {self.signal_s} s before it: "
                "each attempt would do little more than start. Use "
                f"--time {-(-2 * self.signal_s // 60)} (minutes) or more, or less --signal-s."
            )
        for name in _ONE_LINE:
            value = getattr(self, name)  # a text or several
            if re.search("[\n\r]", "".join(value)):
                problems.append(f"{flag_of(name)} {value!r} contains a line break. Use one line.")
        if self.tasks_per_node > 1 and self.gpus_per_node % self.tasks_per_node:
            problems.append(
                f"--tasks-per-node {self.tasks_per_node} cannot share --gpus-per-node "
                f"{self.gpus_per_node} equally. Use 1, or a divisor of {self.gpus_per_node}."
            )
        if not re.fullmatch(r"[\w.-]+", self.name):
            problems.append(
                f"--name {self.name!r} is no valid job name. Use letters, digits, . _ -."
            )
        if problem := file_system_problem(self.run_dir, "a job of SLURM keeps its state"):
            problems.append(f"--run-dir {problem}")
        return problems

    @property
    def interpreter(self) -> str:
        """Return the Python that runs the training."""
        return self.python or ("python" if self.container else sys.executable)

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each setting that is legal but likely to be slow."""
        per_node = self.gpus_per_node
        if per_node and not self.cpus_per_task:
            yield (
                "--cpus-per-task is not set: SLURM's default is one core per process, which slows "
                "down compilation and data loading. Use the cores of a node divided by "
                "--tasks-per-node."
            )
        shape = value_of(self.arguments, "mesh", "mesh.shape") or ""
        tensor = re.search(r"\b(?:tp|tensor)=(\d+)", shape)
        if tensor and per_node and per_node % int(tensor[1]):
            yield (
                f"the tensor axis ({tensor[1]}) spans nodes of {per_node} GPUs: every layer would "
                f"wait for the network between nodes. Use tp ≤ {per_node} that divides it, and pp "
                "or fsdp across nodes."
            )


def limit_s(text: str) -> int:
    """Return the seconds of a SLURM time limit; 0 = not a time limit."""
    match = _TIME.fullmatch(text)
    if match is None:
        return 0
    days, first, second, third = (None if part is None else int(part) for part in match.groups())
    if days is not None:  # D-HH, D-HH:MM, D-HH:MM:SS
        return 86400 * days + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    if third is not None:  # HH:MM:SS
        return 3600 * (first or 0) + 60 * (second or 0) + third
    return 60 * (first or 0) + (second or 0)  # MM, MM:SS


def main(argv: Sequence[str]) -> int:
    """Check the arguments; print, write or submit the batch script; return the exit code."""
    config = read_settings(SlurmConfig, argv, command=COMMAND, summary=SUMMARY, rest="arguments")
    nodes, sizes = Nodes.parse(config.nodes), LegalSizes()
    if not config.program:
        arguments = config.arguments
        if nodes.least and value_of(arguments, "mesh.elastic") is None:
            config = dataclasses.replace(config, arguments=[*arguments, "--mesh.elastic=true"])
        result = read_sizes(config.arguments)  # reject bad arguments before anyone waits for nodes
        if isinstance(result, int):
            return result
        sizes = result
    if nodes.least and sizes.legal is not None:
        nodes = _with_legal_nodes(config, nodes, sizes)
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


def _with_legal_nodes(config: SlurmConfig, nodes: Nodes, sizes: LegalSizes) -> Nodes:
    """Return the numbers of nodes for which the program has a legal mesh, or raise ConfigError."""
    tasks = config.tasks_per_node
    devices = sizes.simulate or config.gpus_per_node // tasks or 1
    requested = Range(minimum=nodes.least, maximum=nodes.most)
    counts = legal_nodes(sizes, requested, tasks, devices)
    if not counts:
        each, legal = tasks * devices, sizes.legal or ()
        fitting = [count // each for count in legal if count % each == 0]
        fix = "Change --gpus-per-node, --tasks-per-node or the mesh."
        if fitting:
            fix = f"Use a range with one of these numbers of nodes: {_join(fitting)}."
        raise ConfigError(
            f"--nodes {config.nodes} with {each} devices each allows no legal job: model, batch "
            f"and mesh are legal on {_join(legal)} devices. {fix}"
        )
    least, most = counts[0], counts[-1]  # nodes beyond `most` would be idle
    if (least, most) != (nodes.least, nodes.most):
        print(
            f"warning: of --nodes {config.nodes}, only {_join(counts)} have a legal mesh: the "
            f"script requests {least}-{most}.",
            file=sys.stderr,
        )
    return Nodes(most=most, least=least, legal=tuple(counts))


def _join(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def batch_script(
    config: SlurmConfig, nodes: Nodes | None = None, *, tasks: Sequence[ArrayTask] = ()
) -> str:
    """Return the script; with `tasks` it is a job array, and each task is one run."""
    import jinja2

    nodes = nodes or Nodes.parse(config.nodes)
    # The shell does not expand quoted text, and the home differs in a container.
    named = "" if config.program or tasks else run_of(config.arguments)
    run_dir = os.path.expanduser(config.run_dir or named * (not is_url(named)))
    config = dataclasses.replace(config, run_dir=run_dir)
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["quote"] = shlex.quote
    return environment.from_string(_SCRIPT).render(
        config=config,
        nodes=nodes,
        manifest=manifest,
        final_codes="|".join(str(code) for code in runtime.FINAL_CODES),
        tasks=tasks,
        # SLURM_JOB_ID of an array task may refer to all tasks of the array.
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if tasks else "$SLURM_JOB_ID",
        options=_options(config, nodes, len(tasks)),
        command=_command(config, nodes, tasks),
    )


def _options(config: SlurmConfig, nodes: Nodes, num_tasks: int) -> dict[str, object]:
    """Return `#SBATCH` option -> value; the script omits options that are empty or 0."""
    tasks = config.tasks_per_node
    # With --ntasks SLURM allocates only the nodes that the minimum needs: an elastic job requests
    # CPUs instead, and passes the tasks to srun.
    elastic = bool(nodes.least)
    return {
        "job-name": config.name,
        "array": f"0-{num_tasks - 1}" if num_tasks else "",
        "nodes": f"{nodes.least}-{nodes.most}" if elastic else nodes.most,
        "ntasks-per-node": 0 if elastic else tasks,
        "mincpus": tasks * max(1, config.cpus_per_task) if elastic and tasks > 1 else 0,
        "gpus-per-node": config.gpus_per_node,
        "cpus-per-task": config.cpus_per_task,
        **{name: getattr(config, name) for name in _PASSED_ON},
        "output": "%x-%A_%a.out" if num_tasks else "%x-%j.out",
        "open-mode": "append",
        "signal": f"B:USR1@{config.signal_s}",
    }


def _command(config: SlurmConfig, nodes: Nodes, tasks: Sequence[ArrayTask]) -> str:
    """Return the srun command, with each flag and its value on one line."""
    program = config.program or f"{shlex.quote(config.interpreter)} -m jaxdist.train"
    container = shlex.quote(config.container)
    srun = "srun --kill-on-bad-exit=1 --wait=60"
    if nodes.least:
        number = "nodes" if nodes.legal else "SLURM_JOB_NUM_NODES"
        srun += f' --nodes="${number}" --ntasks-per-node={config.tasks_per_node}'
    binds = "".join(f" --bind {shlex.quote(path)}" for path in _mounts(config, tasks))
    if config.container.endswith(".sif"):
        program = f"apptainer exec --nv{binds} {container} {program}"
    elif config.container.endswith("/"):
        # Use a directory: a ch-run that serves an image file would be killed by the signals meant
        # for training. --write, because mount points are created in the image.
        mounts = f'--bind "$HOME" --bind "$PWD"{binds} --cd "$PWD"'
        program = f"ch-run --write --set-env {mounts} {container} -- {program}"
    elif config.container:
        pairs = [path if ":" in path else f"{path}:{path}" for path in _mounts(config, tasks)]
        mounts = "".join("," + shlex.quote(pair) for pair in pairs)
        srun += f' --container-image={container} --container-mounts="$PWD:$PWD"{mounts}'
        srun += ' --container-workdir="$PWD"'
    words = ['"${arguments[@]}"'] if tasks else _flags(config.arguments)
    lines = [program, '--run-dir="$run_dir"', *words]
    return srun + " \\\n    " + " \\\n        ".join(lines)


def _mounts(config: SlurmConfig, tasks: Sequence[ArrayTask]) -> list[str]:
    # All tasks of an array share one command: mount the parents of their run directories.
    folders = [config.run_dir, *(os.path.dirname(task.run_dir) for task in tasks)]
    return [*config.mount, *dict.fromkeys(path for path in folders if path.startswith("/"))]


def _flags(args: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in map(shlex.quote, args):
        if lines and not word.startswith("-"):
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


_SCRIPT = r"""#!/bin/bash
{% for name, value in options.items() if value %}
#SBATCH --{{ name }}={{ value }}
{% endfor %}
#SBATCH --requeue
{% for option in config.sbatch %}
#SBATCH {{ option }}
{% endfor %}

{% for name in config.module %}
module load {{ name | quote }}
{% endfor %}
{% for line in config.setup %}
{{ line }}
{% endfor %}

set -u
ulimit -c 0                       # an abort must not fill the disk with core files
attempt=${SLURM_RESTART_COUNT:-0} # 0 the first time
max_requeues={{ config.max_requeues }}
max_restarts={{ config.max_restarts }}                    # in a row without a new checkpoint
{% if tasks %}
case $SLURM_ARRAY_TASK_ID in
{% for task in tasks %}
{{ loop.index0 }})
    run_dir={{ task.run_dir | quote }}
    arguments=({{ task.arguments | map("quote") | join(" ") }})
    ;;
{% endfor %}
esac
{% else %}
run_dir={{ config.run_dir | quote if config.run_dir else "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" }}
{% endif %}
state=$run_dir/slurm/$SLURM_JOB_ID
mkdir -p "$state" || exit 2
if [ -e "$state/done" ]; then     # SLURM 24.11 may start a finished job again
    echo "slurm: nothing left to do"
    exit 0
fi
export JAXDIST_EXIT_CODE_FILE=$state/exit-code-$attempt
# A secret of this attempt: processes of another job cannot join.
export JAXDIST_JOB_TOKEN=$(od -An -N16 -tx8 /dev/urandom | tr -d ' \n')
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun 22.05 does not inherit it
{% if config.container.endswith("/") %}
export USER=${USER:-$(id -un)}    # ch-run needs it
{% endif %}

{% if not (config.container or config.program) %}
{{ config.interpreter | quote }} -c 'import jaxdist' || {
    echo "slurm: this Python has no jaxdist: set --python, or activate it with --setup"
    exit 2
}

{% endif %}
{% if nodes.legal %}
# Numbers of nodes with a legal mesh; allocated nodes beyond the largest that fits stay idle.
nodes=0
for count in {{ nodes.legal | join(" ") }}; do
    if [ "$count" -le "$SLURM_JOB_NUM_NODES" ]; then nodes=$count; fi
done
if [ "$nodes" -eq 0 ]; then
    echo "slurm: $SLURM_JOB_NUM_NODES nodes allocated, which have no legal mesh:" \
        "at least {{ nodes.legal[0] }} are needed"
    exit 2
elif [ "$nodes" -lt "$SLURM_JOB_NUM_NODES" ]; then
    echo "slurm: $SLURM_JOB_NUM_NODES nodes allocated, which have no legal mesh:" \
        "using $nodes"
fi

{% endif %}
checkpoints() {                    # step and time of each valid checkpoint, the newest last
    for file in "$run_dir"/checkpoints/[0-9]*/{{ manifest.FILE_NAME }}; do
        at=${file%/*}              # without a manifest it is incomplete
        if [ -e "$file" ] && [ ! -e "$at/{{ manifest.CORRUPT }}" ] &&
            [ ! -e "$at/{{ manifest.SUPERSEDED }}" ]; then
            echo "${at##*/} $(stat -c %Y "$file")"
        fi
    done | sort -n
}
before=$(checkpoints)

# USR1: the time limit is near. Forward it to all processes, which save and exit with 75.
# TERM: SLURM has sent it to them already (scancel, preemption, requeue, a lost node).
notice= srun_pid=
trap 'notice=USR1; [ -n "$srun_pid" ] && kill -USR1 "$srun_pid"' USR1
trap 'notice=${notice:-TERM}' TERM

{{ command }} &
srun_pid=$!
[ "$notice" = USR1 ] && kill -USR1 "$srun_pid"  # it came before srun had started
while :; do                        # a trapped signal ends `wait`, not srun
    wait "$srun_pid"; code=$?
    kill -0 "$srun_pid" 2>/dev/null || break
done

# Process 0 writes its exit code after the last save; srun's is the highest of all tasks. Other
# programs and a killed process 0 write none: then srun's is used.
job_code=$(cat "$JAXDIST_EXIT_CODE_FILE" 2>/dev/null || echo "$code")
after=$(checkpoints)
saved=$(comm -13 <(echo "$before" | sort) <(echo "$after" | sort))
newest=$(echo "$after" | tail -n 1 | cut -d " " -f 1)
echo "slurm: attempt $attempt ended: exit code $job_code, srun $code, signal ${notice:-none}," \
    "checkpoint ${newest:-none}"
case $job_code in
    0) touch "$state/done"; exit 0 ;;
    {{ final_codes }}) exit "$job_code" ;; # bad settings, corruption, NaN, Ctrl-C
    75) rm -f "$state/crashes" ;;  # saved: continue
    *)
        crashes=$(cat "$state/crashes" 2>/dev/null || echo 0)
        if [ -n "$saved" ]; then crashes=0; fi
        echo $((crashes + 1)) >"$state/crashes"
        if [ "$crashes" -ge "$max_restarts" ]; then
            echo "slurm: $((crashes + 1)) crashes without a new checkpoint: giving up"
            exit $((code ? code : 1))
        fi
        ;;
esac

# After TERM, SLURM itself requeues the job if it should; a requeue here would revive a cancelled
# job. Requeue only at the time limit.
reason=$(squeue --noheader --jobs="{{ job }}" --format=%r)
if [ "$notice" = TERM ] && [ "$reason" != TimeLimit ]; then
    echo "slurm: ended by SLURM (${reason:-no reason given})"
    exit 75
fi
if [ "$attempt" -ge "$max_requeues" ]; then
    echo "slurm: requeued $attempt times already: giving up"
    exit 75
fi
echo "slurm: requeueing from checkpoint ${newest:-none}"
trap 'exit 75' TERM
if scontrol requeue "{{ job }}"; then
    sleep 120 &                    # SLURM ends this script
    wait
fi
exit 75
"""
