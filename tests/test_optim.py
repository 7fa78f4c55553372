"""Optimizers and schedules compared with PyTorch, numpy code of the papers, and closed forms."""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import Case, initial_state, layout_of, make_update, model_of

from jaxdist import optim
from jaxdist.core.matrices import Sides, sides_of
from jaxdist.core.types import Dims
from jaxdist.optim import OptimConfig, make_lr_schedule, make_optimizer
from jaxdist.optim.adafactor import adafactor
from jaxdist.settings import problems_of

AXES = {
    "embed": Dims(("vocab", "d_model")),
    "layers": {
        "qkv": Dims(("layers", "d_model", "kv_heads", None, "head_dim")),
        "qkv_bias": Dims(("layers", "kv_heads", None, "head_dim")),
        "out": Dims(("layers", "heads", "head_dim", "d_model")),
        "up": Dims(("layers", "d_model", None, "mlp")),
        "down": Dims(("layers", "mlp", "d_model")),
        "scale": Dims(("layers", "d_model")),
    },
    "norm": Dims(("d_model",)),
}
SIZES = {"vocab": 7, "d_model": 6, "layers": 2, "heads": 2, "kv_heads": 2, "head_dim": 4, "mlp": 10}
FUSED = 3
MATRICES = {"embed", "qkv", "out", "up", "down"}
HIDDEN = {"qkv", "out", "up", "down"}
NUM_STEPS = 4
OPTIMIZERS = typing.get_args(typing.get_type_hints(OptimConfig)["optimizer"])


def named(tree):
    return {path[-1].key: leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def random_tree(seed):
    rng = np.random.default_rng(seed)
    draw = lambda dims: rng.normal(size=[SIZES.get(d, FUSED) for d in dims]).astype(np.float32)
    return jax.tree.map(draw, AXES)


def train(config, lr=0.1, axes=AXES):
    optimizer = make_optimizer(config, axes)
    params = jax.tree.map(jnp.asarray, random_tree(0))
    state = optimizer.init(params)
    update = make_update(optimizer)
    history = []
    for step in range(NUM_STEPS):
        updates, state = update(random_tree(step + 1), state, params)
        params = jax.tree.map(lambda p, u: p - lr * u, params, updates)
        history.append(named(params))
    return history, state


def reference(rule, lr=0.1, weight_decay=0.0, decayed=MATRICES):
    params = {k: v.astype(np.float64) for k, v in named(random_tree(0)).items()}
    rules = {name: rule(name) for name in params}
    history = []
    for step in range(NUM_STEPS):
        grads = named(random_tree(step + 1))
        for name, p in params.items():
            decay = weight_decay * p if name in decayed else 0.0
            params[name] = p - lr * (rules[name](grads[name].astype(np.float64)) + decay)
        history.append(dict(params))
    return history


def assert_same_history(ours, expected, rtol=2e-5, atol=2e-6):
    for step, (a, b) in enumerate(zip(ours, expected, strict=True)):
        for name in b:
            np.testing.assert_allclose(
                a[name], b[name], rtol=rtol, atol=atol, err_msg=f"{name} after step {step + 1}"
            )


def numpy_adam(b1=0.9, b2=0.95, eps=1e-8):
    m = v = t = 0.0

    def direction(g):
        nonlocal m, v, t
        t += 1
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g * g
        return m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)

    return direction


def torch_history(make):
    torch = pytest.importorskip("torch", reason="torch is a test extra (pip install .[reference])")
    tensors = {k: torch.nn.Parameter(torch.tensor(v)) for k, v in named(random_tree(0)).items()}
    optimizer = make(torch, tensors)
    history = []
    for step in range(NUM_STEPS):
        for name, grad in named(random_tree(step + 1)).items():
            tensors[name].grad = torch.tensor(grad)
        optimizer.step()
        history.append({k: v.detach().numpy().copy() for k, v in tensors.items()})
    return history


