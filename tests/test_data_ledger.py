"""The data ledger: the same chain on every mesh and across restarts; other data are rejected."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from data_cases import open_text, sharding_on
from refusals import refused

from jaxdist.data import Loader, Position, resume_position
from jaxdist.data.__main__ import main
from jaxdist.data.order import NUM_LINKS, Link
from jaxdist.run.startup import check_recorded_ledger
from jaxdist.settings import ConfigError

BATCH = 8


@pytest.fixture
def dataset(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return open_text(text, seq_len=8)[0]


def walk(dataset, steps, *, mesh="dp=2", seed=3, **start) -> tuple[list[Link], dict]:
    loader = Loader(
        dataset, global_batch_size=BATCH, seed=seed, sharding=sharding_on(mesh), **start
    )
    links = [(next(loader), loader.ledger.links[-1])[1] for _ in range(steps)]
    state = json.loads(json.dumps(loader.state()))
    loader.close()
    return links, state


def chain_by_hand(dataset, seed, first_samples) -> list[str]:
    digests = [""]
    for first in first_samples:
        rows = [int(dataset.order(seed).rows(np.array([s]))[0]) for s in range(first, first + 8)]
        content = b"".join(row.to_bytes(8, "little") for row in rows)
        text = f"{digests[-1]} {dataset.fingerprint} ".encode()
        digests.append(hashlib.blake2b(text + content, digest_size=16).hexdigest())
    return digests[1:]


def test_the_chain_equals_the_reference_on_every_mesh_and_across_a_restart(dataset):
    steps = NUM_LINKS + 4
    links, state = walk(dataset, steps)
    expected = chain_by_hand(dataset, 3, range(0, steps * BATCH, BATCH))
    assert [link.digest for link in links] == expected
    assert walk(dataset, steps, mesh="fsdp=4")[0] == links
    assert len(state["ledger"]) == NUM_LINKS + 1
    after, _ = walk(dataset, 3, mesh="dp=1", start=resume_position(state, dataset, seed=3))
    assert after == walk(dataset, steps + 3)[0][steps:]
    assert walk(dataset, 2, seed=4)[0] != links[:2]


@pytest.mark.parametrize("index", [1, 5, -1])
def test_a_resume_with_another_ledger_is_refused(dataset, index):
    _, state = walk(dataset, 10)
    state["ledger"][index][2] = "0" * 32
    with pytest.raises(ConfigError, match="data ledger"):
        resume_position(state, dataset, seed=3)


def test_a_resume_with_another_row_order_is_refused(dataset, monkeypatch):
    from jaxdist.data import order

    _, state = walk(dataset, 10)
    resume_position(state, dataset, seed=3)
    monkeypatch.setattr(order, "_ROUNDS", 6)
    order.keys_of.cache_clear()
    with pytest.raises(ConfigError, match="data ledger"):
        resume_position(state, dataset, seed=3)
    order.keys_of.cache_clear()


def test_new_data_continue_the_chain(dataset, tmp_path):
    (tmp_path / "other.txt").write_text("something else altogether, and more of it. " * 60)
    other = open_text(tmp_path / "other.txt", seq_len=8)[0]
    links, state = walk(dataset, 3)
    start = resume_position(state, other, seed=3, restarts=True)
    assert start.ledger == (links[-1],)
    later, state = walk(other, 2, start=start)
    resume_position(state, other, seed=3)
    assert later[0].first_sample == 0 and later != walk(other, 2)[0]


def run_directory(path, dataset_flags, links, dataset, seed=3):
    from jaxdist.config import read_run
    from jaxdist.settings import write_toml

    argv = [*dataset_flags, f"--seed={seed}", "--train.seq-len=8", "--train.global-batch-size=8"]
    path.mkdir()
    (path / "config.toml").write_text(write_toml(read_run(argv, command="test")))
    header = {"kind": "event", "event": "run", "step": 0, "global_batch_size": BATCH, "seed": seed}
    lines = [{**header, "data_fingerprint": dataset.fingerprint}]
    for step, link in enumerate(links, start=1):
        line = {"kind": "train", "step": step, "first_sample": link.first_sample}
        lines.append({**line, "data_ledger": link.digest})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_removed_command_names_its_replacement():
    with refused("data prove", "--replay RUN:STEP"):
        main(["prove", "runs/a", "2:4"])


def test_a_checkpoint_of_another_run_than_the_metrics_is_refused(dataset, tmp_path):
    links, _ = walk(dataset, 6)
    path = run_directory(
        tmp_path / "run", [f"--data.sources={tmp_path / 'text.txt'}"], links, dataset
    )
    run = SimpleNamespace(path=path, metrics=path / "metrics.jsonl", is_writer=True, resumed=True)
    check_recorded_ledger(run, 4, Position(32, ledger=(links[3],)))
    check_recorded_ledger(run, 9, Position(72, ledger=(links[3],)))  # a line that a kill cut off
    with refused("step 5", links[4].digest, links[3].digest):
        check_recorded_ledger(run, 5, Position(40, ledger=(links[3],)))
