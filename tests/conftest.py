"""Simulate eight CPU devices in every test process, so that no test uses an accelerator."""

import gc
import importlib.metadata
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"  # no test contacts the hub
# Optimize machine code less: a train step compiles in an eighth of the time (8.0 -> 1.1 s of CPU
# time). The program, its collectives and its memory are decided before and do not change.
os.environ.setdefault(
    "XLA_FLAGS",
    # Each additional LLVM module costs time: 5.2 -> 3.8 s for four steps.
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
    + (
        "--xla_cpu_use_fusion_emitters=false"  # LLVM IR from HLO, not through MLIR
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else ""  # later versions support only MLIR
    ),
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # 5 % of the time of step tests

import jax

from jaxdist.runtime import setup_compilation_cache

CACHES = Path(tempfile.gettempdir()) / f"jaxdist-tests-{os.getuid()}"
# Tracing allocates millions of objects that stay alive. A collection after every 700 takes a fifth
# of the time (112 -> 90 s of CPU time for the tests of the step and the audit).
gc.set_threshold(100_000, 50, 100)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Otherwise hundreds of processes would each compile their imports (2 s).
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(CACHES / "pyc")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
jax.config.update("jax_num_cpu_devices", 8)
# Each program is compiled once per machine, by the first test or worker that needs it.
setup_compilation_cache(os.environ.setdefault("JAXDIST_CACHE", str(CACHES / "xla")))

from jaxdist.core import step_plan  # noqa: E402

step_plan.UNROLL_UP_TO = 0  # scanned layers, as in a large model; quick to compile

# Fixtures used by several files. Imported after the devices are configured: they import JAX.
import object_servers  # noqa: E402
from damaged import pristine, run  # noqa: E402, F401


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Return the folder of real data: tinyshakespeare.txt and CIFAR-10 in both formats."""
    named = os.environ.get("JAXDIST_TEST_DATA")
    path = Path(named) if named else Path(__file__).parent.parent.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no real data: set JAXDIST_TEST_DATA to a folder with tinyshakespeare.txt")
    return path


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, object_servers.s3(patch) as address:
        yield address


@pytest.fixture
def propagating(monkeypatch):
    """Make the logger `jaxdist` propagate its records from the start of the test.

    An earlier command in this process may have turned propagation off. pytest adds its handler to a
    logger that does not propagate at the start of a test; it would then receive each record twice.
    """
    monkeypatch.setattr(logging.getLogger("jaxdist"), "propagate", True)


SLOW_TEST = 25
"""Time of an average slow test, in fast ones."""

LONG_TESTS = {"kubernetes_pods": 100, "launch_elastic_train": 100, "launch_faults": 100}
"""Files with few slow tests of some minutes, and their additional time in fast tests."""


@pytest.hookimpl(trylast=True)  # after `-m` has selected
def pytest_collection_modifyitems(config, items):
    """Run the longest files first (needs `--no-loadscope-reorder`), by the number of their tests.

    Tests marked `product` run only if `-m` names the mark.

    Workers take complete files (`--dist loadfile`). A file with a single test of two minutes must
    not be last, when the other workers are idle.
    """
    if "product" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("product")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("product")]
    name = lambda item: item.path.stem.removeprefix("test_")
    times = Counter(LONG_TESTS)
    for item in items:
        times[name(item)] += SLOW_TEST if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -times[name(item)])


HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
}


@pytest.fixture(autouse=True)
def reset_signal_handlers():
    """Remove signal handlers that earlier commands in this process installed.

    Training in this process for another module leaves its handlers, and a thread that ends the
    process at the second Ctrl-C.
    """
    signal.set_wakeup_fd(-1)
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


STRICT = {
    f"test_{name}"
    for name in (
        "block_sums", "cnn", "collectives", "context", "context_cudnn", "losses", "model_families",
        "models", "optim", "parity", "pipeline", "precision", "sharding", "layer_vjp", "state",
        "step",
    )
}  # fmt: skip
"""Tests of the core, where each change of dtype must be explicit."""


@pytest.fixture(scope="module", autouse=True)
def strict_promotion(request):
    """Disable implicit dtype promotion in the tests of the core.

    Other tests differentiate complete models in half precision. Flax's norms and JAX's own
    attention need promotion for this.
    """
    with jax.numpy_dtype_promotion("strict" if request.module.__name__ in STRICT else "standard"):
        yield


@pytest.fixture
def users_promotion():
    """Enable standard promotion, which half precision with JAX's own attention needs."""
    with jax.numpy_dtype_promotion("standard"):
        yield
