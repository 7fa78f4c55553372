"""What one device computes in a step: floating point operations of products, bytes of the rest.

Products (matrix units), attention (its own kernel) and everything else, which waits for memory:
norms, rotations, activations, residuals, casts, the loss and the optimizer. Backward costs twice
the products of forward; what the remat policy recomputes comes on top. A product whose result only
feeds a residual is never recomputed: the compiler drops it.
"""

from __future__ import annotations

from jaxdist.plan.estimate.job import WIDE, Job
from jaxdist.plan.estimate.model_costs import ModelCosts, Work, costs_of
from jaxdist.plan.estimate.muon import orthogonalised

_ATTENTION_BACKWARD = 2.5
"""FLOPs of a fused attention backward in forwards: five products instead of two."""


def model_flops_per_token(job: Job, convention: str = "causal") -> float:
    """Useful FLOPs of one token or image, forward and backward, as the MFU counts them.

    A model that does not say is traced; backward counts as twice the forward, attention as whole.
    """
    if job.model.flops_per_token:
        return float(job.model.flops_per_token.get(convention, 0.0))
    return costs_of(job).flops_per_token(convention)


def layer_backward(job: Job) -> Work:
    """One layer's backward, with what the remat policy recomputes."""
    costs = costs_of(job)
    forward = costs.forward()
    backward = Work(
        products=2.0 * forward.products,
        attention=_ATTENTION_BACKWARD * forward.attention,
        memory_bytes=job.engine.software.backward_passes * forward.memory_bytes,
    )
    return backward + costs.recomputed(forward) + _stacked(job, costs)


_STACK_PASSES = 3
"""How often what a layer keeps passes through memory besides its kernels: a copy into the layers'
stack reads and writes it, and a copy out of it does again for about half, what products and
attention read; other kernels read a slice where it lies. Between remat policies the compiled
programs of GPT-2, 1.7B and 8B differ by 2.5 to 4.1 passes over what one keeps and the other not."""


def _stacked(job: Job, costs: ModelCosts) -> Work:
    """What one layer keeps, written into the stack of all layers and read back."""
    if job.unrolls or not job.engine.stacks_layers:
        return Work()
    return Work(memory_bytes=float(_STACK_PASSES * costs.kept_per_layer()))


def microbatch_extra(job: Job) -> Work:
    """Per microbatch: weights cast, and gradients added to those before."""
    casts = (WIDE + job.compute_bytes) * job.total(job.layers, "param") * 2
    added = 3 * WIDE * job.total(job.weights, "gradient") * (job.num_microbatches > 1)
    return Work(memory_bytes=casts + added)


def optimizer(job: Job) -> Work:
    """Once a step: the gradients' norm; moments, parameters, their average read and written."""
    elements = job.total(job.weights, "moment")
    moments = job.config.optim.moment_bytes
    per_element = 3 * WIDE + 3 * WIDE + 2 * moments  # norm, scaling; parameter twice, gradient
    average = 2 * job.config.optim.ema_bytes * job.total(job.weights, "param")
    return Work(memory_bytes=float(per_element * elements + average))


def orthogonalisation(job: Job) -> float:
    """FLOPs, in float32, of five Newton-Schulz steps on a device's share of Muon's matrices."""
    total = 0.0
    for share in orthogonalised(job):
        low, high = sorted((share.rows, share.columns))
        total += share.matrices * 5 * (4 * low * low * high + 2 * low**3)
    return total
