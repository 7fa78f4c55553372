"""Settings of the models, with their validation. Does not import Flax."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, TypeAlias

from jaxdist.core.types import AttentionCall, ExpertsCall
from jaxdist.models.expert_settings import ExpertSettings, repeated_block
from jaxdist.settings import setting

VOCAB_MULTIPLE = 64
"""The vocabulary is padded to a multiple of this, so that tensor axes of 2, 4, ... divide it."""

ROPE_SCALING: Mapping[str, Mapping[str, float | bool | None]] = {
    "linear": {"factor": None},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
    },
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 0.0,
        "truncate": True,
    },
}
"""Type of `rope_scaling` -> its other keys and defaults (None = required), as in Hugging Face's
config.json. If `attention_factor` is 0, it is computed from `factor`."""

IMAGE_CHANNELS = 3

KERNEL_SIZE = 3

_NOT_IN_CUDNN = {
    "attention_dropout": "cannot drop attention probabilities reproducibly on every mesh",
    "attention_softcap": "cannot cap scores",
    "attention_sinks": "has no attention sinks",
}

_SMALL_VOCAB, _SMALL_WIDTH = 256, 8
"""Sizes to which a model is shrunk: vocabulary; width of heads, and of the MLP per device."""


class _ModelDefaults:
    """Facts of a model that are needed before it is built; those of a custom model are unknown.

    Attributes:
        rules, context_parallel: as in `Model`.
        reads: "text", "images", or "" for any data.
        size_settings: logical dim or size -> its setting, for messages.
        num_labels: outputs of its score head; 0 = it has no such head.
        max_seq_len: number of tokens per row that the model is made for; 0 = unknown.
    """

    rules: ClassVar[Mapping[str, str | None]] = {}
    context_parallel: ClassVar[bool] = False
    is_user_model: ClassVar[bool] = False
    reads: ClassVar[str] = ""
    size_settings: ClassVar[Mapping[str, str]] = {}
    num_labels: int = 0
    max_seq_len: int = 0

    @property
    def stack_settings(self) -> Mapping[str, str]:
        """Entries that replace those of `size_settings` if several layers repeat."""
        return {}

    @property
    def head_parts(self) -> list[str]:
        """Names of the parameters of a decoder's head, without the norm; [] for other models."""
        return []

    @property
    def dims(self) -> dict[str, int]:
        """Logical dim -> size."""
        return {}

    @property
    def active_experts(self) -> float:
        """Share of the experts that process a token; 1 without experts."""
        return 1.0

    @property
    def attention_call(self) -> AttentionCall:
        """Arguments that the layers pass to `Context.attend`."""
        return AttentionCall()

    def shrunken(self, *, num_layers: int, multiple: int) -> Self:
        """Return a smaller model to check a mesh; by default this one."""
        del num_layers, multiple
        return self

    def problems(self) -> list[str]:
        """Return error messages for invalid settings and combinations in this section."""
        return []

    def run_problems(self, *_: Any, **facts: Any) -> list[str]:
        """Return error messages for conflicts with a run, see `DecoderConfig.run_problems`."""
        return []


