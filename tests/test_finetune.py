"""From a Hugging Face directory to a tuned one, in one command, against transformers."""

import dataclasses
import json
import subprocess

import jax
import numpy as np
import pytest
from commands import records, run, run_here
from decoders import FAMILIES, logits_of
from hf_models import CHATML, write_model, write_tokenizer
from refusals import refused

from jaxdist.config import read_run
from jaxdist.data import open_datasets
from jaxdist.models import DecoderConfig, build
from jaxdist.run.setup import Parts
from jaxdist.run.trained_run import open_run
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main as convert

VOCAB = 320
FLAGS = [
    "--data.records=chat",
    "--data.eval_fraction=0.2",
    "--train.seq_len=64",
    "--train.global_batch_size=8",
    "--optim.peak_lr=3e-3",
    "--optim.warmup_steps=2",
    "--eval.interval_steps=0",
    "--monitoring.log_interval_steps=1",
]


def talk(number: int) -> dict:
    color = ("red", "green", "blue")[number % 3]
    return {
        "messages": [
            {"role": "user", "content": f"What colour has number {number}?"},
            {"role": "assistant", "content": f"Number {number} is {color}."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": f"Yes, {color}."},
        ]
    }


def config_of(family: str) -> DecoderConfig:
    return dataclasses.replace(FAMILIES[family], vocab_size=VOCAB, max_seq_len=64)


def make_directory(path, family: str):
    talks = [talk(number) for number in range(60)]
    write_model(path, config_of(family), scale=0.1)
    texts = [message["content"] for t in talks for message in t["messages"]]
    write_tokenizer(path, texts, VOCAB, CHATML)
    (path / "chats.jsonl").write_text("".join(json.dumps(t) + "\n" for t in talks))


def tune(path, run_dir, *flags) -> subprocess.CompletedProcess:
    done = run(
        "train", "--init-from", path, f"--data.sources={path / 'chats.jsonl'}", "--run-dir",
        run_dir, *FLAGS, *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def transformers_loss(path, rows) -> float:
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    total = weight = 0.0
    for row in range(len(rows["tokens"])):
        for segment in range(1, rows["segments"][row].max() + 1):
            inside = rows["segments"][row] == segment
            with torch.no_grad():
                logits = model(torch.from_numpy(rows["tokens"][row][inside][None]).long()).logits[0]
            log_probs = torch.log_softmax(logits.double(), -1).numpy()
            picked = log_probs[np.arange(inside.sum()), rows["targets"][row][inside]]
            total -= (picked * rows["weights"][row][inside]).sum()
            weight += rows["weights"][row][inside].sum()
    return total / weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        ("llama3.1", "fsdp=8"),
        ("gpt2", "dp=2,tp=2,pp=2"),
    ],
)
def test_one_command_tunes_a_hugging_face_directory(tmp_path, family, mesh):
    """The first loss equals transformers', losses fall, and the exported model has our logits."""
    source, run_dir = tmp_path / "model", tmp_path / "run"
    make_directory(source, family)
    done = tune(source, run_dir, "--steps=30", f"--mesh={mesh}", "--simulate=8")
    assert f"weights from {source}" in done.stdout + done.stderr
    losses = [record["loss"] for record in records(run_dir, "train")]
    opened = open_run(str(run_dir))
    assert opened.parts.config.model == config_of(family)
    train, _ = open_datasets(opened.parts.config.data, seq_len=64)
    assert train.identity["packing"] == "best_fit"
    first = train.rows(train.order(0).rows(np.arange(8)))
    # Float32 sums in another order: the contract's tolerance between meshes.
    np.testing.assert_allclose(losses[0], transformers_loss(source, first), rtol=2e-5)
    assert losses[-1] < 0.7 * losses[0]
    out = tmp_path / "out"
    assert convert(["to-hf", str(run_dir), str(out)]) == 0
    assert (out / "chat_template.jinja").read_text() == CHATML
    params, step, _ = opened.weights()
    assert step == 30
    import torch
    import transformers

    exported = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    with torch.no_grad():
        expected = exported.eval()(torch.from_numpy(first["tokens"]).long()).logits.numpy()
    ours = logits_of(
        build(config_of(family), seq_len=64),
        jax.tree.map(np.asarray, params),
        {"tokens": first["tokens"]},
    )
    np.testing.assert_allclose(ours, expected, atol=1e-4, rtol=0)  # logits of order 10


def test_a_directory_sets_model_and_tokenizer_and_the_user_the_rest(tmp_path):
    make_directory(tmp_path, "llama3.1")
    for spelled in ("--init-from", "--init_from"):
        config = read_run([spelled, str(tmp_path), "--model.dropout=0.1"], command="jaxdist.train")
        assert config.init_from == str(tmp_path)
        assert config.data.tokenizer == str(tmp_path / "tokenizer.json")
        assert config.model.dropout == 0.1
        assert config.model.num_kv_heads == 2 and config.model.tie_embeddings
        assert config.optim.peak_lr == 2e-5
    file = tmp_path / "run.toml"
    file.write_text(f'init_from = "{tmp_path}"\n[optim]\npeak_lr = 1e-4\n')
    config = read_run(["--config", str(file)], command="jaxdist.train")
    assert config.model.vocab_size == VOCAB and config.optim.peak_lr == 1e-4


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--model.num_layers=4"], r"model.num_layers=4 .* 2\b"),
        (["--model.rope_theta=10000"], r"model.rope_theta=10000.0"),
        (["--model=cnn", "--data.sources=stdlib"], r"model.kind='cnn' with init_from"),
    ],
)
def test_settings_that_contradict_the_weights_are_refused(tmp_path, flags, error):
    make_directory(tmp_path, "llama3.1")
    with pytest.raises(ConfigError, match=error):
        read_run(["--init-from", str(tmp_path), *flags], command="jaxdist.train")


