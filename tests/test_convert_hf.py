"""`convert from-hf` and `to-hf` against transformers: equal logits, bit-identical round trips."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import environment
from decoders import FAMILIES, VARIANTS, logits_of, random_tokens
from hf_models import reference_logits, reference_of, write_model, write_tokenizer
from refusals import missing, refused

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import stored_run
from jaxdist.models import build
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.families import family_of, read_config
from jaxdist.models.huggingface.tensors import pieces
from jaxdist.models.weights import num_params
from jaxdist.run.setup import assemble
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main

SEQ = 16
TOLERANCE = 2e-5  # float32 sums in another order, logits of order 1
QUIET = {"log": lambda line: None}


@pytest.fixture(scope="module", params=FAMILIES)
def source_model(request, tmp_path_factory):
    """Save a model with transformers (two shards); return family, folder, tokens and logits."""
    path = tmp_path_factory.mktemp(request.param)
    reference = reference_of(FAMILIES[request.param])
    reference.save_pretrained(path, max_shard_size="60KB")
    write_tokenizer(path, ["a text"], FAMILIES[request.param].vocab_size)
    tokens = random_tokens(2, SEQ)
    return request.param, path, tokens, reference_logits(reference, tokens)


@pytest.fixture(scope="module")
def converted(source_model, tmp_path_factory):
    out = tmp_path_factory.mktemp("ours") / "run"
    assert main(["from-hf", str(source_model[1]), str(out)]) == 0
    return out


@pytest.mark.parametrize("mesh", ["dp=2,tp=2", pytest.param("fsdp=8", marks=pytest.mark.product)])
def test_logits_equal_transformers_after_loading_onto_a_mesh(source_model, converted, mesh):
    name, _, tokens, expected = source_model
    settings = stored_run(converted / "config.toml")
    assert settings.model == FAMILIES[name]
    settings = dataclasses.replace(
        settings, mesh=dataclasses.replace(settings.mesh, shape=mesh), precision=settings.precision
    )
    parts = assemble(settings, jax.devices()[: 8 if mesh == "fsdp=8" else 4])
    reader = Checkpointer(converted / "checkpoints", CheckpointConfig(), read_only=True, **QUIET)
    params = reader.restore_params(parts.abstract_state().params)
    assert len(params["embed"]["table"].sharding.device_set) > 1
    on_host = jax.tree.map(np.asarray, params)
    ours = logits_of(build(FAMILIES[name], seq_len=SEQ), on_host, {"tokens": tokens})
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)


def test_a_round_trip_keeps_the_bits_of_every_tensor(source_model, converted, tmp_path):
    name, source, tokens, expected = source_model
    out = tmp_path / "back"
    assert main(["to-hf", str(converted), str(out), "--shard_gb=0.00004"]) == 0
    before, after = safetensors.open_all(source), safetensors.open_all(out)
    tied = {"lm_head.weight"} if FAMILIES[name].tie_embeddings else set()
    assert set(after) - tied == set(before) - tied
    for tensor in set(before) - tied:
        assert before[tensor].read().tobytes() == after[tensor].read().tobytes(), tensor
    assert len(list(out.glob("*.safetensors"))) > 1
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    np.testing.assert_array_equal(reference_logits(loaded.eval(), tokens), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_rare_variants_equal_transformers_both_ways(name, tmp_path):
    reference = reference_of(VARIANTS[name])
    reference.save_pretrained(tmp_path)
    tokens = random_tokens(2, SEQ)
    expected = reference_logits(reference, tokens)
    assert expected.std() > 0.3  # the tolerance is absolute: logits must be of order 1
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert config == VARIANTS[name]
    model = build(config, seq_len=SEQ)
    assert num_params(model) == reference.num_parameters()
    ours = logits_of(model, tree_of(tmp_path), {"tokens": tokens})
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)
    stored = safetensors.open_all(tmp_path)
    for piece in pieces(config, family_of(config)):
        tensors = [stored[source].read() for source in piece.tensor_names]
        for back, tensor in zip(piece.split(piece.join(tensors)), tensors, strict=True):
            np.testing.assert_array_equal(back, tensor)


def tree_of(folder) -> dict:
    from test_huggingface import joined

    params: dict = {}
    for path, values in joined(folder).items():
        *outer, leaf = path.removeprefix("params/").split("/")
        inner = params
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[leaf] = values
    return params


@pytest.mark.parametrize("window", [0, 5])
def test_phi3_is_read_from_fused_tensors_and_written_as_llama_or_mistral(tmp_path, window):
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    sizes = dataclasses.replace(FAMILIES["mistral"], sliding_window=window)
    reference = reference_of(sizes, "phi3")
    reference.save_pretrained(tmp_path / "in")
    tokens = random_tokens(2, SEQ)
    expected = reference_logits(reference, tokens)
    assert main(["from-hf", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    assert stored_run(tmp_path / "run" / "config.toml").model == sizes
    ours = logits_of(build(sizes, seq_len=SEQ), tree_of(tmp_path / "in"), {"tokens": tokens})
    np.testing.assert_allclose(ours, expected, atol=TOLERANCE, rtol=0)
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert loaded.config.model_type == ("mistral" if window else "llama")
    again = reference_logits(loaded.eval(), tokens)
    np.testing.assert_allclose(again, expected, atol=TOLERANCE, rtol=0)


def test_training_starts_from_converted_weights_in_its_own_dtype(tmp_path):
    import ml_dtypes

    write_model(tmp_path / "in", FAMILIES["llama3.1"], ml_dtypes.bfloat16)
    assert main(["from-hf", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    settings = stored_run(tmp_path / "run" / "config.toml")
    mesh = dataclasses.replace(settings.mesh, shape="fsdp=4,tp=2")
    parts = assemble(dataclasses.replace(settings, mesh=mesh), jax.devices()[:8])
    params = parts.stored_params(str(tmp_path / "run"), parts.abstract_state().params, [])
    table = params["embed"]["table"]
    assert table.dtype == np.float32 and len(table.sharding.device_set) == 8
    expected = safetensors.open_all(tmp_path / "in")["model.embed_tokens.weight"].read()
    np.testing.assert_array_equal(table[: len(expected)], expected.astype(np.float32))
    other = dataclasses.replace(settings.model, mlp_dim=64)
    wrong = assemble(dataclasses.replace(settings, mesh=mesh, model=other), jax.devices()[:8])
    with refused("params/layers/mlp/up", "[2, 32, 2, 48]", "[2, 32, 2, 64]", num_problems=2):
        checkpoint = str(tmp_path / "run" / "checkpoints" / "0")
        wrong.stored_params(checkpoint, wrong.abstract_state().params, [])


def test_weights_keep_their_dtype(tmp_path):
    import ml_dtypes

    write_model(tmp_path / "in", FAMILIES["qwen3"], ml_dtypes.bfloat16)
    assert main(["from-hf", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    stored = StoredArrays(tmp_path / "run" / "checkpoints" / "0")
    assert {entry["dtype"] for entry in stored.entries.values()} == {"bfloat16"}
    assert main(["verify", str(tmp_path / "run"), "--arrays=true"]) == 0
    assert main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before = safetensors.open_all(tmp_path / "in")
    after = safetensors.open_all(tmp_path / "out")
    assert all(before[n].read().tobytes() == after[n].read().tobytes() for n in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_layers_of_different_dtypes_keep_every_bit(tmp_path):
    import ml_dtypes

    write_model(tmp_path / "in", FAMILIES["qwen3"])
    stored = {name: t.read() for name, t in safetensors.open_all(tmp_path / "in").items()}
    stored |= {n: x.astype(ml_dtypes.bfloat16) for n, x in stored.items() if ".layers.0." in n}
    tensors = {n: safetensors.Tensor(x.shape, x.dtype, [x]) for n, x in stored.items()}
    safetensors.write(tmp_path / "in" / "model.safetensors", tensors, {})
    for verb, source, out in (("from-hf", "in", "run"), ("to-hf", "run", "out")):
        assert main([verb, str(tmp_path / source), str(tmp_path / out)]) == 0
    for name, tensor in safetensors.open_all(tmp_path / "out").items():
        np.testing.assert_array_equal(tensor.read(), stored[name].astype(np.float32), name)


def test_base_models_without_the_prefix_are_converted(tmp_path):
    source = tmp_path / "in"
    write_model(source, FAMILIES["gpt2"])
    tensors = {
        name.removeprefix("transformer."): safetensors.Tensor(t.shape, t.dtype, [t.read()])
        for name, t in safetensors.open_all(source).items()
    }
    safetensors.write(source / "model.safetensors", tensors, {})
    assert main(["from-hf", str(source), str(tmp_path / "run")]) == 0


def change(path, **values) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


WRONG = {
    "family": (lambda p: change(p, model_type="mamba"), "model_type='mamba' is not supported"),
    "bias": (lambda p: change(p, attention_bias=True), "self_attn.o_proj.bias"),
    "layers": (lambda p: change(p, num_hidden_layers=3), "model.layers.2.input_layernorm"),
    "fewer_layers": (lambda p: change(p, num_hidden_layers=1), "is not part of the model"),
    "no_config": (lambda p: (p / "config.json").unlink(), "config.json cannot be read"),
    "no_weights": (lambda p: (p / "model.safetensors").unlink(), "has neither"),
    "cut_short": (
        lambda p: (p / "model.safetensors").write_bytes(
            (p / "model.safetensors").read_bytes()[:-9]
        ),
        "cannot be read as safetensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_unsupported_models_are_refused_and_nothing_is_written(tmp_path, case):
    write_model(tmp_path / "in", FAMILIES["llama2"])
    spoil, expected = WRONG[case]
    spoil(tmp_path / "in")
    with pytest.raises(ConfigError) as caught:
        main(["from-hf", str(tmp_path / "in"), str(tmp_path / "run")])
    assert expected in "\n".join(caught.value.problems)
    assert not (tmp_path / "run").exists()


def test_ignored_dropout_is_reported(tmp_path, capsys):
    write_model(tmp_path / "in", FAMILIES["gpt2"])
    change(tmp_path / "in", resid_pdrop=0.1)
    assert main(["from-hf", str(tmp_path / "in"), str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert missing(text, "resid_pdrop=0.1", "ignored", "model.dropout") == []
    # A table of 33 tokens is filled up to 64.
    assert f"19,200 parameters, {in_bytes(4 * (19_200 + 31 * 32))}:" in text


MEASURED = """
import sys
from jaxdist.tools.convert.__main__ import main
assert main(sys.argv[1:]) == 0
lines = open("/proc/self/status")
print("peak", next(line for line in lines if line.startswith("VmHWM")).split()[1])
"""


def peak_bytes(*words) -> int:
    command = [sys.executable, "-c", MEASURED, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment())
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("peak ")[1]) * 1024


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor_and_not_by_the_model(tmp_path):
    """320 MB of weights, 101 MB the largest tensors (one kept, one transposed): 2x that, 64 MB.

    This excludes the memory of a conversion of a few KB: imports and threads.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc to know the peak")
    sizes = dict(num_layers=2, num_heads=16, num_kv_heads=4, max_seq_len=64)
    models = {
        "small": DecoderConfig(vocab_size=64, d_model=64, mlp_dim=64, **sizes),
        "large": DecoderConfig(vocab_size=24576, d_model=1024, mlp_dim=4096, **sizes),
    }
    peaks = {}
    for name, config in models.items():
        write_model(tmp_path / name, config)
        run, out = tmp_path / f"{name}-run", tmp_path / f"{name}-out"
        peaks[name] = (
            peak_bytes("from-hf", tmp_path / name, run),
            peak_bytes("to-hf", run, out),
        )
    before = (tmp_path / "large" / "model.safetensors").stat().st_size
    largest = 24576 * 1024 * 4
    assert before > 2.4 * largest
    for small, large in zip(peaks["small"], peaks["large"], strict=True):
        assert large - small <= 2 * largest + (64 << 20), peaks
    original = safetensors.open_all(tmp_path / "large")
    for name, tensor in safetensors.open_all(tmp_path / "large-out").items():
        assert tensor.read().tobytes() == original[name].read().tobytes(), name
