"""Five steps of AdamW on a mesh equal PyTorch's on transformers' models with experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from decoders import VARIANTS, random_tokens
from hf_models import reference_of

from jaxdist.core.parallel.context import place_batch
from jaxdist.core.sharding import Layout
from jaxdist.core.state import TrainState, state_shardings
from jaxdist.core.step import Optimizer, TrainConfig, make_step
from jaxdist.models import build
from jaxdist.optim import OptimConfig, make_optimizer

torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
pytest.importorskip("transformers", reason="needs the reference extra")

SEQ, ROWS, RATE, STEPS = 16, 8, 1e-2, 5


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", pytest.param("dots1", marks=pytest.mark.product)]
)
def test_five_steps_of_adamw_equal_pytorch(name, tmp_path):
    """The bias of dots.llm1 is constant here: PyTorch has no rule for it."""
    from test_convert_hf import tree_of

    config = VARIANTS[name]
    reference = reference_of(config, scale=1.0)
    reference.save_pretrained(tmp_path / "first")
    router = {**config.router, "balance_loss": 0.0, "bias_rate": 0.0}
    model = build(dataclasses.replace(config, router=router), seq_len=SEQ)
    spec = tiny.MeshSpec.parse("fsdp=2,ep=2,tp=2")
    layout = Layout(mesh=spec.build(jax.devices()[:8]), rules=model.rules, sequence_parallel=True)
    rule = make_optimizer(
        OptimConfig(beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1), model.axes
    )
    constant = lambda step: jnp.full((), RATE, jnp.float32)
    train = TrainConfig(global_batch_size=ROWS, seq_len=SEQ, num_microbatches=2)
    plan = tiny.plan_of(model, layout, train, tiny.PrecisionConfig(compute_dtype="float32"))
    step = make_step(model, model.objective, Optimizer(rule, constant), layout, plan)
    params = jax.tree.map(jnp.asarray, tree_of(tmp_path / "first"))
    state = TrainState(
        step=jnp.int32(0), params=params, opt_state=rule.init(params), copies={},
        loss_scale={}, key=jax.random.key(0),
    )  # fmt: skip
    kept = dict(loss_scale={}, offload=False, copies=())
    state = jax.device_put(state, state_shardings(model, rule, layout, **kept))

    is_matrix = lambda name, p: p.ndim > 1 and not name.endswith("bias")
    decays = [p for name, p in reference.named_parameters() if is_matrix(name, p)]
    others = [p for name, p in reference.named_parameters() if not is_matrix(name, p)]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), eps=1e-4)
    losses, expected = [], []
    for index in range(STEPS):
        tokens = random_tokens(ROWS, SEQ + 1, seed=index)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        batch["weights"] = np.ones((ROWS, SEQ), np.float32)
        state, metrics = step.train(state, place_batch(batch, step.batch_sharding), np.inf)
        losses.append(float(metrics["loss"]))
        logits = reference(torch.from_numpy(batch["tokens"]).long()).logits
        targets = torch.from_numpy(batch["targets"]).long()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    reference.save_pretrained(tmp_path / "last")
    actual, correct = jax.device_get(state.params), tree_of(tmp_path / "last")
    far = jax.tree.map(lambda a, b: np.abs(a - b).max(), actual, correct)
    # Adam divides by gradients: rounding of the smallest grows to this share of a step.
    assert max(jax.tree.leaves(far)) <= 0.02 * RATE, far
