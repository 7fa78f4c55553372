"""`python -m jaxdist.doctor`: is everything ready for a long run, and what to do where not.

    python -m jaxdist.doctor
    python -m jaxdist.doctor --config configs/llama3_8b.toml --mesh fsdp=8
    python -m jaxdist.launch --nproc-per-node 8 --module jaxdist.doctor -- --mesh fsdp=8
    srun python -m jaxdist.doctor --config configs/pipeline_64gpu.toml

Checks software, GPUs and their links, environment variables, disk, shared memory and limits against
the settings of a run. With several processes, started as training would be, it also checks that all
run the same code, reach each other, agree on the time and share the run directory. It times an
all-reduce over each axis of the mesh and names what is slow or wrong.

Exit code: 0 if a run can start, 1 on an error (with --strict also on a warning), 2 on bad flags.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist import runtime
from jaxdist.runtime import coordination

if TYPE_CHECKING:
    from jaxdist.core.mesh import MeshSpec
    from jaxdist.runtime import Job
    from jaxdist.tools.doctor.findings import Finding, Reported
    from jaxdist.tools.doctor.options import DoctorConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Check everything and report; the exit code is the same in all processes."""
    from jaxdist.core.settings import ConfigError
    from jaxdist.tools.doctor import findings
    from jaxdist.tools.doctor.options import read_doctor

    config = read_doctor(sys.argv[1:] if argv is None else argv, summary=__doc__ or "")
    # 1. What one process can see, before jax starts a device or sets variables of its own.
    host = socket.gethostname()
    alone = examine_host(config, dict(os.environ))
    # 2. Devices and the other processes.
    if config.simulate:
        runtime.simulate(config.simulate)
    runtime.reserve_memory()
    try:
        job = runtime.join(config.runtime)
    except (ConfigError, RuntimeError) as failure:
        alone.append(_not_joined(failure))
        reported = findings.merge([(host, alone)])
        return report(reported, config, num_processes=1)
    everyone = _gather("findings", {"host": host, "findings": [_plain(f) for f in alone]}, config)
    hosts = [one["host"] for one in everyone]
    lists = [[findings.Finding(**f) for f in one["findings"]] for one in everyone]
    # 3. What only all processes together can see. Process 0 reports it.
    lists[0] = [*lists[0], *examine_job(config, job, hosts)]
    reported = findings.merge(list(zip(hosts, lists, strict=True)))
    code = report(reported, config, num_processes=job.num_processes, quiet=not job.is_main)
    return runtime.Agreed(code)


def examine_host(config: DoctorConfig, environ: dict[str, str]) -> list[Finding]:
    """Findings of one process about its host, its software and its environment."""
    from jaxdist.core.settings import ConfigError
    from jaxdist.run.monitoring.environment import nvidia_versions, versions
    from jaxdist.tools.doctor import gpus, host, slurm, software, variables

    found = software.check_versions(versions(), nvidia_versions())
    of_gpus, num_gpus = gpus.examine_gpus()
    found += of_gpus
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


def examine_job(config: DoctorConfig, job: Job, hosts: list[str]) -> list[Finding]:
    """Findings of all processes together; collective."""
    found = _devices_found(job)
    if job.num_processes > 1:
        found += _same_software(config, hosts)
        found += _network(config, job, hosts)
        found += _shared_directory(config, job, hosts)
    spec, of_mesh = _mesh(config, job)
    found += of_mesh
    return found + _compute(config, job, hosts, spec)


def _devices_found(job: Job) -> list[Finding]:
    from jaxdist.tools.doctor.findings import ok

    kinds = ", ".join(sorted({row.kind for row in job.devices}))
    return [
        ok(
            "job",
            f"{job.num_devices} × {kinds} ({job.platform}) in {job.num_processes} process(es) on "
            f"{len(job.hosts)} host(s), started by: {job.source}",
        )
    ]