class _ImageDefaults(_ModelDefaults):
    """Facts of the image classifiers, of which size and classes are those of CIFAR-10."""

    reads: ClassVar[str] = "images"
    image_size: ClassVar[int] = 32
    num_classes: ClassVar[int] = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(ExpertSettings, _ModelDefaults):
    """A decoder-only language model: Llama, Mistral, Qwen, OLMo, Gemma, GPT-2 and gpt-oss."""

    kind: Literal["decoder"] = setting("decoder", "decoder = a language model")
    vocab_size: int = setting(1024, "number of tokens in the vocabulary", ge=1, le=2**31)
    d_model: int = setting(128, "width of the residual stream", ge=1, le=2**20)
    num_layers: int = setting(8, "number of transformer blocks", ge=1, le=10_000)
    num_heads: int = setting(8, "number of query heads", ge=1, le=2**16)
    num_kv_heads: int = setting(0, "key/value heads; 0 = num_heads, fewer = grouped-query", ge=0)
    head_dim: int = setting(0, "width of a head; 0 = d_model / num_heads", ge=0)
    mlp_dim: int = setting(384, "hidden width of the MLP", ge=1, le=2**24)
    max_seq_len: int = setting(
        2048,
        "length of the learned position table, the longest row with it; with rotary positions no "
        "limit, but the length in eval.tasks and exports",
        ge=1,
    )
    norm: Literal["rms", "zero_centered_rms", "layer"] = setting(
        "rms",
        "rms = RMSNorm, zero_centered_rms = RMSNorm that multiplies by 1 + its scale (Gemma), "
        "layer = LayerNorm with bias",
    )
    norm_eps: float = setting(1e-5, "epsilon of the norms, added to the variance", gt=0)
    norm_placement: Literal["pre", "post", "both"] = setting(
        "pre",
        "norms of attention and MLP: pre = on their inputs (Llama), post = on their outputs "
        "(OLMo 2), both = on inputs and outputs (Gemma)",
    )
    positions: Literal["rotary", "learned"] = setting("rotary", "position encoding: RoPE or table")
    rope_theta: float = setting(10000.0, "base of the rotary frequencies", gt=0)
    rope_scaling: dict[str, Any] = setting(
        {},
        "stretch rotary positions to rows longer than in pretraining: type linear, llama3 "
        "(Llama 3.1) or yarn, other keys as in Hugging Face's config.json, e.g. "
        '{type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, '
        "original_max_position_embeddings = 8192}; empty = none",
    )
    local_rope_theta: float = setting(
        0.0,
        "base of the rotary frequencies in layers with a sliding window, which then ignore "
        "rope_scaling (Gemma 3: 10000); 0 = rope_theta in all layers",
        ge=0,
    )
    activation: Literal["swiglu", "geglu", "gelu", "clamped_swiglu"] = setting(
        "swiglu",
        "swiglu = gated SiLU, geglu = gated tanh GELU (Gemma), gelu = tanh GELU (GPT-2), "
        "clamped_swiglu = (up + 1) · gate · sigmoid(1.702 gate), with gate at most 7 and up from "
        "-7 to 7 (gpt-oss)",
    )
    qk_norm: Literal["none", "head", "all"] = setting(
        "none",
        "RMSNorm of queries and keys: head = every head separately (Qwen 3), all = all heads of a "
        "token together (OLMo 2)",
    )
    bias: list[Literal["qkv", "out", "mlp", "router"]] = setting(
        [],
        "products with a bias: qkv = query, key and value (Qwen 2, GPT-2), out = the attention "
        "output, mlp = both of the MLP (GPT-2) or of each expert, router = the router (gpt-oss)",
    )
    tie_embeddings: bool = setting(False, "the output head uses the embedding table (tied weights)")
    num_labels: int = setting(
        0,
        "outputs of a score head on the last token of each record, in place of a vocabulary: 1 = a "
        "reward model (objective.kind=reward), more = classes (data.records=text_label); 0 = none",
        ge=0,
        le=2**16,
    )
    scale_embeddings: bool = setting(False, "multiply embeddings by sqrt(d_model) (Gemma)")
    sliding_window: int = setting(
        0, "sliding window: keys that a query sees, its own included; 0 = all (Mistral 4096)", ge=0
    )
    full_attention_every: int = setting(
        0,
        "every n-th layer attends to all keys, the others to sliding_window (Gemma 2: 2, Gemma 3: "
        "6); 0 = all layers have the window",
        ge=0,
    )
    query_pre_attn_scalar: int = setting(
        0, "attention scores are divided by the square root of this; 0 = head_dim", ge=0
    )
    attention_softcap: float = setting(
        0.0, "soft cap of attention scores, a tanh; 0 = none (Gemma 2: 50)", ge=0
    )
    attention_sinks: bool = setting(
        False,
        "each head has a trained score in the softmax of attention, without a value, so that a "
        "query may attend to nothing (gpt-oss)",
    )
    logit_softcap: float = setting(
        0.0, "soft cap of the output logits, a tanh; 0 = none (Gemma 2: 30)", ge=0
    )
    dropout: float = setting(
        0.0, "dropout rate of the outputs of embedding, attention and MLP (GPT-2 0.1)", ge=0, lt=1
    )
    attention_dropout: float = setting(
        0.0, "dropout rate of attention probabilities (GPT-2 0.1)", ge=0, lt=1
    )
    init_std: float = setting(
        0.02,
        "standard deviation of initial weights; divided by sqrt(2 num_layers) for the last product "
        "of attention and MLP",
        gt=0,
        le=100,
    )
    attention: Literal["auto", "xla", "cudnn"] = setting(
        "auto", "attention kernel; auto = cuDNN if it supports dtype, heads and mask, else XLA"
    )

    @property
    def head_parts(self) -> list[str]:
        """Name of the kernel of scores or logits; [] if it is the embedding table."""
        return ["head/score"] if self.num_labels else ["head/kernel"] * (not self.tie_embeddings)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.head_dim or self.d_model // max(1, self.num_heads)

    @property
    def padded_vocab(self) -> int:
        """Number of rows of the embedding table: the vocabulary and its padding."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def dims(self) -> dict[str, int]:
        """Logical dim -> size."""
        return {
            "layers": (self.num_layers - self.stack[0]) // len(self.stack[1]),
            "vocab": self.padded_vocab,
            "d_model": self.d_model,
            "heads": self.num_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_width,
            "mlp": self.mlp_dim,
            "positions": self.max_seq_len,
            **({"experts": self.num_experts} if self.num_experts else {}),
            **({"shared_mlp": self.shared_expert_dim} if self.shared_expert_dim else {}),
            **({"dense_mlp": self.dense_mlp_dim} if self.dense_mlp_dim else {}),
        }

    @functools.cached_property
    def stack(self) -> tuple[int, tuple[bool, ...]]:
        """Number of dense first layers; for each layer of the repeated block: it is not dense."""
        return repeated_block([i not in self.dense_layers for i in range(self.num_layers)])

    @property
    def stack_settings(self) -> Mapping[str, str]:
        """Entries that replace those of `size_settings` if several layers repeat."""
        size = len(self.stack[1])
        return {"layers": f"blocks of {size} layers"} if size > 1 else {}

    def fewer_layers(self, num_blocks: int) -> dict[str, Any]:
        """Return `num_layers` and `dense_layers` for at most this number of repeated blocks."""
        count = min(self.num_layers, self.stack[0] + num_blocks * len(self.stack[1]))
        return {"num_layers": count, "dense_layers": [i for i in self.dense_layers if i < count]}

    @property
    def dense(self) -> DecoderConfig:
        """The model with the MLP of its dense layers in all layers."""
        fields = dataclasses.fields(ExpertSettings)
        none: dict[str, Any] = {f.name: f.default for f in fields}
        none |= {"router": {}, "dense_layers": []}
        return dataclasses.replace(self, **none, mlp_dim=self.dense_mlp_dim or self.mlp_dim)

    @property
    def windows(self) -> list[int]:
        """Attention window of each layer in keys; 0 = no window."""
        every = self.full_attention_every or self.num_layers + 1
        return [self.sliding_window if (i + 1) % every else 0 for i in range(self.num_layers)]

    @property
    def attention_call(self) -> AttentionCall:
        """Arguments that the layers pass to `Context.attend`."""
        return AttentionCall(
            sliding_window=self.sliding_window,
            full_every=self.full_attention_every,
            kernel=self.attention,
            dropout=self.attention_dropout,
            softcap=self.attention_softcap,
            sinks=self.attention_sinks,
        )

    @property
    def experts_call(self) -> ExpertsCall:
        """Sizes of the layers' calls of `Context.experts`."""
        if not self.num_experts:
            return ExpertsCall()
        return ExpertsCall(self.experts_per_token, 1 if self.activation == "gelu" else 2)

    rules: ClassVar[Mapping[str, str | None]] = {
        "shared_mlp": "tensor",
        "dense_mlp": "tensor",
    }
    context_parallel: ClassVar[bool] = True
    reads: ClassVar[str] = "text"
    size_settings: ClassVar[Mapping[str, str]] = {
        "layers": "model.num_layers",
        "vocab": "padded model.vocab_size",
        "vocab_size": "model.vocab_size",
        "d_model": "model.d_model",
        "heads": "model.num_heads",
        "kv_heads": "model.num_kv_heads",
        "mlp": "model.mlp_dim",
        "experts": "model.num_experts",
        "shared_mlp": "model.shared_expert_dim",
        "dense_mlp": "model.dense_mlp_dim",
    }

    def shrunken(self, *, num_layers: int, multiple: int) -> Self:
        """Return this model with at most `num_layers` repeated blocks, small d_model and MLP."""
        d_model = _SMALL_WIDTH * math.lcm(self.num_heads, multiple)
        is_wide = self.d_model > d_model
        return dataclasses.replace(
            self,
            **self.fewer_layers(num_layers),
            d_model=d_model if is_wide else self.d_model,
            head_dim=_SMALL_WIDTH if is_wide else self.head_dim,
            mlp_dim=min(self.mlp_dim, _SMALL_WIDTH * multiple),
            vocab_size=min(self.vocab_size, _SMALL_VOCAB),
        )

    def run_problems(
        self,
        *,
        seq_len: int,
        num_tokens: int,
        tokenizer: str,
        simulate: int,
        matmul_dtype: str,
    ) -> list[str]:
        """Return error messages for conflicts of model and run; `num_tokens` 0 = unknown."""
        errors = self.expert_conflicts(matmul_dtype)
        if self.positions == "learned" and seq_len > self.max_seq_len:
            errors.append(
                f"train.seq_len={seq_len} is longer than model.max_seq_len={self.max_seq_len}, the "
                "learned position table. Reduce one or increase the other."
            )
        if self.vocab_size < num_tokens:
            errors.append(
                f"model.vocab_size={self.vocab_size} is smaller than the {num_tokens} tokens of "
                f"data.tokenizer={tokenizer!r}. Use {num_tokens} or more."
            )
        if self.attention == "cudnn" and simulate:
            errors.append(
                f"model.attention='cudnn' needs a GPU, but simulate={simulate} makes CPU "
                "devices. Use attention='auto'."
            )
        return errors

    def problems(self) -> list[str]:
        """Return error messages for invalid settings and combinations in this section."""
        problems = []
        if not self.head_dim and self.d_model % self.num_heads:
            problems.append(
                f"model.num_heads={self.num_heads} does not divide d_model={self.d_model}. "
                "Choose a divisor, or set model.head_dim."
            )
        if self.num_heads % self.kv_heads:
            problems.append(
                f"model.num_kv_heads={self.kv_heads} does not divide num_heads={self.num_heads}: "
                "each key/value head serves the same number of query heads. Use a divisor."
            )
        if self.positions == "rotary" and self.head_width % 2:
            problems.append(
                f"model.head_dim={self.head_width} is odd: rotary positions rotate pairs. "
                "Use an even head_dim, or positions = 'learned'."
            )
        for name, why in _NOT_IN_CUDNN.items():
            if getattr(self, name) and self.attention == "cudnn":
                problems.append(
                    f"model.attention='cudnn' {why}. Use attention='xla' or 'auto', or "
                    f"{name}={'false' if getattr(self, name) is True else 0}."
                )
        if self.full_attention_every and not self.sliding_window:
            problems.append(
                f"model.full_attention_every={self.full_attention_every} without a window: all "
                "layers attend to all keys. Set model.sliding_window, or full_attention_every=0."
            )
        if self.local_rope_theta and not (self.full_attention_every and self.positions == "rotary"):
            problems.append(
                f"model.local_rope_theta={self.local_rope_theta:g} is for models whose layers "
                "differ: set model.full_attention_every and positions = 'rotary', or set "
                "model.rope_theta instead."
            )
        return (
            problems
            + self._rope_problems()
            + self.expert_problems(self.bias, self.num_layers, self.full_attention_every)
        )

    def _rope_problems(self) -> list[str]:
        rope = self.rope_scaling
        if not rope:
            return []
        kind = str(rope.get("type"))
        if kind not in ROPE_SCALING:
            return [
                f"model.rope_scaling={rope} has type {kind!r}. Use type = "
                f"{', '.join(map(repr, ROPE_SCALING))}."
            ]
        allowed = ROPE_SCALING[kind]
        required = {name for name, default in allowed.items() if default is None}
        numbers = {name: value for name, value in rope.items() if name != "type"}
        wrong = [
            *(f"lacks {name}" for name in sorted(required - set(numbers))),
            *(
                f"has {name}, which type {kind!r} does not"
                for name in numbers
                if name not in allowed
            ),
            *(
                f"has {name}={value!r}, which is not {'true or false' if switch else 'a number'}"
                f"{'' if switch else ' above 0'}"
                for name, value in numbers.items()
                if (switch := isinstance(allowed.get(name), bool)) != isinstance(value, bool)
                or not isinstance(value, int | float)
                or value < 0
                or (value == 0 and name in required)
            ),
        ]
        if not wrong and kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
            wrong = ["has a low_freq_factor that is not below high_freq_factor"]
        keys = ", ".join(allowed)
        fix = f"Type {kind!r} has the keys {keys}; Llama 3.1 uses llama3 with 8, 1, 4 and 8192."
        return [f"model.rope_scaling={rope} {'; '.join(wrong)}. {fix}"] if wrong else []


