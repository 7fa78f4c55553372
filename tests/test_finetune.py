"""Hugging Face directories tuned in one command, also with new tokens, against transformers."""

import dataclasses
import json
import subprocess

import jax
import ml_dtypes
import numpy as np
import pytest
from commands import records, run, run_here
from decoders import FAMILIES, logits_of
from hf_models import CHATML, write_model, write_tokenizer
from refusals import refused

from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import read_run
from jaxdist.data import open_datasets
from jaxdist.models import DecoderConfig, build
from jaxdist.models.adapters import LoraConfig
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.directory import read_model
from jaxdist.run.setup import Parts
from jaxdist.run.trained_run import open_run
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main as convert
from jaxdist.tools.verify.__main__ import main as verify

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


@pytest.mark.parametrize(("model_type", "new"), [("phi3", ""), ("llama", "head/kernel")])
def test_adapters_that_peft_cannot_use_are_refused_before_training(tmp_path, model_type, new):
    make_directory(tmp_path, "llama2")
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--init-from", str(tmp_path), "--lora.rank=4", "--train.seq_len=64"]
    flags += [f"--reinit-params={new}"] if new else []
    read_run(flags, command="jaxdist.train")
    with refused("checkpoint.export=hf", new or "fuses", "convert merge", num_problems=1):
        read_run([*flags, "--checkpoint.export=hf"], command="jaxdist.train")


def test_weights_with_nan_are_refused_by_name(tmp_path):
    from jaxdist.run.setup import assemble

    model = dataclasses.replace(FAMILIES["llama2"], vocab_size=256)
    write_model(tmp_path / "in", model, scale=float("nan"))
    flags = ["--mesh=dp=1", "--data.tokenizer=bytes"]
    config = read_run([f"--init-from={tmp_path / 'in'}", *flags], command="jaxdist.train")
    with refused(tmp_path / "in", "embed/table", "NaN"):
        assemble(config, jax.devices()[:1]).init_state()


