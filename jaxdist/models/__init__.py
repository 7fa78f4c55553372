"""Build models as `Model` records of pure functions; Flax NNX stays inside this package."""

from __future__ import annotations

from jaxdist.core.types import Model
from jaxdist.models.configs import CnnConfig, CustomConfig, DecoderConfig, ModelConfig, ResnetConfig
from jaxdist.runtime.named_function import named_function
from jaxdist.settings import ConfigError

PYTHON_MODEL = "python:model"
"""Factory of a run whose model was passed as a Python object."""


def build(config: ModelConfig, *, seq_len: int) -> Model:
    """Return the `Model` of a config; a built-in model starts no device."""
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
    """Return the model of a config's factory; the current directory is importable for it."""
    if config.factory == PYTHON_MODEL:
        raise ConfigError(
            "model.factory: the model of this run was passed as a Python object and is not "
            "stored. Pass it again: jaxdist.open(RUN, model=MODEL)."
        )
    try:
        factory = named_function(config.factory)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.factory={config.factory!r} cannot be loaded: {error}. Use an importable "
            "module:function (the current directory is on the path)."
        ) from error
    try:
        model = factory(seq_len=seq_len, **config.args)
    except TypeError as error:
        raise ConfigError(
            f"model.factory={config.factory!r} raised TypeError: {error}. It is called "
            f"with seq_len and model.args = {sorted(config.args)}."
        ) from error
    if not isinstance(model, Model):
        raise ConfigError(
            f"model.factory={config.factory!r} returned {type(model).__name__}, "
            "not a jaxdist.core.types.Model. Build the record as in jaxdist/models/example.py."
        )
    return model
