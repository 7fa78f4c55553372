"""Choice of an attention kernel from the fields of a call and of the devices."""

from typing import Any

from jaxdist.core.attention import AttentionPlan, AttentionRequest, choose_kernel


def kernel_of(kernel: str, **fields: Any) -> tuple[str, str]:
    """Return `choose_kernel` of a call whose fields are mixed with those of an `AttentionPlan`."""
    device = {name: fields.pop(name) for name in AttentionPlan._fields if name in fields}
    return choose_kernel(AttentionRequest(kernel=kernel, **fields), AttentionPlan(**device))