@dataclasses.dataclass(frozen=True, kw_only=True)
class CnnConfig(_ImageDefaults):
    """A small convolutional classifier: two conv blocks, two dense layers (CIFAR-10 tutorial)."""

    kind: Literal["cnn"] = setting("cnn", "cnn = an image classifier")
    channels: ClassVar[tuple[int, int]] = (32, 64)
    """Channels of the two conv blocks."""
    mlp_dim: int = setting(512, "width of the first dense layer", ge=1)

    rules: ClassVar[Mapping[str, str | None]] = {
        "channels_1": "tensor",
        "hidden": "tensor",
        "channels_2": "fsdp",
        "flat": "fsdp",
    }
    size_settings: ClassVar[Mapping[str, str]] = {
        "channels_1": "channels of the first conv block",
        "channels_2": "channels of the second conv block",
        "hidden": "model.mlp_dim",
        "flat": "pixels × channels of the second conv block",
        "num_classes": "the number of classes",
    }

    def shrunken(self, *, num_layers: int, multiple: int) -> Self:
        """Return this model with a small dense layer."""
        del num_layers
        return dataclasses.replace(self, mlp_dim=min(self.mlp_dim, _SMALL_WIDTH * multiple))

    @property
    def flat_size(self) -> int:
        """Number of features after the conv blocks, each of which halves height and width."""
        return (self.image_size // 4) ** 2 * self.channels[1]

    @property
    def dims(self) -> dict[str, int]:
        """Logical dim -> size."""
        return {
            "channels_1": self.channels[0],
            "channels_2": self.channels[1],
            "flat": self.flat_size,
            "hidden": self.mlp_dim,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResnetConfig(_ImageDefaults):
    """A residual network for CIFAR-10 with batch norm (He et al. 2015, section 4.2)."""

    kind: Literal["resnet"] = setting("resnet", "resnet = an image classifier with batch norm")
    depth: int = setting(20, "number of weight layers: 6 n + 2, e.g. 20, 32, 44, 56 or 110", ge=8)

    width: ClassVar[int] = 16
    """Channels of the first third of the layers. They double twice."""
    rules: ClassVar[Mapping[str, str | None]] = {"hidden": "tensor", "channels": "fsdp"}
    size_settings: ClassVar[Mapping[str, str]] = {
        "hidden": "channels of the first third",
        "channels": "channels of the first third",
        "num_classes": "the number of classes",
    }

    @property
    def dims(self) -> dict[str, int]:
        """Logical dim -> its smallest size, which divides its other sizes."""
        return {"hidden": self.width, "channels": self.width}

    @property
    def blocks_per_stage(self) -> int:
        """Number of residual blocks, of two layers each, at one image size."""
        return (self.depth - 2) // 6

    def problems(self) -> list[str]:
        """Return error messages for invalid settings and combinations in this section."""
        if self.depth % 6 == 2:
            return []
        return [
            f"model.depth={self.depth} must be 6 n + 2: three stages of n blocks of two "
            "layers, the first layer and the head. Use 20, 32, 44, 56 or 110."
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomConfig(_ModelDefaults):
    """A user's model: a function that returns a `jaxdist.core.types.Model`."""

    kind: Literal["custom"] = setting("custom", "custom = the model that model.factory returns")
    factory: str = setting("", "module:function that returns a Model, called with args and seq_len")
    args: dict[str, Any] = setting({}, "keyword arguments for the factory")

    is_user_model: ClassVar[bool] = True

    def problems(self) -> list[str]:
        """Return error messages for invalid settings and combinations in this section."""
        module, _, function = self.factory.partition(":")
        if not module or not function.isidentifier():
            return [
                f"model.factory={self.factory!r} is not module:function. "
                "Use e.g. my_package.my_model:build."
            ]
        return []


ModelConfig: TypeAlias = DecoderConfig | CnnConfig | ResnetConfig | CustomConfig
