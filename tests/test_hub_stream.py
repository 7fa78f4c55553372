"""Streamed data sets: a step's batch depends only on (data, seed, step), and disk use is bounded.

A local hub serves real files over HTTP. Every text has its own bytes, so rows identify their file.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from commands import ROOT, run_here
from data_cases import sharding_on, tar_members, write_tar
from hub_server import Hub, finish_downloads, hub_in_use
from launched_job import workers_of
from refusals import refused

from jaxdist.data import DataConfig, Loader, hub_stream, open_datasets, resume_position, tars
from jaxdist.data import parquet as parquet_files
from jaxdist.run.metrics_log import read_records
from jaxdist.run.text_generation import first_prompt
from jaxdist.runtime import hub as hub_files

COMMIT = "0" * 39 + "1"
NUM_FILES, BUFFER, BATCH, SEQ_LEN = 7, 2, 4, 8
SOURCE = f"hf://org/set@{COMMIT}"


def tokens_of(number: int) -> bytes:
    """Return the text of a file; its bytes and its number of rows are its own."""
    rng = np.random.default_rng(number)
    return bytes(rng.integers(1 + 30 * number, 31 + 30 * number, 100 + 40 * number).tolist())


def write_files(folder: Path) -> None:
    folder.mkdir()
    for number in range(NUM_FILES):
        text = tokens_of(number).decode("latin-1")
        line = json.dumps({"text": text}) + "\n"
        (folder / f"train-{number}.jsonl").write_text(line)


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    with hub_in_use(tmp_path, monkeypatch) as server:
        write_files(tmp_path / "set")
        server.store("datasets", "org/set", tmp_path / "set", COMMIT)
        yield server


def opened(**settings):
    about = {"sources": [SOURCE], "tokenizer": "bytes", "streaming": True, "eval_fraction": 0.0}
    config = DataConfig(**about | {"streaming_buffer": BUFFER} | settings)
    return open_datasets(config, seq_len=SEQ_LEN)


def walk(dataset, steps, mesh="dp=2", seed=3, **start):
    loader = Loader(
        dataset, global_batch_size=BATCH, seed=seed, sharding=sharding_on(mesh), **start
    )
    try:
        batches = [(np.asarray(next(loader)["tokens"]), loader.digest) for _ in range(steps)]
        return batches, json.loads(json.dumps(loader.state()))
    finally:
        loader.close()


def expected_rows() -> list[list[bytes]]:
    """Return the rows of each file: consecutive windows that have a next token."""
    utf8 = [tokens_of(n).decode("latin-1").encode() + b"\0" for n in range(NUM_FILES)]
    count = lambda text: (len(text) - 1) // SEQ_LEN
    return [[t[i * SEQ_LEN : (i + 1) * SEQ_LEN] for i in range(count(t))] for t in utf8]


def test_epochs_hold_each_row_once_in_shuffled_buffers(hub):
    files = expected_rows()
    of = {row: number for number, rows in enumerate(files) for row in rows}
    total = sum(map(len, files))
    steps = -(-3 * total // BATCH)
    batches, _ = walk(opened()[0], steps)
    rows = [bytes(row.astype(np.uint8)) for tokens, _ in batches for row in tokens][: 3 * total]
    epochs = [rows[i : i + total] for i in range(0, 3 * total, total)]
    orders = []
    for number, epoch in enumerate(epochs):
        assert sorted(epoch) == sorted(of)
        order = list(dict.fromkeys(of[row] for row in epoch))
        # 1 file, then 1, 2, 2, 1 in the first epoch (growing buffers); 2, 2, 2, 1 later
        at = 0
        for size in [1, 2, 2, 2] if number == 0 else [2, 2, 2, 1]:
            buffer = set(order[at : at + size])
            count = sum(len(files[file]) for file in buffer)
            assert {of[row] for row in epoch[:count]} == buffer
            if size > 1:  # jointly shuffled
                numbers = np.array([of[row] for row in epoch[:count]])
                assert np.count_nonzero(np.diff(numbers)) >= 5
            for file in buffer:
                assert [row for row in epoch[:count] if of[row] == file] != files[file]
            epoch, at = epoch[count:], at + size
        orders.append(order)
    assert orders[0][0] == 0 and len({tuple(order) for order in orders}) == 3
    other, _ = walk(opened()[0], 20, seed=4)
    assert any(not np.array_equal(a[0], b[0]) for a, b in zip(other, batches, strict=False))


@pytest.mark.parametrize(("mesh", "at"), [("dp=1", 1), ("fsdp=4", 13), ("dp=2,tp=4", 47)])
def test_resume_on_another_mesh_reads_only_the_current_buffers(hub, monkeypatch, mesh, at):
    undisturbed, _ = walk(opened()[0], 60)
    _, state = walk(opened()[0], at)
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "another host"))
    hub.sent.clear()
    dataset = opened()[0]
    position = resume_position(state, dataset, seed=3)
    after, _ = walk(dataset, 60 - at, mesh=mesh, start=position)
    for one, two in zip(after, undisturbed[at:], strict=True):
        assert np.array_equal(one[0], two[0]) and one[1] == two[1]
    if at == 47:  # in the second pass: the counts of all files are in the checkpoint
        hub.sent.clear()
        monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "third host"))
        dataset = opened()[0]
        walk(dataset, 1, start=resume_position(state, dataset, seed=3))
        time.sleep(0.5)
        read = {name for name in hub.sent if name.startswith("train")}
        assert len(read) <= 2 * BUFFER < NUM_FILES


def test_rows_after_a_rollback_are_the_same_again(hub):
    undisturbed, _ = walk(opened()[0], 24)
    dataset = opened()[0]
    _, state = walk(dataset, 3)
    walk(dataset, 20, start=resume_position(state, dataset, seed=3))  # opens further shards
    again, _ = walk(dataset, 21, start=resume_position(state, dataset, seed=3))
    assert [digest for _, digest in again] == [digest for _, digest in undisturbed[3:]]


def test_prompt_at_the_end_needs_no_download(hub, monkeypatch):
    dataset = opened()[0]
    walk(dataset, 60)  # the first shard is deleted
    monkeypatch.setattr(hub_stream.StreamedPart, "_open", lambda self, shard: 1 / 0)
    assert first_prompt(DataConfig(sources=[SOURCE]), dataset)


def test_disk_holds_two_buffers_and_no_downloads(hub):
    sizes, raw = [], []
    dataset = opened()[0]
    loader = Loader(dataset, global_batch_size=BATCH, seed=3, sharding=sharding_on("dp=2"))
    for _ in range(80):
        next(loader)
        names = [name for _, _, names in os.walk("cache") for name in names]
        sizes.append(names.count("corpus.json"))
        raw.append(sum(name.endswith(".jsonl") for name in names))
        time.sleep(0.01)
    loader.close()
    assert max(sizes) <= 2 * BUFFER + 1 < NUM_FILES  # one more while a buffer begins
    assert max(raw) <= 4
    assert not list(Path("hub").rglob("train-*"))  # nothing in the cache of the hub


def test_first_step_needs_one_shard(hub):
    hub.stalled |= {f"train-{number}.jsonl" for number in range(1, NUM_FILES)}
    batches, state = walk(opened()[0], 2)
    assert len(batches) == 2 and [n >= 0 for n in state["row_counts"]["0"]] == [True] + [False] * 6


def test_processes_of_a_host_share_the_work(hub):
    loaders = [
        Loader(opened()[0], global_batch_size=BATCH, seed=3, sharding=sharding_on("dp=2"))
        for _ in range(2)
    ]
    for _ in range(30):  # most of an epoch
        first, second = (np.asarray(next(loader)["tokens"]) for loader in loaders)
        assert np.array_equal(first, second)
    for loader in loaders:
        loader.close()
    read = [name for name in hub.sent if name.startswith("train")]
    assert len(read) == len(set(read)) >= 5


def test_missing_shard_is_made_while_another_process_waits_for_it(hub):
    dataset = opened()[0]
    folder = dataset.streams[0]._folder
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        for number in range(NUM_FILES):  # as a process that found it missing at the same time
            lock = stack.enter_context((folder / f"{number:06d}.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_SH)
        batches, _ = walk(dataset, 2)
    assert len(batches) == 2


def test_shards_in_use_are_kept_on_nfs(hub, monkeypatch):
    def of_nfs(file, kind, lock=fcntl.flock):  # as nfs4_proc_lock of Linux
        if kind & fcntl.LOCK_SH and not file.readable():
            raise OSError(errno.EBADF, "not open for reading")
        lock(file, kind)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    used, other = (opened()[0].streams[0] for _ in range(2))
    used.count(0)
    other.keep([1])
    assert (used._folder / "000000" / "corpus.json").exists()


def test_held_out_rows_are_the_end_of_the_first_file(hub):
    train, held_out = opened(eval_fraction=0.25)
    rows = held_out.rows(np.arange(held_out.num_rows))["tokens"]
    first = tokens_of(0).decode("latin-1").encode() + b"\0"
    cut = round(len(first) * 0.75)
    assert bytes(rows[0].astype(np.uint8)) == first[cut : cut + SEQ_LEN]
    total = sum(map(len, expected_rows()))
    batches, _ = walk(train, -(-total // BATCH))
    seen = {bytes(row.astype(np.uint8)) for tokens, _ in batches for row in tokens}
    held = {bytes(row.astype(np.uint8)) for row in rows}
    assert not held & seen
    hub.sent.clear()
    assert held_out.rows(np.arange(2))["tokens"].shape == (2, SEQ_LEN) and not hub.sent


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_large_files_are_read_in_parts(hub, monkeypatch, tmp_path, kind):
    texts = [f"text {i} " + "x" * (i % 300) for i in range(900)]
    (tmp_path / "rows").mkdir()
    path = tmp_path / "rows" / f"train.{kind}"
    if kind == "tar":
        write_tar(path, tar_members(texts))
    else:
        parquet.write_table(pa.table({"text": texts}), path, row_group_size=30, compression=None)
    hub.store("datasets", "org/rows", tmp_path / "rows", COMMIT)
    size = path.stat().st_size
    monkeypatch.setattr(hub_stream, "PART_BYTES", size // 9)
    monkeypatch.setattr(hub_files, "RETRY_S", ())
    monkeypatch.setattr(parquet_files, "_FOOTER_BYTES", 100)
    monkeypatch.setattr(tars, "_MORE_BYTES", 700)
    source = {"sources": [f"hf://org/rows@{COMMIT}"], "packing": "best_fit"}
    config = DataConfig(**source, tokenizer="bytes", streaming=True, eval_fraction=0.0)
    dataset = open_datasets(config, seq_len=320)[0]
    assert dataset.streams[0].num_shards == 9
    loader = Loader(dataset, global_batch_size=BATCH, seed=3, sharding=sharding_on("dp=2"))
    next(loader)
    assert hub.num_bytes < size
    read = []
    for shard in range(9):
        count = dataset.streams[0].count(shard)
        numbers = shard * hub_stream.SHARD_ROWS + np.arange(count)
        rows = dataset.rows(numbers)
        for tokens, segments in zip(rows["tokens"], rows["segments"], strict=True):
            read += [bytes(tokens[segments == s].astype(np.uint8)) for s in set(segments) - {0}]
    loader.close()
    assert sorted(read) == sorted(text.encode() for text in texts)
    assert hub.num_bytes < 2 * size  # what each part needs, and a footer or the next header
    undisturbed, _ = walk(dataset, 40)
    _, state = walk(dataset, 17)
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "another host"))
    resumed = open_datasets(config, seq_len=320)[0]
    after, _ = walk(resumed, 23, mesh="fsdp=4", start=resume_position(state, resumed, seed=3))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(after, undisturbed[17:], strict=True))
    path.write_bytes(path.read_bytes().replace(b"text 7 ", b"text 8 "))
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "second"))
    again = open_datasets(config, seq_len=320)[0]
    with refused(f"train.{kind}", "digest", "HF_ENDPOINT"):
        walk(again, 1)


FLAGS = [
    "--data.tokenizer=bytes", "--model.vocab_size=256", "--model.d_model=16",
    "--model.num_layers=1", "--model.num_heads=2", "--model.mlp_dim=16", "--train.seq_len=8",
    "--train.global_batch_size=8", "--optim.warmup_steps=1", "--eval.interval_steps=0",
    "--monitoring.tracker=", "--checkpoint.save_interval_steps=4", f"--data.sources={SOURCE}",
    "--data.streaming=true", "--data.streaming_buffer=2", "--steps=40",
]  # fmt: skip


@pytest.mark.slow
def test_killed_run_continues_with_other_processes_and_mesh(hub, monkeypatch):
    """Two processes, killed while the hub stalls; then one process on another mesh."""
    assert run_here("train", *FLAGS, "--mesh=dp=8", "--run-dir=undisturbed") == 0
    first_pass = list(dict.fromkeys(name for name in hub.sent if name.startswith("train")))
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "second"))
    hub.stalled |= set(first_pass[-2:])
    launch = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--nproc-per-node=2",
        "--max-restarts=0",
        "--",
    ]
    words = [*launch, *FLAGS, "--simulate=2", "--mesh=dp=4", "--run-dir=run"]
    environment = {**os.environ, **hub.environment, "PYTHONPATH": str(ROOT)}
    environment["HF_HUB_CACHE"] = str(Path.cwd() / "hub")
    with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as launcher:
        deadline = time.monotonic() + 400
        while not list(Path("run").glob("checkpoints/8/*")) and time.monotonic() < deadline:
            assert launcher.poll() is None
            time.sleep(0.1)
        time.sleep(2)
        for pid in [launcher.pid, *workers_of(launcher.pid)][::-1]:
            os.kill(pid, signal.SIGKILL)
    hub.stalled.clear()
    hub.sent.clear()
    assert run_here("train", *FLAGS, "--mesh=fsdp=4,tp=2", "--run-dir=run") == 0
    both = [read_records(f"{run}/metrics.jsonl") for run in ("undisturbed", "run")]
    one, two = ({r["step"]: r for r in some if r["kind"] == "train"} for some in both)
    assert one.keys() == two.keys() and len(one) == 40
    for step, record in one.items():
        assert record["data_ledger"] == two[step]["data_ledger"]
        assert record["loss"] == pytest.approx(two[step]["loss"], rel=2e-5)


def test_streams_and_files_are_mixed_by_weight(hub):
    Path("own.txt").write_text("~" * 400)
    mixed = {"sources": [SOURCE, "own.txt"], "mixture_weights": [3.0, 1.0]}
    batches, state = walk(opened(**mixed)[0], 40)
    own = [(tokens == ord("~")).all(axis=1).sum() for tokens, _ in batches]
    assert abs(sum(own) - 40) <= 2 and [len(x) for x in state["row_counts"].values()] == [7]
    _, state = walk(opened(**mixed)[0], 17)
    dataset = opened(**mixed)[0]
    after, _ = walk(dataset, 23, mesh="fsdp=4", start=resume_position(state, dataset, seed=3))
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(after, batches[17:], strict=True))


def test_dead_server_is_waited_for(hub, monkeypatch, caplog):
    monkeypatch.setattr(hub_files, "RETRY_S", (0.2,) * 20)
    undisturbed, _ = walk(opened()[0], 40)
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "second"))
    dataset = opened()[0]
    loader = Loader(dataset, global_batch_size=BATCH, seed=3, sharding=sharding_on("dp=2"))
    batches = [np.asarray(next(loader)["tokens"]) for _ in range(2)]
    hub.is_down = True
    time.sleep(0.5)
    hub.is_down = False
    batches += [np.asarray(next(loader)["tokens"]) for _ in range(38)]
    loader.close()
    assert all(np.array_equal(a, b[0]) for a, b in zip(batches, undisturbed, strict=True))


def test_server_that_stays_down_is_an_error_and_a_resume_continues(hub, monkeypatch):
    undisturbed, _ = walk(opened()[0], 30)
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "second"))
    monkeypatch.setattr(hub_files, "RETRY_S", (0.05,))
    opened()
    finish_downloads()
    hub.sent.clear()
    hub.fail_after = 3
    dataset = opened()[0]
    loader = Loader(dataset, global_batch_size=BATCH, seed=3, sharding=sharding_on("dp=2"))
    done = 0
    with refused(hub.address, "org/set"):
        while done < 30:
            next(loader)
            done += 1
            state = json.loads(json.dumps(loader.state()))
    loader.close()
    assert 0 < done < 30
    hub.fail_after = None
    dataset = opened()[0]
    position = resume_position(state, dataset, seed=3)
    after, _ = walk(dataset, 30 - done, start=position)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(after, undisturbed[done:], strict=True))


def test_changed_shard_is_rejected(hub, tmp_path):
    opened()
    path = tmp_path / "set" / "train-0.jsonl"
    before = path.read_bytes()
    path.write_bytes(before[:20] + b"~" + before[21:])
    with refused("train-0.jsonl", "digest", "HF_ENDPOINT"):
        walk(opened()[0], 1)
    assert not any("000000" in folders for _, folders, _ in os.walk("cache"))


def test_other_row_count_than_in_the_checkpoint_is_rejected(hub):
    _, state = walk(opened()[0], 10)
    state["row_counts"]["0"][0] += 1
    dataset = opened()[0]
    with refused("data ledger"):
        resume_position(state, dataset, seed=3)
    dataset.streams[0].counts = [99] * NUM_FILES
    with refused("has 12 rows", "99"):
        dataset.rows(np.arange(2))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sources": ["stdlib"]}, ("data.streaming", "hf://ORG/NAME")),
        ({"sources": [SOURCE, "stdlib"]}, ("mixture_weights", "one number per source")),
        ({"sources": [SOURCE] * 2, "mixture_weights": [1, 1, "5:size/size"]}, ("proportion",)),
        ({"num_workers": 2}, ("data.num_workers=2",)),
        ({"records": "preference"}, ("data.records=preference",)),
        ({"records": "chat", "long_records": "reject"}, ("cut or drop",)),
    ],
)  # fmt: skip
def test_settings_that_do_not_stream_are_rejected(hub, settings, words):
    with refused(*words):
        opened(**settings)


def test_too_short_files_are_an_error(hub):
    config = DataConfig(sources=[SOURCE], tokenizer="bytes", streaming=True, eval_fraction=0.0)
    dataset, _ = open_datasets(config, seq_len=5000)
    with refused("holds a row", "seq_len"):
        walk(dataset, 1)


def test_offline_run_streams_from_the_cache_of_the_hub(hub, monkeypatch):
    from huggingface_hub import constants, snapshot_download

    expected, _ = walk(opened()[0], 40)
    snapshot_download("org/set", repo_type="dataset", revision=COMMIT)
    monkeypatch.setenv("JAXDIST_CACHE", str(Path.cwd() / "second"))
    hub.forget()
    opened()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.forget()
    hub.sent.clear()
    again, _ = walk(opened()[0], 40)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(again, expected, strict=True))
    assert not hub.sent and len(list(Path("hub").rglob("train-*.jsonl"))) == NUM_FILES