def test_adamw_equals_pytorch_with_decay_on_matrices_only():
    def make(torch, tensors):
        groups = [
            {
                "params": [v for k, v in tensors.items() if (k in MATRICES) == decays],
                "weight_decay": wd,
            }
            for decays, wd in ((True, 0.3), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)

    config = OptimConfig(optimizer="adamw", weight_decay=0.3)
    # float32 against float32 with another order of operations: a few units in the last place.
    assert_same_history(train(config)[0], torch_history(make))


def test_sgd_weight_decay_is_decoupled_from_the_momentum():
    def rule(_):
        m = 0.0

        def direction(g):
            nonlocal m
            m = 0.8 * m + g
            return m

        return direction

    config = OptimConfig(optimizer="sgd", momentum=0.8, weight_decay=0.2)
    assert_same_history(train(config)[0], reference(rule, weight_decay=0.2))


def test_lion_equals_its_paper():
    def rule(_):
        m = 0.0

        def direction(g):
            nonlocal m
            update = np.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
            return update

        return direction

    config = OptimConfig(optimizer="lion", beta2=0.99, weight_decay=0.3)
    assert_same_history(train(config)[0], reference(rule, weight_decay=0.3))


def split_matrices(name, g):
    if name == "embed":
        return [g]
    if name == "qkv":
        return [layer[:, :, i].reshape(6, 8) for layer in g for i in range(FUSED)]
    if name == "up":
        return [layer[:, i] for layer in g for i in range(FUSED)]
    if name == "out":
        return [layer.reshape(8, 6) for layer in g]
    if name == "down":
        return list(g)
    return list(g) if name in ("qkv_bias", "scale") else [g]


def join_matrices(name, parts):
    if name == "embed" or name == "norm":
        return parts[0]
    if name == "qkv":
        parts = [part.reshape(6, 2, 4) for part in parts]
        return np.stack([np.stack(parts[i : i + FUSED], 2) for i in (0, FUSED)])
    if name == "up":
        return np.stack([np.stack(parts[i : i + FUSED], 1) for i in (0, FUSED)])
    if name == "out":
        parts = [part.reshape(2, 4, 6) for part in parts]
    return np.stack(parts)


def matrix_by_matrix(name, make):
    """Return a rule for a leaf, made from a rule for one matrix or vector."""
    rules = []

    def direction(g):
        parts = split_matrices(name, g)
        rules.extend(make() for _ in range(len(parts) - len(rules)))
        return join_matrices(name, [rule(part) for rule, part in zip(rules, parts, strict=True)])

    return direction


def numpy_adafactor():
    """Shazeer and Stern, algorithms 4 (matrices) and 5 (vectors), with update clipping."""
    r = c = v = t = 0.0

    def direction(g):
        nonlocal r, c, v, t
        t += 1
        decay = 1 - t**-0.8
        if g.shape in {(6, 8), (8, 6), (6, 10), (10, 6), (7, 6)}:
            r = decay * r + (1 - decay) * (g**2).mean(1)
            c = decay * c + (1 - decay) * (g**2).mean(0)
            u = g / np.sqrt(np.outer(r, c) / r.mean())
        else:
            v = decay * v + (1 - decay) * g**2
            u = g / np.sqrt(v)
        return u / max(1.0, np.sqrt((u**2).mean()) / 0.9)

    return direction


def test_adafactor_equals_its_paper_matrix_by_matrix(monkeypatch):
    monkeypatch.setattr("jaxdist.optim.adafactor.UPDATE_CLIP", 0.9)
    rule = lambda name: matrix_by_matrix(name, numpy_adafactor)
    config = OptimConfig(optimizer="adafactor", weight_decay=0.1)
    assert_same_history(train(config)[0], reference(rule, weight_decay=0.1))


def test_adafactor_does_not_change_parameters_without_a_gradient():
    """A token that has not occurred in a batch yet, or a complete leaf."""
    axes = {"table": Dims(("vocab", "d_model")), "scale": Dims(("d_model",))}
    params = {"table": jnp.ones((4, 3)), "scale": jnp.ones(3)}
    rule = adafactor(OptimConfig(optimizer="adafactor"), axes)
    grads = {"table": params["table"].at[1].set(0), "scale": jnp.zeros(3)}
    updates, _ = rule.update(grads, rule.init(params))
    for update, grad in zip(jax.tree.leaves(updates), jax.tree.leaves(grads), strict=True):
        assert np.isfinite(update).all()
        np.testing.assert_array_equal(np.asarray(update) == 0, np.asarray(grad) == 0)


def newton_schulz(x):
    """Jordan's quintic iteration, five times, in the wide orientation."""
    transpose = x.shape[0] > x.shape[1]
    x = x.T if transpose else x
    x = x / np.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if transpose else x


def numpy_muon():
    m = t = 0.0

    def direction(g):
        nonlocal m, t
        t += 1
        m = 0.95 * m + 0.05 * g
        looked_ahead = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
        return 0.2 * math.sqrt(max(g.shape)) * newton_schulz(looked_ahead)

    return direction


def test_muon_orthogonalizes_hidden_matrices_and_uses_adamw_for_the_rest():
    def rule(name):
        return matrix_by_matrix(name, numpy_muon) if name in HIDDEN else numpy_adam()

    config = OptimConfig(optimizer="muon", momentum=0.95, weight_decay=0.1)
    # The quintic amplifies float32 rounding by its slope at zero, at most 3.44^5.
    assert_same_history(train(config)[0], reference(rule, weight_decay=0.1), rtol=2e-4, atol=2e-5)


DIVIDED = [("dp=2,fsdp=2,cp=2", 3), ("pp=2,fsdp=2,tp=2", 0)]


@pytest.mark.parametrize(
    ("mesh", "zero"),
    [
        ("fsdp=2,tp=2", 0),
        ("dp=2,fsdp=2", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in DIVIDED),
    ],
)
def test_sharded_muon_matches_one_device(mesh, zero):
    """Random matrices: a misplaced slice, or one orthogonalized alone, gives another update."""
    axes = model_of("rotary").axes
    layout = layout_of(Case("rotary", mesh, zero=zero))
    shardings = layout.shardings(layout.moment_specs(axes))
    config = OptimConfig(optimizer="muon", momentum=0.95)
    start = initial_state("rotary").params
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), start)
    alone, sharded = make_optimizer(config, axes), make_optimizer(config, axes, shardings)
    expected, _ = make_update(alone)(grads, alone.init(start), start)
    sharded_trees = jax.device_put((grads, start), (shardings, shardings))
    actual, _ = make_update(sharded)(
        sharded_trees[0], sharded.init(sharded_trees[1]), sharded_trees[1]
    )
    for one, many in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert np.abs(np.asarray(one) - many).max() <= 1e-5 * np.abs(one).max()


