"""Build models with adapters: which weights have them, their records and first values."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.core.types import Array, Batch, Context, Dims, Model, Params, Sums
from jaxdist.core.weights import Parameter
from jaxdist.models.adapted_weights import (
    Adapter,
    ExpertLora,
    LoraWeight,
    RouterLora,
    TokenRows,
    with_dropout,
)
from jaxdist.models.adapters import (
    EXPERTS,
    SCORE,
    LoraConfig,
    Product,
    has_adapters,
    parameter_targets,
    products_of,
)
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.weights import weights_of
from jaxdist.settings import ConfigError


def with_adapters(config: LoraConfig, settings: Any, model: Model) -> Model:
    """Return a model of `settings` with adapters; unchanged with rank 0, or if it has them."""
    if not config.rank or has_adapters(model):
        return model
    decoder = settings if isinstance(settings, DecoderConfig) else None
    storage = config.storage
    plans = _named_plans(config, model) if decoder is None else _decoder_plans(config, decoder)
    blocks = config.blocks(settings)

    def free(name: str, dims: Dims) -> Any:
        if name == SCORE and decoder:  # trained next to the adapters, as PEFT's modules_to_save
            return dims
        if name in blocks:
            return blocks[name].record(dims)
        dtype = dims.storage if dims.update == "increment" else storage
        return Parameter(dims, storage=dtype, update="none", keeps_dtype=dims.keeps_dtype)

    tables = {"embed/table": 0, "head/kernel": 1} if config.token_ids else {}
    ids = tuple(config.token_ids)

    products = products_of(decoder) if decoder else {}

    def num_inputs(name: str) -> int:
        return len(products[name].inputs) if decoder else plans[name][0].dim

    def kind(name: str, dims: Dims) -> type[LoraWeight]:
        is_router = decoder is not None and name.endswith("/router")
        return ExpertLora if "experts" in dims else RouterLora if is_router else LoraWeight

    def record(path: Any, dims: Dims) -> Any:
        name = _name(path)
        if name in tables:
            return TokenRows(free(name, dims), Dims((None, "d_model")), ids, tables[name])
        parts = plans.get(name)
        if parts is None:
            return free(name, dims)
        last = _stacked(dims) + num_inputs(name)
        layers, ins, outs = dims[: _stacked(dims)], dims[_stacked(dims) : last], dims[last:]
        return kind(name, dims)(
            free(name, dims),
            {
                part.module: {
                    "a": Dims((*layers, *ins, None)),
                    "b": Dims((*layers, None, *outs)),
                    **({"scale": Dims((*layers, *outs))} if config.variant == "dora" else {}),
                }
                for part in parts
            },
            parts,
            dims[:1] == ("layers",),
        )

    def init(key: Array) -> Params:
        """Return frozen weights and new adapters; stacked leaves are [num_layers, ...]."""

        def leaf(path: Any, w: Array, dims: Dims) -> Any:
            """Return a parameter [*dims] in its storage dtype, with its adapters if it has any."""
            name = _name(path)
            is_free = dims.update == "increment" or (name == SCORE and decoder)
            stored = w if is_free else w.astype(storage)
            frozen = blocks[name].quantize(stored) if name in blocks else stored
            if name in tables:
                rows = jnp.zeros((len(ids), settings.d_model), jnp.float32)
                return TokenRows(frozen, rows, ids, tables[name]).with_start()
            if name not in plans:
                return frozen
            count = num_inputs(name)
            is_dora = config.variant == "dora"
            sizes = w.shape[: _stacked(dims)], w.shape[_stacked(dims) :]
            made = {p.module: _init(key, *sizes, count, p, is_dora) for p in plans[name]}
            own = kind(name, dims)(frozen, made, plans[name], dims[:1] == ("layers",))
            return own if "experts" in dims else own.with_start()

        return jax.tree_util.tree_map_with_path(leaf, model.init(key), model.axes)

    axes = jax.tree_util.tree_map_with_path(record, model.axes)
    adapted = dataclasses.replace(model, init=init, axes=axes, increments=None)
    if config.dropout:
        adapted = _with_dropout(adapted, config.dropout)
    moved = sum(
        w.size * (settings.active_experts if "experts" in w.dims else 1.0)
        for w in weights_of(adapted)
        if w.dims.update == "gradient"
    )
    change = 6.0 * moved - 2.0 * _num_frozen_products(config, decoder, model, plans)
    flops = {name: count + change for name, count in model.flops_per_token.items()}
    return dataclasses.replace(adapted, flops_per_token=flops)


def _with_dropout(model: Model, rate: float) -> Model:
    """Return a model with dropout of the inputs of adapters in its blocks and first layers."""
    own_embed, own_block = model.embed, model.block
    assert own_embed is not None and own_block is not None

    def embed(params: Params, batch: Batch, context: Context) -> Array:
        """Return x [batch, seq_shard, d_model] before the stacked layers."""
        return own_embed(params, batch, with_dropout(context, rate, batch["rows"]))

    @functools.wraps(own_block)
    def block(params: Params, x: Array, aux: Any, context: Context) -> tuple[Array, Sums]:
        """Return x [batch, seq_shard, d_model] and the block's loss terms and metrics."""
        return own_block(params, x, aux, with_dropout(context, rate, aux["rows"]))

    return dataclasses.replace(model, embed=embed, block=block)


def _decoder_plans(config: LoraConfig, decoder: DecoderConfig) -> dict[str, tuple[Adapter, ...]]:
    """Return name -> adapters of each weight of a decoder that has any."""
    ranks = config.target_modules(decoder)
    return {
        name: parts
        for name, product in products_of(decoder).items()
        if (parts := _parts_of(config, product, ranks))
    }


