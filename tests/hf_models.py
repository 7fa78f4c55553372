"""Write Hugging Face model directories, with and without transformers, and a tokenizer for them."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxdist.models.configs import DecoderConfig
from jaxdist.models.huggingface import safetensors
from jaxdist.models.huggingface.families import family_of, write_config
from jaxdist.models.huggingface.tensors import pieces

# ChatML, with the assistant's replies marked for transformers' own mask.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_tokenizer(path: Path, texts, vocab_size: int = 320, template: str = "") -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 3,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(token, special=True) for token in special])
    inner.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "eos_token": "<|im_end|>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (path / "chat_template.jinja").write_text(template)


def write_model(path: Path, config: DecoderConfig, dtype=np.float32, scale: float = 1.0) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(write_config(config, "float32")))
    rng = np.random.default_rng(0)
    tensors = {}
    for piece in pieces(config, family_of(config)):
        for source in piece.sources:
            values = scale * rng.standard_normal(source.shape, np.float32)
            if piece.name.endswith("/scale"):  # norm scales are near 1
                values += 1
            values = values.astype(dtype)
            tensors[source.name] = safetensors.Tensor(values.shape, values.dtype, [values])
    safetensors.write(path / "model.safetensors", tensors, {})


def rewrite_tensors(path: Path, change) -> None:
    values = {name: tensor.read() for name, tensor in safetensors.open_all(path).items()}
    change(values)
    tensors = {name: safetensors.Tensor(x.shape, x.dtype, [x]) for name, x in values.items()}
    safetensors.write(path / "model.safetensors", tensors, {})


def reference_of(config: DecoderConfig, family: str = "", scale: float = 10.0):
    """Return a model of transformers with random weights, from the `config.json` of `config`."""
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    written = write_config(config, "float32")
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    settings = {**written, **ends, "model_type": family or written["model_type"]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings), attn_implementation="eager"
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
        for key, weight in model.named_parameters():
            if key.endswith("sinks") or "gate_up_proj" in key:
                weight.mul_(scale)  # by default so large that sinks and limits matter
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.5 * torch.randn_like(buffer) - 0.5)
    return model.eval()


def reference_logits(model, tokens) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.numpy()