def test_in_gpt2_only_matrices_and_tables_decay_and_muon_updates_the_blocks():
    from jaxdist.models import DecoderConfig, build

    biases = dict(bias=["qkv", "out", "mlp"], norm="layer", activation="gelu")
    config = DecoderConfig(d_model=16, num_layers=2, num_heads=2, positions="learned", **biases)
    axes = build(config, seq_len=8).axes
    names = lambda mask: {
        path[-1].key for path, yes in jax.tree_util.tree_leaves_with_path(mask) if yes
    }
    blocks = {"qkv", "out", "up", "down"}
    assert names(optim.decay_mask(axes)) == blocks | {"table", "positions", "kernel"}
    assert names(optim.hidden_matrices(axes)) == blocks


def test_hidden_matrices_are_stacked_matrices_or_cnn_kernels():
    assert {k for k, v in named(optim.hidden_matrices(AXES)).items() if v} == HIDDEN
    cnn = {
        "conv": Dims((None, None, None, "channels")),
        "conv_bias": Dims(("channels",)),
        "dense": Dims(("flat", "mlp")),
        "head": Dims(("mlp", "classes")),
    }
    assert {k for k, v in named(optim.hidden_matrices(cnn)).items() if v} == {"conv", "dense"}
    # A convolution's matrix is [height * width * in, out].
    assert sides_of(cnn)["conv"] == Sides((), (0, 1, 2), (3,))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bfloat16_moments_keep_second_moments_in_float32_and_stay_close(optimizer):
    config = OptimConfig(optimizer=optimizer, moment_dtype="bfloat16", beta2=0.99)
    history, state = train(config)
    exact, _ = train(dataclasses.replace(config, moment_dtype="float32"))
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state) if leaf.ndim > 1 or leaf.size == 6}
    assert ("bfloat16" in dtypes) == (optimizer != "adafactor")  # it has no first moment
    assert ("float32" in dtypes) == (optimizer in ("adamw", "adafactor", "muon"))
    if optimizer == "lion":
        return  # the sign of a rounded momentum may flip if it is close to zero
    for name, value in history[-1].items():
        # A moment is rounded to 8 bits at each of four steps of size 0.1 * O(1).
        np.testing.assert_allclose(value, exact[-1][name], atol=0.02, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optax_finds_the_param_shaped_trees_of_the_state(optimizer):
    rule = make_optimizer(OptimConfig(optimizer=optimizer), AXES)
    params = random_tree(0)
    marked = optax.tree_utils.tree_map_params(
        rule, lambda leaf, p: leaf.shape == p.shape or leaf.ndim < p.ndim, rule.init(params), params
    )
    flags = [leaf for leaf in jax.tree.leaves(marked) if isinstance(leaf, bool)]
    assert len(flags) >= len(jax.tree.leaves(params)) and all(flags)


def lrs(total_steps=100, global_batch_size=256, **fields):
    config = OptimConfig(**{"peak_lr": 0.5, "min_lr_ratio": 0.1, "warmup_steps": 9, **fields})
    schedule = make_lr_schedule(
        config, total_steps=total_steps, global_batch_size=global_batch_size
    )
    values = jax.jit(schedule)(jnp.arange(total_steps + 20))
    assert values.dtype == jnp.float32
    return np.asarray(values)


SHAPES = {
    "cosine": lambda p: 0.05 + 0.45 * (1 + math.cos(math.pi * p)) / 2,
    "linear": lambda p: 0.05 + 0.45 * (1 - p),
    "constant": lambda p: 0.5,
}


@pytest.mark.parametrize("decay_steps", [0, 40])
@pytest.mark.parametrize("schedule", SHAPES)
def test_schedule_equals_its_closed_form(schedule, decay_steps):
    got = lrs(schedule=schedule, decay_steps=decay_steps)
    length = decay_steps or 100 - 9
    want = [
        0.5 * (s + 1) / 10 if s < 9 else SHAPES[schedule](min(1.0, (s - 9) / length))
        for s in range(120)
    ]
    np.testing.assert_allclose(got, want, rtol=1e-5)  # float32 cosine


def test_wsd_stays_at_the_peak_and_decays_over_the_last_fraction():
    got = lrs(schedule="wsd", decay_steps=30)
    np.testing.assert_allclose(got[9:71], 0.5, rtol=1e-6)
    np.testing.assert_allclose(got[70:101], np.linspace(0.5, 0.05, 31), rtol=1e-5)
    np.testing.assert_allclose(got[100:], 0.05, rtol=1e-6)


def test_warmup_starts_above_zero_and_no_warmup_starts_at_the_peak():
    assert 0 < lrs()[0] == pytest.approx(0.05)
    assert lrs(warmup_steps=0)[0] == pytest.approx(0.5)
    # A run shorter than its warmup stays in it.
    np.testing.assert_allclose(
        lrs(total_steps=5, schedule="wsd")[:5], 0.05 * np.arange(1, 6), rtol=1e-6
    )


@pytest.mark.parametrize(
    ("scaling", "factor"), [("none", 1.0), ("linear:64", 4.0), ("sqrt:64", 2.0)]
)
def test_learning_rate_scales_with_the_effective_batch(scaling, factor):
    got = lrs(lr_scaling=scaling, global_batch_size=256)
    np.testing.assert_allclose(got, factor * lrs(), rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peak_lr", 0.0), ("peak_lr", math.nan), ("warmup_steps", -1), ("decay_steps", -1),
        ("min_lr_ratio", 1.5), ("lr_scaling", "linear:0"), ("lr_scaling", "sqrt"),
        ("beta1", 1.0), ("beta2", -0.1), ("eps", 0.0),
        ("momentum", 1.0), ("weight_decay", -0.1),
        ("max_grad_norm", math.inf),
    ],
)  # fmt: skip
def test_invalid_value_is_reported_with_its_rule(field, value):
    (problem,) = problems_of(OptimConfig(**{field: value}), "optim")
    assert problem.startswith(f"optim.{field}={value} must be")


