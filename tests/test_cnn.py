"""Compare the image classifier with the same network in PyTorch: steps and training results."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import plan_of

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.core.state import init_state
from jaxdist.core.step import Optimizer, TrainConfig, make_step
from jaxdist.data.images import open_cifar
from jaxdist.models import CnnConfig, build
from jaxdist.models.configs import IMAGE_CHANNELS, KERNEL_SIZE
from jaxdist.models.weights import num_params
from jaxdist.optim import OptimConfig, make_optimizer


class TinyConfig(CnnConfig):
    """Images of 8 x 8 pixels and few channels."""

    image_size = 8
    channels = (8, 16)


TINY = TinyConfig(mlp_dim=24)
SGD = OptimConfig(optimizer="sgd", momentum=0.9, weight_decay=0.0)


def layout_of(model, mesh, **options):
    spec = MeshSpec.parse(mesh)
    devices = jax.devices()[: spec.num_devices]
    return Layout(mesh=spec.build(devices), rules=model.rules, **options)


def random_batch(rows=8, seed=0, size=8):
    rng = np.random.default_rng(seed)
    return {
        "images": rng.normal(size=(rows, size, size, 3)).astype(np.float32),
        "labels": rng.integers(0, 10, rows, np.int32),
        "weights": np.ones(rows, np.float32),
    }


def trainer(config, mesh="1", learning_rate=0.1, num_microbatches=1, **options):
    """Return (step, first state) of plain SGD with momentum."""
    model = build(config, seq_len=1)
    layout, optimizer = layout_of(model, mesh, **options), make_optimizer(SGD, model.axes)
    train = TrainConfig(num_microbatches=num_microbatches)
    schedule = lambda step: jnp.float32(learning_rate)
    rule = Optimizer(optimizer, schedule)
    step = make_step(model, model.objective, rule, layout, plan_of(model, layout, train))
    return step, lambda seed: init_state(model, optimizer, layout, seed=seed, loss_scale={})


# PyTorch's side


def torch_cnn(torch, config):
    """Build the tutorial's network; its classes draw their own initial weights."""
    nn, size = torch.nn, KERNEL_SIZE
    return nn.Sequential(
        nn.Conv2d(IMAGE_CHANNELS, config.channels[0], size, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(*config.channels, size, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(config.flat_size, config.mlp_dim),
        nn.ReLU(),
        nn.Linear(config.mlp_dim, config.num_classes),
    )


LAYER_INDEX = {"conv_1": 0, "conv_2": 3, "dense_1": 7, "dense_2": 9}


def from_torch(network, config, read=lambda weight: weight.detach()):
    tree = {}
    for name, index in LAYER_INDEX.items():
        kernel, bias = (read(w).numpy() for w in (network[index].weight, network[index].bias))
        if kernel.ndim == 4:
            kernel = kernel.transpose(2, 3, 1, 0)
        elif name == "dense_1":
            # PyTorch flattens channels first; we flatten them last.
            side = config.image_size // 4
            kernel = kernel.reshape(-1, config.channels[1], side, side).transpose(2, 3, 1, 0)
            kernel = kernel.reshape(config.flat_size, -1)
        else:
            kernel = kernel.T
        tree[name] = {"kernel": np.array(kernel), "bias": np.array(bias)}
    return tree


def torch_loss(torch, network, batch):
    images = torch.from_numpy(batch["images"].transpose(0, 3, 1, 2).copy())
    logits = network(images)
    labels = torch.from_numpy(batch["labels"]).long()
    return torch.nn.functional.cross_entropy(logits, labels), logits


def assert_trees_close(ours, expected, tolerance):
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        own = ours
        for key in path:
            own = own[key.key]
        scale = np.abs(leaf).max()
        np.testing.assert_allclose(own, leaf, atol=tolerance * scale, rtol=0, err_msg=str(path))


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("1", {"num_microbatches": 2}),
        ("dp=2,fsdp=2,tp=2", {}),
        ("dp=2,tp=4", {"zero": 3}),
    ],
    ids=["microbatches2", "dp2_fsdp2_tp2", "dp2_tp4_zero3"],
)
def test_two_sgd_steps_equal_pytorch(mesh, options):
    """The second step covers momentum and updated weights."""
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    torch.manual_seed(0)
    network = torch_cnn(torch, TINY)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    step, start = trainer(TINY, mesh, **options)
    state = start(0)
    params = jax.device_put(
        from_torch(network, TINY), jax.tree.map(lambda x: x.sharding, state.params)
    )
    state = type(state)(**{**vars(state), "params": params})
    for number in range(2):
        batch = random_batch(seed=number)
        optimizer.zero_grad()
        loss, logits = torch_loss(torch, network, batch)
        loss.backward()
        optimizer.step()
        squares = [float((w.grad**2).sum()) for w in network.parameters()]
        hits = (logits.argmax(-1).numpy() == batch["labels"]).mean()

        state, metrics = step.train(state, jax.device_put(batch, step.batch_sharding), np.inf)
        # float32 sums in another order
        np.testing.assert_allclose(metrics["loss"], loss.item(), rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(sum(squares)), rtol=1e-5)
        assert metrics["accuracy"] == hits and metrics["weight"] == 8
        assert_trees_close(jax.device_get(state.params), from_torch(network, TINY), 1e-6)


