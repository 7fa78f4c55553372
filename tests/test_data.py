"""Order, mixing, splits, batches, resuming: a step's batch depends on (data, seed, step) alone."""

import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.core.mesh import BATCH_AXES, MeshSpec
from jaxdist.core.types import ConfigError
from jaxdist.data import DataConfig, Loader, Order, eval_batches, open_datasets, resume_sample
from jaxdist.data.loader import make_batch

MESHES = ["dp=1", "dp=8", "dp=2,tp=4", "fsdp=4,dp=2", "pp=2,dp=2,tp=2", "fsdp=8"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def text(tmp_path):
    """A text of 1000 different-looking bytes without byte 0."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(1 + i * 37 % 100 for i in range(1000)))
    return path


def sharding_on(mesh: str) -> NamedSharding:
    spec = MeshSpec.parse(mesh)
    return NamedSharding(spec.build(jax.devices()[: spec.num_devices]), PartitionSpec(BATCH_AXES))


def open_text(*sources: Path, seq_len: int = 16, **settings):
    names = [str(source) for source in sources]
    return open_datasets(DataConfig(sources=names, **settings), seq_len=seq_len)


# --- order


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_each_epoch_takes_every_row_once(size):
    order = Order([size], [], seed=3)
    for epoch in range(3):
        samples = np.arange(epoch * size, (epoch + 1) * size)
        assert sorted(order.rows(samples)) == list(range(size))


def test_epochs_and_seeds_are_ordered_differently():
    def orders(seed, epoch):
        return Order([1000], [], seed).rows(np.arange(1000) + 1000 * epoch)

    # Two independent orders of 1000 rows agree in 1 place on average, in 10 almost never.
    kinds = [orders(0, 0), orders(0, 1), orders(1, 0), orders(1, 1), orders(2, 0)]
    for i, one in enumerate(kinds):
        for other in kinds[:i]:
            assert (one == other).sum() < 10


def test_every_row_is_equally_likely_at_every_place():
    counts = np.zeros((7, 7))
    for seed in range(1000):
        rows = Order([7], [], seed).rows(np.arange(7))
        counts[np.arange(7), rows] += 1
    expected = 1000 / 7
    # Chi-square of 36 degrees of freedom: 99.99 % of fair orders stay below 80.
    assert ((counts - expected) ** 2 / expected).sum() < 80


def test_large_orders_have_no_trace_of_the_storage_order():
    rows = Order([10**10], [], 0).rows(np.arange(100_000))
    assert len(np.unique(rows)) == 100_000
    assert rows.max() > 9.9e9
    # Correlation of 1e5 independent pairs: standard deviation 0.003.
    assert abs(np.corrcoef(np.arange(100_000), rows)[0, 1]) < 0.015
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.015


def test_order_is_pinned():
    """A checkpoint of an earlier version must find its order again; else raise STATE_VERSION."""
    assert Order([1000], [], 7).rows(np.array([0, 1, 999, 1000, 123456])).tolist() == PINNED
    mixed = Order([10, 1000], [0.25, 0.75], 7).rows(np.arange(8)).tolist()
    assert mixed == PINNED_MIXED


PINNED = [531, 750, 580, 726, 177]
PINNED_MIXED = [8, 992, 7, 195, 186, 9, 502, 787]


def test_a_sample_has_one_row_however_it_is_asked_for():
    order = Order([50, 70], [0.3, 0.7], 1)
    whole = order.rows(np.arange(500))
    assert np.concatenate(
        [order.rows(np.arange(i, i + 20)) for i in range(0, 500, 20)]
    ).tolist() == (whole.tolist())
    assert order.rows(np.array([499, 3])).tolist() == whole[[499, 3]].tolist()


def test_mixing_keeps_the_shares_at_every_time_and_epochs_within_each_source():
    sizes, weights = [30, 1000, 7], [5.0, 3.0, 2.0]
    rows = Order(sizes, weights, 0).rows(np.arange(20000))
    starts = np.cumsum([0, *sizes])
    for part, share in enumerate([0.5, 0.3, 0.2]):
        mine = (starts[part] <= rows) & (rows < starts[part + 1])
        seen = np.cumsum(mine)
        # A spread by the golden ratio stays within a few samples of the exact share.
        assert np.abs(seen - share * np.arange(1, 20001)).max() < 8
        own = rows[mine] - starts[part]
        whole = len(own) // sizes[part] * sizes[part]
        for epoch in own[:whole].reshape(-1, sizes[part])[:50]:
            assert sorted(epoch) == list(range(sizes[part]))


def test_mixing_goes_on_where_the_last_period_ended():
    rows = Order([100_000, 100_000], [1.0, 1.0], 0).rows(np.arange(140_000))
    assert len(np.unique(rows)) == 140_000


# --- rows


def test_stream_rows_are_consecutive_windows_and_targets_the_next_token(text):
    train, held = open_text(text, eval_fraction=0.0)
    stream = np.frombuffer(text.read_bytes() + b"\0", np.uint8)
    assert held is None
    assert train.num_rows == 1000 // 16
    batch = train.rows(np.array([3, 0, 61]))
    for row, index in enumerate([3, 0, 61]):
        at = index * 16
        np.testing.assert_array_equal(batch["tokens"][row], stream[at : at + 16])
        np.testing.assert_array_equal(batch["targets"][row], stream[at + 1 : at + 17])
    assert batch["weights"].min() == 1
    assert "segments" not in batch


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(32, 1), (33, 2), (34, 2), (48, 2)])
def test_a_row_needs_a_target_for_its_last_input(tmp_path, num_tokens, num_rows):
    path = tmp_path / "short.txt"
    path.write_text("x" * (num_tokens - 1))  # and the end token
    train, _ = open_text(path, eval_fraction=0.0)
    assert train.num_rows == num_rows
    assert train.rows(np.arange(num_rows))["targets"].shape == (num_rows, 16)


@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_rows_match_the_declared_fields(text, tmp_path, packing):
    other = tmp_path / "other.txt"
    other.write_text("some other text " * 40)
    train, _ = open_text(text, other, packing=packing, eval_fraction=0.0)
    batch = train.rows(np.array([train.num_rows - 1, 0, 1]))
    got = {name: (values.shape, values.dtype) for name, values in batch.items()}
    assert got == {name: ((3, *shape), dtype) for name, (shape, dtype) in train.fields.items()}


def test_held_out_tokens_are_the_end_of_the_stream_and_never_trained_on(text):
    train, held = open_text(text, eval_fraction=0.2)
    stream = np.frombuffer(text.read_bytes() + b"\0", np.uint8)
    cut = round(1001 * 0.8)
    trained = train.rows(np.arange(train.num_rows))
    tested = held.rows(np.arange(held.num_rows))
    np.testing.assert_array_equal(trained["tokens"].ravel(), stream[: train.num_rows * 16])
    np.testing.assert_array_equal(tested["tokens"].ravel(), stream[cut : cut + held.num_rows * 16])
    assert train.num_rows * 16 + 1 <= cut  # the last target too is before the cut


@pytest.mark.parametrize("packing", ["documents", "best_fit"])
def test_held_out_documents_are_whole(tmp_path, packing):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": chr(65 + i) * 20}) + "\n" for i in range(26)))
    train, held = open_text(path, packing=packing, seq_len=32, eval_fraction=0.25)
    seen = [set(np.unique(d.rows(np.arange(d.num_rows))["tokens"])) - {0} for d in (train, held)]
    assert not seen[0] & seen[1]
    assert 65 in seen[0]
    assert 89 in seen[1]


def test_eval_sources_replace_the_held_out_part(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("other " * 40)
    train, held = open_text(text, eval_sources=[str(other)])
    assert train.num_rows == 1000 // 16
    assert held.num_rows == 240 // 16
    assert held.tokenizer.decode(held.rows(np.array([0]))["tokens"][0]).startswith("other other")


def documents_file(tmp_path, lengths):
    """Document i is `length` bytes, all of value i+1."""
    path = tmp_path / "documents.jsonl"
    lines = [json.dumps({"text": chr(i + 1) * n}) for i, n in enumerate(lengths)]
    path.write_text("\n".join(lines))
    return path


def check_packed(batch):
    """What must hold for any packed batch of `documents_file`, by looking at each position."""
    for tokens, targets, weights, segments, positions in zip(
        *(batch[k] for k in ("tokens", "targets", "weights", "segments", "positions")), strict=True
    ):
        for at in range(len(tokens)):
            if segments[at] == 0:
                assert weights[at] == 0
                continue
            started = at == 0 or segments[at] != segments[at - 1]
            assert positions[at] == (0 if started else positions[at - 1] + 1)
            if not started:  # inside a segment only one document, ended by byte 0
                assert tokens[at] in (tokens[at - 1], 0)
                assert tokens[at - 1] != 0
            if weights[at]:
                assert targets[at] in (tokens[at], 0)
                assert tokens[at] != 0
            else:
                assert tokens[at] == 0


def test_packed_windows_mark_documents(tmp_path):
    lengths = [3, 1, 0, 40, 7, 8, 2, 16, 15, 5]  # "8" ends where a row does
    path = documents_file(tmp_path, lengths)
    train, _ = open_text(path, packing="documents", eval_fraction=0.0)
    batch = train.rows(np.arange(train.num_rows))
    check_packed(batch)
    stream = b"".join(bytes([i + 1]) * n + b"\0" for i, n in enumerate(lengths) if n)
    assert bytes(batch["tokens"].ravel().astype(np.uint8)) == stream[: batch["tokens"].size]
    assert batch["segments"].min() == 1


@pytest.mark.parametrize("seed", range(3))
def test_fitted_rows_hold_every_document_once_and_cut_only_long_ones(tmp_path, seed):
    lengths = np.random.default_rng(seed).integers(1, 50, 60)
    path = documents_file(tmp_path, lengths)
    train, _ = open_text(path, packing="best_fit", eval_fraction=0.0)
    batch = train.rows(np.arange(train.num_rows))
    check_packed(batch)
    inputs = batch["tokens"][batch["segments"] > 0]
    # Each document of n bytes has n inputs: its end is only ever a target.
    np.testing.assert_array_equal(np.bincount(inputs, minlength=61)[1:], lengths)
    for document, length in enumerate(lengths, start=1):
        rows = np.flatnonzero((batch["tokens"] == document).any(1))
        assert len(rows) == -(-length // 16)
    # Never worse than one row more than first fit's bound (Johnson 1973): 11/9 optimum + 1.
    assert train.num_rows <= 11 / 9 * np.ceil(lengths.sum() / 16) + 1


def test_a_dataset_is_a_source_for_grain(text):
    train, _ = open_text(text)
    shuffled = grain.MapDataset.source(train).seed(1).shuffle()
    assert shuffled[0]["tokens"].shape == (16,)
    assert len(shuffled) == train.num_rows


# --- loader


@pytest.mark.parametrize("mesh", MESHES)
def test_batches_are_the_same_on_every_mesh(text, mesh):
    train, _ = open_text(text)
    loader = Loader(train, global_batch_size=8, seed=5, sharding=sharding_on(mesh))
    order = train.order(5)
    for step in range(12):  # more than an epoch
        expected = train.rows(order.rows(np.arange(step * 8, step * 8 + 8)))
        batch = next(loader)
        assert batch.keys() == expected.keys()
        for name, values in batch.items():
            assert isinstance(values, jax.Array)
            np.testing.assert_array_equal(values, expected[name])
    loader.close()


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
@pytest.mark.parametrize("mesh", [m for m in MESHES if m != "dp=1"])
def test_a_process_reads_only_the_rows_of_its_devices(text, monkeypatch, mesh, num_processes):
    """Of 8 devices in mesh order, process p is played with the p-th part of them."""
    train, _ = open_text(text)
    expected = train.rows(train.order(5).rows(np.arange(16)))
    sharding = sharding_on(mesh)
    devices = list(sharding.mesh.devices.flat)
    own = len(devices) // num_processes
    part = type(train.parts[0])
    original, read = part.rows, []
    monkeypatch.setattr(part, "rows", lambda self, i: (read.extend(i), original(self, i))[1])
    everything = set()
    order = train.order(5)
    for process in range(num_processes):
        mine = devices[process * own : (process + 1) * own]

        def play(shape, sharding, callback, mine=mine):
            places = sharding.devices_indices_map(shape)
            return {d: (places[d], callback(places[d])) for d in mine}

        monkeypatch.setattr(jax, "make_array_from_callback", play)
        read.clear()
        batch = make_batch(
            train, lambda place: train.rows(order.rows(np.arange(16)[place])), 16, sharding
        )
        for name, held in batch.items():
            for place, values in held.values():
                np.testing.assert_array_equal(values, expected[name][place])
        replicas = {(c[1], c[2]) for c, d in np.ndenumerate(sharding.mesh.devices) if d in mine}
        assert len(read) == len(replicas) * 16 // MeshSpec.parse(mesh).num_replicas
        everything |= set(read)
    assert everything == set(order.rows(np.arange(16)))


def test_rows_are_read_once_per_batch_however_many_devices_hold_them(text, monkeypatch):
    train, _ = open_text(text)
    asked = []
    part = type(train.parts[0])
    original = part.rows
    monkeypatch.setattr(part, "rows", lambda self, i: (asked.append(len(i)), original(self, i))[1])
    sharding = sharding_on("dp=2,tp=4")
    next(eval_batches(train, global_batch_size=8, sharding=sharding))
    assert asked == [4, 4]


def test_starting_at_a_step_equals_having_run_to_it(text):
    train, _ = open_text(text)
    settings = {"global_batch_size": 8, "seed": 1, "sharding": sharding_on("dp=2")}
    whole = Loader(train, **settings)
    batches = [next(whole) for _ in range(10)]
    later = Loader(train, **settings, start_step=6)
    for batch in batches[6:]:
        np.testing.assert_array_equal(next(later)["tokens"], batch["tokens"])
    whole.close()
    later.close()


def test_state_counts_batches_handed_out_and_survives_another_batch_size(text):
    train, _ = open_text(text)
    sharding = sharding_on("dp=2")
    loader = Loader(train, global_batch_size=8, seed=1, sharding=sharding, prefetch=4)
    for _ in range(3):
        next(loader)
    state = json.loads(json.dumps(loader.state()))
    loader.close()
    assert state["next_sample"] == 24
    first = resume_sample(state, train, seed=1)
    resumed = Loader(train, global_batch_size=4, seed=1, sharding=sharding, start_sample=first)
    expected = train.rows(train.order(1).rows(np.arange(24, 28)))
    np.testing.assert_array_equal(next(resumed)["tokens"], expected["tokens"])
    resumed.close()


def state_of(dataset, seed=0):
    loader = Loader(dataset, global_batch_size=4, seed=seed, sharding=sharding_on("dp=1"))
    next(loader)
    loader.close()
    return loader.state()


def test_resuming_refuses_other_data_and_says_what_changed(text):
    train, _ = open_text(text)
    state = state_of(train)
    assert resume_sample(state, train, seed=0) == 4
    with pytest.raises(ConfigError, match="seq_len was 16 and is 8"):
        resume_sample(state, open_text(text, seq_len=8)[0], seed=0)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        resume_sample(state, train, seed=1)
    text.write_bytes(text.read_bytes()[:-1] + b"!")
    changed, _ = open_text(text)
    with pytest.raises(ConfigError, match="content, split or order of the sources is another"):
        resume_sample(state, changed, seed=0)
    assert resume_sample(state, changed, seed=0, on_change="restart") == 0
    with pytest.raises(ConfigError, match="has version 0, this code"):
        resume_sample(state | {"version": 0}, train, seed=0)


def test_fingerprint_follows_content_and_not_place(text, tmp_path):
    copy = tmp_path / "elsewhere.txt"
    copy.write_bytes(text.read_bytes())
    assert open_text(text)[0].fingerprint == open_text(copy)[0].fingerprint
    assert open_text(text)[0].fingerprint != open_text(text)[1].fingerprint


class Broken(Exception):
    pass


def test_a_failure_of_the_thread_is_raised_at_every_next(text, monkeypatch):
    train, _ = open_text(text)
    part = type(train.parts[0])
    original, calls = part.rows, []

    def rows(self, indices):
        calls.append(1)
        if len(calls) > 2:
            raise Broken("disk gone")
        return original(self, indices)

    monkeypatch.setattr(part, "rows", rows)
    loader = Loader(train, global_batch_size=4, seed=0, sharding=sharding_on("dp=1"))
    next(loader), next(loader)
    for _ in range(2):
        with pytest.raises(Broken, match="disk gone"):
            next(loader)
    loader.close()


def data_threads():
    return [t for t in threading.enumerate() if t.name == "jaxdist-data"]


def test_closing_or_forgetting_a_loader_ends_its_thread(text):
    train, _ = open_text(text)
    settings = {"global_batch_size": 4, "seed": 0, "sharding": sharding_on("dp=1")}
    loader = Loader(train, **settings)
    next(loader)
    loader.close()
    loader.close()
    assert not data_threads()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader)
    forgotten = Loader(train, **settings)
    next(forgotten)
    del forgotten
    assert not data_threads()


def test_batches_are_made_under_the_transfer_guard(text):
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
    with pytest.raises(ConfigError, match="global_batch_size=12 does not divide over 8 parts"):
        Loader(train, global_batch_size=12, seed=0, sharding=sharding)
    with pytest.raises(ConfigError, match="global_batch_size=4"):
        eval_batches(held, global_batch_size=4, sharding=sharding)


# --- evaluation


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("packing", ["stream", "documents", "best_fit"])
def test_evaluation_counts_each_row_once(text, mesh, packing):
    _, held = open_text(text, text, packing=packing, eval_fraction=0.3)
    whole = held.rows(np.arange(held.num_rows))
    assert held.num_rows % 8, "the last batch must be ragged for this test to say something"
    batches = list(eval_batches(held, global_batch_size=8, sharding=sharding_on(mesh)))
    assert len(batches) == -(-held.num_rows // 8)
    weights = np.concatenate([b["weights"] for b in batches])
    assert weights[held.num_rows :].sum() == 0
    for name, values in whole.items():
        joined = np.concatenate([np.asarray(b[name]) for b in batches])
        np.testing.assert_array_equal(joined[: held.num_rows], values)


def test_limited_evaluation_takes_different_rows_from_all_over(text):
    train, _ = open_text(text)
    batches = eval_batches(train, global_batch_size=4, sharding=sharding_on("dp=1"), max_batches=5)
    got = np.concatenate([np.asarray(b["tokens"]) for b in batches])
    expected = train.rows(np.arange(20) * train.num_rows // 20)["tokens"]
    np.testing.assert_array_equal(got, expected)


# --- many processes

WORKER = textwrap.dedent(
    """
    import sys
    import jax
    import numpy as np
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    port, process, source = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    from jax.sharding import NamedSharding, PartitionSpec
    from jaxdist.data import DataConfig, Loader, eval_batches, open_datasets
    from jaxdist.core.mesh import BATCH_AXES, MeshSpec
    from jaxdist.core.types import ConfigError
    train, held = open_datasets(DataConfig(sources=[source]), seq_len=16)
    for spec in ("dp=4", "dp=2,tp=2", "tp=4"):
        sharding = NamedSharding(MeshSpec.parse(spec).build(), PartitionSpec(BATCH_AXES))
        try:
            loader = Loader(train, global_batch_size=8, seed=5, sharding=sharding)
        except ConfigError as error:
            print("REFUSED", error)
            sys.exit(0)
        order = train.order(5)
        for step in range(3):
            expected = train.rows(order.rows(np.arange(step * 8, step * 8 + 8)))
            for name, values in next(loader).items():
                for shard in values.addressable_shards:
                    np.testing.assert_array_equal(shard.data, expected[name][shard.index])
        loader.close()
        total = sum(
            float(jax.jit(lambda x: x.sum())(b["weights"]))
            for b in eval_batches(held, global_batch_size=8, sharding=sharding)
        )
        assert total == held.num_rows * 16, total
    print("SAME")
    """
)


def run_two_processes(sources):
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parent.parent))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(port), str(i), str(source)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i, source in enumerate(sources)
    ]  # fmt: skip
    try:
        return [p.communicate(timeout=180)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_two_processes_hold_the_batches_of_one(text):
    for output in run_two_processes([text, text]):
        assert output.strip().endswith("SAME"), output


@pytest.mark.slow
def test_processes_with_other_data_are_refused(text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    for output in run_two_processes([text, other]):
        assert "REFUSED processes [1] opened other data than process 0" in output, output
