"""Costs of exchanges between processes as they grow, counted in the real code, no network.

Simulated processes are threads that share a counting stand-in for the key-value store. `scale.py`
in scripts/bench measures the same exchanges with jax's service.
"""

import contextlib
import sys
import time
import types
import zlib

import numpy as np
import pytest
from commands import ROOT
from key_value_store import Job
from refusals import missing

from jaxdist.checkpoint import manifest, restore, save
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.events import EventLog, make_group
from jaxdist.checkpoint.local import copies, store, tier
from jaxdist.checkpoint.local.copies import FailureDomain
from jaxdist.data.loader import _every_state
from jaxdist.runtime import coordination, distributed
from jaxdist.runtime.cluster_environment import JoinPlan
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError
from jaxdist.tools.doctor import checks as doctor
from jaxdist.tools.doctor import processes

sys.path.append(str(ROOT / "scripts" / "bench"))
import scale_faults

SIZES = 64, 512, 2048
MANY_EXCHANGES = 64, 256, 512
"""Sizes of jobs whose exchanges would take too long in a larger one."""
PER_HOST = 8
FILES_PER_PROCESS = 2
ARRAY = b"values"
ENTRY = [len(ARRAY), zlib.crc32(ARRAY)]


def exponent(costs, sizes=SIZES) -> float:
    """Return the exponent of the power law that fits the costs of jobs of these sizes best."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def start(process: int, num_processes: int, path) -> None:
    distributed._check_settings({"train.steps": "10"}, 60)
    plan = JoinPlan(process_id=process, num_processes=num_processes)
    job = distributed._start_devices(plan, [], 60)
    hosts = [(f"node{i:05d}", PER_HOST) for i in range(num_processes // PER_HOST)]
    assert job.host_runs == tuple(hosts) and job.num_devices == 8 * num_processes
    assert len(job.devices) == (job.num_devices if process == 0 else 8)


def checks(process: int, num_processes: int, path) -> None:
    assert coordination.decide("run_start", lambda: process) == 0
    assert coordination.decide_from("reference", True, all)
    make_group().synchronize()


def commit_save(process: int, num_processes: int, path) -> None:
    saver = save.Saver.__new__(save.Saver)
    saver._directory, saver._background = path, make_group()
    saver._writer = types.SimpleNamespace(fingerprints=None)
    count, written = FILES_PER_PROCESS * num_processes, []
    saver._write_document = lambda path, document: [f"d/{i:05d}" for i in range(count)]
    saver._write_manifest = lambda outcome, files, metrics: written.append(files)
    assert saver._commit(save.Outcome(step=5), {}, {}) == count * len(ARRAY)
    assert list(map(len, written)) == ([count] if process == 0 else [])


def verify(process: int, num_processes: int, path) -> None:
    restorer = restore.Reader.__new__(restore.Reader)
    restorer.directory, restorer.group = path, make_group()
    restorer.config, restorer._corrupt, restorer._verified = CheckpointConfig(), {}, set()
    assert restorer.problem(5, full=True) == ""


def local_saves(process: int, num_processes: int, path) -> None:
    config = CheckpointConfig(local_dir="/local", local_interval_steps=1)
    opened = tier.LocalTier(path, config, EventLog(print, leader=False))
    opened.save(5, {}, {})
    sender = (process - PER_HOST) % num_processes
    assert [(of, peer.process) for of, peer in opened._part.copied] == [(f"s{sender}", sender)]
    assert opened.choose({}, 1) == 5
    assert {save.shards for save in opened._store.held()} == {f"s{process}", f"s{sender}"}
    assert f"any host of {num_processes // PER_HOST};" in opened.survivable({})


def stream(process: int, num_processes: int, path) -> None:
    states = _every_state({"row": process}, (process, num_processes), everywhere=False)
    assert states == [{"row": i} for i in range(num_processes if process == 0 else 0)]


def doctor_checks(process: int, num_processes: int, path) -> None:
    config = types.SimpleNamespace(runtime=None, directory=path, wait_s=60)
    job = types.SimpleNamespace(process_id=process, num_processes=num_processes)
    hosts = [f"node{i // PER_HOST:05d}" for i in range(num_processes if process == 0 else 0)]
    findings = doctor._network(config, job, hosts) + doctor._shared_directory(config, job, hosts)
    assert [one.severity for one in findings] == (["ok"] * 3 if process == 0 else [])


class LocalStore(store.LocalStore):
    """Saves without files."""

    def __init__(self, root):
        self._saves = set()

    root = types.SimpleNamespace(make_directory=lambda: None)
    held = lambda self: sorted(self._saves)
    write = lambda self, save, files, document: self._saves.add(save) or 1
    take = lambda self, save, fetch: self._saves.add(save)
    problem = lambda self, save: ""
    retain = lambda self: None
    forget = lambda self, current: None


@pytest.fixture
def stand_ins(monkeypatch):
    """Replace the disk, and what is the same in each process and takes long to compute."""
    versions = {"jax": "0.10.2", "jaxdist's code": "0" * 12}
    monkeypatch.setattr(distributed, "versions", lambda: versions)
    monkeypatch.setattr(
        distributed.socket,
        "gethostname",
        lambda: f"node{coordination.process_id_and_count()[0] // PER_HOST:05d}",
    )
    computed = lambda path, names: dict.fromkeys(names, ENTRY)
    monkeypatch.setattr(manifest, "fingerprints", computed)

    def read(path):
        count = FILES_PER_PROCESS * coordination.process_id_and_count()[1]
        return {"files": {f"d/{i:05d}": ENTRY for i in range(count)}}

    monkeypatch.setattr(manifest, "read", read)
    monkeypatch.setattr(manifest, "size_problems", lambda path, files: [])
    monkeypatch.setattr(manifest, "content_problems", lambda path, files, names: [])
    own_id = lambda *_: coordination.process_id_and_count()[0]
    monkeypatch.setattr(tier, "LocalStore", LocalStore)
    monkeypatch.setattr(tier, "FileServer", lambda *_: types.SimpleNamespace(port=1))
    monkeypatch.setattr(tier, "own_address", lambda: "10.0.0.1")
    monkeypatch.setattr(
        tier, "FileClient", lambda *_: contextlib.nullcontext(types.SimpleNamespace(read=None))
    )
    monkeypatch.setattr(tier, "digest_of", lambda leaves: f"s{own_id()}")
    monkeypatch.setattr(tier.LocalTier, "_start", lambda self, work, *args: work(*args))
    monkeypatch.setattr(doctor.coordination, "own_address", lambda: "10.0.0.1")
    listener = types.SimpleNamespace(port=1, close=lambda: None)
    monkeypatch.setattr(processes, "Listener", lambda: listener)
    answered = lambda to: {
        "failed": {},
        "offset_s": dict.fromkeys(to, 0.0),
        "rtt_s": dict.fromkeys(to, 0.1),
    }
    monkeypatch.setattr(processes, "visit", answered)
    monkeypatch.setattr(processes.Token, "write", lambda self: "")
    monkeypatch.setattr(processes.Token, "is_complete", lambda self: True)


WORK = start, checks, commit_save, verify, local_saves, stream, doctor_checks


@pytest.mark.parametrize("work", WORK)
def test_costs_of_an_exchange_grow_with_the_job_in_process_0_only(
    work, stand_ins, monkeypatch, tmp_path
):
    path, measured = locate(tmp_path), {}
    sizes = MANY_EXCHANGES if work in (local_saves, doctor_checks) else SIZES
    for size in sizes:
        job = Job(monkeypatch, size)
        assert job.run(lambda process, size=size: work(process, size, path)) == [None] * size
        first, *others = job.clients.values()
        each = max(c.requests for c in others), max(c.bytes for c in others)
        measured[size] = first.requests, first.bytes, *each
        assert each[0] <= 32, measured  # before a quadratic exchange takes minutes
    requests_0, bytes_0, requests, num_bytes = zip(*measured.values(), strict=True)
    assert exponent(requests_0, sizes) <= 1.1 and exponent(bytes_0, sizes) <= 1.1, measured
    assert exponent(requests, sizes) <= 0.3, measured
    if work is start:  # each process also receives the names of the hosts, once
        name = len('["node00000", 8], ')
        num_bytes = [b - name * n // PER_HOST for n, b in zip(sizes, num_bytes, strict=True)]
    assert exponent(num_bytes, sizes) <= 0.3, measured


def test_process_0_chooses_copies_and_a_save_in_time_that_grows_with_the_job():
    """In quadratic time, the exponent would be 2."""
    sizes, seconds = (512, 2048, 8192), []
    for size in sizes:
        domains = [FailureDomain(f"r{i // 16:05d}", f"n{i:05d}") for i in range(size)]
        names = [f"s{i}" for i in range(size)]
        held = [[name, [store.Save(0, 5, name)]] for name in names]
        begin = time.process_time()
        claim = copies.survivable(copies.holders(domains, names, 1), domains)
        assert store.newest(held, 0).sources == list(range(size))
        seconds.append(time.process_time() - begin)
        assert (claim.any_hosts, claim.any_rack, len(claim.fatal)) == (1, True, size)
    assert exponent(seconds, sizes) <= 1.5, seconds


@pytest.mark.parametrize("fault", [*scale_faults.MEMBERSHIP, *scale_faults.COORDINATION])
def test_a_fault_is_named_and_the_job_continues_or_ends_with_its_code(fault):
    """Each scenario has the assertions about its fault; the table has those of larger jobs."""
    result = scale_faults.inject(fault, 8)
    assert result.outcome and bool(result.named) == ("stalls" not in fault)


def test_differing_settings_and_a_shared_gpu_are_rejected_in_every_process(stand_ins, monkeypatch):
    def settings(process):
        distributed._check_settings({"train.steps": "9" if process == 5 else "10"}, 60)

    def gpus(process):
        gpu = f"GPU-{process - (process == 7)}"
        facts = {"host": f"n{process}", "versions": {}, "gpus": [gpu]}
        coordination.decide_from("process", facts, distributed._check_processes)

    for check, facts in [
        (settings, ("train.steps", "9 in process 5 on node00000", "10 in 15")),
        (gpus, ("GPU-6 on n6", "processes 6 and 7")),
    ]:
        errors = Job(monkeypatch, 16).run(check)
        assert [type(error) for error in errors] == [ConfigError] * 16
        assert [missing(str(error), *facts) for error in errors] == [[]] * 16