def test_every_problem_is_reported_and_the_default_has_none():
    assert problems_of(OptimConfig(), "optim") == []
    assert len(problems_of(OptimConfig(peak_lr=-1.0, beta1=2.0, max_grad_norm=-1.0), "optim")) == 3


def test_adafactor_rejects_moments_in_8_bits():
    (problem,) = problems_of(OptimConfig(optimizer="adafactor", moment_dtype="int8"), "optim")
    assert "optim.moment_dtype='int8'" in problem and "optim.optimizer='adafactor'" in problem
    for changes in ({"optimizer": "adafactor"}, {"optimizer": "muon", "moment_dtype": "int8"}):
        assert problems_of(OptimConfig(**changes), "optim") == []


def test_groups_have_their_own_learning_rate_and_weight_decay():
    """The first match applies; a weight decay of a group is also that of its vectors."""
    groups = ["embed:lr=0.5", "layers/*bias:weight_decay=0.3", "layers:lr=2:weight_decay=0"]
    ours, _ = train(OptimConfig(weight_decay=0.1, groups=groups))
    factor = {"embed": 0.5, "qkv_bias": 1.0, "norm": 1.0}
    decay = {"embed": 0.1, "qkv_bias": 0.3, "norm": 0.0}
    params = {k: v.astype(np.float64) for k, v in named(random_tree(0)).items()}
    rules, expected = {name: numpy_adam() for name in params}, []
    for step in range(NUM_STEPS):
        for name, grad in named(random_tree(step + 1)).items():
            direction = rules[name](grad.astype(np.float64)) + decay.get(name, 0.0) * params[name]
            params[name] = params[name] - 0.1 * factor.get(name, 2.0) * direction
        expected.append(dict(params))
    assert_same_history(ours, expected)


def test_a_group_without_effect_changes_no_bit():
    plain, _ = train(OptimConfig(optimizer="muon", weight_decay=0.1))
    same, _ = train(OptimConfig(optimizer="muon", weight_decay=0.1, groups=["embed:lr=1"]))
    assert all(np.array_equal(plain[-1][name], same[-1][name]) for name in plain[-1])


def test_all_problems_of_groups_are_reported():
    groups = ["embed", "embed:lr=-1", "embed:momentum=1", ":lr=1", "head:lr=2", "norm:lr=1e-3"]
    problems = optim.group_problems(OptimConfig(groups=groups), AXES)
    assert len(problems) == 5
    assert all(text in problem for text, problem in zip(groups[:4], problems, strict=False))
    assert "'head:lr=2'" in problems[4] and "layers/qkv_bias" in problems[4]
