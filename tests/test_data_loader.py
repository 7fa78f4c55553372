"""Batches on devices, resuming, evaluation: a step's batch depends only on (data, seed, step)."""

import hashlib
import itertools
import json
import sys
import textwrap
import threading

import jax
import numpy as np
import pytest
from commands import Fork, free_port
from data_cases import (  # noqa: F401
    CASES,
    MESHES,
    cache,
    laid_out,
    open_case,
    open_text,
    sharding_on,
    write_sources,
    write_text,
)
from refusals import refused

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import device_order
from jaxdist.data import (
    Loader,
    Position,
    eval_batches,
    resume_position,
)
from jaxdist.data.batches import TrainBatches, device_placer, first_sample, part_held
from jaxdist.data.corpus import Corpus
from jaxdist.settings import ConfigError


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


PINNED = {
    "stream": "4893c4ba3086fd91d9252308385db038",
    "documents": "4626d736fb07ac4e492b03d8b173d6e8",
    "best_fit": "7edcfc0f0665f441fba362adca99c80c",
    "chat": "740e0fa3140ab1e933b314ad094fd6c3",
    "joined": "aa725108dc060022b80767aa7f7122a0",
    "mixture": "2b9be027ad95dc50dbb058d300f8d8c6",
    "images": "4a3ba81af4521e6ecd4c374a55ec0f0c",
    "grain": "96cfd7f0c5f35902ea202bd87eb6adf4",
}
"""Digests of batches 0 to 39 and 1000 to 1002 of 8 rows, seed 5, as produced by the loader of
commit 4fb57d1. If one changes, raise STATE_VERSION.
"""
PINNED_BY_LENGTH = {
    "best_fit": "ff60919631e510299d1610d38e0831ee",
    "chat": "0253b983120856320e53db36c2a694c8",
}
"""As `PINNED`, with data.text_format=3."""


@pytest.mark.parametrize(
    ("name", "text_format"), [*((name, 2) for name in CASES), ("best_fit", 3), ("chat", 3)]
)
def test_batches_match_earlier_versions(name, text_format, tmp_path, monkeypatch):
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    train = open_case(name, text_format=text_format)
    sys.modules.pop("case_rows", None)
    digest = hashlib.sha256()
    for start, count in ((0, 40), (1000, 3)):
        loader = Loader(
            train, global_batch_size=8, seed=5, sharding=sharding_on("dp=2,tp=2"),
            start=Position(8 * start),
        )  # fmt: skip
        for _ in range(count):
            batch = next(loader)
            for field in sorted(batch):
                values = np.asarray(batch[field])
                digest.update(f"{field} {values.dtype.str} {values.shape} ".encode())
                digest.update(values.tobytes())
        loader.close()
    assert digest.hexdigest()[:32] == (PINNED if text_format == 2 else PINNED_BY_LENGTH)[name]


@pytest.mark.parametrize("mesh", MESHES)
def test_batches_are_the_same_on_every_mesh(text, mesh):
    train, _ = open_text(text)
    sharding = sharding_on(mesh)
    loader = Loader(train, global_batch_size=8, seed=5, sharding=sharding)
    order = train.order(5)
    for step in range(12):  # more than one epoch
        expected = train.rows(order.rows(np.arange(step * 8, step * 8 + 8)))
        expected = laid_out(expected, sharding)
        batch = next(loader)
        assert batch.keys() == expected.keys()
        for name, values in batch.items():
            assert isinstance(values, jax.Array)
            np.testing.assert_array_equal(values, expected[name])
    loader.close()


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", [m for m in MESHES if m != "dp=1"])
def test_process_keeps_only_the_parts_of_its_devices(text, monkeypatch, mesh, num_processes):
    """Process p is simulated with the p-th part of 8 devices in mesh order."""
    train, _ = open_text(text)
    order = train.order(5)
    sharding = sharding_on(mesh)
    expected = laid_out(train.rows(order.rows(np.arange(16, 32))), sharding)
    devices = list(sharding.mesh.devices.flat)
    own = len(devices) // num_processes
    everything = set()
    for process in range(num_processes):
        mine = devices[process * own : (process + 1) * own]

        def make_local_parts(shape, sharding, callback, mine=mine):
            indices = sharding.devices_indices_map(shape)
            return {d: (indices[d], callback(indices[d])) for d in mine}

        monkeypatch.setattr(jax, "make_array_from_callback", make_local_parts)
        held = part_held(sharding, 16, train.fields, mine)
        batches = TrainBatches(train, 5, 16, held, start=0, left_out=())
        first, batch = device_placer(train.fields, 16, held, sharding)(batches[1])
        assert first == 16
        for name, parts in batch.items():
            for index, values in parts.values():
                np.testing.assert_array_equal(values, expected[name][index])
        at = [c for c, d in np.ndenumerate(sharding.mesh.devices) if d in mine]
        rows = len({c[1:4] for c in at}) * 16 // MeshSpec.parse(mesh).num_replicas
        positions = len({c[4] for c in at}) * 16 // sharding.mesh.shape["context"]
        assert {x.shape for x in batches[1][1].values()} == {(rows, positions)}
        everything |= {(row, index) for row in held.rows for index in range(16)}
    assert {row for row, _ in everything} == set(range(16))