def test_a_directory_that_cannot_be_used_is_refused_before_anything_starts(tmp_path):
    make_directory(tmp_path, "llama3.1")
    (tmp_path / "tokenizer.json").unlink()
    ask = lambda: read_run(["--init-from", str(tmp_path)], command="jaxdist.train")
    with refused("data.tokenizer=", tmp_path / "tokenizer.json"):
        ask()
    sizes = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "model_type": "mamba"}))
    with refused("model_type='mamba'"):
        ask()
    (tmp_path / "config.json").write_text("{")
    with refused(tmp_path / "config.json", "line 1 column 2"):
        ask()
    with refused(f"init_from='{tmp_path / 'nowhere'}'"):
        read_run(["--init-from", str(tmp_path / "nowhere")], command="jaxdist.train")


def test_dropout_of_the_directory_is_not_applied_silently(tmp_path):
    make_directory(tmp_path, "gpt2")
    sizes = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "resid_pdrop": 0.1}))
    flags = ["--init-from", str(tmp_path), "--train.seq_len=64"]
    config = read_run(flags, command="jaxdist.train")
    assert config.model.dropout == 0
    assert any("resid_pdrop=0.1" in line for line in config.remarks())


@pytest.mark.slow
def test_a_tuned_run_resumes_with_the_same_command(tmp_path, monkeypatch):
    """The second start reads the checkpoint and no weights; settings are those of the first."""
    source, run_dir = tmp_path / "model", tmp_path / "run"
    make_directory(source, "llama2")
    job = ["--init-from", source, f"--data.sources={source / 'chats.jsonl'}", *FLAGS]
    job += ["--run-dir", run_dir, "--mesh=dp=4,fsdp=2"]
    assert run_here("train", *job, "--steps=2") == 0
    monkeypatch.setattr(Parts, "stored_params", None)  # the function that reads weights
    assert run_here("train", *job, "--steps=3") == 0
    restored = [e["step"] for e in records(run_dir, "event") if e["event"] == "restore"]
    assert restored == [2]
    assert [record["step"] for record in records(run_dir, "train")] == [1, 2, 3]


def test_a_new_head_is_random_and_omitted_weights_are_named(tmp_path):
    """A separate head of a tied model is refused until it is named; the seed initializes it."""
    from jaxdist.run.setup import assemble

    source = tmp_path / "model"
    make_directory(source, "qwen2")
    flags = ["--init-from", str(source), "--model.tie_embeddings=false", "--mesh=fsdp=4"]
    flags += ["--train.global_batch_size=8"]
    with refused("model.tie_embeddings=False", "gives True"):
        read_run(flags, command="jaxdist.train")
    config = read_run([*flags, "--reinit-params=head/kernel"], command="jaxdist.train")
    parts = assemble(config, jax.devices()[:4])
    params = parts.init_state().params
    random = assemble(
        dataclasses.replace(config, init_from="", reinit_params=[]), jax.devices()[:4]
    )
    expected = random.init_state().params
    np.testing.assert_array_equal(params["head"]["kernel"], expected["head"]["kernel"])
    stored = parts.stored_params(str(source), parts.init_state().params, reinit=["head/kernel"])
    np.testing.assert_array_equal(params["embed"]["table"], stored["embed"]["table"])
    assert not np.array_equal(params["embed"]["table"], expected["embed"]["table"])
    with refused("reinit_params", "params/tail"):
        broken = dataclasses.replace(config, reinit_params=["head/kernel", "tail"])
        assemble(broken, jax.devices()[:4]).init_state()
    tied = dataclasses.replace(config.model, tie_embeddings=True, bias=[])
    other = dataclasses.replace(config, model=tied, reinit_params=[])
    with refused("params/layers/attention/qkv_bias", "reinit_params"):
        assemble(other, jax.devices()[:4]).init_state()
    unused = dataclasses.replace(other, reinit_params=["layers/attention/qkv_bias"])
    assemble(unused, jax.devices()[:4]).init_state()
    with refused("reinit_params=['head']", "init_from"):
        read_run(["--reinit-params=head"], command="jaxdist.train")


def test_weights_with_nan_are_refused_by_name(tmp_path):
    from jaxdist.run.setup import assemble

    model = dataclasses.replace(FAMILIES["llama2"], vocab_size=256)
    write_model(tmp_path / "in", model, scale=float("nan"))
    flags = ["--mesh=dp=1", "--data.tokenizer=bytes"]
    config = read_run([f"--init-from={tmp_path / 'in'}", *flags], command="jaxdist.train")
    with refused(tmp_path / "in", "embed/table", "NaN"):
        assemble(config, jax.devices()[:1]).init_state()
