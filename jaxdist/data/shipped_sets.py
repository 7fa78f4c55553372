"""Data sets of the shipped configs, which `jaxdist data prepare NAME` makes."""

from __future__ import annotations

import dataclasses

_FINEWEB = "hf://HuggingFaceFW/fineweb-edu/sample-10BT"


@dataclasses.dataclass(frozen=True)
class ShippedSet:
    """A data set of shipped configs.

    Attributes:
        out: path in `data.sources` of the configs.
        source: data set on the hub, which is tokenized, or URL of a file (a .tar.gz is unpacked).
        tokenizer: `data.tokenizer` of the tokens; "" for a file.
        sha256, num_bytes: digest and size of the file.
    """

    out: str
    source: str
    tokenizer: str = ""
    sha256: str = ""
    num_bytes: int = 0


SHIPPED_SETS = {
    "fineweb_edu_gpt2": ShippedSet("data/fineweb_edu_gpt2", _FINEWEB, "openai-community/gpt2"),
    "fineweb_edu_llama2": ShippedSet(
        "data/fineweb_edu_llama2", _FINEWEB, "meta-llama/Llama-2-13b-hf"
    ),
    "fineweb_edu_llama3": ShippedSet(
        "data/fineweb_edu_llama3", _FINEWEB, "meta-llama/Meta-Llama-3-8B"
    ),
    "fineweb_edu_mixtral": ShippedSet(
        "data/fineweb_edu_mixtral", _FINEWEB, "mistralai/Mixtral-8x7B-v0.1"
    ),
    "fineweb_edu_qwen3": ShippedSet("data/fineweb_edu_qwen3", _FINEWEB, "Qwen/Qwen3-0.6B"),
    "tinyshakespeare": ShippedSet(
        "data/tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/"
        "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        num_bytes=1_115_394,
    ),
    "cifar10": ShippedSet(
        "data/cifar-10-batches-bin",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        num_bytes=170_052_171,
    ),
}


def prepare_command(source: str) -> str:
    """Return the command that makes a missing source of a shipped config; "" for other sources."""
    names = [name for name, shipped in SHIPPED_SETS.items() if shipped.out == source]
    return f"jaxdist data prepare {names[0]}" if names else ""
