"""Low-rank adapters (LoRA): small trained matrices next to frozen weights.

A product with weight W becomes x·W + scale · (x·A)·B, with A [inputs, rank] and B [rank, outputs]
(Hu et al. 2021, "LoRA", equation 3). DoRA also scales each output, so that the norm of its weights
is a trained value (Liu et al. 2024). Hugging Face's modules in a fused array have one adapter each.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist.core.block_weights import BLOCK, BlockLayout, BlockWeight
from jaxdist.core.types import Model
from jaxdist.core.weights import CompositeWeight, base_of
from jaxdist.models.adapted_weights import AdaptedWeight
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.weights import weights_of
from jaxdist.settings import setting

BaseFormat: TypeAlias = Literal["bf16", "float32", "nf4", "int8"]

EXPERTS = ("gate_up_proj", "down_proj")
"""Targets that are parameters of transformers' experts: of all experts of a layer."""

ROUTER = "router"
"""Target that is a router's parameter: it has an adapter only if `lora.targets` names it."""


@dataclasses.dataclass(frozen=True)
class Product:
    """An array of a layer that may have adapters, [inputs, outputs] after stacked dims.

    Attributes:
        names: Hugging Face's names of the modules that it consists of, as in `lora.targets`.
        inputs: sizes of the dims that the product sums over.
        sizes: number of outputs of each module along dim `dim` of the outputs.
        unit_dim: logical dim of the inputs that holds complete quantized blocks.
        has_experts: it is an array of all experts of a layer.
        layer: its layer in the parameters, e.g. "layers/1"; "" if all layers are equal.
    """

    names: tuple[str, ...]
    inputs: tuple[int, ...]
    sizes: tuple[int, ...]
    unit_dim: str
    dim: int = 0
    has_experts: bool = False
    layer: str = ""


