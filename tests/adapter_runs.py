"""PEFT's tensors of the adapters in a tree of parameters."""

import jax
import numpy as np

from jaxdist.models.huggingface import peft as peft_format


def named(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def peft_tensors(config, params) -> dict[str, np.ndarray]:
    """Return PEFT's tensors of the adapters in a tree of parameters."""
    flat = {f"params/{named(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    tensors = {}
    for module in peft_format.modules(config.model, config.lora):
        own = (name for name in flat if name.startswith(f"{module.array}/"))
        adapter = {name.rpartition("/")[2]: np.asarray(flat[name][module.layer]) for name in own}
        tensors |= module.to_peft(adapter)
    return tensors
