"""Local saves: the one that a restart uses, its files, and their transfer to another host."""

import dataclasses
import os
import shutil
import socket
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refusals import missing, refused

from jaxdist.checkpoint import CheckpointConfig, Checkpointer, CheckpointError
from jaxdist.checkpoint.events import CorruptCheckpoint
from jaxdist.checkpoint.local import tier
from jaxdist.checkpoint.local.store import (
    LINEAGE_FILE,
    Lineage,
    LocalStore,
    Save,
    newest,
    read_lineage,
    write_lineage,
)
from jaxdist.core.mesh import MeshSpec
from jaxdist.runtime.coordination.transfer import FileClient, FileServer
from jaxdist.runtime.storage import locate


def test_the_newest_generation_precedes_the_newest_step():
    inventories = [
        ["x", [[0, 90, "x"], [1, 60, "x"], [1, 70, "y"]]],
        ["y", [[0, 90, "y"], [1, 60, "y"]]],
    ]
    assert newest(inventories, 0)[:3] == (1, 60, [0, 1])  # shards x of step 70 are missing
    assert newest(inventories, 61)[:3] == (0, 90, [0, 1])
    nothing = newest(inventories, 91)
    assert not nothing.sources and not nothing.reason
    gone = newest([["x", []], ["y", [[1, 70, "y"]]]], 0)
    assert not gone.sources and missing(gone.reason, "step 70", "1 of 2 processes") == []
    other = newest([["z", [[1, 70, "y"]]]], 0)
    assert not other.sources and missing(other.reason, "step 70", "layout") == []


def test_saves_of_repeated_steps_do_not_count(tmp_path):
    history = Lineage("a", [-1, 40, 60])
    assert history.counts(0, 40) and not history.counts(0, 41)
    assert history.counts(1, 60) and not history.counts(1, 61)
    assert history.counts(2, 99) and not history.counts(3, 10)
    directory = locate(tmp_path)
    write_lineage(directory, history)
    assert read_lineage(directory) == history
    (tmp_path / LINEAGE_FILE).write_text("{")
    stranger = read_lineage(directory)
    assert stranger.run != "a" and stranger.resumed_from == []


def store_with(path: Path, *saves: Save) -> LocalStore:
    store = LocalStore(locate(path))
    for save in saves:
        store.write(save, [("00000.0", np.arange(9, dtype=np.uint8))], "{}")
    return store


def test_a_save_without_a_manifest_or_with_other_bytes_does_not_count(tmp_path):
    one, two, three = (Save(0, step, "x") for step in (1, 2, 3))
    store = store_with(tmp_path, one, two, three)
    assert sorted(store.held()) == [one, two, three]
    (tmp_path / one.path / "manifest.json").unlink()
    (tmp_path / two.path / "00000.0").write_bytes(b"12345678")
    assert store.held() == [three] and store.problem(three) == ""
    (tmp_path / three.path / "00000.0").write_bytes(b"123456789")
    assert missing(store.problem(three), "00000.0", "CRC-32") == []
    store.clean(Lineage("a", [-1, 1]))
    assert not (tmp_path / one.path).exists() and not store.held()


def test_the_newest_two_saves_of_all_shards_are_kept(tmp_path):
    saves = [Save(*each) for each in ((0, 9, "x"), (1, 4, "x"), (1, 4, "y"), (1, 6, "x"))]
    store = store_with(tmp_path, *saves)
    store.retain()
    assert sorted(store.held()) == saves[1:]


def test_files_are_sent_only_to_hosts_with_the_secret(tmp_path):
    save = Save(0, 1, "x")
    store = store_with(tmp_path / "a", save, Save(0, 2, "x"))
    (tmp_path / "outside").write_bytes(b"private")
    server = FileServer(store.root, "secret", "127.0.0.1")
    try:
        other = LocalStore(locate(tmp_path / "b"))
        with FileClient("127.0.0.1", server.port, "secret") as client:
            other.take(save, client.read)
            assert other.held() == [save] and other.problem(save) == ""
            assert other.read(save, "00000.0") == bytes(range(9))
            for path in ("../outside", "/etc/hostname", "0/x/7/manifest.json", ""):
                with pytest.raises(FileNotFoundError):
                    client.read(path)
            (tmp_path / "a" / save.path / "00000.0").write_bytes(b"123456789")
            with pytest.raises(CorruptCheckpoint, match="other content"):
                other.take(save, client.read)
            assert other.held() == []
        with (
            FileClient("127.0.0.1", server.port, "guess") as stranger,
            pytest.raises(OSError, match="signature"),
        ):
            stranger.read(f"{save.path}/manifest.json")
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.recv(100)
            raw.sendall(f"{'0' * 64} {save.path}/manifest.json\n".encode())
            assert raw.recv(100) == b""
    finally:
        server.close()
    with pytest.raises(OSError):
        FileClient("127.0.0.1", server.port, "secret")