@pytest.mark.parametrize("name", ["stream", "documents", "best_fit", "chat", "mixture", "grain"])
def test_process_builds_its_part_as_in_the_complete_row(name, tmp_path, monkeypatch):
    """Check every zigzag part of every row, for processes with one to four context devices."""
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    train = open_case(name)
    everything = np.arange(train.num_rows)
    complete = train.rows(everything)
    reads, tokens = [], Corpus.tokens
    count = lambda self, start, stop: (reads.append(stop - start), tokens(self, start, stop))[1]
    monkeypatch.setattr(Corpus, "tokens", count)
    for size in (2, 4):
        sharding = sharding_on(f"dp={8 // size},cp={size}")
        replica = sharding.mesh.devices[0, 0].flat[:size]
        order = device_order(16, size).reshape(size, -1)
        for first, last in itertools.combinations(range(size + 1), 2):
            held = part_held(sharding, 8, train.fields, list(replica[first:last]))
            reads.clear()
            part = train.rows(everything, held.spans)
            positions = order[first:last].reshape(-1)
            assert part.keys() == complete.keys()
            for field, values in part.items():
                np.testing.assert_array_equal(values, complete[field][:, positions])
                assert values.dtype == complete[field].dtype
            if name in ("stream", "documents"):  # and the target of the last position in each run
                assert sum(reads) == train.num_rows * (len(positions) + len(held.spans))


def test_rows_are_read_once_per_batch_for_any_number_of_devices(text, monkeypatch):
    train, _ = open_text(text)
    row_counts = []
    part = type(train.parts[0])
    original = part.rows
    monkeypatch.setattr(
        part, "rows", lambda self, i, s: (row_counts.append(len(i)), original(self, i, s))[1]
    )
    sharding = sharding_on("dp=2,tp=4")
    list(eval_batches(train, global_batch_size=8, sharding=sharding, max_batches=1))
    assert row_counts == [8]


def test_first_sample_of_a_batch_equals_sequential_counting():
    generator = np.random.default_rng(0)
    for _ in range(200):
        batch, start = generator.integers(1, 9, 2)
        begins = generator.integers(0, 60, generator.integers(0, 4))
        left_out = [(int(b), int(b + generator.integers(1, 12))) for b in begins]
        sample = int(start)
        for number in range(20):
            for begin, end in sorted(left_out):
                if sample < end and begin < sample + batch:
                    sample = end
            assert first_sample(number, int(batch), int(start), left_out) == sample
            sample += int(batch)


def test_starting_at_a_step_equals_running_to_it(text):
    train, _ = open_text(text)
    settings = {"global_batch_size": 8, "seed": 1, "sharding": sharding_on("dp=2")}
    uninterrupted = Loader(train, **settings)
    batches = [next(uninterrupted) for _ in range(10)]
    later = Loader(train, **settings, start=Position(48))
    for batch in batches[6:]:
        np.testing.assert_array_equal(next(later)["tokens"], batch["tokens"])
    uninterrupted.close()
    later.close()


def test_state_counts_batches_handed_out_and_survives_another_batch_size(text):
    train, _ = open_text(text)
    sharding = sharding_on("dp=2")
    loader = Loader(train, global_batch_size=8, seed=1, sharding=sharding, prefetch=4)
    for _ in range(3):
        next(loader)
    state = json.loads(json.dumps(loader.state()))
    loader.close()
    start = resume_position(state, train, seed=1)
    assert (start.sample, start.left_out) == (24, ())
    resumed = Loader(train, global_batch_size=4, seed=1, sharding=sharding, start=start)
    expected = train.rows(train.order(1).rows(np.arange(24, 28)))
    np.testing.assert_array_equal(next(resumed)["tokens"], expected["tokens"])
    resumed.close()


