"""Twenty steps of Adam on a mesh and in PyTorch, and PEFT's tensors of adapters."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxdist.config import RunConfig
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.core.weights import frozen
from jaxdist.data import DataConfig
from jaxdist.models.adapters import LoraConfig, merge
from jaxdist.models.huggingface import peft as peft_format
from jaxdist.models.huggingface.directory import read_model
from jaxdist.optim import OptimConfig
from jaxdist.run.setup import assemble
from jaxdist.run.teacher import with_teacher

STEPS, RATE = 20, 3e-3
ROWS, SEQ, VOCAB = 8, 32, 96
MESHES = {
    "fsdp=2,tp=2": {},
    "pp=2,cp=2": {"microbatches": 4, "virtual": 2},
    "fsdp=2,pp=2": {"microbatches": 2},
    "pp=2,tp=2": {"microbatches": 4, "virtual": 2},
    "dp=2,cp=2": {"microbatches": 2},
    "dp=4": {"microbatches": 2},
    "fsdp=4": {},
    "tp=2": {},
    "dp=2,fsdp=2,tp=2": {},
    "cp=2,tp=2": {},
    "fsdp=2,cp=2": {},
    "pp=2": {"microbatches": 2},
    "dp=2,fsdp=2,pp=2": {"microbatches": 2},
}


def adapter_run(
    path, *, rows, seq_len, mesh="dp=1", microbatches=0, virtual=1, lora=(), model=None, **sections
) -> RunConfig:
    """Return a float32 run of `STEPS` plain Adam steps from the model at `path`, or of `model`."""
    config = RunConfig(
        init_from=str(path),
        model=model or read_model(path),
        lora=LoraConfig(**{"rank": 4, "alpha": 8.0, "base_format": "float32", **dict(lora)}),
        mesh=MeshConfig(shape=mesh),
        train=TrainConfig(
            steps=STEPS, global_batch_size=rows, seq_len=seq_len, num_microbatches=microbatches
        ),
        optim=OptimConfig(
            peak_lr=RATE, schedule="constant", warmup_steps=0, weight_decay=0.0, eps=1e-4,
            max_grad_norm=0.0,
        ),
        precision=PrecisionConfig(compute_dtype="float32"),
        **{"data": DataConfig(tokenizer="bytes"), **sections},
    )  # fmt: skip
    pipeline = dataclasses.replace(config.pipeline, num_virtual_stages=virtual)
    return dataclasses.replace(config, pipeline=pipeline)


def named(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def peft_tensors(config, params) -> dict[str, np.ndarray]:
    flat = {f"params/{named(path)}": x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    tensors = {}
    for module in peft_format.modules(config.model, config.lora):
        own = (name for name in flat if name.startswith(f"{module.array}/"))
        adapter = {name.rpartition("/")[2]: np.asarray(flat[name][module.layer]) for name in own}
        tensors |= module.to_peft(adapter)
    if config.model.num_labels:
        tensors[peft_format.SCORE] = np.asarray(flat["params/head/score"]).T
    tables = peft_format.token_tables(config.model, config.lora)
    return tensors | {
        peft_format.rows_name(module): np.asarray(flat[array]) for array, module in tables.items()
    }


def batches():
    random = np.random.default_rng(5)
    while True:
        rows = random.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
        yield {
            "tokens": rows[:, :-1],
            "targets": rows[:, 1:],
            "weights": np.ones((ROWS, SEQ), np.float32),
        }


def train(config, steps=STEPS):
    # B starts at zero, and then neither a wrong A nor a wrong base would show.
    is_moved = lambda path: named(path).endswith(("/b", "/rows"))
    moved = lambda path, x: x + 0.02 * noise(path, x) if is_moved(path) else x
    history, *rest = train_on(config, batches(), steps, moved)
    return losses_of(history), *rest


def losses_of(history):
    return [metrics["loss"] for metrics in history]


def train_on(config, batches, steps=STEPS, start=lambda path, x: x):
    """Return the metrics of each step, the parts, and the parameters before and after.

    `start` maps the path and the initial value of a parameter to its value.
    """
    devices = jax.devices()[: config.mesh.spec.num_devices]
    parts = with_teacher(assemble(config, devices), {})
    state, history = parts.init_state(), []
    params = jax.tree_util.tree_map_with_path(start, parts.in_model_order(state.params))
    before = jax.tree.map(lambda x: np.array(x, copy=True), params)  # the step donates them
    state = dataclasses.replace(state, params=parts.in_execution_order(params))
    for batch in itertools.islice(batches, steps):
        placed = parts.teacher(place_batch(batch, parts.step.batch_sharding))
        state, metrics = parts.step.train(state, placed, np.inf)
        metrics.pop("layer_sums", None)  # of experts, one for each layer
        history.append({name: float(x) for name, x in metrics.items()})
    return history, parts, before, jax.device_get(parts.in_model_order(state.params))


def noise(path, x):
    seed = len(named(path)) + x.ndim
    return np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)


def peft_model(config, folder, before):
    """Return PEFT's model with the adapters `before`, next to the model at `folder`."""
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    transformers = pytest.importorskip("transformers", reason="needs the reference extra")
    peft = pytest.importorskip("peft", reason="needs the reference extra (peft)")
    kind, more = transformers.AutoModelForCausalLM, {}
    if config.model.num_labels:
        kind = transformers.AutoModelForSequenceClassification
        more = {"num_labels": config.model.num_labels, "pad_token_id": 0}
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, **more)
    settings = peft_format.write_config(config.model, config.lora, str(folder))
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    wrapped = peft.get_peft_model(
        model,
        peft.LoraConfig(**{k: v for k, v in settings.items() if k in names - {"inference_mode"}}),
    )
    start = {name: torch.from_numpy(x.copy()) for name, x in peft_tensors(config, before).items()}
    result = peft.set_peft_model_state_dict(wrapped, start)
    assert not result.unexpected_keys
    moving = [p for p in wrapped.parameters() if p.requires_grad]
    assert sum(p.numel() for p in moving) == sum(x.numel() for x in start.values())
    return wrapped


