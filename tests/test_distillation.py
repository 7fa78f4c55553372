"""Distillation against PyTorch, one device, and closed forms."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapter_runs import MESHES, STEPS, adapter_run, train_in_torch, train_on
from commands import records, run_here
from decoders import FAMILIES
from hf_models import write_model
from refusals import refused

from jaxdist.core.losses import sum_over_tokens
from jaxdist.core.token_logps import make_token_logps
from jaxdist.core.types import TokenHead
from jaxdist.hardware import GPUS, Cluster
from jaxdist.objectives.config import ObjectiveConfig
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory, teacher_field_bytes
from jaxdist.plan.estimate.time import estimate_time, teacher_work
from jaxdist.run.setup import assemble
from jaxdist.run.teacher import with_teacher
from jaxdist.settings import problems_of

ROWS, SEQ, VOCAB = 16, 24, 200
SIZES = dict(num_layers=4, vocab_size=VOCAB, max_seq_len=SEQ)
STUDENT = dataclasses.replace(FAMILIES["qwen3"], **SIZES)
TEACHER = dataclasses.replace(FAMILIES["llama2"], **SIZES, d_model=64, mlp_dim=96)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "student", STUDENT, scale=0.1)
    write_model(folder / "teacher", TEACHER, scale=0.2)
    return folder


def config_of(models, mesh="dp=1", microbatches=0, virtual=1, lora=0, teacher="teacher", **changes):
    objective = {"kind": "distill", "beta": 0.5, **changes}
    return adapter_run(
        models / "student", rows=ROWS, seq_len=SEQ, mesh=mesh, microbatches=microbatches,
        virtual=virtual, lora={"rank": lora},
        objective=ObjectiveConfig(teacher=str(models / teacher), **objective),
    )  # fmt: skip


def batches():
    random = np.random.default_rng(5)
    weights = np.ones((ROWS, SEQ), np.float32)
    weights[:, :3] = 0
    while True:
        rows = random.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
        yield {"tokens": rows[:, :-1], "targets": rows[:, 1:], "weights": weights}


def train(config, steps=STEPS):
    return train_on(config, batches(), steps)[0]


CHANGES = {
    "fsdp=2,tp=2": {"lora": 4, "kind": "distill_reverse"},
    "fsdp=4": {"kind": "distill_reverse"},
    "fsdp=2,pp=2": {"lora": 4},
    "dp=2,fsdp=2,pp=2": {"kind": "distill_reverse"},
}


@pytest.fixture(scope="module")
def alone(models):
    return functools.cache(lambda **changes: train(config_of(models, **changes)))


@pytest.mark.parametrize(
    "mesh",
    [
        "fsdp=2,tp=2",
        *(pytest.param(mesh, marks=pytest.mark.product) for mesh in [*MESHES][1:]),
    ],
)
def test_a_mesh_learns_the_same_as_one_device(models, alone, mesh):
    changes = CHANGES.get(mesh, {})
    history = train(config_of(models, mesh, **MESHES[mesh], **changes))
    expected = alone(**changes)
    assert expected[-1]["loss"] < 0.99 * expected[0]["loss"]
    for name in ("loss", "grad_norm", "agreement"):
        values = ([metrics[name] for metrics in part] for part in (history, expected))
        # Gradients near 0.08 are differences of probabilities.
        atol = 1e-5 if name == "grad_norm" else 0
        np.testing.assert_allclose(*values, rtol=2e-5, atol=atol, err_msg=name)


@pytest.mark.parametrize("changes", [{}, {"kind": "distill_reverse", "beta": 0.0}], ids=str)
def test_twenty_steps_equal_those_in_pytorch(models, alone, changes):
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    open_model = functools.partial(
        transformers.AutoModelForCausalLM.from_pretrained,
        attn_implementation="eager", dtype=torch.float32,
    )  # fmt: skip
    student, teacher = open_model(models / "student"), open_model(models / "teacher")
    beta, top_k = changes.get("beta", 0.5) or 1.0, 128

    def loss_of(batch):
        tokens = torch.from_numpy(batch["tokens"]).long()
        with torch.no_grad():
            taught = (teacher(tokens).logits * beta).log_softmax(-1)
        learned = (student(tokens).logits * beta).log_softmax(-1)
        chosen = taught.topk(top_k).indices
        is_other = torch.ones_like(taught).scatter(-1, chosen, 0)
        rest = lambda x, mask=is_other: (x.exp() * mask).sum(-1, keepdim=True).log()
        taught, learned = (
            torch.cat([x.gather(-1, chosen), rest(x)], -1) for x in (taught, learned)
        )
        p, q = (learned, taught) if "kind" in changes else (taught, learned)
        terms = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        return beta**-2 * terms[torch.from_numpy(batch["weights"]) > 0].mean()

    expected = train_in_torch(config_of(models), student, loss_of, batches())
    losses = [metrics["loss"] for metrics in alone(**changes)]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    assert expected[-1] < 0.98 * expected[0]


def test_a_mixture_of_experts_teaches(models):
    """The sums of its router are not predictions."""
    experts = dict(num_experts=4, experts_per_token=2, mlp_dim=16)
    write_model(models / "experts", dataclasses.replace(TEACHER, **experts), scale=0.2)
    losses = [
        train(config_of(models, mesh, teacher="experts"), steps=2)[-1]["loss"]
        for mesh in ("dp=1", "fsdp=2,pp=2")
    ]
    np.testing.assert_allclose(losses[1:], losses[0], rtol=2e-5)


def test_outcomes_that_the_student_excludes_have_gradients():
    """The other tokens have probability 1e-35, for which 1 minus the sum of the rest is 0."""
    x, tokens = jnp.ones((1, 1, 1)), jnp.asarray([[[2, 0]]])
    logps = lambda kernel: make_token_logps(None, 0, sum_over_tokens)(
        TokenHead(x, kernel, 4), tokens
    ).logps[0, 0]
    kernel = jnp.asarray([[80.0, 0.0, 79.0, 1.0]])
    expected = jax.nn.log_softmax(kernel[0])
    rest = jnp.logaddexp(expected[1], expected[3])
    np.testing.assert_allclose(logps(kernel), [expected[2], expected[0], rest], rtol=1e-6)
    gradient = jax.grad(lambda kernel: logps(kernel)[2])(kernel)[0]
    share = jax.nn.softmax(jnp.asarray([0.0, 1.0]))
    probs = jnp.exp(expected)
    np.testing.assert_allclose(
        gradient, [-probs[0], share[0], -probs[2], share[1]], rtol=1e-5, atol=1e-7
    )


def run_of(tmp_path, *flags):
    settings = (
        "--model.d-model 32 --model.num-heads 4 --model.vocab-size 256 --train.seq-len 32 "
        "--train.global-batch-size 16 --optim.peak-lr 1e-2 --eval.interval-steps "
        "10 --data.eval-fraction 0.1 --monitoring.tracker= --eval.max-batches 2 "
        "--eval.final-max-batches 2"
    )
    (tmp_path / "a.txt").write_text("".join(f"line {i} of {i * 7} words\n" for i in range(900)))
    data = f"--data.sources={tmp_path / 'a.txt'}", "--data.tokenizer=bytes"
    assert run_here("train", *settings.split(), *data, *flags) == 0


@pytest.mark.slow
def test_a_run_teaches_another_on_a_mesh(tmp_path, capsys):
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    run_of(tmp_path, f"--run-dir={teacher}", "--model.num-layers=2", "--train.steps=20")
    distill = "--objective.kind=distill", f"--objective.teacher={teacher}"
    small = "--model.num-layers=1", "--mesh=dp=2,fsdp=2,tp=2"
    for steps in (10, 20):  # the second run resumes
        run_of(tmp_path, f"--run-dir={student}", *distill, *small, f"--train.steps={steps}")
    trained, evals = records(student, "train"), records(student, "eval")
    assert trained[-1]["loss"] < 0.3 * trained[0]["loss"]
    assert evals[0]["loss"] > evals[1]["loss"] and evals[1]["agreement"] > 0.3
    assert "perplexity" not in evals[1]
    capsys.readouterr()
    assert run_here("evaluate", student, "--json", "--max-batches=2") == 0
    means = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert means["loss"] == pytest.approx(evals[1]["loss"], rel=1e-5)
    assert run_here("train", f"--replay={student}:3", "--mesh=dp=2,fsdp=2,tp=2") == 0


@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "dp=2,pp=2"])
def test_the_estimate_counts_memory_and_work_of_the_teacher(models, mesh):
    config = config_of(models, mesh)
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=4)
    job = Job.of(config, config.mesh.spec, cluster)
    memory = estimate_memory(job)
    parts = with_teacher(assemble(config, jax.devices()[:4]), {})
    fields = {"tokens", "targets", "weights"}
    batch = parts.abstract_batch()
    own = {name: x for name, x in batch.items() if name in fields}
    size = lambda tree: sum(
        np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )
    predict, params = parts.teacher._predict, parts.teacher.parts.abstract_state().params
    stats = predict.lower(params, own).compile().memory_analysis()
    # The program of the teacher reads its weights and the batch, and returns its predictions.
    expected = stats.argument_size_in_bytes - size(own)
    np.testing.assert_allclose(memory.state["teacher"], expected, rtol=0.05)
    assert expected > 0.2 * memory.state["parameters"]
    np.testing.assert_allclose(teacher_field_bytes(job), stats.output_size_in_bytes, rtol=0.05)
    np.testing.assert_allclose(memory.state["batch"], size(batch), rtol=0.05)
    assert sum(memory.phases["teacher"].values()) > 0
    # Two FLOPs per weight and token of the layers, and of the head twice.
    d, mlp, layers = TEACHER.d_model, TEACHER.mlp_dim, TEACHER.num_layers
    weights = layers * (4 * d * d + 3 * d * mlp) // config.mesh.spec["pipeline"]
    weights += 2 * d * TEACHER.padded_vocab
    expected = 2 * weights * job.tokens / config.mesh.spec["tensor"]
    np.testing.assert_allclose(teacher_work(job).products, expected)
    other = dataclasses.replace(config, objective=ObjectiveConfig())
    alone = estimate_time(Job.of(other, config.mesh.spec, cluster))
    assert estimate_time(job).seconds > alone.seconds


def test_teachers_that_do_not_fit_are_rejected(models, tmp_path):
    write_model(tmp_path / "other", dataclasses.replace(TEACHER, vocab_size=64))
    heads = dataclasses.replace(TEACHER, num_heads=1, head_dim=16)
    write_model(tmp_path / "heads", heads)
    with refused("vocabulary has 64 tokens", "student 200"):
        train(config_of(models, teacher=tmp_path / "other"))
    with refused("objective.teacher=", "heads=1", num_problems=2):
        train(config_of(models, "tp=2", teacher=tmp_path / "heads"))
    config = config_of(models, "tp=2", teacher=tmp_path / "heads")
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=2)
    with refused("objective.teacher=", "heads=1", num_problems=2):
        estimate_memory(Job.of(config, config.mesh.spec, cluster))
    with refused("objective.teacher=", "does not exist"):
        train(config_of(models, teacher=tmp_path / "missing"))
    config = config_of(models)
    for objective in (
        ObjectiveConfig(kind="distill"),
        dataclasses.replace(config.objective, kind="dpo"),
    ):
        problems = problems_of(dataclasses.replace(config, objective=objective))
        assert any("objective.teacher=" in problem for problem in problems)
