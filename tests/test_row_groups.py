"""Row groups that overlap, and products by position: equal results, and when they are used.

GPUs with a split tensor axis run them; here they are enabled on CPU.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_audit import parts_of
from test_parity import check
from tiny import (
    Case,
    layout_of,
    model_of,
    plan_of,
    reference,
    run,
    step_of,
    text_batch,
    train_config,
)

from jaxdist.core import step_plan
from jaxdist.core.forward import row_chunks
from jaxdist.core.parallel import tensor
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.step import TrainConfig
from jaxdist.core.types import dot
from jaxdist.models import DecoderConfig
from jaxdist.run.audit import audit_parts


@pytest.fixture
def two_groups(monkeypatch):
    monkeypatch.setattr(step_plan, "row_chunks_of", lambda *_: (2, ""))


@pytest.mark.parametrize(
    "case",
    [
        Case("rotary", "fsdp=2,tp=2", microbatches=2, remat="dots"),
        pytest.param(
            Case("learned", "dp=2,tp=4", sequence=False, remat="full"), marks=pytest.mark.product
        ),
        pytest.param(
            Case("rotary", "pp=2,fsdp=2,tp=2", microbatches=2, remat="dots"),
            marks=pytest.mark.product,
        ),
        pytest.param(Case("rotary", "pp=2,tp=2", microbatches=2), marks=pytest.mark.product),
    ],
    ids=str,
)
def test_two_groups_equal_one_device(case, two_groups):
    """Each row of the batch has separate documents."""
    layout, model = layout_of(case), model_of(case.model)
    assert plan_of(model, layout, train_config(case), pipeline=case.pipeline).max_row_chunks == 2
    check(run(case), reference(case.model))


def test_rows_that_do_not_divide_stay_together(two_groups):
    step, state = step_of(Case("rotary", "dp=4,tp=2", microbatches=4))  # one row a device
    batch = place_batch(text_batch(), step.batch_sharding)
    assert jax.eval_shape(step.train, state, batch, np.inf)[1]["loss"].shape == ()


@pytest.mark.parametrize("rows, groups", [(1, 1), (2, 2), (3, 3), (6, 3), (7, 1), (16, 4)])
def test_the_rows_limit_the_number_of_groups(rows, groups):
    assert row_chunks(rows, 4) == groups


def test_dropout_of_a_row_is_the_same_in_a_group(monkeypatch):
    model = DecoderConfig(
        d_model=32, num_layers=1, num_heads=4, mlp_dim=64, vocab_size=64, dropout=0.3,
        attention_dropout=0.2,
    )  # fmt: skip

    def first_loss():
        parts = parts_of("tp=2", model=model, num_microbatches=1)
        batch = {
            name: np.resize(np.arange(7), leaf.shape).astype(leaf.dtype)
            for name, leaf in parts.abstract_batch().items()
        }
        return float(parts.step.train(parts.init_state(), batch, np.inf)[1]["loss"])

    one = first_loss()
    monkeypatch.setattr(step_plan, "row_chunks_of", lambda *_: (2, ""))
    assert first_loss() == pytest.approx(one, rel=1e-6)


def test_the_audit_reads_groups(two_groups):
    audit = audit_parts(parts_of("dp=2,fsdp=2,tp=2"))
    assert audit.violations == [] and audit.num_parameters and audit.transfers


@pytest.mark.parametrize(
    "mesh, platform, matmul, groups",
    [
        ("fsdp=2,tp=2", "gpu", "", 4),
        ("tp=4", "gpu", "", 4),
        ("fsdp=4", "gpu", "", 1),
        ("fsdp=2,tp=2", "cpu", "", 1),
        ("fsdp=2,tp=2", "gpu", "fp8", 1),
        ("pp=2,tp=2", "gpu", "", 4),
        ("pp=2,tp=2", "cpu", "", 1),
        ("cp=2,tp=2", "gpu", "", 1),
    ],
)
def test_groups_are_for_collectives_of_layers_that_gpus_split(mesh, platform, matmul, groups):
    layout = layout_of(Case("rotary", mesh))
    assert step_plan.row_chunks_of(layout, matmul, platform)[0] == groups


def test_a_tensor_axis_that_xla_splits_has_no_groups():
    layout = SimpleNamespace(used=layout_of(Case("rotary", "tp=2")).used, auto_tensor=True)
    assert step_plan.row_chunks_of(layout, "", "gpu")[0] == 1


@pytest.mark.parametrize(
    "dims, shapes",
    [
        ("batch seq d, d ways mlp -> batch seq ways mlp", [(2, 3, 4), (4, 2, 5)]),
        ("batch seq heads dim, heads dim d -> batch seq d", [(3, 2, 2, 4), (2, 4, 5)]),
        ("rows d, d classes -> rows classes", [(3, 4), (4, 2)]),
    ],
)
def test_a_product_by_position_equals_the_plain_product(dims, shapes):
    x, w = (jax.random.normal(jax.random.key(len(s)), s) for s in shapes)
    plain, pull = jax.vjp(lambda x, w: dot(dims, x, w), x, w)
    product, turned = jax.vjp(lambda x, w: tensor.dot_by_position(dims, x, w), x, w)
    np.testing.assert_allclose(product, plain, rtol=1e-6)
    # Sums over tokens in another order: of at most nine float32 products.
    for one, other in zip(pull(plain), turned(plain), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mesh, sequence, platform, product",
    [
        ("fsdp=2,tp=2", True, "gpu", "by_position"),
        ("pp=2,tp=2", True, "gpu", "by_position"),
        ("fsdp=2,tp=2", False, "gpu", "plain"),  # positions are not scattered
        ("fsdp=4", True, "gpu", "plain"),
        ("fsdp=2,tp=2", True, "cpu", "cpu"),
        ("pp=2,tp=2", True, "cpu", "cpu"),
    ],
)
def test_the_product_depends_on_the_platform(mesh, sequence, platform, product):
    layout = layout_of(Case("rotary", mesh, sequence=sequence))
    model, settings = model_of("rotary"), step_plan.StepSettings(TrainConfig())
    plan = step_plan.plan_step(model, layout, step_plan.Device(platform), False, settings)
    assert plan.dot == product


def test_the_audit_reads_products_by_position(monkeypatch):
    monkeypatch.setattr(step_plan, "_choose_dot", lambda *_: ("by_position", ""))
    audit = audit_parts(parts_of("dp=2,fsdp=2,tp=2"))
    assert audit.violations == [] and audit.num_parameters and audit.transfers
