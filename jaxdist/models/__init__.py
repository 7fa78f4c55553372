"""Models as `Model` records of pure functions; their Flax NNX modules never leave this room.

`build` makes the record that a config names; the record is all that the rest of the package sees.
"""

from __future__ import annotations

from jaxdist.core.types import Model
from jaxdist.models.configs import CnnConfig, CustomConfig, DecoderConfig, ModelConfig

__all__ = ["CnnConfig", "CustomConfig", "DecoderConfig", "ModelConfig", "build"]


def build(config: ModelConfig, *, seq_len: int) -> Model:
    """The `Model` of a config; imports Flax, starts no device.

    `seq_len` is the length of a row of text, for FLOPs and position tables.

    Raises:
        ConfigError: a custom factory that cannot be imported or does not return a `Model`.
    """
    if isinstance(config, DecoderConfig):
        from jaxdist.models.decoder import build_decoder

        return build_decoder(config, seq_len=seq_len)
    if isinstance(config, CnnConfig):
        from jaxdist.models.cnn import build_cnn

        return build_cnn(config)
    from jaxdist.models.custom import build_custom

    return build_custom(config, seq_len=seq_len)
