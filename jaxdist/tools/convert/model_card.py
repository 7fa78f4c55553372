"""The `README.md` of an exported model: where it comes from, in the format of hub model cards."""

from __future__ import annotations

import json
from typing import Any

from jaxdist import __version__
from jaxdist.config import RunConfig
from jaxdist.runtime import hub

_CLASSES = {"transformers": "AutoModelFor", "peft": "AutoPeftModelFor"}


def model_card(settings: RunConfig, step: int, metrics: dict[str, Any], library: str) -> str:
    """Return the README.md of an export; `library`, transformers or peft, loads the model."""
    start = settings.init_from
    scores = settings.model.num_labels > 0
    pipeline = "text-classification" if scores else "text-generation"
    header = {"library_name": library, "pipeline_tag": pipeline, "tags": ["jaxdist"]}
    if hub.is_hub_name(start):
        header["base_model"] = start.partition("@")[0]
    train = settings.train
    most = "up to " * (len(train.stages) > 1)
    facts = {
        "initial weights": start or f"random, seed {settings.seed}",
        "steps": f"{step:,} of {most}{train.global_batch_size:,} rows of {train.seq_len:,} tokens",
        "data": ", ".join(map(str, settings.data.sources)),
        "records": settings.data.records,
        "objective": settings.objective.kind,
        "optimizer": f"{settings.optim.optimizer}, peak learning rate {settings.optim.peak_lr}",
        **{f"evaluation: {name}": f"{value:.4g}" for name, value in metrics.items()},
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    lines = "\n".join(f"{name}: {json.dumps(value)}" for name, value in header.items())
    name = _CLASSES[library] + ("SequenceClassification" if scores else "CausalLM")
    return (
        f"---\n{lines}\n---\n\n# {settings.name}\n\nTrained with jaxdist {__version__}.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n```python\nfrom {library} import {name}\n\n"
        f"model = {name}.from_pretrained(FOLDER)\n```\n"
    )
