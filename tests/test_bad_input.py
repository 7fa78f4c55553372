"""User errors through the real commands: one message each, and nothing starts.

A message contains the value, the allowed values and the fix. Commands exit with code 2.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import nothing_starts  # noqa: F401

from jaxdist import runtime
from jaxdist.settings import ConfigError

FIXES = (
    "Add ", "Change ", "Check ", "Choose ", "Did you mean", "Drop ", "Give ", "Name ", "Raise ",
    "Reduce ", "Remove ", "Set ", "Shorten ", "The default is ", "Try ", "Use ", "remove ", "use ",
    "--help",
)  # fmt: skip
"""Words with which a message begins what to do."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {
        "good.txt": "some text to train on\n" * 50,
        "mixed/a.jsonl": '{"text": "x"}\n',
        "mixed/b.txt": "y",
        "a/run/readme.txt": "no config here",
        "rules.toml": "[train]\nsteps = 0\n[optim]\nbeta1 = 1.5\n[model]\nmlp_dim = 0\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "tokens.bin").write_bytes(bytes(range(256)))
    (tmp_path / "cifar").mkdir()
    (tmp_path / "cifar" / "data_batch_1.bin").write_bytes(b"\0" * 3073)
    return tmp_path


def refusal(command, argv, capsys):
    """Check that the command refuses with exit code 2, and return its message."""
    in_main = command in ("data", "report")
    name = f"jaxdist.{command}.__main__" if in_main else f"jaxdist.{command}"
    try:
        code = importlib.import_module(name).main(argv)
    except ConfigError as error:
        return str(error)
    except SystemExit as leaving:
        code = leaving.code
    assert code == 2
    return capsys.readouterr().err


MESH = {  # tests/test_mesh.py covers the notation
    "too many devices": (
        ["--simulate=8", "--mesh=dp=4,tp=4"], "needs 16 devices, 8 are", "--mesh dp=2,tp=4"),
    "too few devices": (["--simulate=8", "--mesh=dp=4"], "needs 4 devices", "--mesh dp=8"),
    "heads": (["--mesh=tp=16"],
        "tp=16 does not divide model.num_heads=8", "Legal with 16 devices"),
    "kv heads": (
        ["--mesh=tp=4", "--model.num_kv_heads=2"],
        "does not divide model.num_kv_heads=2", "Legal with 4"),
    "layers": (["--mesh=pp=9"], "pp=9: some stages of model.num_layers=8", "pp=8 or less"),
    "layers of a stage": (
        ["--mesh=pp=2", "--simulate=2", "--pipeline.layers-per-stage=4,5"],
        "layers_per_stage=4,5 has 9 layers", "with the sum model.num_layers=8"),
    "batch": (["--mesh=dp=3"], "global_batch_size=16 is not a multiple of 3", "15 or 18"),
    "microbatches": (
        ["--mesh=dp=4", "--train.num_microbatches=16"], "multiple of 64",
        "Use --train.num-microbatches 4, a batch of 64"),
    "microbatches of a pipeline": (
        ["--mesh=pp=2", "--train.global-batch-size=6", "--train.num-microbatches=4"],
        "multiple of 4", "Use --train.num-microbatches 2, a batch of 4 or 8"),
    "fsdp width": (
        ["--mesh=fsdp=32", "--model.d_model=240"],
        "fsdp=32 does not divide model.d_model=240", "Legal"),
    "zero width": (
        ["--mesh=dp=32", "--zero=3", "--model.d_model=240"], "(zero=3) does not divide", "Legal"),
    "stages of a cnn": (
        ["--mesh=pp=2", "--model=cnn", "--data.sources=cifar"], "no stacked layers", "Use pp=1"),
    "nothing legal": (
        ["--simulate=11", "--train.global_batch_size=6"],
        "not a multiple of 11", "Legal with 10 devices"),
}  # fmt: skip

FLAGS = {  # tests/test_config.py covers the problems of the reader itself
    "lr": (["--lr=3e-4"], "--lr", "Did you mean --optim.peak-lr"),
    "other kind's field": (["--model.depth=8"], "of kind decoder", "See --help"),
    "not a kind": (["--model=cmm"], "'cmm'", "decoder, cnn, resnet or custom"),
    "bad name": (["--name=a/b"], "name='a/b'", "Use run_dir for a path"),
    "resume from nowhere": (["--resume=runs/none"], "resume='runs/none'", "use auto"),
    "resume misspelt": (["--resume=atuo"], "resume='atuo' is not auto, never", "use auto"),
    "run directory is a file": (["--run-dir=good.txt"], "run_dir='good.txt' is a file", "Name"),
    "coordinator alone": (
        ["--runtime.coordinator_address=n1:29400"], "n1:29400", "Give all three"),
    "negative seed": (["--seed=-1"], "seed=-1", "The default is 0"),
}  # fmt: skip

