"""How a model continues text; light to import: a wrong value is answered before jax starts."""

from __future__ import annotations

import dataclasses

from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How long, how daring and how complete generated text is."""

    max_new_tokens: int = setting(200, "tokens to add to each prompt", ge=1)
    temperature: float = setting(
        0.8, "divides the logits before sampling; 0 = always the likeliest token", ge=0
    )
    top_k: int = setting(0, "sample from this many likeliest tokens only; 0 = all", ge=0)
    top_p: float = setting(
        1.0, "sample from the likeliest tokens that hold this probability; 1 = all", gt=0, le=1
    )
    seed: int = setting(0, "seed of the sampling")
    stop_at_end: bool = setting(True, "stop a text at the tokens that end one")
    show_special: bool = setting(
        False, "print special tokens too, such as the one that ends an answer"
    )