def test_a_connection_cut_within_a_file_leaves_no_save(tmp_path):
    store = store_with(tmp_path / "a", Save(0, 1, "x"))
    server = FileServer(store.root, "secret", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as cutter:

        def relay():
            there, _ = cutter.accept()
            with there, socket.create_connection(("127.0.0.1", server.port)) as behind:
                there.sendall(behind.recv(100))
                behind.sendall(there.recv(1000))
                there.sendall(behind.recv(75))  # the proof, the size, and a few bytes

        thread = threading.Thread(target=relay)
        thread.start()
        other = LocalStore(locate(tmp_path / "b"))
        with (
            FileClient("127.0.0.1", cutter.getsockname()[1], "secret") as client,
            pytest.raises(OSError, match="cut"),
        ):
            other.take(Save(0, 1, "x"), client.read)
        thread.join()
    server.close()
    assert other.held() == []


def state_of(step: int, mesh: str = "fsdp=2") -> dict:
    spec = MeshSpec.parse(mesh)
    built = spec.build(jax.devices()[: spec.num_devices])
    split, replicated = NamedSharding(built, P(None, "fsdp")), NamedSharding(built, P())
    w = np.random.default_rng(step).standard_normal((4, 8)).astype(np.float32)
    return {
        "params": {
            "w": jax.device_put(w, split),
            "b": jax.device_put(jnp.asarray(w[0], jnp.bfloat16), replicated),
        },
        "rest": {
            "step": jax.device_put(jnp.int32(step), replicated),
            "key": jax.device_put(jax.random.key(step), replicated),
        },
    }


def target_of(state: dict) -> dict:
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    return jax.tree.map(like, state)


def bits(state: dict) -> list[bytes]:
    state = {**state, "rest": {**state["rest"], "key": jax.random.key_data(state["rest"]["key"])}}
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


@dataclasses.dataclass
class Job:
    """One run of one process, opened repeatedly."""

    path: Path
    lines: list[str] = dataclasses.field(default_factory=list)

    @property
    def disk(self) -> Path:
        return self.path / "disk"

    def open(self, **settings) -> Checkpointer:
        self.lines.clear()
        config = CheckpointConfig(
            **{"local_dir": str(self.disk), "local_interval_steps": 1, **settings}
        )
        return Checkpointer(self.path / "checkpoints", config, log=self.lines.append)

    def save(self, steps, *, durable=(), **settings) -> None:
        opened = self.open(**settings)
        for step in steps:
            due = "interval" if step in durable else "local"
            opened.save(step, state_of(step), {"next": step}, due=due)
            opened.wait()
            opened._local and opened._local.wait()
        opened.close()

    def resume(self, mesh: str = "fsdp=2", **settings) -> tuple[int | None, Checkpointer]:
        opened = self.open(**settings)
        target = target_of(state_of(0, mesh))
        step = opened.choose(lambda: target)
        if step is not None:
            state, meta, restored_step = opened.restore(target, step=step)
            assert meta == {"next": restored_step} and restored_step <= step
            assert bits(state) == bits(state_of(restored_step, mesh))
            step = restored_step
        return step, opened

    def resumed(self, mesh: str = "fsdp=2", **settings) -> int | None:
        step, opened = self.resume(mesh, **settings)
        opened.close()
        return step


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(tmp_path)


def files(job: Job) -> list[Path]:
    return sorted(path for path in job.disk.rglob("0*.*"))


def test_a_restart_uses_the_newer_of_the_two_tiers(job):
    job.save([2, 4, 6, 8], durable=[4])
    steps = {path.parent.name for path in files(job)}
    assert steps == {"6", "8"}  # the newest two
    assert job.resumed() == 8
    shutil.rmtree(job.disk)
    assert job.resumed() == 4
    job.save([5, 6], durable=[6])
    assert {path.parent.name for path in files(job)} == {"5"}
    assert job.resumed() == 6


def test_a_first_restart_needs_no_durable_checkpoint(job):
    job.save([1, 2])
    step, opened = job.resume()
    assert step == 2 and opened.weights_kind(2, "auto") == "raw"
    (restored,) = [e for e in opened.pop_events() if e["event"] == "restore"]
    assert (restored["step"], restored["tier"]) == (2, "local")
    opened.close()


def test_a_damaged_local_save_is_skipped_and_named(job):
    job.save([2, 4, 6], durable=[2])
    largest = max((p for p in files(job) if p.parent.name == "6"), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[3] ^= 1
    largest.write_bytes(bytes(data))
    step, opened = job.resume()
    damaged = [e for e in opened.pop_events() if e["event"] == "local_save_damaged"]
    opened.close()
    assert step == 4 and [e["step"] for e in damaged] == [6]
    assert missing(damaged[0]["reason"], largest.name, "CRC-32") == []


def test_wrong_bits_in_intact_files_are_skipped(job):
    job.save([2, 4, 6], durable=[2])
    store = LocalStore(locate(next(path for path in job.disk.iterdir())))
    newest_save = max(store.held())
    names = [path.name for path in files(job) if path.parent.name == "6"]
    kept = {name: bytearray(store.read(newest_save, name)) for name in names}
    max(kept.values(), key=len)[0] ^= 1
    document = (job.disk / store.root.name / newest_save.path / "document.json").read_text()
    store.write(newest_save, list(kept.items()), document)
    assert job.resumed() == 4
    assert any(missing(line, "step 6", "wrong checksum") == [] for line in job.lines)


def test_another_layout_restores_the_durable_tier_and_reports_it(job):
    job.save([2, 4], durable=[2])
    assert job.resumed("fsdp=4") == 2
    assert any(missing(line, "step 4", "layout") == [] for line in job.lines)


def test_repeated_steps_invalidate_earlier_local_saves(job):
    job.save([2, 4, 6], durable=[2])
    away = job.path / "away"
    shutil.copytree(job.disk, away)
    shutil.rmtree(job.disk)
    assert job.resumed() == 2  # the host with the saves was missing
    shutil.rmtree(job.disk)
    shutil.copytree(away, job.disk)  # and returns
    assert job.resumed() == 2
    assert not files(job)


def test_a_run_that_continues_without_local_saves_invalidates_them(job):
    job.save([2, 4], durable=[2])
    assert job.resumed(local_dir="") == 2
    assert job.resumed() == 2


def test_a_new_run_of_the_same_name_ignores_local_saves_of_the_old_one(job):
    job.save([2, 4])
    shutil.rmtree(job.path / "checkpoints")
    assert job.resumed() is None


def test_a_copy_of_a_run_leaves_the_local_saves_to_the_original(job):
    job.save([2, 4], durable=[2])
    copy, disk = Job(job.path / "copy"), {"local_dir": str(job.disk)}
    shutil.copytree(job.path / "checkpoints", copy.path / "checkpoints")
    assert copy.resumed(**disk) == 2
    copy.save([6, 8], **disk)
    assert job.resumed() == 4 and copy.resumed(**disk) == 8


def test_a_save_is_skipped_while_the_previous_one_is_written(job, monkeypatch):
    written = threading.Event()
    write = LocalStore.write
    monkeypatch.setattr(
        LocalStore, "write", lambda self, *args: (written.wait(20), write(self, *args))[1]
    )
    opened = job.open()
    for step in (1, 2):
        opened.save(step, state_of(step), {"next": step}, due="local")
    written.set()
    opened.close()
    events = [(e["event"], e["step"]) for e in opened.pop_events()]
    assert events == [("local_save_skipped", 2), ("local_save", 1)]
    assert job.resumed() == 1


def test_a_full_disk_fails_the_local_save_and_keeps_earlier_ones(job, monkeypatch):
    job.save([2])
    step, opened = job.resume()
    assert step == 2
    write = type(locate(job.disk)).write

    def full(self, data, **how):
        if "/4/" in self.path:
            raise OSError(28, "No space left on device")
        write(self, data, **how)

    monkeypatch.setattr(type(locate(job.disk)), "write", full)
    opened.save(4, state_of(4), {"next": 4}, due="local")
    opened._local.wait()
    (failed,) = [e for e in opened.pop_events() if e["event"] == "local_save_failed"]
    opened.close()
    assert failed["step"] == 4 and missing(failed["reason"], "No space left") == []
    assert {path.parent.name for path in files(job)} == {"2"}


def test_a_save_that_fails_after_it_is_written_does_not_count(job, monkeypatch):
    """The planted error is raised after the files of the save are written."""
    job.save([2])
    step, opened = job.resume()

    def refuse():
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(tier, "flush_appended", refuse)
    opened.save(4, state_of(4), {"next": 4}, due="local")
    opened.close()
    assert step == 2 and {path.parent.name for path in files(job)} == {"2"}
    assert "local_save_failed" in [e["event"] for e in opened.pop_events()]


def test_a_finished_run_leaves_nothing_on_local_disks(job):
    opened = job.open()
    opened.save(1, state_of(1), {"next": 1}, due="local")
    assert "not the loss of" in opened.survivable(state_of(1))
    opened.discard_local()
    opened.close()
    assert not list(job.disk.iterdir())


@pytest.mark.parametrize("local_dir", ["$NO_SUCH_VARIABLE/x", "/proc/no/such"])
def test_a_local_directory_that_cannot_be_used_is_refused(job, local_dir):
    with refused("checkpoint.local_dir", local_dir):
        job.open(local_dir=local_dir)


def test_a_bucket_is_no_local_directory():
    assert missing("\n".join(CheckpointConfig(local_dir="s3://a/b").problems()), "s3://a/b") == []
    assert CheckpointConfig(local_dir="/nvme").problems() == []


def test_a_local_save_suffices_if_all_checkpoints_are_corrupt(job):
    job.save([4, 6], durable=[6])
    for file in (job.path / "checkpoints" / "6" / "arrays").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert job.resumed() == 4
    shutil.rmtree(job.disk)
    with pytest.raises(CheckpointError):
        job.resumed()