RULES = {
    "steps 0": (["--steps=0"], "train.steps=0", "The default is 320"),
    "heads and width": (["--model.num_heads=3"], "num_heads=3 does not divide", "Choose a"),
    "kv heads and heads": (["--model.num_kv_heads=3"], "num_kv_heads=3", "Use a divisor"),
    "odd rotary head": (["--model.head_dim=15"], "head_dim=15 is odd", "Use an even"),
    "cudnn on CPU": (
        ["--model.attention=cudnn", "--simulate=1"], "needs a GPU", "attention='auto'"),
    "position table": (
        ["--model.positions=learned", "--train.seq_len=4096"], "seq_len=4096 is longer", "Reduce"),
    "vocabulary below bytes": (["--model.vocab_size=100"], "vocab_size=100 is smaller", "Use 1024"),
    "remat": (["--train.remat=some"], "remat='some'", "Use auto, none"),
    "remat name": (["--train.remat=names:qkv,mlp"], "select mlp", "Use names from"),
    "learning rate nan": (["--optim.peak_lr=nan"], "optim.peak_lr=nan", "The default is"),
    "checkpoints kept": (["--checkpoint.max_to_keep=0"], "max_to_keep=0", "The default is"),
    "log interval": (["--monitoring.log_interval_steps=0"], "log_interval_steps=0", "1 or more"),
    "custom without factory": (["--model=custom"], "model.factory=''", "Use e.g."),
}  # fmt: skip

DATA = {
    "held out": (["--data.eval_fraction=1"], "eval_fraction=1.0", "at least 0 and below 1"),
    "text for a cnn": (["--model=cnn"], "not a CIFAR-10 folder", "--model decoder"),
    "resnet depth": (
        ["--model=resnet", "--data.sources=cifar", "--model.depth=21"], "model.depth=21", "Use 20"),
    "images for a decoder": (["--data.sources=cifar"], "contains images", "--model cnn"),
}  # fmt: skip

FILES = {
    "no file": (["--config=none.toml"], "none.toml does not exist", "llama3_8b"),
    "broken rules": (["--config=rules.toml"], "[train.steps: rules.toml line 2]", "The default"),
}

TRAIN = {**MESH, **FLAGS, **RULES, **DATA, **FILES}

OTHERS = {
    "evaluate nothing": ("evaluate", [], "RUN", "jaxdist.evaluate RUN"),
    "evaluate no run": ("evaluate", ["a/run"], "'a/run' has no config.toml", "Name a run"),
    "evaluate typo": ("evaluate", ["x", "--max_batch=3"], "--max-batch", "--max-batches"),
    "generate nothing": ("generate", [], "RUN", "jaxdist.generate RUN"),
    "generate no run": ("generate", ["runs/none"], "'runs/none' has no", "Name a run"),
    "generate top_p": ("generate", ["x", "--top_p=2"], "top_p=2.0", "above 0 and at most 1"),
    "generate temperature": ("generate", ["x", "--temperature=hot"], "'hot'", "default is 0.8"),
    "data nothing": ("data", [], "SOURCES is missing", "Use python -m jaxdist.data SOURCES"),
    "data no source": ("data", ["nope.txt", "--out=t"], "'nope.txt'", "Check the path"),
    "data out exists": ("data", ["good.txt", "--out=mixed"], "--out mixed exists", "Choose"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "expected_value", "fix"), TRAIN.values(), ids=TRAIN)
def test_train_rejects_with_value_allowed_and_fix(argv, expected_value, fix, folder, capsys):
    text = refusal("train", argv, capsys)
    assert expected_value in text and fix in text
    heading, *lines = text.splitlines()
    assert heading.startswith("jaxdist.train: ")
    assert lines and all(line.startswith("  - ") for line in lines)
    assert int(heading.split()[1]) == len(lines)
    for line in lines:
        assert any(word in line for word in FIXES), line


@pytest.mark.parametrize(("command", "argv", "expected_value", "fix"), OTHERS.values(), ids=OTHERS)
def test_other_commands_reject_with_value_and_fix(
    command, argv, expected_value, fix, folder, capsys
):
    text = refusal(command, argv, capsys)
    assert expected_value in text and fix in text
    assert "Traceback" not in text


SUBPROCESSES = {
    "mesh": ["jaxdist.train", "--simulate=8", "--mesh=dp=3,tp=3"],
    "command": ["jaxdist", "trian"],
}


@pytest.mark.parametrize("argv", SUBPROCESSES.values(), ids=SUBPROCESSES)
def test_rejected_command_exits_2_without_traceback(argv, folder):
    out = subprocess.run(
        [sys.executable, "-m", *argv],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(runtime.__file__).parents[2]), "PATH": ""},
    )
    assert out.returncode == 2, out.stderr
    assert out.stdout == ""
    assert 0 < len(out.stderr.splitlines()) < 12
    assert "Traceback" not in out.stderr and "Error" not in out.stderr
    assert not list(folder.glob("runs/*"))
