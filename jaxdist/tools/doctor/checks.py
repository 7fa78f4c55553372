"""Settings of the doctor, and all checks in order: one process, all processes, the report."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist import runtime
from jaxdist.config import ALIASES, RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.axes import by_name
from jaxdist.core.parallel.data import DATA
from jaxdist.core.trials import wrong_operations
from jaxdist.run.monitoring.environment import nvidia_versions, versions
from jaxdist.runtime import JoinedJob, coordination
from jaxdist.runtime.distributed import code_digest
from jaxdist.runtime.entry_point import advice_for
from jaxdist.runtime.storage import file_system_problem
from jaxdist.settings import ConfigError, problems_of, read_settings, setting
from jaxdist.tools.doctor import devices, findings, gpus, host, processes, variables
from jaxdist.tools.doctor.findings import Finding, Reported, error, note, ok

COMMAND = "jaxdist.doctor"
_ALIASES = {
    **ALIASES,
    "coordinator_address": "runtime.coordinator_address",
    "num_processes": "runtime.num_processes",
    "process_id": "runtime.process_id",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig(RunConfig):
    """The settings of the run to check for, sizes of the measurements, and the output format."""

    json: bool = setting(False, "print one JSON object instead of text")
    strict: bool = setting(False, "exit with 1 on warnings too, not only on errors")
    disk_mib: int = setting(
        64, "MiB written, synced and read back on the disk of the run directory; 0 = none", ge=0
    )
    allreduce_mib: int = setting(
        0, "MiB per device for the all-reduce of each mesh axis; 0 = 256 on GPUs, 1 on CPU", ge=0
    )
    wait_s: int = setting(60, "seconds that processes wait for each other in one check", ge=1)

    def problems(self) -> list[str]:
        """Return problems of the run directory; those of training are findings of the report."""
        problem = file_system_problem(self.run_dir, "disks are measured")
        return [f"run_dir={problem}"] if problem else []

    @property
    def directory(self) -> Path:
        """Return the run directory or its nearest existing parent."""
        run_dir = Path(self.run_dir or "runs").expanduser().absolute()
        return next(path for path in (run_dir, *run_dir.parents) if path.is_dir())

    @property
    def checkpoints_bytes(self) -> int:
        """Return the peak disk bytes of checkpoints, without those of `keep_interval_steps`."""
        one = self.state_bytes(self.build_model(), gradients=False)
        unfinished = 1 + self.checkpoint.async_save  # a save in progress, and a halfway one
        return one * (self.checkpoint.max_to_keep + self.checkpoint.best[1] + unfinished)


def read_doctor(argv: Sequence[str], summary: str = "") -> DoctorConfig:
    """Return the settings of the command line."""
    config = read_settings(
        DoctorConfig, argv, command=COMMAND, summary=summary, aliases=_ALIASES, check_rules=False
    )
    problems = problems_of(config, deep=False) + problems_of(config.runtime, "runtime")
    if problems:
        raise ConfigError(problems, heading=COMMAND)
    return config


def run(config: DoctorConfig) -> int:
    """Make all checks; print the findings in process 0; return the exit code, equal everywhere.

    It is 0, or 1 after an error (with `strict` also after a warning). A process that cannot join
    the job prints its own findings.
    """
    # 1. This process, before jax starts a device or sets variables of its own.
    name = socket.gethostname()
    local = examine_host(config, dict(os.environ))
    # 2. Devices and the other processes.
    if config.simulate:
        runtime.simulate(config.simulate)
    runtime.reserve_memory()
    try:
        job = runtime.join(config.runtime)
    except (ConfigError, RuntimeError) as failure:
        local.append(_join_failure(failure))
        return report(findings.merge([(name, local)]), config, num_processes=1)
    plain = [dataclasses.asdict(finding) for finding in local]
    everyone = _collect("findings", {"host": name, "findings": plain}, config)
    hosts = [one["host"] for one in everyone]
    # 3. All processes together; process 0 reports.
    together = examine_job(config, job, hosts)

    def finish() -> int:
        lists = [[Finding(**finding) for finding in one["findings"]] for one in everyone]
        lists[0] += together
        reported = findings.merge(list(zip(hosts, lists, strict=True)))
        return report(reported, config, num_processes=job.num_processes)

    return runtime.Agreed(coordination.decide("doctor/report", finish))


def examine_host(config: DoctorConfig, environ: dict[str, str]) -> list[Finding]:
    """Return findings about this host and its software; unset XLA_FLAGS that XLA rejects."""
    gpu_findings, num_gpus = gpus.examine_gpus()
    results = [*host.check_versions(versions(), nvidia_versions()), *gpu_findings]
    try:
        plan = runtime.resolve(environ, config.runtime, num_gpus)
    except ConfigError:  # reported when the job is joined
        plan = runtime.JoinPlan()
    results += variables.check_variables(
        environ,
        num_gpus=num_gpus,
        simulated=config.simulate > 0,
        coordinator_address=plan.coordinator_address,
        num_hosts=plan.num_hosts,
        interfaces=[name for _, name in socket.if_nameindex()],
    )
    unreadable = variables.unreadable_flags(environ)
    if unreadable:
        os.environ.pop("XLA_FLAGS")  # XLA would end this process
    results += unreadable
    results += host.examine_disk(config.directory, config.disk_mib << 20, config.checkpoints_bytes)
    results += host.examine_slurm(environ)
    return results + host.examine_limits(num_gpus)


def examine_job(config: DoctorConfig, job: JoinedJob, hosts: list[str]) -> list[Finding]:
    """Return findings of all processes together, in other processes than 0 an incomplete list.

    Collective. `hosts` is the host of each process.
    """
    kinds = ", ".join(sorted({row.kind for row in job.devices}))
    results = [
        ok(
            "job",
            f"{job.num_devices} × {kinds} ({job.platform}) in {job.num_processes} process(es) on "
            f"{len(set(job.host_of.values()))} host(s), started by: {job.source}",
        )
    ]
    if job.num_processes > 1:
        packages = versions() | nvidia_versions() | {"code": code_digest()}
        compare = lambda everyone: host.compare(list(zip(hosts, everyone, strict=True)))
        results += _check("software", packages, config, compare)
        results += _network(config, job, hosts)
        results += _shared_directory(config, job, hosts)
    spec, mesh_findings = _mesh(config, job)
    return results + mesh_findings + _compute(config, job, hosts, spec)


def _network(config: DoctorConfig, job: JoinedJob, hosts: list[str]) -> list[Finding]:
    listener = processes.Listener()
    addresses = _collect("addresses", (coordination.own_address(), listener.port), config)
    own_peers = lambda process: processes.peers(process, len(addresses))
    to_visit = lambda: [{i: addresses[i] for i in own_peers(p)} for p in range(len(addresses))]
    to_me = coordination.scatter("doctor/peers", to_visit)
    visited = processes.visit({int(i): (host, port) for i, (host, port) in to_me.items()})
    # Ends when all have visited this process.
    results = _check("visits", visited, config, lambda all: processes.check_visits(all, hosts))
    listener.close()
    return results


def _shared_directory(config: DoctorConfig, job: JoinedJob, hosts: list[str]) -> list[Finding]:
    directory, own_id = config.directory, job.process_id
    nonce = coordination.decide("doctor/nonce", lambda: f"{os.getpid():x}{os.urandom(4).hex()}")
    own = processes.Token(directory, nonce, own_id)
    failures = _collect("wrote", own.write(), config)
    view = processes.read_tokens(directory, nonce, processes.watched(own_id, job.num_processes))

    def check(everyone: list[Any]) -> list[Finding]:
        failed = {i: why for i, why in enumerate(failures) if why}
        return processes.check_views(dict(enumerate(everyone)), hosts, directory, failed)

    results = _check("read", view, config, check)
    own.delete()
    return results


def _mesh(config: DoctorConfig, job: JoinedJob) -> tuple[MeshSpec, list[Finding]]:
    """Return the run's mesh, and findings about it and about the settings.

    If training would reject the mesh, return data parallelism over all devices.
    """
    problems = [
        error("settings", problem, "correct the setting: training would reject it")
        for problem in problems_of(config.run)
    ]
    try:
        spec, reason = config.choose_mesh(job.num_devices, model=config.build_model())
    except ConfigError as failure:
        fix = "set a legal mesh with --mesh"
        problems = problems or [error("mesh", failure.problems[-1], fix)]
        return MeshSpec.over(DATA, job.num_devices), problems
    return spec, [*problems, ok("mesh", f"{spec}: {reason}")]


def _compute(
    config: DoctorConfig, job: JoinedJob, hosts: list[str], spec: MeshSpec
) -> list[Finding]:
    on_cpu = job.platform == "cpu"
    products = devices.compute(job.local_devices, 128 if on_cpu else 8192)
    check = lambda all: devices.check_compute(all, hosts, simulated=on_cpu)
    results = _check("compute", products, config, check)
    first = job.local_devices[0]
    if not on_cpu:
        wrong = wrong_operations(first)
        check = lambda all: devices.check_operations(all, hosts)
        results += _check("operations", wrong, config, check)
    if counts := devices.row_counts_that_change_bits(first):
        text = f"the bits of a product's row depend on the number of rows (here {counts}, not 1)"
        results.append(note("devices", text))
    mesh = spec.build(jax.devices())
    num_bytes = (config.allreduce_mib or (1 if on_cpu else 256)) << 20

    def check_axes(everyone: list[Any]) -> list[Finding]:
        return [
            finding
            for axis, groups in devices.groups_of(mesh, everyone).items()
            for finding in devices.check_axis(
                axis,
                groups,
                num_bytes=num_bytes,
                hosts=hosts,
                simulated=on_cpu,
                device_kind=job.devices[0].kind,
                moves=by_name()[axis].moves,
            )
        ]

    return results + _check("axes", devices.time_axes(mesh, num_bytes), config, check_axes)


def _check(
    topic: str, value: Any, config: DoctorConfig, check: Callable[[list[Any]], list[Finding]]
) -> list[Finding]:
    """Collect `value` of all processes; return `check(values)` in process 0, [] elsewhere."""
    everyone = _collect(topic, value, config)
    return check(everyone) if everyone else []


def _collect(topic: str, value: Any, config: DoctorConfig) -> list[Any]:
    everyone = coordination.collect(f"doctor/{topic}", value, config.wait_s)
    return [json.loads(json.dumps(one)) for one in everyone]


def _join_failure(failure: Exception) -> Finding:
    if isinstance(failure, ConfigError):  # each line names its fix
        return error("job", "; ".join(failure.problems), "correct this and run the doctor again")
    lines = str(failure).splitlines() or [repr(failure)]
    fix = advice_for(str(failure), "read the first lines of jax's message")
    return error("job", "; ".join(lines)[:600], fix)


def report(reported: list[Reported], config: DoctorConfig, *, num_processes: int) -> int:
    """Print findings as text or JSON; return 1 after an error, with `strict` a warning, else 0."""
    if config.json:
        print(json.dumps(findings.record_of(reported, strict=config.strict), indent=2))
    else:
        print(findings.text_of(reported, num_processes=num_processes))
    return findings.exit_code(reported, strict=config.strict)