def _named_plans(config: LoraConfig, model: Model) -> dict[str, tuple[Adapter, ...]]:
    """Return name -> (adapter,) of weights of a custom model, or raise `ConfigError`."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model.axes)]
    weights = dict(zip(names, weights_of(model), strict=True))
    if averages := [n for n, w in weights.items() if w.dims.update in ("statistic", "increment")]:
        raise ConfigError(
            f"lora.rank={config.rank}: adapters freeze the rest of the model, but training updates "
            f"{', '.join(averages)} without gradients. Use lora.rank=0."
        )
    fits = lambda name, pattern: any(
        fnmatch.fnmatchcase(name, end) for end in (pattern, f"{pattern}/*")
    )
    num_dims = lambda w: len(w.dims) - w.is_stacked
    free = {n: w for n, w in weights.items() if w.is_matrix and "experts" not in w.dims}
    plans: dict[str, tuple[Adapter, ...]] = {}
    problems = []
    for target in config.targets:
        pattern, _, text = target.partition(":")
        count = int(text) if text.isdecimal() else 0 if text else 1
        matching = {n: w for n, w in free.items() if fits(n, pattern)}
        if not matching:
            problems.append(
                f"lora.targets has {target!r}, which matches no matrix that may have adapters. "
                f"{model.name} has {', '.join(free) or 'none'}."
            )
        for name, w in matching.items():
            if not 0 < count < num_dims(w):
                problems.append(
                    f"lora.targets has {target!r}, but {name} has the dims "
                    f"{', '.join(map(str, w.dims[w.is_stacked :]))}. Name how many of the first "
                    f"ones its product sums over, 1 to {num_dims(w) - 1}."
                )
                continue
            ranks = (text.partition("=") for text in config.ranks)
            own = next((int(r) for key, _, r in ranks if fits(name, key)), config.rank)
            module = name.replace("/", ".")
            inputs = math.prod(w.shape[w.is_stacked :][:count])
            sizes: Any = dict(dim=count, start=0, size=0, num_inputs=inputs)
            plans[name] = (Adapter(module=module, rank=own, scale=config.scale(own), **sizes),)
    for text in config.ranks:
        if not any(fits(name, text.partition("=")[0]) for name in plans):
            problems.append(f"lora.ranks has {text!r}, which matches no target. Omit it.")
    if problems:
        raise ConfigError(problems)
    return plans


def _num_frozen_products(
    config: LoraConfig, decoder: DecoderConfig | None, model: Model, plans: Mapping[str, Any]
) -> float:
    """Return the number of frozen weights per token whose own gradient is not computed.

    That gradient is a third of a weight's products. It is computed for experts with adapters, which
    do not count. Of a custom model only the targets are products for certain.
    """
    if decoder is None:
        named = {w.name: w for w in weights_of(model)}
        return sum(named[parts[0].module].size for parts in plans.values())
    merges = bool({*EXPERTS} & {*parameter_targets(config, decoder)})
    frozen = (w for w in weights_of(model) if not (merges and "experts" in w.dims))
    share = lambda w: w.size * (decoder.active_experts if "experts" in w.dims else 1.0)
    in_layers = lambda w: w.is_stacked or w.name.startswith("first_layers")
    products = sum(share(w) for w in frozen if in_layers(w) and w.is_matrix)
    trains_head = config.token_ids or decoder.num_labels
    return products + (0 if trains_head else decoder.vocab_size * decoder.d_model)


def _parts_of(
    config: LoraConfig, product: Product, ranks: Mapping[str, int]
) -> tuple[Adapter, ...]:
    """Return the adapters of an array; fused modules share its dim 2 (qkv) or 1 (up)."""
    dim, parts, start = product.dim + len(product.inputs), [], 0
    inputs = math.prod(product.inputs)
    for name, size in zip(product.names, product.sizes, strict=True):
        if rank := ranks.get(name, 0):
            sizes: Any = dict(dim=dim, start=start, size=size, num_inputs=inputs)
            scale, layer = config.scale(rank), product.layer
            parts.append(Adapter(module=name, rank=rank, scale=scale, layer=layer, **sizes))
        start += size
    return tuple(parts)


def _stacked(dims: Dims) -> int:
    """Return the number of leading dims that stack weights, out of layers and experts."""
    return (dims[:1] == ("layers",)) + ("experts" in dims)


def _init(
    key: Array,
    stack: tuple[int, ...],
    shape: tuple[int, ...],
    count: int,
    part: Adapter,
    is_dora: bool,
) -> dict[str, Array]:
    """Return A [*stack, *inputs, rank], uniform in ±1/sqrt(inputs) as in PEFT, and B = 0.

    B is [*stack, rank, *outputs of the module], `shape` [*inputs, *outputs] of the weight, `stack`
    its numbers of layers and experts. DoRA's scale [*stack, *outputs] is 1 until `with_start`.
    """
    ins, outs = shape[:count], list(shape[count:])
    outs[part.dim - count] = part.size or outs[part.dim - count]
    bound = 1 / math.sqrt(math.prod(ins))
    named = f"{part.layer}{part.module} {(*stack, *shape)}".encode()
    own = jax.random.fold_in(key, zlib.crc32(named) & 0x7FFFFFFF)
    a = jax.random.uniform(own, (*stack, *ins, part.rank), jnp.float32, -bound, bound)
    made = {"a": a, "b": jnp.zeros((*stack, part.rank, *outs), jnp.float32)}
    return {**made, "scale": jnp.ones((*stack, *outs), jnp.float32)} if is_dora else made


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