def train_in_torch(config, model, loss_of, batches):
    """Return the losses of `STEPS` steps of a model of PyTorch; `loss_of` a batch, before each."""
    import torch

    moving = [p for p in model.parameters() if p.requires_grad]
    rule = torch.optim.AdamW(moving, RATE, betas=(config.optim.beta1, config.optim.beta2),
                             eps=config.optim.eps, weight_decay=0.0)  # fmt: skip
    losses = []
    for batch in itertools.islice(batches, STEPS):
        loss = loss_of(batch)
        rule.zero_grad()
        loss.backward()
        rule.step()
        losses.append(loss.item())
    assert losses[0] != losses[-1]
    return losses


def check_mesh(config, expected):
    """Train, compare losses with those of one device and the base with itself; `train`'s result."""
    losses, parts, before, after = train(config)
    assert abs(expected[-1] - expected[0]) > 1e-3
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    start, end = (frozen(tree, parts.model.axes) for tree in (before, after))
    jax.tree.map(np.testing.assert_array_equal, start, end)  # every bit of the base stayed
    return losses, parts, before, after


def check_merged(config):
    """Compare the losses of adapters and of the merged weights; return the adapted parameters."""
    _, parts, before, _ = train(config, steps=0)
    complete = assemble(dataclasses.replace(config, lora=LoraConfig()), jax.devices()[:1])
    batch = next(batches())
    losses = [
        float(one.step.evaluate(params, place_batch(batch, one.step.batch_sharding))["loss"])
        for one, params in ((parts, before), (complete, jax.jit(merge)(before)))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    return before


def train_with_peft(config, folder, before):
    """Train adapters with PEFT next to the model at `folder`: losses, and their tensors after."""
    wrapped = peft_model(config, folder, before)
    import peft
    import torch

    def loss_of(batch):
        logits = wrapped(torch.from_numpy(batch["tokens"]).long()).logits
        targets = torch.from_numpy(batch["targets"]).long()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    losses = train_in_torch(config, wrapped, loss_of, batches())
    return losses, {n: x.numpy() for n, x in peft.get_peft_model_state_dict(wrapped).items()}


def check_equal_to_peft(config, trained, folder) -> None:
    """Compare a result of `train` with PEFT on the weights in `folder`."""
    losses, _, before, after = trained
    expected, end = train_with_peft(config, folder, before)
    assert losses[0] != losses[-1]
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    ours = peft_tensors(config, after)
    assert ours.keys() == end.keys()
    for name, x in ours.items():
        # Adam divides small gradients by small numbers: 20 steps of at most RATE each.
        np.testing.assert_allclose(x, end[name], atol=2e-2 * STEPS * RATE, err_msg=name)
