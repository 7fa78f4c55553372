"""Scaled rotary positions of decoders against Hugging Face transformers, and their rejections."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from decoders import FAMILIES, VARIANTS

from jaxdist.models import DecoderConfig, layers
from jaxdist.models.huggingface.families import read_config, write_config

transformers = pytest.importorskip("transformers", reason="needs the reference extra")

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 4.0},
        {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
        {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 1.25,
        },
        VARIANTS["gpt_oss"].rope_scaling | {"original_max_position_embeddings": 256},
        FAMILIES["llama3.1"].rope_scaling,
    ],
    ids=lambda scaling: f"{scaling['type']}{len(scaling)}",
)
def test_scaled_rope_equals_hugging_face_and_survives_a_round_trip(scaling):
    """A reference that is not scaled, or of another length, differs by more than 1e-2."""
    config = DecoderConfig(
        d_model=128, num_heads=2, rope_theta=5e5, rope_scaling=scaling, max_seq_len=2048
    )
    assert config.problems() == []
    written = json.loads(json.dumps(write_config(config, "float32")))
    assert read_config(written).rope_scaling == scaling
    kind = scaling["type"]
    rope = {"rope_theta": config.rope_theta, **written["rope_scaling"]}
    llama = transformers.LlamaConfig(
        hidden_size=128, num_attention_heads=2, max_position_embeddings=2048, rope_parameters=rope
    )
    expected, length = ROPE_INIT_FUNCTIONS[kind](llama, "cpu")
    positions = jnp.arange(2048)
    stretch, ours = layers.rope_stretch(scaling, 64, config.rope_theta)
    cos, sin = layers.rotary_angles(positions, 64, config.rope_theta, stretch, ours)
    angles = np.arange(2048)[:, None] * expected.double().numpy()
    assert ours == pytest.approx(length, rel=1e-12)
    np.testing.assert_allclose(cos, length * np.cos(angles), atol=1e-3)
    np.testing.assert_allclose(sin, length * np.sin(angles), atol=1e-3)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "longrope", "factor": 2.0}, "longrope"),
        ({"type": "linear"}, "lacks factor"),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3.0}, "beta_fast"),
        ({**FAMILIES["llama3.1"].rope_scaling, "low_freq_factor": 4.0}, "low_freq_factor"),
        ({"type": "yarn", "factor": 0, "original_max_position_embeddings": 8}, "factor=0"),
        (VARIANTS["gpt_oss"].rope_scaling | {"truncate": 1.0}, "truncate=1.0"),
    ],
)
def test_a_wrong_rope_scaling_is_refused(scaling, named):
    (problem,) = DecoderConfig(rope_scaling=scaling).problems()
    assert named in problem