TOKENS = ["<|tool|>", "<|/tool|>"]
TEXTS = ["the quick brown fox jumps over the lazy dog"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """Return a function: (family, rows, dtype) -> a model and the same with two new tokens."""
    folder = tmp_path_factory.mktemp("tokens")

    def make(family="llama2", rows=288, dtype=np.float32, old_settings=False):
        base = folder / f"{family}-{rows}-{np.dtype(dtype).name}"
        out = base.with_name(f"{base.name}-more")
        if not base.exists():
            config = dataclasses.replace(FAMILIES[family], vocab_size=rows, max_seq_len=64)
            write_model(base, config, dtype, scale=0.1)
            write_tokenizer(base, TEXTS, 288, CHATML)
            if old_settings:
                file = base / "tokenizer_config.json"
                special = {"content": "<|im_end|>", "special": True}
                added = {"added_tokens_decoder": {str(num_tokens(base) - 1): special}}
                file.write_text(json.dumps(json.loads(file.read_text()) | added))
            words = [str(base), str(out), "--tokens", ",".join([*TOKENS, "<|im_end|>"])]
            assert convert(["add-tokens", *words]) == 0
        return base, out

    return make


def num_tokens(folder) -> int:
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()


def tensors_of(folder):
    return {name: tensor.read() for name, tensor in safetensors.open_all(folder).items()}


@pytest.mark.parametrize(
    "family, rows, dtype, old_settings",
    [
        ("llama2", 0, np.float32, False),
        ("llama2", 384, ml_dtypes.bfloat16, True),  # the checkpoint has unused rows
        ("gpt2", 0, np.float32, False),  # tied
    ],
)
def test_new_rows_are_the_mean_and_other_weights_keep_every_bit(
    extended, family, rows, dtype, old_settings
):
    base, out = extended(family, rows or 290, dtype, old_settings)
    old = num_tokens(base)
    ids = [old, old + 1]
    before, after = tensors_of(base), tensors_of(out)
    assert before.keys() == after.keys()
    tables = {name for name in before if "wte" in name or "embed_tokens" in name or "head" in name}
    assert len(tables) == (1 if family == "gpt2" else 2)
    for name, x in before.items():
        if name not in tables:
            np.testing.assert_array_equal(x, after[name], err_msg=name)
            continue
        size = max(len(x), old + 2)
        assert after[name].shape == (size, x.shape[1])
        np.testing.assert_array_equal(x[:old], after[name][:old])
        mean = x[:old].astype(np.float64).mean(0).astype(dtype)
        assert np.abs(mean).max() > 0
        for row in after[name][old:]:
            np.testing.assert_array_equal(row, mean)
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    for text, id in zip(TOKENS, ids, strict=True):
        assert tokenizer.encode(f"a{text}b", add_special_tokens=False)[1:-1] == [id]
        assert tokenizer.decode([id], skip_special_tokens=True) == ""
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template
    assert len(tokenizer) == old + 2


def test_logits_of_transformers_are_kept(extended):
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    base, out = extended(rows=290)
    load = transformers.AutoModelForCausalLM.from_pretrained
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():
        one, two = (load(path, dtype=torch.float32)(tokens).logits for path in (base, out))
    old = num_tokens(base)
    np.testing.assert_allclose(one[..., :old], two[..., :old], atol=1e-5)


TOKEN_FLAGS = [
    "--lora.rank=4", "--lora.base_format=float32", "--train.seq_len=32",
    "--train.global_batch_size=8", "--eval.final_max_batches=1", "--monitoring.tracker=",
    "--data.records=chat", "--optim.peak_lr=0.05", "--train.steps=6", "--checkpoint.export=hf",
    "--mesh=fsdp=4,tp=2",
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trained_rows_reach_peft_and_merged_weights(extended, tmp_path):
    base, out = extended(rows=290)
    run, first = tmp_path / "run", num_tokens(base)
    message = {"role": "user", "content": "<|tool|> fox <|/tool|>"}
    answer = {"role": "assistant", "content": "<|tool|> dog <|/tool|>"}
    data = tmp_path / "chats.jsonl"
    data.write_text((json.dumps({"messages": [message, answer]}) + "\n") * 40)
    ids = f"--lora.token-ids={first},{first + 1}"
    words = ["--init-from", out, "--data.sources", data, "--run-dir", run]
    assert run_here("train", *words, *TOKEN_FLAGS, ids) == 0
    exported = run / "export" / "6"
    stored = StoredArrays(run / "checkpoints" / "6")
    rows = {name: stored.read(name) for name in stored.entries if name.startswith("params/")}
    rows = {name: x for name, x in rows.items() if name.endswith("/rows")}
    start = tensors_of(out)["model.embed_tokens.weight"][first]
    assert rows.keys() == {"params/embed/table/rows", "params/head/kernel/rows"}
    for x in rows.values():
        assert x.shape == (2, 32) and np.abs(x[0] - x[1]).max() > 1e-3
    assert np.abs(rows["params/embed/table/rows"] - start).max() > 1e-3
    assert verify([str(run), "--export", str(exported)]) == 0
    assert convert(["from-peft", str(exported), str(tmp_path / "again")]) == 0
    again = StoredArrays(tmp_path / "again" / "checkpoints" / "0")
    for name, x in rows.items():
        np.testing.assert_array_equal(again.read(name), x)
    assert convert(["merge", str(run), str(tmp_path / "merged")]) == 0
    assert verify([str(run), "--export", str(tmp_path / "merged")]) == 0
    assert convert(["to-hf", str(tmp_path / "merged"), str(tmp_path / "hf")]) == 0
    # PEFT resizes the original model to the tokenizer, and then replaces the rows.
    small = ["to-peft", str(run), str(tmp_path / "small"), "--base", str(base)]
    assert convert(small) == 0

    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    peft = pytest.importorskip("peft", reason="needs the reference extra (peft)")
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained
    tokens = torch.tensor([[5, first, 8, first + 1, 11]])
    with torch.no_grad():
        logits = [
            model.eval()(tokens).logits.numpy()
            for model in (
                load(tmp_path / "hf", dtype=torch.float32),
                adapted(exported, dtype=torch.float32),
                adapted(tmp_path / "small", dtype=torch.float32),
                load(out, dtype=torch.float32),
            )
        ]
    bound = 5e-6 * np.abs(logits[0]).max()
    np.testing.assert_allclose(logits[1], logits[0], atol=bound)
    np.testing.assert_allclose(logits[2][..., : first + 2], logits[0][..., : first + 2], atol=bound)
    assert np.abs(logits[3] - logits[0]).max() > 0.05


def test_errors_name_the_fix(extended, tmp_path):
    base, out = extended(rows=290)
    (tmp_path / "adapter_config.json").write_text("[]")
    with refused("adapter_config.json", "list"):
        convert(["from-peft", str(tmp_path), str(tmp_path / "x")])
    model, lora, tensors = read_model(base), LoraConfig(rank=8), {}
    for module in peft_format.modules(model, lora):
        for name, shape in module.shapes(lora, 8).items():
            zeros = np.zeros(shape, np.float32)
            tensors[name] = safetensors.Tensor(shape, zeros.dtype, [zeros])
    safetensors.write(tmp_path / peft_format.WEIGHTS, tensors, {})
    settings = peft_format.write_config(model, LoraConfig(rank=4), str(base))
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with refused("r=4 in adapter_config.json", "q_proj=8", num_problems=1):
        convert(["from-peft", str(tmp_path), str(tmp_path / "x")])
    with refused("all of <|tool|>", "already"):
        convert(["add-tokens", str(out), str(tmp_path / "x"), "--tokens", "<|tool|>"])
    with refused("--tokens is empty"):
        convert(["add-tokens", str(base), str(tmp_path / "x")])
    words = ["--init-from", base, "--run-dir", tmp_path / "run", "--lora.rank=4"]
    with refused("lora.token_ids has 999", "add-tokens"):
        run_here("train", *words, "--lora.token-ids=3,999")
    with refused("token twice"):
        run_here("train", *words, "--lora.token-ids=3,3")
    with refused("without lora.rank"):
        run_here("train", *words[:-1], "--lora.token-ids=3")