def _same_software(config: DoctorConfig, hosts: list[str]) -> list[Finding]:
    from jaxdist.run.monitoring.environment import nvidia_versions, versions
    from jaxdist.tools.doctor import software

    code = {"code": software.code_digest(Path(__file__).parents[1])}
    everyone = _gather("software", versions() | nvidia_versions() | code, config)
    return software.compare(list(zip(hosts, everyone, strict=True)))


def _network(config: DoctorConfig, job: Job, hosts: list[str]) -> list[Finding]:
    from jaxdist.tools.doctor import network

    plan = runtime.resolve(os.environ, config.runtime)
    listener = network.Listener(plan.coordinator_address.rpartition(":")[0])
    addresses = [(host, port) for host, port in _gather("addresses", listener.address, config)]
    visits = _gather("visits", network.visit(addresses, job.process_id), config)
    listener.close()
    return network.check_visits(visits, hosts)


def _shared_directory(config: DoctorConfig, job: Job, hosts: list[str]) -> list[Finding]:
    from jaxdist.tools.doctor import directory

    own, here = job.process_id, config.directory
    nonce = _gather("nonce", f"{os.getpid():x}{os.urandom(4).hex()}", config)[0]
    failed = {
        i: why
        for i, why in enumerate(_gather("wrote", directory.leave_token(here, nonce, own), config))
        if why
    }
    writers = [i for i in range(job.num_processes) if i not in failed]
    views = _gather("read", directory.read_tokens(here, nonce, writers), config)
    directory.take_token(here, nonce, own)
    return directory.check_views(dict(enumerate(views)), hosts, here, failed)


def _mesh(config: DoctorConfig, job: Job) -> tuple[MeshSpec, list[Finding]]:
    """The run's mesh; where training would refuse it, all devices as replicas."""
    from jaxdist.core.mesh import MeshSpec
    from jaxdist.core.parallel.data import DATA
    from jaxdist.core.settings import ConfigError
    from jaxdist.tools.doctor.findings import error, ok
    from jaxdist.tools.doctor.options import refused

    found = [
        error("settings", problem, "training refuses to start with them: correct what is named")
        for problem in refused(config)
    ]
    try:
        spec, reason = config.choose_mesh(job.num_devices, model=config.build_model())
    except ConfigError as failure:
        if not found:
            problems = [line.removeprefix("  - ") for line in failure.problems[-1:]]
            found.append(error("mesh", problems[0], "name a mesh that is legal with --mesh"))
        return MeshSpec.over(DATA, job.num_devices), found
    return spec, [*found, ok("mesh", f"{spec}: {reason}")]


def _compute(config: DoctorConfig, job: Job, hosts: list[str], spec: MeshSpec) -> list[Finding]:
    import jax

    from jaxdist.core.parallel.axes import by_name
    from jaxdist.tools.doctor import devices

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


def _plain(finding: Finding) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(finding)


def _not_joined(failure: Exception) -> Finding:
    from jaxdist.core.settings import ConfigError
    from jaxdist.runtime.entry_point import RERUN, advice_for
    from jaxdist.tools.doctor.findings import error

    if isinstance(failure, ConfigError):  # each line says what to do
        return error("job", "; ".join(failure.problems), "do so, and ask the doctor again")
    lines = str(failure).splitlines() or [repr(failure)]
    advice = advice_for(str(failure))
    fix = "read the first lines of what jax says" if advice == RERUN else advice
    return error("job", "; ".join(lines)[:600], fix)


def report(
    reported: list[Reported], config: DoctorConfig, *, num_processes: int, quiet: bool = False
) -> int:
    """Print the report (process 0's task); returns the exit code."""
    from jaxdist.tools.doctor import findings
    from jaxdist.tools.doctor.text import text_of

    if not quiet and config.json:
        print(json.dumps(findings.record_of(reported, strict=config.strict), indent=2))
    elif not quiet:
        print(text_of(reported, num_processes=num_processes))
    return findings.exit_code(reported, strict=config.strict)


if __name__ == "__main__":
    runtime.run_command(main)
