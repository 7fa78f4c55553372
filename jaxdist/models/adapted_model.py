"""Build models with adapters: which weights have them, their records and first values."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.core.types import Array, Dims, Model, Params
from jaxdist.core.weights import Parameter
from jaxdist.models.adapted_weights import (
    Adapter,
    ExpertLora,
    LoraWeight,
    TokenRows,
    with_dropout,
)
from jaxdist.models.adapters import (
    INPUTS,
    SCORE,
    LoraConfig,
    expert_targets,
    has_adapters,
    input_sizes,
    modules_of,
    tensors_of,
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
    blocks = {f"layers/{array}": own for array, own in config.blocks(settings).items()}

    def free(name: str, dims: Dims) -> Any:
        if name == SCORE and decoder:  # trained next to the adapters, as PEFT's modules_to_save
            return dims
        if name in blocks:
            return blocks[name].record(dims)
        return Parameter(dims, storage=storage, update="none")

    tables = {"embed/table": 0, "head/kernel": 1} if config.token_ids else {}
    ids = tuple(config.token_ids)

    def num_inputs(name: str) -> int:
        return INPUTS[name.removeprefix("layers/")] if decoder else plans[name][0].dim

    def record(path: Any, dims: Dims) -> Any:
        name = _name(path)
        if name in tables:
            return TokenRows(free(name, dims), Dims((None, "d_model")), ids, tables[name])
        parts = plans.get(name)
        if parts is None:
            return free(name, dims)
        last = _stacked(dims) + num_inputs(name)
        layers, ins, outs = dims[: _stacked(dims)], dims[_stacked(dims) : last], dims[last:]
        return (ExpertLora if "experts" in dims else LoraWeight)(
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
            bool(layers),
        )

    def init(key: Array) -> Params:
        """Return frozen weights and new adapters; stacked leaves are [num_layers, ...]."""

        def leaf(path: Any, w: Array, dims: Dims) -> Any:
            """Return a parameter [*dims] in its storage dtype, with its adapters if it has any."""
            name = _name(path)
            stored = w if name == SCORE and decoder else w.astype(storage)
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
            if "experts" in dims:
                return ExpertLora(frozen, made, plans[name])
            return LoraWeight(frozen, made, plans[name], bool(_stacked(dims))).with_start()

        return jax.tree_util.tree_map_with_path(leaf, model.init(key), model.axes)

    axes = jax.tree_util.tree_map_with_path(record, model.axes)
    block = model.block
    if config.dropout and block is not None:
        block = with_dropout(block, config.dropout)
    adapted = dataclasses.replace(model, init=init, axes=axes, block=block)
    moved = sum(
        w.size * (settings.active_experts if "experts" in w.dims else 1.0)
        for w in weights_of(adapted)
        if w.dims.update == "gradient"
    )
    change = 6.0 * moved - 2.0 * _num_frozen_products(config, decoder, model, plans)
    flops = {name: count + change for name, count in model.flops_per_token.items()}
    return dataclasses.replace(adapted, flops_per_token=flops)


def _decoder_plans(config: LoraConfig, decoder: DecoderConfig) -> dict[str, tuple[Adapter, ...]]:
    """Return name -> adapters of each weight of a decoder that has any."""
    ranks = config.target_modules(decoder)
    return {
        f"layers/{array}": parts
        for array, names in modules_of(decoder).items()
        if (parts := _parts_of(config, decoder, array, names, ranks))
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
                f"lora.targets has {target!r}, which matches no matrix of {model.name}. It has "
                f"{', '.join(free) or 'none'}."
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
            plans[name] = (Adapter(module, own, config.scale(own), count, 0, 0, inputs),)
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
    merges = bool(expert_targets(config, decoder))
    frozen = (w for w in weights_of(model) if not (merges and "experts" in w.dims))
    share = lambda w: w.size * (decoder.active_experts if "experts" in w.dims else 1.0)
    products = sum(share(w) for w in frozen if w.is_stacked and w.is_matrix)
    trains_head = config.token_ids or decoder.num_labels
    return products + (0 if trains_head else decoder.vocab_size * decoder.d_model)


def _parts_of(
    config: LoraConfig,
    decoder: DecoderConfig,
    array: str,
    names: tuple[str, ...],
    ranks: Mapping[str, int],
) -> tuple[Adapter, ...]:
    """Return the adapters of an array; fused modules share its dim 2 (qkv) or 1 (up)."""
    sizes, dim = tensors_of(decoder, array, names)
    dim += INPUTS[array]
    inputs = math.prod(input_sizes(decoder, array))
    parts, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        if rank := ranks.get(name, 0):
            scale = config.scale(rank)
            parts.append(Adapter(name, rank, scale, dim, start, size, inputs))
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
    named = f"{part.module} {(*stack, *shape)}".encode()
    own = jax.random.fold_in(key, zlib.crc32(named) & 0x7FFFFFFF)
    a = jax.random.uniform(own, (*stack, *ins, part.rank), jnp.float32, -bound, bound)
    made = {"a": a, "b": jnp.zeros((*stack, part.rank, *outs), jnp.float32)}
    return {**made, "scale": jnp.ones((*stack, *outs), jnp.float32)} if is_dora else made


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
