"""Sizes and families of the models, with their rules. Pure data: imports no Flax.

Beside its settings a kind says what must be known before it is built: `dims` and `rules` (as of
`Model`; {} where only the built model knows), whether `sequence` parallelism may split its rows,
and what it `reads`: "text", "images" or "" where any data may do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from jaxdist.core.types import setting

VOCAB_MULTIPLE = 64
"""Embedding tables are padded to a multiple of this, on every mesh alike, so that a tensor axis of
up to 64 divides them and matrix units run full; padding entries never get probability."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only language model: Llama, Mistral, Qwen and GPT-2 families by their parts."""

    kind: Literal["decoder"] = setting("decoder", "decoder = a language model")
    vocab_size: int = setting(256, "tokens of the vocabulary")
    d_model: int = setting(128, "width of the residual stream")
    num_layers: int = setting(8, "blocks")
    num_heads: int = setting(8, "query heads")
    num_kv_heads: int = setting(0, "key/value heads; 0 = num_heads, fewer = grouped-query")
    head_dim: int = setting(0, "width of a head; 0 = d_model / num_heads")
    mlp_dim: int = setting(384, "hidden width of the MLP")
    max_seq_len: int = setting(2048, "longest sequence (the learned position table's length)")
    norm: Literal["rms", "layer"] = setting("rms", "rms = RMSNorm, layer = LayerNorm with bias")
    norm_eps: float = setting(1e-5, "added to the variance")
    positions: Literal["rotary", "learned"] = setting("rotary", "how positions enter")
    rope_theta: float = setting(10000.0, "base of the rotary frequencies")
    rope_scaling: Literal["none", "llama3"] = setting(
        "none", "llama3 = stretch low frequencies as Llama 3.1 does"
    )
    rope_factor: float = setting(8.0, "llama3 scaling: by how much low frequencies are stretched")
    rope_low_freq_factor: float = setting(1.0, "llama3 scaling: below it, stretched fully")
    rope_high_freq_factor: float = setting(4.0, "llama3 scaling: above it, left alone")
    rope_original_len: int = setting(8192, "llama3 scaling: context length before stretching")
    activation: Literal["swiglu", "gelu"] = setting(
        "swiglu", "swiglu = gated SiLU, gelu = tanh GELU as in GPT-2"
    )
    qk_norm: bool = setting(False, "RMSNorm on each query and key head (Qwen 3)")
    qkv_bias: bool = setting(False, "bias on query, key and value products (Qwen 2, GPT-2)")
    out_bias: bool = setting(False, "bias on the attention output product (GPT-2)")
    mlp_bias: bool = setting(False, "bias on the MLP products (GPT-2)")
    tie_embeddings: bool = setting(False, "the head uses the embedding table")
    sliding_window: int = setting(0, "keys a query sees, itself included; 0 = all (Mistral 4096)")
    dropout: float = setting(0.0, "share of the embedding and of each branch dropped (GPT-2 0.1)")
    attention_dropout: float = setting(0.0, "share of attention probabilities dropped (GPT-2 0.1)")
    init_std: float = setting(
        0.02, "standard deviation of weights; output products get it over sqrt(2 num_layers)"
    )
    attention: Literal["auto", "xla", "cudnn"] = setting(
        "auto", "attention kernel; auto = cuDNN on GPUs where it can honour the mask, else XLA"
    )

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.d_model // max(1, self.num_heads)

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding table."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def dims(self) -> dict[str, int]:
        """Logical dim -> size."""
        return {
            "layers": self.num_layers,
            "vocab": self.padded_vocab,
            "d_model": self.d_model,
            "heads": self.num_heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_width,
            "mlp": self.mlp_dim,
            "positions": self.max_seq_len,
        }

    rules: ClassVar[Mapping[str, str | None]] = {}
    sequence: ClassVar[bool] = True
    reads: ClassVar[str] = "text"

    def problems(self) -> list[str]:
        """Every violated rule of this section."""
        problems = []
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "mlp_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                problems.append(f"model.{name}={getattr(self, name)} is too few. Use 1 or more.")
        for name in ("num_kv_heads", "head_dim", "sliding_window"):
            if getattr(self, name) < 0:
                problems.append(f"model.{name}={getattr(self, name)} must be ≥ 0 (0: see --help).")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(
                    f"model.{name}={getattr(self, name)} is a share: 0 ≤ {name} < 1. Use e.g. 0.1."
                )
        if problems:
            return problems
        return problems + self._shape_problems()

    def run_problems(
        self, *, seq_len: int, num_tokens: int, tokenizer: str, simulate: int
    ) -> list[str]:
        """Violated rules between this model and the rest of a run.

        Args:
            seq_len: tokens of a row.
            num_tokens: tokens that the data holds; 0 = not known.
            tokenizer: its name, for the message.
            simulate: simulated CPU devices; 0 = none.
        """
        found = []
        if self.positions == "learned" and seq_len > self.max_seq_len:
            found.append(
                f"train.seq_len={seq_len} is longer than model.max_seq_len={self.max_seq_len}, the "
                "learned position table. Shorten one or lengthen the other."
            )
        if self.vocab_size < num_tokens:
            found.append(
                f"model.vocab_size={self.vocab_size} is smaller than the {num_tokens} tokens of "
                f"data.tokenizer={tokenizer!r}. Use {num_tokens} or more."
            )
        if self.attention == "cudnn" and simulate:
            found.append(
                f"model.attention='cudnn' needs a GPU, and simulate={simulate} asks for CPU "
                "devices. Use attention='auto'."
            )
        return found

    def _shape_problems(self) -> list[str]:
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
                f"model.head_dim={self.head_width} is odd: rotary positions turn pairs. "
                "Use an even head_dim, or positions = 'learned'."
            )
        if self.attention_dropout and self.attention == "cudnn":
            problems.append(
                "model.attention='cudnn' cannot drop attention probabilities reproducibly on "
                "every mesh. Use attention='xla' or attention_dropout=0."
            )
        if self.rope_scaling == "llama3" and (
            self.rope_low_freq_factor >= self.rope_high_freq_factor
        ):
            problems.append(
                f"model.rope_low_freq_factor={self.rope_low_freq_factor} must be below "
                f"rope_high_freq_factor={self.rope_high_freq_factor}. Llama 3.1 uses 1 and 4."
            )
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class CnnConfig:
    """A small convolutional classifier: two conv blocks, two dense layers (CIFAR-10 tutorial)."""

    kind: Literal["cnn"] = setting("cnn", "cnn = an image classifier")
    image_size: int = setting(32, "height and width of the images, pixels")
    in_channels: int = setting(3, "channels of the images")
    channels_1: int = setting(32, "channels of the first conv block")
    channels_2: int = setting(64, "channels of the second conv block")
    kernel_size: int = setting(3, "height and width of the conv kernels, pixels")
    hidden: int = setting(512, "width of the first dense layer")
    num_classes: int = setting(10, "classes")

    rules: ClassVar[Mapping[str, str | None]] = {
        "channels_1": "tensor",
        "hidden": "tensor",
        "channels_2": "fsdp",
        "flat": "fsdp",
    }
    sequence: ClassVar[bool] = False
    reads: ClassVar[str] = "images"

    @property
    def flat_size(self) -> int:
        """Features after the conv blocks (each halves height and width)."""
        return (self.image_size // 4) ** 2 * self.channels_2

    @property
    def dims(self) -> dict[str, int]:
        """Logical dim -> size."""
        return {
            "channels_1": self.channels_1,
            "channels_2": self.channels_2,
            "flat": self.flat_size,
            "hidden": self.hidden,
        }

    def problems(self) -> list[str]:
        """Every violated rule of this section."""
        problems = [
            f"model.{field.name}={getattr(self, field.name)} is too few. Use 1 or more."
            for field in dataclasses.fields(self)
            if field.name != "kind" and getattr(self, field.name) < 1
        ]
        if self.image_size % 4:
            problems.append(
                f"model.image_size={self.image_size} must be divisible by 4: each of the two conv "
                "blocks halves it. CIFAR-10 has 32."
            )
        if self.kernel_size % 2 == 0:
            problems.append(f"model.kernel_size={self.kernel_size} must be odd. Use 3 or 5.")
        return problems

    def run_problems(self, **_: Any) -> list[str]:
        """Violated rules between this model and the rest of a run: CIFAR-10 fits these sizes."""
        if (self.image_size, self.in_channels, self.num_classes) == (32, 3, 10):
            return []
        return [
            f"model.image_size={self.image_size}, in_channels={self.in_channels}, "
            f"num_classes={self.num_classes} do not fit CIFAR-10, which has 32, 3 and 10. Use "
            "those."
        ]


DIM_SETTINGS = {
    "layers": "model.num_layers",
    "vocab": "padded model.vocab_size",
    "d_model": "model.d_model",
    "heads": "model.num_heads",
    "kv_heads": "model.num_kv_heads",
    "mlp": "model.mlp_dim",
    "channels_1": "model.channels_1",
    "channels_2": "model.channels_2",
    "hidden": "model.hidden",
    "flat": "pixels × model.channels_2",
}
"""Logical dim -> the setting that gives its size, for messages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomConfig:
    """Your own model: a function that returns a `jaxdist.core.types.Model`."""

    kind: Literal["custom"] = setting("custom", "custom = a model of your own")
    factory: str = setting("", "module:function that returns a Model, called with args and seq_len")
    args: dict[str, Any] = setting({}, "keyword arguments for the factory")

    dims: ClassVar[Mapping[str, int]] = {}
    rules: ClassVar[Mapping[str, str | None]] = {}
    sequence: ClassVar[bool] = False
    reads: ClassVar[str] = ""

    def problems(self) -> list[str]:
        """Every violated rule of this section."""
        module, _, function = self.factory.partition(":")
        if not module or not function.isidentifier():
            return [
                f"model.factory={self.factory!r} is not module:function. "
                "Use e.g. my_package.my_model:build."
            ]
        return []

    def run_problems(self, **_: Any) -> list[str]:
        """Nothing is known before the factory was called."""
        return []


ModelConfig: TypeAlias = DecoderConfig | CnnConfig | CustomConfig
