"""A custom decoder is planned like the built-in one: same sizes, other arrays and names."""

import jax
import jax.numpy as jnp
import pytest
from test_estimate import LLAMA

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.core.types import AttentionMask, Dims, Model, TokenHead
from jaxdist.hardware import parse_gpus
from jaxdist.models import CustomConfig, DecoderConfig
from jaxdist.objectives import cross_entropy
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.plan.estimate.time import estimate_time

TABLES = {
    "wte": ("vocab", "width"),
    "lm_head": ("width", "vocab"),
    "ln_f": ("width",),
}
LAYER = {
    "ln_1": ("width",),
    "q": ("width", "heads", "head_dim"),
    "k": ("width", "kv_heads", "head_dim"),
    "v": ("width", "kv_heads", "head_dim"),
    "o": ("heads", "head_dim", "width"),
    "ln_2": ("width",),
    "gate": ("width", "ffn"),
    "up": ("width", "ffn"),
    "down": ("ffn", "width"),
}


def build(*, seq_len: int, config: DecoderConfig = LLAMA) -> Model:
    dims = {
        "width": config.d_model,
        "heads": config.num_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_width,
        "ffn": config.mlp_dim,
        "vocab": config.padded_vocab,
    }

    def init(key):
        shape = lambda names: tuple(dims[name] for name in names)
        tables = {name: jnp.zeros(shape(names)) for name, names in TABLES.items()}
        stacked = {n: jnp.zeros((config.num_layers, *shape(names))) for n, names in LAYER.items()}
        return {**tables, "layers": stacked}

    def norm(x, gain):
        wide = x.astype(jnp.float32)
        variance = jnp.mean(wide**2, -1, keepdims=True)
        return (wide / jnp.sqrt(variance + 1e-5) * gain).astype(x.dtype)

    def rotate(x, positions):
        width = x.shape[-1] // 2
        angles = jnp.outer(positions, 1e4 ** -(jnp.arange(width) / width))[:, None]
        one, two = jnp.split(x, 2, -1)
        turned = [one * jnp.cos(angles) - two * jnp.sin(angles)]
        turned.append(two * jnp.cos(angles) + one * jnp.sin(angles))
        return jnp.concatenate(turned, -1).astype(x.dtype)

    def embed(params, batch, context):
        rows = jnp.take(params["wte"], batch["tokens"], axis=0).astype(context.dtype)
        return context.leave(rows)

    def block(params, x, batch, context):
        positions = context.position_ids(batch["tokens"].shape[1])
        h = context.enter(norm(x, params["ln_1"]))
        q, k, v = (jnp.einsum("bsd,dhk->bshk", h, params[name]) for name in "qkv")
        h = context.attend(rotate(q, positions), rotate(k, positions), v, AttentionMask())
        x = x + context.leave(jnp.einsum("bshk,hkd->bsd", h, params["o"]))
        h = context.enter(norm(x, params["ln_2"]))
        h = jax.nn.silu(h @ params["gate"]) * (h @ params["up"])
        return x + context.leave(h @ params["down"]), {}

    def head(params, x, batch, context):
        x = context.enter(norm(x, params["ln_f"]))
        return TokenHead(x, params["lm_head"].astype(x.dtype), config.vocab_size), {}

    axes = {name: Dims(names) for name, names in TABLES.items()}
    layers = {name: Dims(("layers", *names)) for name, names in LAYER.items()}
    return Model(
        name="custom", init=init, axes={**axes, "layers": layers}, dims=dims,
        rules={"width": "fsdp", "ffn": "tensor"}, embed=embed, block=block, head=head,
        objective=cross_entropy, num_layers=config.num_layers, sequence=True,
        context_parallel=True, vocab_size=config.vocab_size,
    )  # fmt: skip


def both(mesh: str, seq_len: int = 1024, zero: int = 0, **train) -> list[Job]:
    spec = MeshSpec.parse(mesh)
    number = spec.num_devices
    cluster = parse_gpus(f"h100:{number if number <= 8 else f'{number // 8}x8'}")[0]
    models = LLAMA, CustomConfig(factory="test_estimate_custom:build")
    return [
        Job.of(
            RunConfig(
                model=model,
                train=TrainConfig(global_batch_size=64, seq_len=seq_len, **train),
                mesh=MeshConfig(zero=zero),
            ),
            spec,
            cluster,
        )
        for model in models
    ]


@pytest.mark.parametrize("remat", ["none", "dots", "full", "names:attention"])
@pytest.mark.parametrize(
    ("mesh", "seq_len", "zero"),
    [
        ("dp=1", 1024, 0),
        ("dp=8", 1024, 0),
        ("dp=8", 1024, 2),
        ("fsdp=8", 1024, 0),
        ("fsdp=4,tp=2", 1024, 0),
        ("tp=4", 4096, 0),
        ("fsdp=2,cp=4", 8192, 0),
        ("pp=4,dp=2", 1024, 0),
        ("pp=2,fsdp=4,tp=2", 1024, 0),
    ],
)
def test_custom_decoder_is_estimated_like_the_built_in_one(mesh, seq_len, zero, remat):
    built_in, custom = both(mesh, seq_len, zero, remat=remat)
    assert custom.decoder is not None and custom.attention == built_in.attention == "cudnn"
    memory, expected = estimate_memory(custom), estimate_memory(built_in)
    assert memory.total_bytes == pytest.approx(expected.total_bytes, rel=0.01)
    assert not memory.is_rough
    time, expected = estimate_time(custom), estimate_time(built_in)
    assert time.seconds == pytest.approx(expected.seconds, rel=0.02)
    assert time.mfu == pytest.approx(expected.mfu, rel=0.02)


def test_named_remat_policies_require_named_values():
    """The custom block names nothing; `Context.attend` names the output of attention itself."""
    built_in, custom = both("fsdp=8", remat="names:qkv,attention")
    assert custom.keeps("attention") and not custom.keeps("qkv") and built_in.keeps("qkv")
