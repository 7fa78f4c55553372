"""`jaxdist data spike` finds the rows behind a loss, on any mesh, with each row's own loss."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import Fork, run_here
from hub_server import hub_in_use
from refusals import refused

from jaxdist.data import __main__ as data
from jaxdist.data.images import TEST_FILE, TRAIN_FILES
from jaxdist.run.metrics_log import read_records
from jaxdist.run.trained_run import open_run
from jaxdist.tools.spike import main

FLAGS = [
    "--data.sources=good.txt,bad.txt", "--data.tokenizer=bytes", "--model.vocab_size=256",
    "--model.d_model=32", "--model.num_layers=2", "--model.num_heads=4", "--model.mlp_dim=32",
    "--model.num_kv_heads=4", "--train.seq_len=64", "--train.global_batch_size=8",
    "--optim.warmup_steps=1", "--optim.peak_lr=0.01", "--monitoring.tracker=", "--mesh=dp=8",
    "--eval.interval_steps=0", "--checkpoint.save_interval_steps=20", "--seed=3",
]  # fmt: skip
GARBAGE = "".join(map(chr, np.random.default_rng(0).integers(33, 127, 150)))


@pytest.fixture(scope="module")
def spike(tmp_path_factory):
    """Train on a text with garbage in the middle of its second file; return the step that reads it.

    Rows 3 and 4 of the second file have 42 and 64 tokens of it.
    """
    patch = pytest.MonkeyPatch()
    patch.chdir(tmp_path_factory.mktemp("spike"))
    patch.setenv("JAXDIST_CACHE", "cache")
    line = "one line of a text\n"
    Path("good.txt").write_text(line * 150)
    Path("bad.txt").write_text((line * 12)[:214] + GARBAGE + line * 60)
    assert run_here("train", *FLAGS, "--run-dir=run", "--steps=45") == 0
    losses = [r["loss"] for r in read_records("run/metrics.jsonl") if r["kind"] == "train"]
    yield 26 + int(np.argmax(losses[25:])), losses
    patch.undo()


def listed(capsys, *argv) -> dict:
    capsys.readouterr()
    assert main(["run", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])  # others are logged


def test_planted_garbage_is_first(spike, capsys):
    step, losses = spike
    files = sorted(Path("run").rglob("*"))
    result = listed(capsys, step)
    rows = result["rows"]
    assert result["loss"] == losses[step - 1] > 1.2 * np.median(losses[25:])
    assert (result["checkpoint"], result["repeated_steps"]) == (
        (step - 1) // 20 * 20,
        (step - 1) % 20,
    )
    assert result["mean_row_loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert len(rows) == 8 and rows[0]["source"] == "bad.txt"
    assert rows[0]["row_of_source"] in (3, 4, 5)
    assert rows[0]["text"][:8] in GARBAGE
    assert rows[0]["loss"] > 2 * rows[3]["loss"] and rows[0]["share"] > 0.2
    assert [r["loss"] for r in rows] == sorted((r["loss"] for r in rows), reverse=True)
    assert sum(r["share"] for r in rows) == pytest.approx(1)
    assert main(["run", str(step), "--top=1"]) == 0
    out = capsys.readouterr().out
    assert f"{rows[0]['loss']:.4f}" in out and repr(rows[0]["text"]) in out
    assert f"{rows[1]['loss']:.4f}" not in out
    assert sorted(Path("run").rglob("*")) == files  # nothing is written


def test_row_losses_equal_those_of_batches_with_one_labeled_row(spike, capsys):
    """At the step after a checkpoint; the reference is the compiled evaluation of a single row."""
    rows = listed(capsys, 41)["rows"]
    run = open_run("run", step=40)
    params = run.parts.in_execution_order(run.weights(40).params)
    data = run.open_held_out(["good.txt", "bad.txt"])  # in the same order of rows
    data = data.rows(np.arange(data.num_rows))
    train_rows = [row for row in rows if row["source"] == "good.txt"]
    assert train_rows
    for row in train_rows[:2]:
        batch = {k: np.repeat(v[row["row"]][None], 8, axis=0) for k, v in data.items()}
        batch["weights"][1:] = 0
        sums = jax.device_get(run.parts_for().step.evaluate(params, batch))
        assert row["loss"] == pytest.approx(float(sums["loss"] / sums["weight"]), rel=1e-5)
        assert row["tokens"] == float(sums["weight"])


@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "pp=2,fsdp=4"])
def test_losses_are_equal_on_every_mesh(spike, capsys, mesh):
    one, many = (listed(capsys, 41, *flags)["rows"] for flags in ([], [f"--mesh={mesh}"]))
    assert [row["row"] for row in one] == [row["row"] for row in many]
    for a, b in zip(one, many, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert (a["text"], a["tokens"]) == (b["text"], b["tokens"])


NUM_ROWS, WRONG = 40, 18  # training rows, and the one with a wrong label


def write_images() -> list[str]:
    """Write images of the colors of their class."""
    rng = np.random.default_rng(1)
    colors = rng.integers(0, 256, (10, 3))
    for number, name in enumerate([*TRAIN_FILES, TEST_FILE]):
        labels = np.arange(8) % 4
        pixels = np.clip(colors[labels, :, None] + rng.integers(-9, 9, (8, 3, 1024)), 0, 255)
        labels[WRONG % 8] += 5 * (number == WRONG // 8)
        records = np.concatenate([labels[:, None], pixels.reshape(8, -1)], 1)
        records.astype(np.uint8).tofile(f"{name}.bin")
    return [
        "--model=cnn",
        "--model.mlp_dim=16",
        "--data.sources=.",
        FLAGS[-7],
        "--optim.peak_lr=0.002",
    ]


def write_labeled_texts() -> list[str]:
    """Write texts of the letter of their class."""
    letters = np.arange(NUM_ROWS) % 4
    labels = np.where(np.arange(NUM_ROWS) == WRONG, (letters + 1) % 4, letters)
    rows = [{"text": "abcd"[i] * 20, "label": int(n)} for i, n in zip(letters, labels, strict=True)]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ["--data.records=text_label", "--model.num_labels=4", "--data.eval_fraction=0"]
    flags = ["--data.sources=train.jsonl", "--train.seq_len=32", FLAGS[-7], FLAGS[-6], *data]
    return [*FLAGS[1:8], *flags]


@pytest.mark.parametrize("write", [write_images, write_labeled_texts])
def test_row_with_a_wrong_label_is_first(tmp_path, monkeypatch, capsys, write):
    monkeypatch.chdir(tmp_path)
    flags = [*write(), *FLAGS[-5:], "--train.global_batch_size=8", "--steps=30"]
    assert run_here("train", *flags, "--run-dir=run") == 0
    capsys.readouterr()
    records = [r for r in read_records("run/metrics.jsonl") if r["kind"] == "train"]
    losses = {r["step"]: r["loss"] for r in records}
    step = max(range(26, 31), key=losses.get)  # of the last epoch
    result = listed(capsys, step)
    first, *others = result["rows"]
    assert first["row_of_source"] == WRONG and first["label"] != first["predicted"]
    assert all(row["label"] == row["predicted"] for row in others) and len(others) == 7
    assert first["loss"] > 3 * others[0]["loss"]
    assert result["mean_row_loss"] == pytest.approx(losses[step], rel=1e-5)
    assert first["text"] == ("" if write is write_images else "c" * 20)
    names = ("row", "source", "label", "predicted", "text")
    listed_on_mesh = listed(capsys, step, "--mesh=dp=2,fsdp=2")["rows"]
    for one, two in zip(result["rows"], listed_on_mesh, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert [two[name] for name in names] == [one[name] for name in names]
    assert main(["run", str(step), "--top=1"]) == 0
    words = capsys.readouterr().out.splitlines()[-1].split()
    assert words[4:7] == [str(WRONG), str(first["label"]), str(first["predicted"])]


def test_rows_of_a_stream_name_their_file(tmp_path, monkeypatch, capsys):
    with hub_in_use(tmp_path, monkeypatch) as hub:
        Path("set").mkdir()
        for number in range(4):
            text = "one line of a text\n" * 80
            text = text[:500] + GARBAGE + text if number == 2 else text
            Path(f"set/train-{number}.jsonl").write_text(json.dumps({"text": text}))
        hub.store("datasets", "org/set", Path("set"), "0" * 40)
        stream = ["--data.sources=hf://org/set", "--data.streaming=true", "--data.eval_fraction=0"]
        assert run_here("train", *FLAGS[1:], *stream, "--run-dir=run", "--steps=30") == 0
        losses = [r["loss"] for r in read_records("run/metrics.jsonl") if r["kind"] == "train"]
        first = listed(capsys, 16 + int(np.argmax(losses[15:])))["rows"][0]
    assert first["source"] == f"hf://org/set@{'0' * 40}/train-2.jsonl"
    assert first["row_of_source"] in (7, 8, 9, 10) and first["text"][:8] in GARBAGE


def test_command_runs_as_typed(spike):
    """`data` is a folder below `run`, so the command is in `tools`."""
    typed = Fork("jaxdist", "data", "spike", "run", "41", "--json", "--top=1")
    out, errors = typed.communicate(timeout=200)
    assert typed.returncode == 0, errors
    assert len(json.loads(out)["rows"]) == 1
    with refused("data spike", "-m jaxdist.spike"):
        data.main(["spike", "run", "41"])


def test_steps_without_a_record_are_rejected(spike):
    with refused("step 99", "steps 1 to 45"):
        main(["run", "99"])