SCORE = "head/score"
"""Name of the score head, which has no adapter: it is trained itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters: train small matrices next to frozen weights."""

    rank: int = setting(0, "rank of the adapters; 0 = train the weights themselves", ge=0, le=4096)
    alpha: float = setting(16.0, "factor of the adapters' outputs, see lora.variant", gt=0)
    dropout: float = setting(
        0.0, "dropout rate of the inputs of adapters, each with its own mask", ge=0, lt=1
    )
    targets: list[str] = setting(
        ["attention", "mlp"],
        "products with an adapter: attention, mlp, or names of Hugging Face's modules, e.g. "
        "q_proj, v_proj; with experts gate_up_proj and down_proj (of these), router, "
        "shared_expert.up_proj, shared_expert_gate, mlp.up_proj (of dense_layers); of a custom "
        "model patterns of parameter names, e.g. layers/*/up, or layers/out:2 if its first 2 dims "
        "are summed over",
    )
    variant: Literal["lora", "rslora", "dora"] = setting(
        "lora",
        "lora = multiply by alpha / rank; rslora = by alpha / sqrt(rank), which suits ranks above "
        "64; dora = as lora, and train the norm of each output's weights",
    )
    ranks: list[str] = setting([], "other ranks for some modules, e.g. q_proj=8,down_proj=32")
    token_ids: list[int] = setting(
        [],
        "tokens whose rows of the embedding table and of the head are also trained, e.g. those of "
        "convert add-tokens",
    )
    base_format: BaseFormat = setting(
        "bf16",
        "format of the frozen weights: bf16, float32, nf4 (4 bits with double quantization) or "
        "int8; the last two are for products of the layers, in blocks of 64, with bf16 elsewhere",
    )

    @property
    def storage(self) -> Literal["float32", "bfloat16"]:
        """Dtype of the frozen weights that are not quantized."""
        return "float32" if self.base_format == "float32" else "bfloat16"

    def blocks(self, model: Any) -> dict[str, BlockLayout]:
        """Return name of each quantized array of a layer -> its blocks; {} if none is quantized."""
        if self.base_format not in ("nf4", "int8"):
            return {}
        if not (self.rank and isinstance(model, DecoderConfig)):
            return {}
        return {
            name: BlockLayout(
                self.base_format,
                product.inputs,
                # Of experts, gate and up are two tensors in files.
                (1,) * sum(product.sizes) if name.endswith("mlp/up") else product.sizes,
                product.dim,
                # GPT-2's query, key and value are one tensor, with the queries of all heads first.
                is_outer=name.endswith("attention/qkv") and len(product.names) == 1,
                has_experts=product.has_experts,
                is_stacked=not name.startswith("first_layers/"),
            )
            for name, product in products_of(model).items()
            if product.names != (ROUTER,)
        }

    def block_units(self, model: Any) -> dict[str, int]:
        """Return logical dim -> number of adjacent entries that no shard may cut."""
        units: dict[str, int] = {}
        for name, blocks in self.blocks(model).items():
            dim, own = products_of(model)[name].unit_dim, blocks.unit
            if dim == "heads":
                own //= math.gcd(own, model.head_width)
            units[dim] = math.lcm(units.get(dim, 1), own)
        return units

    def problems(self) -> list[str]:
        """Return error messages for invalid settings and combinations in this section."""
        if not self.rank:
            changed = [n for n, value in vars(self).items() if value != getattr(LoraConfig(), n)]
            return [
                f"lora.{name}={getattr(self, name)!r} without lora.rank: there are no adapters. "
                f"Set lora.rank, e.g. 16, or leave out lora.{name}."
                for name in changed
            ]
        problems = [] if self.targets else ["lora.targets=[] adds no adapter. Use attention,mlp."]
        if len({*self.token_ids}) < len(self.token_ids):
            problems.append(f"lora.token_ids={self.token_ids} has a token twice. Name it once.")
        if self.dropout and self.variant == "dora":
            problems.append(
                f"lora.dropout={self.dropout} with lora.variant='dora' needs a second product with "
                "the frozen weights. Use lora.dropout=0, or another variant."
            )
        for text in self.ranks:
            name, _, rank = text.partition("=")
            if not (name and rank.isdecimal() and 0 < int(rank) <= 4096):
                problems.append(
                    f"lora.ranks has {text!r}, which is not MODULE=RANK. Use e.g. q_proj=8."
                )
        return problems

    def run_problems(self, model: Any) -> list[str]:
        """Return an error message for each conflict with the model of a run."""
        if not self.rank:
            return []
        if not isinstance(model, DecoderConfig):
            return self._other_problems(model)
        names = list(dict.fromkeys(n for one in products_of(model).values() for n in one.names))
        ranked = [text.partition("=")[0] for text in self.ranks]
        problems = []
        merged = parameter_targets(self, model)
        if merged and (self.dropout or self.variant == "dora"):
            problems.append(
                f"lora.dropout={self.dropout} and lora.variant={self.variant!r} with adapters of "
                f"experts or routers ({', '.join(merged)}), which have neither dropout nor DoRA. "
                "Use --lora.targets attention, or dropout=0 without DoRA."
            )
        if wrong := [i for i in self.token_ids if not 0 <= i < model.vocab_size]:
            problems.append(
                f"lora.token_ids has {', '.join(map(str, wrong))}: tokens are 0 to "
                f"{model.vocab_size - 1}. Add new ones with convert add-tokens."
            )
        for setting_name, names_set, allowed in (
            ("targets", self.targets, ["attention", "mlp", *names]),
            ("ranks", ranked, names),
        ):
            for name in (name for name in names_set if name not in allowed):
                near = difflib.get_close_matches(name, allowed, 1)
                is_outer = any(part in name for part in ("embed", "head", "wte", "wpe"))
                why = "embeddings and head have no adapters" if is_outer else "no such module"
                fix = f"Did you mean {near[0]}?" if near else f"Use {', '.join(allowed)}."
                problems.append(f"lora.{setting_name} has {name!r}: {why}. {fix}")
        problems += [
            f"lora.base_format={self.base_format!r} with {math.prod(blocks.inputs)} inputs of "
            f"{name}: blocks of {BLOCK} do not divide them. Use bf16."
            for name, blocks in self.blocks(model).items()
            if math.prod(blocks.inputs) % BLOCK
        ]
        idle = [n for n in ranked if n in names and n not in self.target_modules(model)]
        problems += [
            f"lora.ranks has {name!r}, which lora.targets leaves out. Add it there, or omit it."
            for name in idle
        ]
        return problems

    def _other_problems(self, model: Any) -> list[str]:
        """Return the conflicts with a model that is no decoder, before it is built."""
        if not model.is_user_model:
            return [
                f"lora.rank={self.rank} with model.kind={model.kind!r}: use a decoder, or a custom "
                "model that multiplies its weights with Context.dot."
            ]
        allowed: dict[str, list[Any]] = {
            "base_format": ["bf16", "float32"], "dropout": [0.0], "token_ids": [[]]
        }  # fmt: skip
        return [
            f"lora.{name}={getattr(self, name)!r} with a custom model, which cannot have it. Use "
            f"{' or '.join(map(str, values))}."
            for name, values in allowed.items()
            if getattr(self, name) not in values
        ]

    def target_modules(self, model: DecoderConfig) -> dict[str, int]:
        """Return Hugging Face's name of each module with an adapter -> rank of the adapter."""
        ranks = {name: rank for name, _, rank in (text.partition("=") for text in self.ranks)}
        return {
            name: int(ranks.get(name) or self.rank)
            for array, product in products_of(model).items()
            for name in product.names
            if name in self.targets or _group(array) in self.targets
        }

    def scale(self, rank: int) -> float:
        """Return the factor of an adapter of a rank (rsLoRA: Kalajdzievski 2023, theorem 3.2)."""
        return self.alpha / (math.sqrt(rank) if self.variant == "rslora" else rank)


