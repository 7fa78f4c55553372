"""Low-rank adapters (LoRA): small trained matrices next to frozen weights.

A product with weight W becomes x·W + scale · (x·A)·B, with A [inputs, rank] and B [rank, outputs]
(Hu et al. 2021, "LoRA", equation 3). DoRA also scales each output, so that the norm of its weights
is a trained value (Liu et al. 2024). Hugging Face's modules in a fused array have one adapter each.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
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

_MODULES: dict[str, tuple[str, ...]] = {
    "attention/qkv": ("q_proj", "k_proj", "v_proj"),
    "attention/out": ("o_proj",),
    "mlp/up": ("gate_proj", "up_proj"),
    "mlp/down": ("down_proj",),
}
_GPT2_MODULES: dict[str, tuple[str, ...]] = {
    "attention/qkv": ("c_attn",),
    "attention/out": ("attn.c_proj",),
    "mlp/up": ("c_fc",),
    "mlp/down": ("mlp.c_proj",),
}
# Our array in a layer -> Hugging Face's modules that it consists of.
EXPERTS: dict[str, tuple[str, ...]] = {"mlp/up": ("gate_up_proj",), "mlp/down": ("down_proj",)}
# Our array of all experts in a layer -> the parameter of transformers' experts that it is.

INPUTS = {"attention/qkv": 1, "attention/out": 2, "mlp/up": 1, "mlp/down": 1}
"""Number of leading dims of an array of a layer (of each expert) that its product contracts."""

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
        "q_proj, v_proj; of experts gate_up_proj and down_proj; of a custom model patterns of "
        "parameter names, e.g. layers/*/up, or layers/out:2 if its first 2 dims are summed over",
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
        has_experts = lambda array: bool(model.num_experts) and array in EXPERTS
        return {
            array: BlockLayout(
                self.base_format,
                input_sizes(model, array),
                # Of experts, gate and up are two tensors in files.
                *tensors_of(model, array, _MODULES[array] if has_experts(array) else names),
                # GPT-2's query, key and value are one tensor, with the queries of all heads first.
                is_outer=array == "attention/qkv" and len(names) == 1,
                has_experts=has_experts(array),
            )
            for array, names in modules_of(model).items()
        }

    def block_units(self, model: Any) -> dict[str, int]:
        """Return logical dim -> number of adjacent entries that no shard may cut."""
        units: dict[str, int] = {}
        for array, blocks in self.blocks(model).items():
            dim = "d_model" if array in ("attention/qkv", "mlp/up") else "mlp"
            own = blocks.unit
            if array == "attention/out":
                dim, own = "heads", own // math.gcd(own, model.head_width)
            units[dim] = math.lcm(units.get(dim, 1), own)
        return units

    def problems(self) -> list[str]:
        """Return error messages for invalid settings and combinations in this section."""
        if not self.rank:
            changed = [f.name for f in dataclasses.fields(self) if _is_changed(self, f)]
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
        names = [name for parts in modules_of(model).values() for name in parts]
        allowed = ["attention", "mlp", *names]
        ranked = [text.partition("=")[0] for text in self.ranks]
        problems = []
        if model.dense_layers:
            problems.append(
                f"lora.rank={self.rank} with model.dense_layers={model.dense_layers}: "
                "adapters of these layers are not supported. Use lora.rank=0."
            )
        of_experts = expert_targets(self, model)
        if of_experts and (self.dropout or self.variant == "dora"):
            problems.append(
                f"lora.dropout={self.dropout} and lora.variant={self.variant!r} with adapters of "
                f"experts ({', '.join(of_experts)}), which have neither dropout nor DoRA. Use "
                "--lora.targets attention, or dropout=0 and another variant."
            )
        if wrong := [i for i in self.token_ids if not 0 <= i < model.vocab_size]:
            problems.append(
                f"lora.token_ids has {', '.join(map(str, wrong))}: tokens are 0 to "
                f"{model.vocab_size - 1}. Add new ones with convert add-tokens."
            )
        for setting_name, unknown in (
            ("targets", [name for name in self.targets if name not in allowed]),
            ("ranks", [name for name in ranked if name not in names]),
        ):
            for name in unknown:
                near = difflib.get_close_matches(name, allowed, 1)
                is_outer = any(part in name for part in ("embed", "head", "wte", "wpe"))
                why = "embeddings and head have no adapters" if is_outer else "no such module"
                if "shared" in name or name.rpartition(".")[2] in ("gate", "router"):
                    near, why = [], "routers and shared experts have no adapters"
                fix = f"Did you mean {near[0]}?" if near else f"Use {', '.join(allowed)}."
                problems.append(f"lora.{setting_name} has {name!r}: {why}. {fix}")
        problems += [
            f"lora.base_format={self.base_format!r} with {math.prod(blocks.inputs)} inputs of "
            f"{array}: blocks of {BLOCK} do not divide them. Use bf16."
            for array, blocks in self.blocks(model).items()
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
            for array, names in modules_of(model).items()
            for name in names
            if name in self.targets or array.partition("/")[0] in self.targets
        }

    def scale(self, rank: int) -> float:
        """Return the factor of an adapter of a rank (rsLoRA: Kalajdzievski 2023, theorem 3.2)."""
        return self.alpha / (math.sqrt(rank) if self.variant == "rslora" else rank)


def _is_changed(config: LoraConfig, field: Any) -> bool:
    return getattr(config, field.name) != getattr(LoraConfig(), field.name)


def modules_of(model: DecoderConfig) -> Mapping[str, tuple[str, ...]]:
    """Return our arrays in a layer -> Hugging Face's names of the modules in it."""
    if model.num_experts:
        # PEFT stores other shapes for parameters of experts with biases (gpt-oss).
        experts = {} if "mlp" in model.bias else EXPERTS
        return {n: _MODULES[n] for n in ("attention/qkv", "attention/out")} | experts
    if model.activation != "gelu":
        return _MODULES
    return _GPT2_MODULES if model.positions == "learned" else _MODULES | {"mlp/up": ("up_proj",)}


def expert_targets(config: LoraConfig, model: DecoderConfig) -> list[str]:
    """Return Hugging Face's names of the experts' parameters that have adapters, or []."""
    names = [name for parts in EXPERTS.values() for name in parts]
    return [name for name in config.target_modules(model) if model.num_experts and name in names]


def num_trained(model: Model) -> int:
    """Return the number of parameters with update="gradient"."""
    return sum(w.size for w in weights_of(model) if w.dims.update == "gradient")


def tensors_of(
    decoder: DecoderConfig, array: str, names: tuple[str, ...]
) -> tuple[tuple[int, ...], int]:
    """Return the sizes of an array's modules along a dim of its outputs, and that dim's index."""
    group = decoder.num_heads // decoder.kv_heads
    if array == "attention/qkv":
        return (group, 1, 1) if len(names) > 1 else (group + 2,), 1
    if names == EXPERTS["mlp/up"]:
        return (1 if decoder.activation == "gelu" else 2,), 0
    return ((1,) * len(names) if array == "mlp/up" else (decoder.d_model,)), 0


def input_sizes(decoder: DecoderConfig, array: str) -> tuple[int, ...]:
    """Return the sizes of the dims of an array of a layer that its product sums over."""
    if array == "attention/out":
        return decoder.num_heads, decoder.head_width
    return (decoder.mlp_dim if array == "mlp/down" else decoder.d_model,)


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
