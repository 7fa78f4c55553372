"""New special tokens: `convert add-tokens` and their training, against transformers and PEFT."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from commands import run_here
from decoders import FAMILIES
from hf_models import CHATML, write_model, write_tokenizer
from refusals import refused

from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.models.huggingface import safetensors
from jaxdist.tools.convert.__main__ import main as convert
from jaxdist.tools.verify.__main__ import main as verify

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


FLAGS = [
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
    assert run_here("train", *words, *FLAGS, ids) == 0
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
