"""cuDNN attention as this package calls it, with a CPU stand-in for its operations."""

import dataclasses
import importlib.util
import sys
from types import SimpleNamespace

import cudnn_stand_in
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_choice import kernel_of
from refusals import refused

from jaxdist.config import read_run
from jaxdist.core import trials
from jaxdist.core.attention import (
    AttentionPlan,
    blockwise,
    cudnn,
    kernel_check,
    make_attend,
)
from jaxdist.core.attention.blockwise import Rule, Span
from jaxdist.core.attention.context_parallel import ExchangePlan
from jaxdist.core.attention.cudnn import DOCUMENTS, Documents
from jaxdist.core.attention.kernel_check import (
    KernelCheck,
    Shapes,
    sample_segments,
    validate_kernel,
)
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.step import Step, TrainConfig
from jaxdist.core.step.kernel_trial import check_kernel
from jaxdist.core.step_plan import Device, kernel_rejection
from jaxdist.core.types import AttentionCall, AttentionMask
from jaxdist.data.packing import text_fields
from jaxdist.run import setup, trained_run

LENGTH = 40
ROWS = {
    "one document": [LENGTH],
    "as many as a call takes": [13, 1, 20, 6],
    "one more": [1, 9, 12, 16, 2],
    "more than two calls take": [4] * 8 + [7, 1],
}