def products_of(model: DecoderConfig) -> dict[str, Product]:
    """Return our arrays that may have adapters, e.g. "layers/attention/qkv" -> the product."""
    first, block = model.stack
    layers = {f"first_layers/{i}": False for i in range(first)}
    layers |= {f"layers/{j}": own for j, own in enumerate(block)} if len(block) > 1 else {}
    layers |= {"layers": block[0]} if len(block) == 1 else {}
    return {
        f"{layer}/{array}": dataclasses.replace(one, layer=layer if len(layers) > 1 else "")
        for layer, is_sparse in layers.items()
        for array, one in _products(model, is_sparse=is_sparse and model.num_experts > 0)
    }


def _products(model: DecoderConfig, *, is_sparse: bool) -> Iterator[tuple[str, Product]]:
    """Yield the arrays of a layer, with experts or without, and their products."""
    d, group = model.d_model, model.num_heads // model.kv_heads
    is_gpt2 = model.activation == "gelu" and model.positions == "learned"
    qkv = ("c_attn",) if is_gpt2 else ("q_proj", "k_proj", "v_proj")
    sizes = (group + 2,) if is_gpt2 else (group, 1, 1)
    yield "attention/qkv", Product(qkv, (d,), sizes, "d_model", 1)
    out = ("attn.c_proj",) if is_gpt2 else ("o_proj",)
    yield "attention/out", Product(out, (model.num_heads, model.head_width), (d,), "heads")
    gates = () if model.activation == "gelu" else ("gate_proj",)

    def mlp(
        width: int, dim: str, start: str, up: str = "up_proj", down: str = "down_proj"
    ) -> Iterator[tuple[str, Product]]:
        ups = tuple(f"{start}{name}" for name in (*gates, up))
        yield "up", Product(ups, (d,), (1,) * len(ups), "d_model")
        yield "down", Product((f"{start}{down}",), (width,), (d,), dim)

    if not is_sparse:
        width, dim, start = model.mlp_dim, "mlp", ""
        if model.num_experts:
            width, dim, start = model.dense_mlp_dim, "dense_mlp", "mlp."
        names = ("c_fc", "mlp.c_proj") if is_gpt2 else ()
        yield from ((f"mlp/{n}", one) for n, one in mlp(width, dim, start, *names))
        return
    yield "mlp/router", Product((ROUTER,), (d,), (model.num_experts,), "d_model")
    if "mlp" not in model.bias:  # PEFT stores other shapes for experts with biases (gpt-oss)
        ways = (1 + len(gates),)
        yield "mlp/up", Product(EXPERTS[:1], (d,), ways, "d_model", has_experts=True)
        yield "mlp/down", Product(EXPERTS[1:], (model.mlp_dim,), (d,), "mlp", has_experts=True)
    if width := model.shared_expert_dim:
        shared = mlp(width, "shared_mlp", "shared_expert.")
        yield from ((f"shared/{n}", one) for n, one in shared)
    if model.shared_expert_gate:
        yield "shared_gate", Product(("shared_expert_gate",), (d,), (1,), "d_model")


