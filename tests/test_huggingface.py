"""Blocks of Hugging Face tensors: which are read, how many bytes, and their location on a mesh."""

import dataclasses
import hashlib
import json

import jax
import numpy as np
import pytest
from commands import Fork, free_port
from decoders import FAMILIES, VARIANTS
from hf_models import rewrite_tensors, write_model
from refusals import missing, refused

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.models import DecoderConfig, build
from jaxdist.models.huggingface import directory, loading, safetensors
from jaxdist.models.huggingface.directory import is_model, open_weights
from jaxdist.models.huggingface.families import (
    read_config,
    write_config,
)
from jaxdist.models.huggingface.loading import load_params
from jaxdist.settings import ConfigError

SEQ = 16


@pytest.fixture
def read_bytes(monkeypatch):
    counted = []
    read = safetensors.StoredTensor.read

    def counting(tensor, *index):
        block = read(tensor, *index)
        counted.append(block.nbytes)
        return block

    monkeypatch.setattr(safetensors.StoredTensor, "read", counting)
    return counted


def random_block(rng, shape) -> tuple[slice, ...]:
    ends = [sorted(rng.integers(0, size + 1, 2)) for size in shape]
    is_full = rng.random(len(shape)) < 0.4
    return tuple(
        slice(0, size) if all_of_it else slice(int(a), int(b))
        for (a, b), size, all_of_it in zip(ends, shape, is_full, strict=True)
    )