def state_of(dataset, seed=0):
    loader = Loader(dataset, global_batch_size=4, seed=seed, sharding=sharding_on("dp=1"))
    next(loader)
    loader.close()
    return loader.state()


def test_resuming_with_other_data_is_refused_with_the_changed_setting(text):
    train, _ = open_text(text)
    state = state_of(train)
    assert resume_position(state, train, seed=0).sample == 4
    with refused("seq_len was 16 and is 8"):
        resume_position(state, open_text(text, seq_len=8)[0], seed=0)
    with refused("seed was 0 and is 1"):
        resume_position(state, train, seed=1)
    text.write_bytes(text.read_bytes()[:-1] + b"!")
    changed, _ = open_text(text)
    with pytest.raises(ConfigError, match="sources"):
        resume_position(state, changed, seed=0)
    assert resume_position(state, changed, seed=0, restarts=True).sample == 0
    with pytest.raises(ConfigError, match="version 0"):
        resume_position(state | {"version": 0}, train, seed=0)


def test_fingerprint_depends_on_content_and_not_on_path(text, tmp_path):
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(text.read_bytes())
    assert open_text(text)[0].fingerprint == open_text(copy)[0].fingerprint
    assert open_text(text)[0].fingerprint != open_text(text)[1].fingerprint


class Broken(Exception):
    pass


def test_loader_failure_is_raised_at_every_next(text, monkeypatch):
    train, _ = open_text(text)
    part = type(train.parts[0])
    original, calls = part.rows, []

    def rows(self, *args):
        calls.append(1)
        if len(calls) > 2:
            raise Broken
        return original(self, *args)

    monkeypatch.setattr(part, "rows", rows)
    loader = Loader(train, global_batch_size=4, seed=0, sharding=sharding_on("dp=1"))
    next(loader), next(loader)
    for _ in range(2):
        with pytest.raises(Broken):
            next(loader)
    loader.close()


def test_closing_or_deleting_a_loader_ends_its_thread(text):
    train, _ = open_text(text)
    settings = {"global_batch_size": 4, "seed": 0, "sharding": sharding_on("dp=1")}
    before = threading.active_count()
    loader = Loader(train, **settings)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    loader.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    forgotten = Loader(train, **settings)
    next(forgotten)
    del forgotten
    assert threading.active_count() == before


def test_batches_work_under_the_transfer_guard(text):
    train, _ = open_text(text)
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        loader = Loader(train, global_batch_size=8, seed=0, sharding=sharding_on("dp=8"))
        next(loader)
        loader.close()
    finally:
        jax.config.update("jax_transfer_guard", "allow")