def _group(name: str) -> str:
    """Return the target "attention" or "mlp" that includes one of our arrays, or ""."""
    part, _, array = name.rpartition("/")
    group = part.rpartition("/")[2]
    return {"attention": "attention", "mlp": "mlp", "shared": "mlp"}.get(group, "") * (
        array not in ("router", "shared_gate")
    )


def parameter_targets(config: LoraConfig, model: DecoderConfig) -> list[str]:
    """Return the targets with adapters that are parameters in PEFT: of experts and routers."""
    every = {n for one in products_of(model).values() for n in one.names if one.has_experts}
    return [name for name in config.target_modules(model) if name in {*every, ROUTER}]


def num_trained(model: Model) -> int:
    """Return the number of parameters with update="gradient"."""
    return sum(w.size for w in weights_of(model) if w.dims.update == "gradient")


def _is_adapted(node: Any) -> bool:
    return isinstance(node, AdaptedWeight)


def has_adapters(model: Model) -> bool:
    """Return whether a model's parameters have adapters."""
    return any(map(_is_adapted, jax.tree.leaves(model.axes, is_leaf=_is_adapted)))


def without_adapters(model: Model) -> Model:
    """Return the model of the frozen weights alone; a model without adapters is unchanged."""
    if not has_adapters(model):
        return model
    return dataclasses.replace(
        model, init=lambda key: base_of(model.init(key)), axes=base_of(model.axes)
    )


def with_base(tree: Any, base: Any) -> Any:
    """Return a tree whose missing leaves (None, or the base of adapters) are those of `base`."""
    is_leaf = lambda node: node is None or _is_adapted(node)

    def leaf(own: Any, w: Any) -> Any:
        if _is_adapted(own):
            return dataclasses.replace(own, base=w)
        return w if own is None else own

    return jax.tree.map(leaf, tree, base, is_leaf=is_leaf)


def only_adapters(tree: Any) -> Any:
    """Return a tree with None for leaves without adapters or trained rows."""
    return jax.tree.map(lambda w: w if _is_adapted(w) else None, tree, is_leaf=_is_adapted)


def with_start(tree: Any) -> Any:
    """Return parameters with adapter arrays that start from frozen weights set to these values."""
    return jax.tree.map(
        lambda w: w.with_start() if _is_adapted(w) else w, tree, is_leaf=_is_adapted
    )


def merge(tree: Any) -> Any:
    """Return dense parameters [layers, ...]; adapted and quantized ones become float32."""

    def dense(w: Any) -> Any:
        if isinstance(w, BlockWeight):
            return w.astype(jnp.float32)
        return w.merged() if _is_adapted(w) else w

    return jax.tree.map(dense, tree, is_leaf=lambda w: isinstance(w, CompositeWeight))