def test_mxfp4_equals_transformers_and_loads_onto_a_mesh(tmp_path):
    """The reference gets the codes as the published files have them: [experts, outputs, ...]."""
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    pytest.importorskip("transformers", reason="needs the reference extra")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = dataclasses.replace(VARIANTS["gpt_oss"], d_model=64, mlp_dim=96)
    write_model(tmp_path, config)
    rng, expected = np.random.default_rng(0), {}

    def pack(tensors):
        for name in [n for n in tensors if n.endswith("_proj") and "experts" in n]:
            count, inputs, outputs = tensors.pop(name).shape
            blocks = rng.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
            scales = rng.integers(110, 140, blocks.shape[:-1], np.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            torched = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
            expected[name] = torched.float().numpy()

    rewrite_tensors(tmp_path, pack)
    tensors = open_weights(tmp_path).tensors
    assert expected.keys() <= tensors.keys() and len(expected) == 4
    for name, values in expected.items():
        for _ in range(20):
            index = random_block(rng, values.shape)
            np.testing.assert_array_equal(tensors[name].read(index), values[index], strict=False)
    target = target_of(config, "fsdp=2,ep=2,tp=2")
    mlp = jax.device_get(load_params(tmp_path, target)["layers"]["mlp"])
    for layer in range(config.num_layers):
        of = lambda part, i=layer: expected[f"model.layers.{i}.mlp.experts.{part}_proj"]
        gates = np.stack([of("gate_up")[..., ::2], of("gate_up")[..., 1::2]], 2)
        np.testing.assert_array_equal(mlp["up"][layer], gates)
        np.testing.assert_array_equal(mlp["down"][layer], of("down"))


SHAPES = [(), (7,), (3000,), (40, 60), (5, 3, 700), (2, 3, 4, 5), (3, 2000, 2), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_block_of_a_tensor_equals_the_slice_of_its_values(tmp_path, shape, dtype):
    rng = np.random.default_rng(0)
    before = rng.standard_normal(5).astype(np.float32)
    values = rng.standard_normal(shape).astype(dtype)
    file = tmp_path / "model.safetensors"
    tensors = {"a": before, "b": values}
    safetensors.write(
        file, {k: safetensors.Tensor(x.shape, x.dtype, [x]) for k, x in tensors.items()}, {}
    )
    stored = safetensors.open_all(tmp_path)["b"]
    assert stored.read().tobytes() == values.tobytes()
    for _ in range(40):
        index = random_block(rng, shape)
        got = stored.read(index)
        assert got.shape == values[index].shape and got.tobytes() == values[index].tobytes()
        assert not isinstance(got.base, np.memmap)  # separate memory, not the file's pages


def target_of(config, mesh: str):
    spec = MeshSpec.parse(mesh)
    model = build(config, seq_len=SEQ)
    layout = Layout(mesh=spec.build(jax.devices()[: spec.num_devices]))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    shardings = layout.shardings(layout.param_specs(model.axes))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


def joined(path) -> dict[str, np.ndarray]:
    weights = open_weights(path)
    read = lambda piece: piece.join([weights.tensors[n].read() for n in piece.tensor_names])
    return {
        name: np.stack([read(p) for p in parts]) if parts[0].layer is not None else read(parts[0])
        for name, parts in weights.pieces.items()
    }


@pytest.mark.parametrize(
    ("name", "mesh", "block_bytes"),
    [
        ("llama3.1", "fsdp=8", 64 << 20),
        ("qwen2", "tp=2,pp=2,fsdp=2", 64 << 20),
        ("qwen3", "dp=1", 900),
        ("llama3.1", "tp=2,pp=2,fsdp=2", 700),
        ("gpt2", "dp=2,fsdp=2,tp=2", 64 << 20),
        ("gpt2", "fsdp=8", 300),
    ],
)
def test_weights_on_a_mesh_are_bit_identical(tmp_path, monkeypatch, name, mesh, block_bytes):
    monkeypatch.setattr(loading, "BLOCK_BYTES", block_bytes)
    config = FAMILIES[name]
    write_model(tmp_path / "in", config)
    params = load_params(tmp_path / "in", target_of(config, mesh))
    expected = joined(tmp_path / "in")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        expected_leaf = expected.pop("params/" + "/".join(key.key for key in path))
        np.testing.assert_array_equal(leaf, expected_leaf)
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected_leaf[shard.index])
    assert not expected


@pytest.mark.parametrize("mesh", ["dp=8", "fsdp=8", "dp=2,fsdp=2,tp=2"])
def test_each_byte_is_read_about_once_in_small_blocks(tmp_path, monkeypatch, read_bytes, mesh):
    monkeypatch.setattr(loading, "BLOCK_BYTES", 1 << 16)
    sizes = dict(d_model=512, num_layers=1, num_heads=8, mlp_dim=1024, vocab_size=512)
    config = DecoderConfig(**sizes)
    write_model(tmp_path / "in", config)
    largest = []
    real = loading._blocks

    def watched(*arguments):
        for index, values in real(*arguments):
            largest.append(values.nbytes)
            yield index, values

    monkeypatch.setattr(loading, "_blocks", watched)
    load_params(tmp_path / "in", target_of(config, mesh))
    stored = (tmp_path / "in" / "model.safetensors").stat().st_size
    assert sum(read_bytes) <= stored
    assert max(largest) <= 1 << 16


def test_missing_or_mismatched_model_is_rejected(tmp_path):
    config = FAMILIES["llama2"]
    source = tmp_path / "in"
    write_model(source, config)
    assert is_model(source) and not is_model(tmp_path)
    other = dataclasses.replace(config, mlp_dim=64)
    with refused("no params/layers/mlp/up [2, 32, 2, 64]", num_problems=2):
        load_params(source, target_of(other, "dp=1"))
    other = dataclasses.replace(config, qk_norm="head")
    with refused("no params/layers/attention/key_norm/scale", num_problems=2):
        load_params(source, target_of(other, "dp=1"))
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**settings, "intermediate_size": 64}))
    with refused("config.json", "[48, 32]", "[64, 32]", num_problems=6):
        directory.open_weights(source)