def segments_of(*rows, padding: int = 0) -> np.ndarray:
    segments = np.array([np.repeat(np.arange(1, len(row) + 1), row) for row in rows], np.int32)
    segments[:, LENGTH - padding :] = 0
    return segments


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("padding", [0, 1])
def test_sequences_match_document_boundaries(name, padding):
    lengths = ROWS[name]
    if padding:  # the last document ends earlier, and padding is its own document
        lengths = [*lengths[:-1], lengths[-1] - 1, 1]
        lengths = [n for n in lengths if n]
    documents = Documents.of(
        jnp.asarray(segments_of(ROWS[name], ROWS["one more"], padding=padding))
    )
    needed = max(len(lengths), len(ROWS["one more"]) + padding)
    assert int(documents.num_calls) == -(-needed // DOCUMENTS)
    calls = [documents.sequences(jnp.int32(n)) for n in range(int(documents.num_calls))]
    starts, sizes = (np.concatenate([np.asarray(x[i][0]) for x in calls]) for i in (0, 1))
    expected = np.cumsum([0, *lengths])[:-1]
    assert starts[: len(lengths)].tolist() == expected.tolist()
    assert sizes[: len(lengths)].tolist() == lengths
    assert set(starts[len(lengths) :]) <= {LENGTH} and set(sizes[len(lengths) :]) <= {0}
    taken = np.array([documents.taken(jnp.int32(n)) for n in range(len(calls))])
    assert np.all(taken.sum(0) == 1)


def pulled(attend, inputs):
    query, key, value, cotangent = inputs
    out, back = jax.vjp(attend, query, key, value)
    return [np.asarray(x) for x in (out, *back(cotangent))]


def inputs_of(heads: int, kv_heads: int, rows: int = 2):
    rng = np.random.default_rng(0)
    shapes = [(rows, LENGTH, n, 8) for n in (heads, kv_heads, kv_heads, heads)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def reference(segments, rule, inputs):
    span = Span(jnp.arange(LENGTH, dtype=jnp.int32)[None], segments)
    return pulled(lambda *x: blockwise.attend(*x, span, span, rule), inputs)


@pytest.mark.parametrize(
    "name, heads, rule",
    [
        ("one document", (4, 4), Rule()),
        ("as many as a call takes", (4, 2), Rule(window=5)),
        ("one more", (3, 1), Rule(causal=False)),
        ("more than two calls take", (4, 2), Rule()),
    ],
)
def test_packed_attention_stays_within_documents(monkeypatch, name, heads, rule):
    forwards, backwards = cudnn_stand_in.install(monkeypatch)
    segments = jnp.asarray(segments_of(ROWS[name], ROWS["one more"], padding=1))
    inputs = inputs_of(*heads)
    actual = pulled(jax.jit(lambda *x: cudnn.attend_packed(*x, segments, rule)), inputs)
    for a, b in zip(actual, reference(segments, rule, inputs), strict=True):
        assert np.max(np.abs(a - b)) <= 3e-6 * np.max(np.abs(b))
    mask = "PADDING_CAUSAL" if rule.causal else "PADDING"
    assert set(forwards) == set(backwards) == {mask}


SHAPES = Shapes(
    rows=3, seq_len=64, heads=4, kv_heads=2, head_dim=16, windows=(0,), dtype=jnp.bfloat16
)


each_use = pytest.mark.parametrize(
    "use", ["packed", "ring", pytest.param("packed_ring", marks=pytest.mark.slow)]
)


@each_use
def test_kernel_is_accepted_if_it_matches_the_reference(monkeypatch, use):
    forwards, backwards = cudnn_stand_in.install(monkeypatch)
    check = validate_kernel(use, SHAPES, jax.devices()[0])
    assert not check.rejection_reason
    assert 0 < max(check.errors.values()) < kernel_check.TOLERANCE / 2
    # Around a ring, both possible kinds of a step, next to each group's own keys.
    masks = {
        "packed": {"PADDING_CAUSAL"},
        "ring": {"CAUSAL", "NO_MASK"},
        "packed_ring": {"PADDING_CAUSAL", "PADDING"},
    }
    assert set(forwards) == set(backwards) == masks[use]


@each_use
def test_kernel_is_rejected_if_it_misses_a_key(monkeypatch, use):
    cudnn_stand_in.install(monkeypatch, late=True)
    check = validate_kernel(use, SHAPES, jax.devices()[0])
    assert "differs" in check.rejection_reason
    assert not check.errors["key gradient"] <= 5 * kernel_check.TOLERANCE


def test_kernel_is_rejected_if_one_window_is_wrong(monkeypatch):
    cudnn_stand_in.install(monkeypatch)
    right = cudnn.attend_packed
    wide = lambda *x: right(*x[:4], Rule(x[4].causal, x[4].window and x[4].window + 1))
    monkeypatch.setattr(cudnn, "attend_packed", wide)
    small = dataclasses.replace(SHAPES, rows=1, seq_len=16, windows=(4,))
    assert "differs" in validate_kernel("packed", small, jax.devices()[0]).rejection_reason

    # The same for each of several windows.
    ones = [np.ones(3)] * 4
    monkeypatch.setattr(kernel_check, "_reference", lambda *_: ones)
    for wrong in (2.0, np.nan):
        packed = lambda inputs, segments, window, wrong=wrong: [
            x * (wrong if window else 1) for x in ones
        ]
        monkeypatch.setattr(kernel_check, "_packed", packed)
        for windows in ((0,), (0, 4), (4, 0)):
            several = dataclasses.replace(small, windows=windows)
            check = validate_kernel("packed", several, jax.devices()[0])
            assert bool(check.rejection_reason) == any(windows)


@each_use
def test_kernel_is_rejected_if_it_cannot_run(use):
    check = validate_kernel(use, SHAPES, jax.devices()[0])  # a CPU
    assert "failed" in check.rejection_reason and not check.errors
    assert check.use == use


def test_comparison_has_more_documents_than_one_call():
    segments = sample_segments(2, 8192)
    assert len(np.unique(segments[0])) > DOCUMENTS
    assert segments[0, -1] == 0 and np.all(segments[1] == 1)
    assert int(Documents.of(jnp.asarray(segments)).num_calls) > 2
    for seq_len in range(1, 6):  # too short for documents, or just long enough
        assert sample_segments(1, seq_len).shape == (1, seq_len)


def plan_for(dtype, *, packed, exchange=None, accumulation=3, is_described=False):
    """Return the part of a plan that the check reads, on an H100."""
    attention = AttentionPlan("gpu", "9.0", exchange, "untested", "untested")
    return SimpleNamespace(
        attention=attention, compute_dtype=dtype, packed=packed,
        exchange=exchange, accumulation=accumulation,
        device=Device("gpu", is_described=is_described),
    )  # fmt: skip


@pytest.fixture(params=["", "differs"])
def trial(request, monkeypatch):
    """Return what another process answers, the compared shapes, a layout, and `check_kernel`."""
    obstacle, compared, gpu = request.param, [], SimpleNamespace()

    def validate(use, shapes, device):
        compared.append(shapes)
        return KernelCheck(errors={}, rejection_reason="", use=use)

    monkeypatch.setattr(trials, "try_kernel", validate)
    monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    layout = SimpleNamespace(
        mesh=SimpleNamespace(devices=np.array([gpu])),
        size=lambda axis: {"tensor": 2, "context": 4}.get(axis.name, 1),
        num_replicas=2,
        auto_tensor=False,
        used=(),
    )
    config = TrainConfig(global_batch_size=24, num_microbatches=3, seq_len=4096)

    def admit(dims, call, plan, layout=layout):
        model = SimpleNamespace(dims=dims, attention_call=call)
        agree = lambda name, text, decision: decision([text, obstacle])
        return check_kernel(model, layout, plan, config, agree)

    return obstacle, compared, layout, admit


def test_rejection_on_one_process_applies_to_all(trial):
    obstacle, compared, layout, check = trial
    sizes = {"heads": 8, "kv_heads": 2, "head_dim": 64}

    def admit(dtype, dims=sizes, is_described=False, layout=layout, **change):
        call = AttentionCall(sliding_window=7, full_every=2, **change)
        return check(dims, call, plan_for(dtype, packed=True, is_described=is_described), layout)

    check_reason = admit(jnp.bfloat16).rejection_reason
    assert obstacle in check_reason and bool(check_reason) == bool(obstacle)
    assert compared == [Shapes(
        rows=4, seq_len=4096, heads=4, kv_heads=1, head_dim=64, windows=(7, 0), dtype=jnp.bfloat16
    )]  # fmt: skip
    # Nothing is compared if the kernel is not requested or the device is only described.
    assert admit(jnp.float32) is None
    assert admit(jnp.bfloat16, dropout=0.1) is None
    assert admit(jnp.bfloat16, softcap=30.0) is None
    assert admit(jnp.bfloat16, dims={"heads": 8}) is None
    split_by_xla = SimpleNamespace(**vars(layout) | {"auto_tensor": True, "used": (TENSOR,)})
    assert admit(jnp.bfloat16, layout=split_by_xla) is None
    assert admit(jnp.bfloat16, is_described=True) is None and len(compared) == 1


def test_ring_comparison_uses_shapes_of_a_group(trial):
    """Four devices share rows, in rings of two."""
    obstacle, compared, _, check = trial
    dims = {"heads": 8, "kv_heads": 4, "head_dim": 64}

    def admit(exchange, dtype=jnp.bfloat16, packed=False, windows=(0,), **change):
        call = SimpleNamespace(
            kernel="auto", sliding_window=0, windows=windows, softcap=0.0, dropout=0.0, sinks=False
        )
        return check(dims, call, plan_for(dtype, packed=packed, exchange=exchange, **change))

    hybrid = ExchangePlan("hybrid", 2, False, "")
    first = admit(hybrid)
    assert bool(first.rejection_reason) == bool(obstacle) and first.use == "ring"
    expected = dict(seq_len=2048, heads=2, kv_heads=1, head_dim=64, windows=(0,))
    assert compared == [Shapes(rows=4, dtype=jnp.bfloat16, **expected)]
    admit(hybrid, accumulation=1)
    assert compared.pop().rows == 12
    # Complete rows are compared as such.
    for exchange in (None, ExchangePlan("all_to_all", 4, False, "")):
        assert admit(exchange).use == "plain" and compared.pop().seq_len >= 1024
    # Nothing is compared if cuDNN's kernel is not requested.
    assert admit(hybrid, dtype=jnp.float32) is None
    gathered = ExchangePlan("all_gather", 1, False, "")
    assert admit(gathered) is None
    assert admit(gathered, packed=True) is None and len(compared) == 1
    # Packed rows around it are compared with the same shapes.
    assert obstacle in admit(hybrid, packed=True).rejection_reason
    assert compared == 2 * compared[:1]
    # A window hides nothing in rows that are not longer.
    assert admit(hybrid, windows=(7, 4096)).use == "ring"
    assert compared[2:] == [dataclasses.replace(compared[0], windows=(7, 0))]
    # No layer would use the kernel.
    assert admit(hybrid, windows=(7,)) is None
    assert admit(hybrid, windows=(4095, 7), packed=True) is None
    assert admit(hybrid, is_described=True) is None and len(compared) == 3


def test_ring_uses_the_kernel_after_an_accepted_comparison(monkeypatch):
    flags = ["--model.d_model=32", "--model.num_heads=2", "--model.num_layers=2", "--mesh=cp=2"]
    flags += ["--train.seq_len=32", "--mesh.context_attention=ring"]
    parts = setup.assemble(read_run(flags, command="test"), jax.devices()[:2])
    assert "not compared" in parts.plan.attention.ring_rejection
    rows, packed = (text_fields(32, is_packed) for is_packed in (False, True))
    assert setup.compare_kernel(parts, rows) is parts  # on a CPU nothing is compared
    unseen = setup.compare_kernel(parts, packed)
    assert unseen.checks == () and unseen.plan.packed
    check = KernelCheck(errors={}, rejection_reason="", use="ring")
    monkeypatch.setattr(setup, "check_kernel", lambda *_: check)
    compared = setup.compare_kernel(parts, rows)
    assert compared.checks == (check,)
    assert compared.plan.attention.ring_rejection == ""


def test_step_is_built_once_from_the_final_plan(monkeypatch):
    flags = ["--model.d_model=32", "--model.num_heads=2", "--model.num_layers=2", "--mesh=dp=1"]
    built = []

    def build(*arguments, **_):
        built.append(arguments[4])
        return Step(train=None, evaluate=None, context=None, options=(), batch_sharding=None)

    check = KernelCheck(errors={}, rejection_reason="differs")
    monkeypatch.setattr(setup, "check_kernel", lambda *_: check)
    monkeypatch.setattr(setup, "make_step", build)
    parts = setup.assemble(read_run(flags, command="test"), jax.devices()[:1])
    parts = setup.compare_kernel(dataclasses.replace(parts, remat="dots"), text_fields(32, True))
    assert built == [] and parts.step is parts.step
    (plan,) = built
    assert (plan.remat, plan.attention.packed_rejection) == ("dots", "differs")


def test_kernel_is_unused_before_an_accepted_comparison():
    layout = SimpleNamespace(auto_tensor=False, used=(TENSOR,))
    here, described = Device("gpu"), Device("gpu", is_described=True)
    assert "not compared" in kernel_rejection(layout, here, None)
    assert kernel_rejection(layout, described, None) == ""
    for reason in ("differs", ""):
        check = KernelCheck(errors={}, rejection_reason=reason)
        assert kernel_rejection(layout, here, check) == reason
    layout.auto_tensor = True
    assert "XLA splits" in kernel_rejection(layout, here, check)


def test_only_packed_rows_are_compared(monkeypatch, tmp_path):
    flags = ["--model.d_model=32", "--model.num_heads=2", "--model.num_layers=2", "--mesh=dp=1"]
    flags += ["--train.seq_len=32"]
    compared_kinds = []

    def check(model, layout, plan, *_):
        compared_kinds.append(plan.packed)
        return KernelCheck(errors={}, rejection_reason="") if plan.packed else None

    monkeypatch.setattr(setup, "check_kernel", check)
    parts = setup.assemble(read_run(flags, command="test"), jax.devices()[:1])
    assert not compared_kinds and "not compared" in parts.plan.attention.packed_rejection
    monkeypatch.setattr(trained_run, "evaluate", lambda step, *_, **__: step)
    rejection = property(lambda own: own.plan.attention.packed_rejection)
    monkeypatch.setattr(trained_run.Parts, "step", rejection)
    run = trained_run.TrainedRun(path=tmp_path, parts=parts)
    plain, packed = (SimpleNamespace(fields=text_fields(32, packed)) for packed in (False, True))
    assert "not compared" in run.evaluate({}, plain) and len(compared_kinds) == 1
    assert run.evaluate({}, packed) == run.evaluate({}, packed) == ""
    assert compared_kinds == [False, True]  # once per kind of rows, however often it is evaluated


def test_jax_operations_accept_the_arguments():
    """Lowered for a GPU without a GPU: one call forward and one backward."""
    assert not cudnn.missing()
    query = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def loss(query, key, value, segments):
        return jnp.sum(cudnn.attend_packed(query, key, value, segments, Rule(window=64)))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(query, key, key, segments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    kept = text.count("PADDING_CAUSAL"), text.count(f"max_seg_per_batch\\22: {DOCUMENTS}")
    assert kept == (2, 2)


def test_batch_too_large_for_cudnn_indices_uses_blockwise_kernel(monkeypatch):
    monkeypatch.setattr(cudnn, "attend_packed", lambda query, *_: query)
    attend = make_attend(AttentionPlan("gpu", "9.0"))

    def blocks(rows, kernel="auto"):
        query = jax.ShapeDtypeStruct((rows, 2**20, 8, 128), jnp.bfloat16)
        segments = jax.ShapeDtypeStruct((rows, 2**20), jnp.int32)
        run = lambda q, s: attend(q, q, q, AttentionMask(segments=s), kernel=kernel)
        return len(jax.make_jaxpr(run)(query, segments).eqns) > 0

    assert not blocks(1) and blocks(2)
    with refused("attention='cudnn'", "32 bits"):
        blocks(2, kernel="cudnn")


def test_jax_without_the_operations_is_detected(monkeypatch):
    import jax._src.cudnn as package

    name = "fused_attention_stablehlo"
    monkeypatch.delattr(package, name)
    monkeypatch.setitem(sys.modules, f"{package.__name__}.{name}", None)
    spec = importlib.util.spec_from_file_location("cudnn_alone", cudnn.__file__)
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, alone)
    spec.loader.exec_module(alone)
    monkeypatch.setattr(cudnn, "operations", alone.operations)
    gpu = dict(platform="gpu", dtype=jnp.bfloat16, compute_capability="9.0", num_keys=64)
    kernel, why = kernel_of("auto", **gpu, head_dim=64, packed=True)
    assert kernel == "xla" and jax.__version__ in why
    assert kernel_of("auto", **gpu, head_dim=64, packed=False)[0] == "cudnn"