def test_a_batch_that_does_not_divide_is_refused(text):
    train, held = open_text(text)
    sharding = sharding_on("fsdp=4,dp=2")
    with pytest.raises(ConfigError, match="global_batch_size=12"):
        Loader(train, global_batch_size=12, seed=0, sharding=sharding)
    for size in (4, 0):
        with pytest.raises(ConfigError, match=f"global_batch_size={size} "):
            eval_batches(held, global_batch_size=size, sharding=sharding)
    alone = eval_batches(held, global_batch_size=1, sharding=sharding_on("dp=1"))
    assert next(iter(alone))["tokens"].shape[0] == 1


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_evaluation_counts_each_row_once(text, mesh, packing):
    _, held = open_text(text, text, packing=packing, eval_fraction=0.3)
    complete = held.rows(np.arange(held.num_rows))
    assert held.num_rows % 8, "the last batch must be ragged for this test to say something"
    sharding = sharding_on(mesh)
    batches = list(eval_batches(held, global_batch_size=8, sharding=sharding))
    assert len(batches) == -(-held.num_rows // 8)
    weights = np.concatenate([b["weights"] for b in batches])
    assert weights[held.num_rows :].sum() == 0
    for name, values in laid_out(complete, sharding).items():
        joined = np.concatenate([np.asarray(b[name]) for b in batches])
        np.testing.assert_array_equal(joined[: held.num_rows], values)


def test_limited_evaluation_spreads_its_rows_over_the_data(text):
    train, _ = open_text(text)
    batches = eval_batches(train, global_batch_size=4, sharding=sharding_on("dp=1"), max_batches=5)
    got = np.concatenate([np.asarray(b["tokens"]) for b in batches])
    expected = train.rows(np.arange(20) * train.num_rows // 20)["tokens"]
    np.testing.assert_array_equal(got, expected)


def test_an_evaluation_that_stops_early_ends_its_thread(text):
    train, _ = open_text(text)
    before = threading.active_count()
    batches = eval_batches(train, global_batch_size=4, sharding=sharding_on("dp=1"))
    next(batches)
    batches.close()
    assert threading.active_count() == before


WORKER = textwrap.dedent(
    """
    import json
    import sys
    import jax
    import numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    port, process = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxdist.core.mesh import MeshSpec
    from jaxdist.core.parallel.axes import row_axes
    from jaxdist.settings import ConfigError
    from jaxdist.data import DataConfig, Loader, eval_batches, open_datasets, resume_position
    train, held = open_datasets(DataConfig(sources=["text.txt"]), seq_len=16)
    for spec in ("dp=4", "dp=2,tp=2", "tp=4"):
        sharding = NamedSharding(MeshSpec.parse(spec).build(), PartitionSpec(row_axes()))
        loader = Loader(train, global_batch_size=8, seed=5, sharding=sharding)
        order = train.order(5)
        for step in range(3):
            expected = train.rows(order.rows(np.arange(step * 8, step * 8 + 8)))
            for name, values in next(loader).items():
                for shard in values.addressable_shards:
                    np.testing.assert_array_equal(shard.data, expected[name][shard.index])
        print("LEDGER", [link.digest for link in loader.ledger.links[-3:]])
        loader.close()
        total = sum(
            float(jax.jit(lambda x: x.sum())(b["weights"]))
            for b in eval_batches(held, global_batch_size=8, sharding=sharding)
        )
        assert total == held.num_rows * 16, total

    # A stream that is divided: each process reads its part, and each part's place is saved.
    config = DataConfig(sources=["two_streams:rows"], eval_fraction=0.0)
    stream, _ = open_datasets(config, seq_len=4)
    settings = {"global_batch_size": 8, "seed": 5}
    settings["sharding"] = NamedSharding(MeshSpec.parse("dp=4").build(), PartitionSpec(row_axes()))

    def firsts(batch):
        return [int(s.data[0, 0]) for s in batch["tokens"].addressable_shards]

    loader = Loader(stream, **settings)
    for step in range(2):
        assert firsts(next(loader)) == [100 * process + 4 * step + n for n in (0, 2)]
    state = json.loads(json.dumps(loader.state()))
    expected = firsts(next(loader))
    loader.close()
    assert len(state["iterators"]) == 2
    resumed = Loader(stream, **settings, start=resume_position(state, stream, seed=5))
    assert firsts(next(resumed)) == expected
    resumed.close()
    state["iterators"].pop()
    try:
        Loader(stream, **settings, start=resume_position(state, stream, seed=5))
    except ConfigError:
        print("SAME")
    other, _ = open_datasets(DataConfig(sources=[["text.txt", "other.txt"][process]]), seq_len=16)
    try:
        Loader(other, **settings)
    except ConfigError as error:
        print("REFUSED", "processes 1 opened" in str(error))
    """
)

STREAMS = """
import grain
import numpy as np

def row(i):
    tokens = np.arange(i, i + 5)
    return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": np.ones(4)}

def rows(*, seq_len, seed, shard_index, num_shards):
    return grain.MapDataset.range(100 * shard_index, 1000).map(row).to_iter_dataset()
"""


@pytest.mark.slow
def test_two_processes_have_the_batches_of_one_and_refuse_other_data(text, tmp_path):
    dataset, _ = open_text(text, seq_len=16)
    loader = Loader(dataset, global_batch_size=8, seed=5, sharding=sharding_on("dp=4"))
    ledger = [(next(loader), loader.ledger.links[-1].digest)[1] for _ in range(3)]
    loader.close()
    (tmp_path / "two_streams.py").write_text(STREAMS)
    (tmp_path / "other.txt").write_bytes(text.read_bytes()[::-1])
    port = free_port()
    processes = [Fork("-c", WORKER, port, number, cwd=tmp_path) for number in range(2)]
    for output in ["".join(process.communicate(timeout=180)) for process in processes]:
        assert output.strip().endswith("SAME\nREFUSED True"), output
        ledger_lines = [line for line in output.splitlines() if line.startswith("LEDGER")]
        assert ledger_lines == [f"LEDGER {ledger}"] * 3
