"""All checks in their order: what one process sees, then what all see together, then the report."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from typing import Any

import jax

from jaxdist import runtime
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.axes import by_name
from jaxdist.core.parallel.data import DATA
from jaxdist.run.monitoring.environment import nvidia_versions, versions
from jaxdist.runtime import JoinedJob, coordination
from jaxdist.runtime.distributed import code_digest
from jaxdist.runtime.entry_point import advice_for
from jaxdist.settings import ConfigError, problems_of
from jaxdist.tools.doctor import (
    devices,
    directory,
    findings,
    gpus,
    host,
    network,
    slurm,
    software,
    variables,
)
from jaxdist.tools.doctor.findings import Finding, Reported, error, ok
from jaxdist.tools.doctor.options import DoctorConfig


def run(config: DoctorConfig) -> int:
    """Check everything and report; returns the exit code, which is the same in all processes."""
    # 1. What one process can see, before jax starts a device or sets variables of its own.
    name = socket.gethostname()
    alone = examine_host(config, dict(os.environ))
    # 2. Devices and the other processes.
    if config.simulate:
        runtime.simulate(config.simulate)
    runtime.reserve_memory()
    try:
        job = runtime.join(config.runtime)
    except (ConfigError, RuntimeError) as failure:
        alone.append(_not_joined(failure))
        return report(findings.merge([(name, alone)]), config, num_processes=1)
    plain = [dataclasses.asdict(finding) for finding in alone]
    everyone = _gather("findings", {"host": name, "findings": plain}, config)
    hosts = [one["host"] for one in everyone]
    lists = [[Finding(**finding) for finding in one["findings"]] for one in everyone]
    # 3. What only all processes together can see. Process 0 reports it.
    lists[0] = [*lists[0], *examine_job(config, job, hosts)]
    reported = findings.merge(list(zip(hosts, lists, strict=True)))
    code = report(reported, config, num_processes=job.num_processes, quiet=not job.is_main)
    return runtime.Agreed(code)


def examine_host(config: DoctorConfig, environ: dict[str, str]) -> list[Finding]:
    """Findings of one process about its host, its software and its environment."""
    of_gpus, num_gpus = gpus.examine_gpus()
    found = [*software.check_versions(versions(), nvidia_versions()), *of_gpus]
    try:
        plan = runtime.resolve(environ, config.runtime, num_gpus)
    except ConfigError:  # reported when the job is joined
        plan = runtime.JoinPlan()
    found += variables.check_variables(
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
    found += unreadable
    found += host.examine_disk(config.directory, config.disk_mib << 20, config.checkpoints_bytes)
    found += host.examine_shared_memory(num_gpus)
    found += slurm.examine_slurm(environ)
    return found + host.examine_limits(num_gpus)


def examine_job(config: DoctorConfig, job: JoinedJob, hosts: list[str]) -> list[Finding]:
    """Findings of all processes together; collective."""
    kinds = ", ".join(sorted({row.kind for row in job.devices}))
    found = [
        ok(
            "job",
            f"{job.num_devices} × {kinds} ({job.platform}) in {job.num_processes} process(es) on "
            f"{len(job.hosts)} host(s), started by: {job.source}",
        )
    ]
    if job.num_processes > 1:
        found += _same_software(config, hosts)
        found += _network(config, job, hosts)
        found += _shared_directory(config, job, hosts)
    spec, of_mesh = _mesh(config, job)
    found += of_mesh
    return found + _compute(config, job, hosts, spec)


def _same_software(config: DoctorConfig, hosts: list[str]) -> list[Finding]:
    code = {"code": code_digest()}
    everyone = _gather("software", versions() | nvidia_versions() | code, config)
    return software.compare(list(zip(hosts, everyone, strict=True)))


def _network(config: DoctorConfig, job: JoinedJob, hosts: list[str]) -> list[Finding]:
    plan = runtime.resolve(os.environ, config.runtime)
    listener = network.Listener(plan.coordinator_address.rpartition(":")[0])
    addresses = [(host, port) for host, port in _gather("addresses", listener.address, config)]
    visits = _gather("visits", network.visit(addresses, job.process_id), config)
    listener.close()
    return network.check_visits(visits, hosts)


def _shared_directory(config: DoctorConfig, job: JoinedJob, hosts: list[str]) -> list[Finding]:
    own, here = job.process_id, config.directory
    nonce = _gather("nonce", f"{os.getpid():x}{os.urandom(4).hex()}", config)[0]
    wrote = _gather("wrote", directory.leave_token(here, nonce, own), config)
    failed = {i: why for i, why in enumerate(wrote) if why}
    writers = [i for i in range(job.num_processes) if i not in failed]
    views = _gather("read", directory.read_tokens(here, nonce, writers), config)
    directory.take_token(here, nonce, own)
    return directory.check_views(dict(enumerate(views)), hosts, here, failed)


def _mesh(config: DoctorConfig, job: JoinedJob) -> tuple[MeshSpec, list[Finding]]:
    """The run's mesh; where training would refuse it, all devices as replicas."""
    found = [
        error("settings", problem, "training refuses to start with them: correct what is named")
        for problem in problems_of(config.run)
    ]
    try:
        spec, reason = config.choose_mesh(job.num_devices, model=config.build_model())
    except ConfigError as failure:
        if not found:
            found.append(
                error("mesh", failure.problems[-1], "name a mesh that is legal with --mesh")
            )
        return MeshSpec.over(DATA, job.num_devices), found
    return spec, [*found, ok("mesh", f"{spec}: {reason}")]


def _compute(
    config: DoctorConfig, job: JoinedJob, hosts: list[str], spec: MeshSpec
) -> list[Finding]:
    on_cpu = job.platform == "cpu"
    alone = _gather("compute", devices.compute(job.local_devices, 128 if on_cpu else 8192), config)
    found = devices.check_compute(alone, hosts, simulated=on_cpu)
    mesh = spec.build(jax.devices())
    num_bytes = (config.allreduce_mib or (1 if on_cpu else 256)) << 20
    timed = _gather("axes", devices.time_axes(mesh, num_bytes), config)
    for axis, groups in devices.groups_of(mesh, timed).items():
        found += devices.check_axis(
            axis,
            groups,
            num_bytes=num_bytes,
            hosts=hosts,
            simulated=on_cpu,
            device_kind=job.devices[0].kind,
            moves=by_name()[axis].moves,
        )
    return found


def _gather(topic: str, value: Any, config: DoctorConfig) -> list[Any]:
    """The values of every process about `topic`, as JSON returns them."""
    return [
        json.loads(json.dumps(one))
        for one in coordination.gather(f"doctor/{topic}", value, config.wait_s)
    ]


def _not_joined(failure: Exception) -> Finding:
    if isinstance(failure, ConfigError):  # each line says what to do
        return error("job", "; ".join(failure.problems), "do so, and ask the doctor again")
    lines = str(failure).splitlines() or [repr(failure)]
    fix = advice_for(str(failure), "read the first lines of what jax says")
    return error("job", "; ".join(lines)[:600], fix)


def report(
    reported: list[Reported], config: DoctorConfig, *, num_processes: int, quiet: bool = False
) -> int:
    """Print the report (process 0's task); returns the exit code."""
    if not quiet and config.json:
        print(json.dumps(findings.record_of(reported, strict=config.strict), indent=2))
    elif not quiet:
        print(findings.text_of(reported, num_processes=num_processes))
    return findings.exit_code(reported, strict=config.strict)
