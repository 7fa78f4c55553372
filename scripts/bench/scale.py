"""Measure how the costs of a job grow with its processes, and fit exponents.

    python scripts/bench/scale.py                    # exchanges of 32 to 256 processes, 3 minutes
    python scripts/bench/scale.py --joins 1024       # also joins that many real processes

Process 0 runs jax's coordination service and the job's real exchanges; the other processes are
threads of a few programs, each with a client of its own. CPU seconds are those of process 0's
program, with the service; bytes are keys and values sent and received by clients. `all to all` is
the earlier `gather`, in which every process read the value of every other one. A joined process is
a fork that goes through the real rendezvous, `jax.distributed.initialize`, the comparison of
settings, versions and GPUs, and the exit; it starts no device and trains nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "bench" / "results" / "scale.md"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import pytest  # noqa: E402, needs sys.path
from key_value_store import Client, Job  # noqa: E402
from test_launch_elastic import a_plan  # noqa: E402
from test_launch_rendezvous import World  # noqa: E402

from jaxdist.run.monitoring.stragglers import find_stragglers, table  # noqa: E402
from jaxdist.runtime import coordination, distributed  # noqa: E402
from jaxdist.runtime.cluster_environment import JoinPlan, RuntimeConfig  # noqa: E402
from jaxdist.runtime.coordination import Group, service  # noqa: E402
from jaxdist.runtime.host_memory import raise_limits  # noqa: E402
from jaxdist.tools.launch import rendezvous  # noqa: E402
from jaxdist.tools.launch.membership import LegalSizes  # noqa: E402

SIZES = 32, 64, 128, 256
MANY = 1024, 2048, 4096, 16384
PROGRAMS = 4
"""Programs that hold the clients of processes 1, 2, …"""
FACTS = {"host": "node00000", "gpus": [], "versions": {f"package-{i}": "1.2.3" for i in range(12)}}


def all_to_all(group: Group, value: Any) -> list[Any]:
    """Read the value of every process in every process, as `gather` did before."""
    key = f"{group.prefix}/{next(group._calls)}"
    service.put(f"{key}/{group.process_id}", value)
    return [service.get(f"{key}/{process}", 300.0) for process in range(group.num_processes)]


def save(group: Group) -> None:
    """Exchange two file names of each process, and their sizes and CRCs, as a save does."""
    n = group.num_processes
    names = group.scatter(lambda: [[f"d/{i:032d}", f"e/{i:032d}"] for i in range(n)])
    group.decide_from([{name: [123, 456] for name in names}, ""], len)


_alive: list[Any] = []
"""Service and clients; their end would be a shutdown, in which each waits for all."""

EXCHANGES: dict[str, Callable[[Group], Any]] = {
    "all to all (before)": lambda group: all_to_all(group, FACTS),
    "`decide_from`": lambda group: group.decide_from(FACTS, len),
    "file lists of a save": save,
}


def main() -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--joins", type=int, default=0, help="real processes that join, 0 = none")
    parser.add_argument("--repeats", type=int, default=3, help="of each exchange")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--clients", nargs=4, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--exchange", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    raise_limits()
    if arguments.exchange:
        costs = exchange(arguments.exchange, *arguments.clients, arguments.repeats)
        print(json.dumps(costs), flush=True)
        time.sleep(2.0 if arguments.clients[0] == 0 else 0.0)  # the service ends last
        os._exit(0)  # clients would wait for each other
    measured = {
        name: [measure(name, size, arguments.repeats) for size in SIZES] for name in EXCHANGES
    }
    joined = join_all(arguments.joins) if arguments.joins else None
    text = page(measured, checks_of_process_0(), launcher_reads(), joined)
    arguments.out.write_text(text)
    print(text)
    return 0


def measure(name: str, size: int, repeats: int) -> dict[str, float]:
    """Return the costs of one exchange in process 0, and the largest costs of another process."""
    port, step = free_port(), -(-(size - 1) // PROGRAMS)
    command = [sys.executable, __file__, f"--repeats={repeats}", f"--exchange={name}", "--clients"]
    parts = [(0, 1), *((i, min(size, i + step)) for i in range(1, size, step))]
    programs = [
        subprocess.Popen(
            [*command, *map(str, (*part, size, port))],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for part in parts
    ]
    outputs = [program.communicate(timeout=120)[0] for program in programs]
    first, *others = [json.loads(output.splitlines()[-1]) for output in outputs]
    result = {"size": size, "cpu_s": first["cpu_s"], "bytes_0": first["bytes"]}
    result |= {key: max(one[key] for one in others) for key in ("bytes", "requests")}
    print(name, result, flush=True)
    return result


def exchange(
    name: str, first: int, last: int, size: int, port: int, repeats: int
) -> dict[str, float]:
    """Take part as processes `first` to `last` - 1; return the costs of one exchange."""
    import jaxlib._jax as library

    address = f"127.0.0.1:{port}"
    if first == 0:
        _alive.append(library.get_distributed_runtime_service(address, size))
    clients: dict[int, Client] = {}
    _alive.append(clients)

    def connect(process: int) -> None:
        client = library.get_distributed_runtime_client(address, process, init_timeout=300)
        client.connect()
        clients[process] = Client(client)

    threads = [threading.Thread(target=connect, args=(i,)) for i in range(first, last)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    costs: dict[int, dict[str, float]] = {}

    def run(process: int) -> None:
        group, client = Group("bench"), clients[process]
        EXCHANGES[name](group)
        group.synchronize()
        before, spent = (client.requests, client.bytes), time.process_time()
        for _ in range(repeats):
            EXCHANGES[name](group)
        requests, moved = client.requests - before[0], client.bytes - before[1]
        group.synchronize()
        spent = time.process_time() - spent
        each = {"cpu_s": spent, "bytes": moved, "requests": requests}
        costs[process] = {key: value / repeats for key, value in each.items()}
        group.synchronize()

    with pytest.MonkeyPatch.context() as patch:
        errors = Job(patch, size, clients).run(run)
    if any(errors):
        raise SystemExit(str(errors))
    return {key: max(one[key] for one in costs.values()) for key in costs[first]}


def checks_of_process_0() -> dict[str, list[dict[str, float]]]:
    """Return the CPU seconds of work in process 0 for thousands of processes."""
    numbers = np.random.default_rng(0)
    times = ("step_time_s", "data_wait_s", "device_wait_s", "host_s", "late_data_s", "late_host_s")
    rows: dict[str, list[dict[str, float]]] = {"comparison of times": [], "GPUs used twice": []}
    for size in MANY:
        reports = {
            i: {**dict(zip(times, numbers.random(6), strict=True)), "host": f"n{i // 8}"}
            | {"num_steps": 50, "late_steps": 50 * (i % 64 == 0), "gpu_clock_mhz": 1980.0}
            for i in range(size)
        }
        everyone = [{**FACTS, "gpus": [f"GPU-{i}"]} for i in range(size)]
        begin = time.process_time()
        table(reports, find_stragglers(reports))
        between = time.process_time()
        distributed._check_processes(everyone)
        rows["comparison of times"].append({"size": size, "cpu_s": between - begin})
        rows["GPUs used twice"].append({"size": size, "cpu_s": time.process_time() - between})
    return rows


def launcher_reads() -> list[dict[str, float]]:
    """Return the files that all launchers of an elastic job read per second, by hosts."""
    rows = []
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            read_json, reads = rendezvous._read_json, [0]
            sizes = LegalSizes(legal=range(1, size + 1), simulate=1)
            world = World(Path(folder), a_plan("1:1", f"1:{size}"), sizes)
            for rank in range(size):
                world.start(rank)
            world.run(5)

            def counted(path: Any, read_json: Any = read_json, reads: list[int] = reads) -> Any:
                reads[0] += 1
                return read_json(path)

            patch.setattr(rendezvous, "_read_json", counted)
            world.run(8)
            rows.append({"size": size, "reads": reads[0] / 8})
    return rows


def join_all(size: int) -> dict[str, float]:
    """Join `size` real processes, compare facts, leave; return seconds and CPU seconds."""
    import jax  # noqa: F401, before the forks

    address, begin, children = f"127.0.0.1:{free_port()}", time.monotonic(), []
    for process in range(size):
        plan = JoinPlan(process_id=process, num_processes=size, coordinator_address=address)
        if (child := os.fork()) == 0:
            code = 1
            with contextlib.suppress(BaseException):
                code = join_one(plan)
            os._exit(code)
        children.append(child)
    forked_s, ended = time.monotonic() - begin, [os.wait4(child, 0) for child in children]
    failed = sum(status != 0 for _, status, _ in ended)
    cpu = [usage.ru_utime + usage.ru_stime for _, _, usage in ended]
    return {
        "size": size, "failed": failed, "forked_s": forked_s,
        "all_s": time.monotonic() - begin, "cpu_0_s": cpu[0],
        "cpu_s": float(np.median(cpu[1:])), "rss_mib": ended[0][2].ru_maxrss / 1024,
    }  # fmt: skip


def join_one(plan: JoinPlan) -> int:
    """Join the job, compare settings and facts, and leave; return an exit code."""
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 2)
    distributed._connect(plan, RuntimeConfig(), on_cpu=True)
    distributed._check_settings({"train.steps": "10"}, 300)
    facts = {**FACTS, "gpus": [f"GPU-{plan.process_id}"]}
    coordination.decide_from("process", facts, distributed._check_processes, 300)
    service.leave()
    return 0


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def exponent(rows: list[dict[str, float]], key: str) -> float:
    """Return the exponent of the power law that fits a cost best."""
    sizes, costs = [row["size"] for row in rows], [max(row[key], 1e-6) for row in rows]
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def page(
    measured: dict[str, list[dict[str, float]]],
    checks: dict[str, list[dict[str, float]]],
    reads: list[dict[str, float]],
    joined: dict[str, float] | None,
) -> str:
    """Return the results as Markdown."""
    versions = f"Python {platform.python_version()}, jax {importlib.metadata.version('jax')}"
    sizes = " / ".join(map(str, SIZES))
    series = lambda rows, key, unit, form: " / ".join(f"{r[key] / unit:{form}}" for r in rows)
    lines = [
        "# Costs against the number of processes",
        "",
        f"{os.cpu_count()} CPU cores, shared, {versions}, {datetime.date.today()}; `python "
        f"scripts/bench/scale.py`. One exchange between {sizes} processes through jax's "
        "coordination service; each process contributes 300 bytes, in a save two file names. "
        "Exponents are fitted over these sizes.",
        "",
        "| exchange | CPU of process 0, s | exponent | kB in process 0 | exponent "
        "| kB in another | exponent | requests of another |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, rows in measured.items():
        cells = [
            series(rows, "cpu_s", 1, ".3f"), f"{exponent(rows, 'cpu_s'):.1f}",
            series(rows, "bytes_0", 1000, ".1f"), f"{exponent(rows, 'bytes_0'):.1f}",
            series(rows, "bytes", 1000, ".1f"), f"{exponent(rows, 'bytes'):.1f}",
            series(rows, "requests", 1, ".0f"),
        ]  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    many = " / ".join(f"{size:,}" for size in MANY)
    lines += ["", f"| in process 0, {many} processes | CPU, s | exponent |", "|---|---|---|"]
    for name, rows in checks.items():
        cells = f"{series(rows, 'cpu_s', 1, '.3f')} | {exponent(rows, 'cpu_s'):.1f}"
        lines.append(f"| {name} | {cells} |")
    lines += [
        "",
        f"The launchers of an elastic job of {sizes} hosts read "
        f"{series(reads, 'reads', 1, ',.0f')} files per second (simulated clocks, exponent "
        f"{exponent(reads, 'reads'):.1f}). Before, "
        f"each read those of all: {' / '.join(f'{n * n + n:,}' for n in SIZES)} (exponent 2).",
    ]
    if joined is not None:
        lines += [
            "",
            f"{joined['size']:.0f} real processes joined one job on this machine, with "
            f"{joined['failed']:.0f} failures: {joined['forked_s']:.0f} s to start all, "
            f"{joined['all_s']:.0f} s until all had compared their settings and left. CPU: "
            f"{joined['cpu_0_s']:.1f} s in process 0, {joined['cpu_s']:.2f} s in another (median).",
        ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
