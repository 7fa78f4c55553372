"""Models as `Model` records of pure functions; their Flax NNX modules never leave this room.

`build` makes the record that a config names; the record is all that the rest of the package sees.
"""

from __future__ import annotations

from jaxdist.core.types import Model
from jaxdist.models.configs import CnnConfig, CustomConfig, DecoderConfig, ModelConfig, ResnetConfig
from jaxdist.runtime.named_function import named_function
from jaxdist.settings import ConfigError

GIVEN_MODEL = "python:model"
"""The factory of a run whose model a Python program gave as an object."""


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
    if isinstance(config, ResnetConfig):
        from jaxdist.models.resnet import build_resnet

        return build_resnet(config)
    return _build_custom(config, seq_len=seq_len)


def _build_custom(config: CustomConfig, *, seq_len: int) -> Model:
    """Import the factory and call it.

    The current directory is importable, as for a script, so a file next to the config works.

    Raises:
        ConfigError: the module or function is not there, or the result is not a `Model`.
    """
    if config.factory == GIVEN_MODEL:
        raise ConfigError(
            "model.factory: the model of this run was given as a Python object, which no file "
            "holds. Give it again: jaxdist.open(RUN, model=MODEL)."
        )
    try:
        factory = named_function(config.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.factory={config.factory!r} cannot be loaded: {error}. Name an importable "
            "module:function (the current directory is on the path)."
        ) from error
    try:
        model = factory(seq_len=seq_len, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"model.factory={config.factory!r} refused its arguments: {error}. It is called "
            f"with seq_len and model.args = {sorted(config.args)}."
        ) from error
    if not isinstance(model, Model):
        raise ConfigError(
            f"model.factory={config.factory!r} returned {type(model).__name__}, "
            "not a jaxdist.core.types.Model. Build the record as in jaxdist/models/example.py."
        )
    return model