def test_file_truncated_during_reading_is_detected(tmp_path):
    write_model(tmp_path, FAMILIES["llama2"])
    weights = open_weights(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    last = max(weights.tensors.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(OSError, match="ended early"):
        last.read()


def write_tensor(file, name: str, value: float) -> None:
    values = np.full(4, value, np.float32)
    safetensors.write(file, {name: safetensors.Tensor([4], values.dtype, [values])}, {})


def test_index_selects_files_and_stray_files_are_ignored(tmp_path, caplog):
    write_tensor(tmp_path / "model-1.safetensors", "a", 1.0)
    write_tensor(tmp_path / "model-2.safetensors", "b", 2.0)
    write_tensor(tmp_path / "stray.safetensors", "a", 9.0)
    with refused("model-1.safetensors", "stray.safetensors", safetensors.INDEX):
        safetensors.open_all(tmp_path)
    index = tmp_path / safetensors.INDEX
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index.write_text(json.dumps({"weight_map": weight_map}))
    with caplog.at_level("INFO", "jaxdist"):
        tensors = safetensors.open_all(tmp_path)
    assert {name: tensor.read()[0] for name, tensor in tensors.items()} == {"a": 1.0, "b": 2.0}
    assert "stray.safetensors" in caplog.text
    index.write_text(json.dumps({"weight_map": {**weight_map, "c": "model-2.safetensors"}}))
    with refused("lacks 1 tensors", "e.g. c"):
        safetensors.open_all(tmp_path)


WORKER = """
import hashlib, json, os, sys
settings = json.loads(sys.argv[1])
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
jax.config.update("jax_num_cpu_devices", 2)
address = f"127.0.0.1:{settings['port']}"
jax.distributed.initialize(
    address, 2, settings["process"], coordinator_bind_address=address,
    cluster_detection_method="deactivate", initialization_timeout=60,
    heartbeat_timeout_seconds=60, shutdown_timeout_seconds=30,
)
import numpy as np
from pathlib import Path
from jax.experimental import multihost_utils
from test_huggingface import target_of
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.loading import load_params
from jaxdist.models import DecoderConfig
from jaxdist.settings import ConfigError

counted, read_block = [], safetensors.StoredTensor.read
def counting(tensor, *index):
    block = read_block(tensor, *index)
    counted.append(block.nbytes)
    return block
safetensors.StoredTensor.read = counting
target = target_of(DecoderConfig(**settings["sizes"]), settings["mesh"])
try:
    params = load_params(Path(settings["folder"]), target)
except ConfigError as error:
    print(json.dumps({"refused": str(error)}))
    sys.stdout.flush()
    jax.distributed.shutdown()  # together: a process whose coordinator is gone aborts
    os._exit(0)
read = sum(counted)
whole = {}
for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name = "params/" + "/".join(key.key for key in path)
    gathered = np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    whole[name] = hashlib.sha256(gathered.tobytes()).hexdigest()
print(json.dumps({"read": read, "leaves": whole}))
sys.stdout.flush()
jax.distributed.shutdown()
os._exit(0)
"""


def two_processes(folders, config, mesh: str) -> list[dict]:
    port = free_port()
    sizes = dataclasses.asdict(config)
    common = {"port": port, "sizes": sizes, "mesh": mesh}
    started = [
        Fork("-c", WORKER, json.dumps({**common, "process": process, "folder": str(folder)}))
        for process, folder in enumerate(folders)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "share"), [("fsdp=2,tp=2", 0.5), ("dp=4", 1.0)])
def test_each_process_reads_the_slices_of_its_own_devices(tmp_path, mesh, share):
    config = dataclasses.replace(FAMILIES["qwen3"], d_model=256, mlp_dim=256, vocab_size=512)
    write_model(tmp_path, config)
    stored = (tmp_path / "model.safetensors").stat().st_size
    results = two_processes([tmp_path, tmp_path], config, mesh)
    expected = {
        name: hashlib.sha256(array.tobytes()).hexdigest()
        for name, array in joined(tmp_path).items()
    }
    for process in results:
        assert process["leaves"] == expected
        assert process["read"] <= (share + 0.02) * stored  # norms are replicated on every device


@pytest.mark.slow
def test_processes_that_see_different_files_are_rejected(tmp_path):
    config = FAMILIES["qwen3"]
    for name, theta in (("a", 1e6), ("b", 1e5)):
        write_model(tmp_path / name, dataclasses.replace(config, rope_theta=theta))
    results = two_processes([tmp_path / "a", tmp_path / "b"], config, "fsdp=4")
    for process in results:
        assert missing(process["refused"], "processes 1 see", "other files") == []


LLAMA = write_config(FAMILIES["llama3.1"], "float32")
GPT2 = write_config(FAMILIES["gpt2"], "float32")
GEMMA = write_config(VARIANTS["gemma2"], "float32")


@pytest.mark.parametrize(
    ("settings", "changes", "key"),
    {
        "unscaled attention": (GPT2, {"scale_attn_weights": False}, "scale_attn_weights=false"),
        "no key of anyone": (LLAMA, {"residual_multiplier": 0.5}, "residual_multiplier=0.5"),
        "quantised": (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        "code of its own": (LLAMA, {"auto_map": {"AutoModel": "x"}}, "auto_map"),
        "biases": (
            {**LLAMA, "model_type": "qwen3"}, {"attention_bias": True}, "attention_bias=true"),
        "biases as text": (LLAMA, {"mlp_bias": "yes"}, 'mlp_bias="yes"'),
        "another family's window": (LLAMA, {"sliding_window": 64}, "sliding_window"),
        "windows in some layers": (
            LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        "windows in no order": (
            GEMMA, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        "another cap of Gemma": (
            {**GEMMA, "model_type": "gemma3_text"}, {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping=50.0"),
        "rope of layers as a number": (
            LLAMA, {"rope_parameters": {"full_attention": 3}}, "full_attention=3 is not an object"),
        "rope of windows as a number": (
            {**GEMMA, "model_type": "gemma3_text", "attn_logit_softcapping": None},
            {"rope_parameters": {"sliding_attention": [3]}},
            "sliding_attention=[3] is not an object"),
        "rope of no name": (LLAMA, {"rope_parameters": {"rope_type": []}}, "rope_type=[]"),
        "rope by length": (LLAMA, {"rope_scaling": {"type": "longrope"}}, 'rope_type="longrope"'),
        "unknown rope": (LLAMA, {"rope_scaling": {"type": "ntk"}}, 'rope_type="ntk"'),
        "half of yarn": (LLAMA, {"rope_scaling": {"rope_type": "yarn"}}, "rope factor=null"),
        "half of llama3": (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rope factor=null"),
        "more than llama3": (
            LLAMA, {"rope_scaling": {**LLAMA["rope_scaling"], "attention_factor": 2.0}},
            "rope attention_factor=2.0"),
        "factor of nothing": (LLAMA, {"rope_scaling": {"factor": 8.0}}, "rope factor=8.0"),
        "no heads": (LLAMA, {"num_attention_heads": 0}, "num_attention_heads=0"),
        "heads as text": (LLAMA, {"num_attention_heads": "8"}, 'num_attention_heads="8"'),
        "half a layer": (LLAMA, {"num_hidden_layers": 1.5}, "num_hidden_layers=1.5"),
        "a billion layers": (LLAMA, {"num_hidden_layers": 10**9}, "num_layers=1000000000"),
        "a missing size": (LLAMA, {"intermediate_size": None}, "intermediate_size is missing"),
        "epsilon": (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps=NaN"),
        "dropout": (LLAMA, {"attention_dropout": "some"}, 'attention_dropout="some"'),
        "a list": ([1, 2], None, "is not an object but list"),
        "no family": ({"model_type": ["llama"]}, {}, "model_type=['llama']"),
        "a window in every third": (
            write_config(VARIANTS["gpt_oss"], "float32"),
            {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        "another format": (
            write_config(VARIANTS["gpt_oss"], "float32"),
            {"quantization_config": {"quant_method": "fp8"}}, 'quant_method="fp8"'),
        "no object": (
            write_config(VARIANTS["gpt_oss"], "float32"), {"quantization_config": "mxfp4"},
            'quantization_config="mxfp4" is not an object'),
        "DeepSeek-V3": ({"model_type": "deepseek_v3"}, {}, "latent attention"),
        "layers of Qwen": (
            write_config(VARIANTS["qwen3_moe"], "float32"), {"decoder_sparse_step": 9},
            "names all layers"),
        "a number of layers": (
            write_config(VARIANTS["qwen3_moe"], "float32"), {"mlp_only_layers": 1},
            "mlp_only_layers=1 is not a list"),
    }.values(),
)  # fmt: skip
def test_config_with_unsupported_computation_is_rejected(settings, changes, key):
    with pytest.raises(ConfigError) as refused:
        read_config(settings if changes is None else {**settings, **changes})
    assert key in str(refused.value)


def test_all_wrong_keys_are_reported_at_once():
    with pytest.raises(ConfigError) as refused:
        read_config({**GPT2, "scale_attn_weights": False, "alibi": True, "n_head": 0})
    assert len(refused.value.problems) == 3


@pytest.mark.parametrize("name", ["olmo2", "gpt2"])
def test_explicit_head_dim_keeps_the_family(name):
    """A value of 0 means d_model / num_heads."""
    config = {**FAMILIES, **VARIANTS}[name]
    named = dataclasses.replace(config, head_dim=config.head_width)
    assert write_config(named, "float32") == write_config(config, "float32")
    other = dataclasses.replace(config, head_dim=2 * config.head_width)
    with refused("llama", "olmo2", "gpt2", "configs/"):
        write_config(other, "float32")


def test_gpt_oss_with_plain_positions_is_written_without_its_default_scaling():
    plain = dataclasses.replace(VARIANTS["gpt_oss"], rope_scaling={})
    assert read_config(write_config(plain, "float32")) == plain
