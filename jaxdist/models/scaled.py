"""Scale a model down for `--try`."""

from __future__ import annotations

import dataclasses

from jaxdist.models.configs import CnnConfig, DecoderConfig, ModelConfig, ResnetConfig
from jaxdist.settings import ConfigError

_WIDTH, _LAYERS, _HEADS = 128, 4, 8


def scaled_model(model: ModelConfig, vocab_size: int, seq_len: int) -> ModelConfig:
    """Return a small model of the same architecture, for rows of `seq_len` tokens.

    The ratio of query to key/value heads stays. Raises `ConfigError` for a custom model.
    """
    if isinstance(model, CnnConfig):
        return dataclasses.replace(model, mlp_dim=min(model.mlp_dim, 64))
    if isinstance(model, ResnetConfig):
        return dataclasses.replace(model, depth=8)
    if not isinstance(model, DecoderConfig):
        raise ConfigError("--try scales the built-in models only. Leave it out.")
    if model.d_model <= _WIDTH:
        return dataclasses.replace(model, vocab_size=vocab_size)
    queries_per_kv = max(1, model.num_heads // model.kv_heads)
    num_kv_heads = max(1, _HEADS // queries_per_kv)
    num_heads = num_kv_heads * queries_per_kv
    scaled = lambda width: width and _multiple_of_8(_WIDTH * width / model.d_model)
    attention_width = _WIDTH * model.num_heads * model.head_width / model.d_model
    return dataclasses.replace(
        model,
        vocab_size=vocab_size,
        d_model=_WIDTH,
        **model.fewer_layers(max(1, _LAYERS // len(model.stack[1]))),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_multiple_of_8(attention_width / num_heads),
        mlp_dim=scaled(model.mlp_dim),
        shared_expert_dim=scaled(model.shared_expert_dim),
        dense_mlp_dim=scaled(model.dense_mlp_dim),
        max_seq_len=seq_len if model.positions == "learned" else model.max_seq_len,
        sliding_window=min(model.sliding_window, seq_len // 2),
        query_pre_attn_scalar=0,
    )


def _multiple_of_8(size: float) -> int:
    return max(8, 8 * round(size / 8))
