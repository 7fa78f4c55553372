"""Custom models with wrong sums are refused at the start of a run, with axis, place and fix."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from refusals import refused
from test_block_sums import ROWS, SEQ, make_model

from jaxdist.config import RunConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.models import CustomConfig
from jaxdist.plan.audit import check_mesh
from jaxdist.run.setup import assemble


def config_on(mesh, num_microbatches=1):
    return RunConfig(
        model=CustomConfig(factory="none:none"),
        mesh=MeshConfig(shape=mesh),
        train=TrainConfig(global_batch_size=ROWS, seq_len=SEQ, num_microbatches=num_microbatches),
    )


# --- models that jax's types refuse while they are traced ---


def scanned(layer):
    """A head_loss with a loop of its own over the layers."""

    def head_loss(params, _, batch, context):
        x = context.split(params["table"][batch["tokens"]])
        body = lambda x, weights: (layer(weights, x, context), None)
        x, _ = jax.lax.scan(body, x, params["layers"])
        return make_model().head_loss(params, x, batch, context)

    return head_loss


@scanned
def a_loop_without_its_sum(weights, x, context):
    return x + jnp.tanh(context.enter(x) @ weights["up"]) @ weights["down"]


@scanned
def a_branch_without_its_sum(weights, x, context):
    layer = lambda x: x + jnp.tanh(context.enter(x) @ weights["up"]) @ weights["down"]
    return jax.lax.cond(x[0, 0, 0] > 0, layer, lambda x: x, x)


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, dy: (dy @ kept[1].T, 0 * kept[1]))


@scanned
def a_backward_pass_without_its_sum(weights, x, context):
    return x + context.leave(jnp.tanh(product(x, weights["up"])) @ weights["down"])


def a_head_without_its_sum(params, _, batch, context):
    x = context.enter(params["table"][batch["tokens"]])
    return {"loss": jnp.sum((x @ params["head"]) ** 2), "weight": jnp.sum(batch["weights"])}


def a_loop_that_starts_at_zeros(params, _, batch, context):
    x = params["table"][batch["tokens"]]
    total, _ = jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(x.shape[1:]), x)
    return make_model().head_loss(params, x + total, batch, context)


def of_one_function(head_loss):
    return dataclasses.replace(
        make_model(), head_loss=head_loss, block=None, embed=None, num_layers=0, vocab_size=16
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize(
    "head_loss, axis, code, fix",
    [
        (a_loop_without_its_sum, "tensor", "lax.scan(body", "Context.leave"),
        (a_branch_without_its_sum, "tensor", "lax.cond(", "Context.leave"),
        (a_backward_pass_without_its_sum, "tensor", "", "Context.enter"),
        (a_head_without_its_sum, "tensor", "", "Context.tensor_sum"),
        (a_loop_that_starts_at_zeros, "data", "lax.scan(lambda total", "collectives.zeros_like"),
    ],
)
def test_a_model_that_jax_cannot_type_is_refused(head_loss, axis, code, fix, num_microbatches):
    model = dataclasses.replace(
        make_model(), head_loss=head_loss, block=None, embed=None, num_layers=0, sequence=False
    )
    parts = assemble(config_on("dp=2,tp=2", num_microbatches), jax.devices()[:4], model=model)
    line = head_loss.__code__.co_firstlineno
    if code:
        lines = Path(__file__).read_text().splitlines()
        line = next(number for number, text in enumerate(lines, 1) if code in text)
    with refused(f"over {axis}", f"{__file__}:{line}", code, fix) as error:
        check_mesh(parts)
    assert "pcast" not in str(error.value)
