"""Inconsistent Hugging Face directories and absent keys: read as by transformers, or rejected."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from decoders import FAMILIES, VARIANTS, logits_of, random_tokens
from hf_models import reference_logits, rewrite_tensors, write_model, write_tokenizer
from refusals import refused
from test_convert_hf import SEQ, TOLERANCE, change, tree_of

from jaxdist.models import build
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.config_keys import DEFAULTS
from jaxdist.models.huggingface.directory import open_weights, read_model
from jaxdist.models.huggingface.families import read_config
from jaxdist.tools.convert.__main__ import main

TABLES = {
    "llama3.1": "model.embed_tokens.weight",
    "gemma2": "model.embed_tokens.weight",
    "gpt2": "transformer.wte.weight",
}


def transformers_logits(path, tokens):
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    return reference_logits(model.eval(), tokens)


def our_logits(path, tokens):
    return logits_of(build(read_model(path), seq_len=SEQ), tree_of(path), {"tokens": tokens})


def check_logits(path) -> None:
    tokens = random_tokens(2, SEQ)
    expected = transformers_logits(path, tokens)
    np.testing.assert_allclose(our_logits(path, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("case", ["differs", "equal", "head_only"])
def test_a_tied_model_with_a_head_has_the_logits_of_transformers(tmp_path, name, case):
    write_model(tmp_path / "in", {**FAMILIES, **VARIANTS}[name], scale=0.1)

    def add_head(tensors):
        head = tensors[TABLES[name]].copy()
        if case == "differs":
            head[-1, -1] += 1.0  # the last value of the last row
        tensors["lm_head.weight"] = head
        if case == "head_only":
            del tensors[TABLES[name]]

    rewrite_tensors(tmp_path / "in", add_head)
    is_tied = case != "differs"
    assert read_model(tmp_path / "in").tie_embeddings == is_tied
    assert ("params/head/kernel" in open_weights(tmp_path / "in").pieces) == (not is_tied)
    check_logits(tmp_path / "in")
    assert main(["from-hf", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] == is_tied
    check_logits(tmp_path / "out")


def test_unexpected_or_missing_heads_are_rejected(tmp_path):
    write_model(tmp_path, FAMILIES["llama3.1"])
    head = np.zeros((97, 32), np.float32)
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({"model.lm_head.weight": head}))
    with refused("model.lm_head.weight"):
        open_weights(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors.pop("model.lm_head.weight"))
    change(tmp_path, tie_word_embeddings=False)
    with refused("lm_head.weight is missing", "tie_word_embeddings"):
        open_weights(tmp_path)


def write_shards(path, scale: float, *, without: str = "") -> None:
    """Write a model's weights times `scale` as shards with an index, without `model.safetensors`.

    The index does not name the tensor `without`.
    """
    write_model(path, FAMILIES["llama2"], scale=scale)
    tensors = safetensors.open_all(path)
    stored = {n: safetensors.Tensor(t.shape, t.dtype, [t.read()]) for n, t in tensors.items()}
    (path / safetensors.SINGLE).unlink()
    safetensors.write_shards(path, stored, 4e-5, {})
    index = json.loads((path / safetensors.INDEX).read_text())
    index["weight_map"].pop(without, None)
    (path / safetensors.INDEX).write_text(json.dumps(index))


def test_single_file_takes_precedence_over_an_index(tmp_path):
    write_shards(tmp_path, scale=0.05)
    assert len(safetensors.indexed_files(safetensors.locate(tmp_path))) > 1
    write_model(tmp_path, FAMILIES["llama2"], scale=0.1)
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        shutil.copy(tmp_path / "config.json", tmp_path / name)  # not weights: a read would fail
    assert {t.file.name for t in open_weights(tmp_path).tensors.values()} == {safetensors.SINGLE}
    check_logits(tmp_path)


def test_tensor_missing_from_the_index_is_not_dropped(tmp_path):
    write_shards(tmp_path, scale=0.1, without="lm_head.weight")
    check_logits(tmp_path)
    change(tmp_path, tie_word_embeddings=True)
    assert not read_model(tmp_path).tie_embeddings
    check_logits(tmp_path)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["model-00001-of-00002.safetensors", "model-00001-of-00003.safetensors"], "-of-00003"),
        (["weights.safetensors", "pytorch_model.bin"], "pytorch_model.bin"),
        (["weights.safetensors", "pytorch_model.bin.index.json"], "pytorch_model.bin.index.json"),
        (["pytorch_model.bin"], "pytorch_model.bin"),
        (["model.safetensors", "adapter_config.json"], "adapter_config.json"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_an_ambiguous_set_of_weights_is_rejected(tmp_path, files, reason):
    write_model(tmp_path, FAMILIES["llama2"])
    content = (tmp_path / safetensors.SINGLE).read_bytes()
    (tmp_path / safetensors.SINGLE).unlink()
    for name in files:
        (tmp_path / name).write_bytes(content)
    with refused(reason):
        open_weights(tmp_path)


def test_model_without_a_tokenizer_is_evaluated_on_tokens_and_generates_no_text(tmp_path, capsys):
    from jaxdist import evaluate, generate
    from jaxdist.data.__main__ import main as tokenize

    config = dataclasses.replace(FAMILIES["llama2"], vocab_size=320)
    write_model(tmp_path / "in", config, scale=0.01)
    run = str(tmp_path / "run")
    assert main(["from-hf", str(tmp_path / "in"), run]) == 0
    assert "no tokenizer.json" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("some text to evaluate on. " * 300)
    (tmp_path / "made").mkdir()
    write_tokenizer(tmp_path / "made", ["some text"])
    words = [str(tmp_path / "text.txt"), f"--out={tmp_path / 'tokens'}"]
    assert tokenize([*words, f"--tokenizer={tmp_path / 'made' / 'tokenizer.json'}"]) == 0
    capsys.readouterr()
    small = ["--global_batch_size=1", "--max_batches=1", "--json"]
    assert evaluate.main([run, f"--sources={tmp_path / 'tokens'}", *small]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    assert abs(loss - np.log(320)) < 0.2  # near uniform, because weights are small
    missing = str(tmp_path / "run" / "tokenizer" / "tokenizer.json")
    for command, words in (
        (evaluate.main, [f"--sources={tmp_path / 'text.txt'}"]),
        (evaluate.main, []),
        (generate.main, ["--prompt=Once"]),
    ):
        with refused(missing):
            command([run, *words])
    (tmp_path / "run" / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "run" / "tokenizer", ["some text"])
    assert generate.main([run, "--prompt=some", "--max_new_tokens=2"]) == 0


SIZES = dict(
    vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=32, intermediate_size=48
)


def minimal(family: str, **keys) -> dict:
    """Return a `config.json` without keys that have a default."""
    sizes = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4) if family == "gpt2" else SIZES
    if family == "dots1":
        sizes = SIZES | dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2)
    return {"model_type": family, **sizes, **keys}


def test_null_turns_a_feature_off_or_is_rejected():
    assert read_config(minimal("mistral", sliding_window=None)).sliding_window == 0
    assert read_config(minimal("mistral", num_key_value_heads=None)).kv_heads == 32
    assert read_config(minimal("gemma2", final_logit_softcapping=None)).logit_softcap == 0
    for family, key in (
        ("gemma2", "query_pre_attn_scalar"),
        ("gemma2", "tie_word_embeddings"),
        ("qwen3", "head_dim"),
        ("llama", "rms_norm_eps"),
        ("llama", "max_position_embeddings"),
    ):
        with refused(f"{key}=null"):
            read_config(minimal(family, **{key: None}))
    with refused("sliding_window"):
        read_config(minimal("gemma2", sliding_window=None))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    with refused("yarn", "phi3"):  # transformers reads it as longrope
        read_config(minimal("phi3", rope_scaling=yarn))


@pytest.mark.parametrize("family", DEFAULTS)
def test_every_key_of_the_class_in_transformers_has_its_default_here(family):
    pytest.importorskip("transformers", reason="needs the reference extra")
    from transformers import AutoConfig

    sizes = minimal(family)
    reference = AutoConfig.for_model(**sizes).to_dict()
    absent = read_config(sizes)
    assert read_config(reference) == absent
    differ = [key for key in reference if read_config({**sizes, key: reference[key]}) != absent]
    assert differ == []


PUBLISHED = {
    "qwen2": {"use_mrope": False},
    "llama": {
        "is_llama_config": True, "rope_interleaved": False, "max_sequence_length": 2048,
        "transformers.js_config": {"dtype": "q4"}, "unsloth_version": "2025.9.1",
        "unsloth_fixed": True, "temperature": 0.7, "pretraining_tp": 2, "some_new_key": None,
        "rope_parameters": None, "layer_types": ["full_attention"] * 2,
    },
    "gpt_oss": {
        "experts_per_token": 4, "initial_context_length": 4096, "output_router_logits": False,
        "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4",
        },
    },
    "gpt2": {"_num_labels": 1, "output_past": True, "eos_token_ids": 0, "model_max_length": 512},
    "phi3": {
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "original_max_position_embeddings": 4096,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    },
}  # fmt: skip
"""Keys of published models of a family that change nothing."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_keys_without_effect_are_accepted(family):
    assert read_config(minimal(family, **PUBLISHED[family])) == read_config(minimal(family))