def test_initial_weights_have_the_range_of_pytorch():
    params = jax.device_get(jax.jit(build(CnnConfig(), seq_len=1).init)(jax.random.key(0)))
    fans = {"conv_1": 27, "conv_2": 288, "dense_1": 4096, "dense_2": 512}
    for name, fan_in in fans.items():
        for leaf in params[name].values():
            assert np.abs(leaf).max() <= fan_in**-0.5
            assert np.abs(leaf).max() > 0.8 * fan_in**-0.5
        # Uniform: the standard deviation is the bound over √3; thousands of draws, so within 5 %.
        np.testing.assert_allclose(params[name]["kernel"].std(), (3 * fan_in) ** -0.5, rtol=0.05)


def test_parameter_count_and_flops_match_the_layers():
    config = CnnConfig()
    model = build(config, seq_len=1)
    shapes = jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0)))
    assert sum(x.size for x in shapes) == num_params(model) == 2_122_186
    macs = 32 * 32 * 27 * 32 + 16 * 16 * 288 * 64 + 4096 * 512 + 512 * 10
    assert model.flops_per_token == {"causal": 6 * macs, "full": 6 * macs}
    assert model.unit == "images" and model.num_layers == 0


def test_images_of_weight_zero_are_not_counted():
    """Such images pad the ragged last batch of an evaluation."""
    step, start = trainer(TINY, "dp=2,fsdp=2,tp=2")
    params = start(0).params
    complete, padded = random_batch(8), random_batch(8)
    padded["weights"][5:] = 0
    padded["images"][5:] = 7.0
    few = {name: value[:5] for name, value in complete.items()}
    sums = jax.device_get(step.evaluate(params, jax.device_put(padded, step.batch_sharding)))
    alone, start = trainer(TINY)
    expected = jax.device_get(alone.evaluate(start(0).params, few))
    assert sums["weight"] == expected["weight"] == 5
    assert sums["correct"] == expected["correct"]
    np.testing.assert_allclose(sums["loss"], expected["loss"], rtol=1e-6)


# Learning on real images


class FewChannels(CnnConfig):
    """Full-size images and few channels."""

    channels = (8, 16)


SMALL = FewChannels(mlp_dim=64)
EPOCHS, BATCH, PEAK_LR = 2, 64, 0.05


def cifar():
    named = os.environ.get("JAXDIST_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parent.parent.parent / "shared" / "data"
    folder = folder / "cifar-10-batches-bin"
    if not folder.is_dir():
        pytest.skip(f"no CIFAR-10 in {folder}: set JAXDIST_TEST_DATA")
    return open_cifar(folder, "half")


def epochs(images):
    rng = np.random.default_rng(0)
    for _ in range(EPOCHS):
        order = rng.permutation(images.num_rows)
        for first in range(0, images.num_rows - BATCH + 1, BATCH):
            yield images.rows(order[first : first + BATCH])


def train_ours(step, state, train, test):
    """Return (loss of each step, accuracy after the last) of our implementation."""
    losses = []
    for batch in epochs(train):
        state, metrics = step.train(state, jax.device_put(batch, step.batch_sharding), np.inf)
        losses.append(float(metrics["loss"]))
    sums = step.evaluate(state.params, test.rows(np.arange(test.num_rows)))
    return losses, float(sums["correct"] / sums["weight"])


def train_torch(torch, network, train, test):
    optimizer = torch.optim.SGD(network.parameters(), lr=PEAK_LR, momentum=0.9)
    losses = []
    for batch in epochs(train):
        optimizer.zero_grad()
        loss = torch_loss(torch, network, batch)[0]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    rows = test.rows(np.arange(test.num_rows))
    with torch.no_grad():
        logits = torch_loss(torch, network, rows)[1]
    return losses, (logits.argmax(-1).numpy() == rows["labels"]).mean()


@pytest.mark.slow
def test_training_on_cifar_matches_the_same_network_in_pytorch():
    """The same recipe, batches and initial weights give the same losses and similar accuracy."""
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    torch.manual_seed(0)
    network = torch_cnn(torch, SMALL)
    train, test = cifar()
    step, start = trainer(SMALL, learning_rate=PEAK_LR)
    state = start(0)
    params = jax.tree.map(jnp.asarray, from_torch(network, SMALL))
    state = type(state)(**{**vars(state), "params": params})
    ours, our_accuracy = train_ours(step, state, train, test)
    torch_losses, their_accuracy = train_torch(torch, network, train, test)
    # Float32 sums in another order. Each step amplifies the difference (1e-2 after 50), until it
    # equals that of two seeds, whose accuracies have a standard deviation of 0.02.
    np.testing.assert_allclose(ours[:10], torch_losses[:10], rtol=1e-4)
    assert min(our_accuracy, their_accuracy) > 0.25  # chance is 0.1
    assert abs(our_accuracy - their_accuracy) < 0.06
