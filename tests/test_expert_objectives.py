"""Objectives of complete rows with experts: the balance loss against TRL, NumPy and one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import test_distillation
import test_preference as preference
from adapter_runs import losses_of, peft_model, train_in_torch, train_on
from decoders import VARIANTS
from hf_models import write_model

from jaxdist.core.parallel.context import place_batch
from jaxdist.run.setup import assemble

FACTOR = 0.5


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a folder with models of one and of four layers, and a teacher."""
    folder = tmp_path_factory.mktemp("bases")
    sizes = dict(vocab_size=preference.VOCAB, max_seq_len=preference.SEQ, num_experts=4)
    for layers in (1, 4):
        config = dataclasses.replace(VARIANTS["qwen3_moe"], **sizes, num_layers=layers)
        write_model(folder / str(layers), config, scale=0.2)
    write_model(folder / "teacher", config, scale=0.3)
    return folder


def config_of(bases, kind, mesh="dp=1", layers=4, microbatches=0, rank=4, **router):
    config = preference.config_of(bases / str(layers), kind, mesh, microbatches)
    router = {"norm_topk": False, "balance_loss": FACTOR, **router}
    if kind.startswith("distill"):
        teacher = dataclasses.replace(config.objective, teacher=str(bases / "teacher"))
        data = dataclasses.replace(config.data, records="text")
        config = dataclasses.replace(config, objective=teacher, data=data)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, router=router),
        lora=dataclasses.replace(config.lora, rank=rank, targets=["attention", "mlp"]),
    )


def train(config):
    kind = config.objective.kind
    if not kind.startswith("distill"):
        return train_on(config, preference.batches(kind))
    known = lambda x: x % preference.VOCAB if x.dtype == np.int32 else x
    batches = test_distillation.batches()
    return train_on(config, ({n: known(x) for n, x in batch.items()} for batch in batches))


# TRL 1.16 and accelerate warn of what torch and transformers deprecate.
@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("kind", ["dpo", pytest.param("kto", marks=pytest.mark.product)])
def test_twenty_steps_equal_trl_with_the_routers_loss(bases, tmp_path, kind):
    """transformers multiplies means over all layers, so the model has one."""
    pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    trl = pytest.importorskip("trl", reason="needs the reference extra (trl)")
    datasets = pytest.importorskip("datasets", reason="needs the reference extra (trl)")
    config = config_of(bases, kind, layers=1, balance_scope="batch")
    history, _, before, _ = train(config)
    wrapped = peft_model(config, bases / "1", before)
    trainer = preference.trl_trainer(trl, transformers, datasets, wrapped, tmp_path, kind)
    # The loads that transformers multiplies add up to the number of experts of a token.
    trainer.router_aux_loss_coef = FACTOR / config.model.experts_per_token
    trainer.aux_loss_enabled = True
    collate = lambda batch: trainer.data_collator(preference.examples_of(batch, kind))
    loss_of = lambda batch: trainer.compute_loss(wrapped, collate(batch))
    expected = train_in_torch(config, wrapped, loss_of, preference.batches(kind))
    ours = [metrics["loss"] + metrics["aux_loss"] for metrics in history]
    np.testing.assert_allclose(ours, expected, rtol=2e-5)
    assert min(metrics["aux_loss"] for metrics in history) > 0.9 * FACTOR


@pytest.fixture(scope="module")
def alone(bases):
    return functools.cache(lambda kind, **options: train(config_of(bases, kind, **options))[0])


CASES = [
    ("fsdp=2,ep=2,tp=2", "dpo", 0, {}),
    ("dp=2,ep=2,cp=2", "orpo", 2, {"balance_scope": "batch", "rank": 0}),
    *(
        pytest.param(*case, marks=pytest.mark.product)
        for case in [
            ("pp=2,ep=2,cp=2", "dpo", 2, {}),
            ("pp=2,ep=2,cp=2", "kto", 2, {"balance_scope": "batch"}),
            ("pp=2,tp=2", "simpo", 4, {"z_loss": 0.01, "rank": 0}),
            ("fsdp=4,ep=2", "ipo", 0, {"balance_scope": "batch"}),
            ("fsdp=2,ep=2", "distill", 2, {"balance_scope": "batch"}),
            ("pp=2,cp=2", "distill_reverse", 2, {}),
        ]
    ),
]


@pytest.mark.parametrize("mesh, kind, microbatches, options", CASES)
def test_a_mesh_learns_the_same_as_one_device(bases, alone, mesh, kind, microbatches, options):
    history = train(config_of(bases, kind, mesh, microbatches=microbatches, **options))[0]
    expected = alone(kind, **options)
    assert losses_of(expected)[0] != losses_of(expected)[-1]
    for name in ("loss", "aux_loss", "balance", "grad_norm"):
        values = ([metrics[name] for metrics in part] for part in (history, expected))
        np.testing.assert_allclose(*values, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("kind", ["orpo", "reward"])
def test_loads_and_bias_count_each_token_of_pairs_once(bases, kind):
    """The router counts prompts and completions, but no padding."""
    config = config_of(bases, "orpo", layers=1, rank=0, bias=True, scores="sigmoid", bias_rate=0.01)
    config = dataclasses.replace(config, init_from="")
    batch = next(preference.batches("orpo"))
    last = preference.SEQ - np.argmax(batch["weights"][:, ::-1] > 0, 1)  # index of the last token
    if kind == "reward":
        model = dataclasses.replace(config.model, num_labels=1)
        objective = dataclasses.replace(config.objective, kind="reward")
        config = dataclasses.replace(config, model=model, objective=objective)
        batch["weights"] = np.eye(preference.SEQ, dtype=np.float32)[last]
    parts = assemble(config, jax.devices()[:1])
    state, bias = parts.init_state(), lambda state: state.params["layers"]["mlp"]["selection_bias"]
    before = np.array(bias(state))
    after, metrics = parts.step.train(state, place_batch(batch, parts.step.batch_sharding), np.inf)
    counts = metrics["layer_sums"]["expert_tokens"]
    assert counts.sum() == (last + 1).sum() * config.model.experts_per_token
    pairs = metrics["layer_sums"]["trained_tokens"]  # whatever their lengths
    np.testing.assert_allclose(pairs, preference.ROWS / 2, rtol=1e-6)
    expected = before + 0.01 * np.sign(counts.mean(-1, keepdims=True) - counts)
    np.testing.assert_allclose(bias(after), expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["aux_loss"], FACTOR * metrics["balance"], rtol=1e-6)
