"""Every test process simulates eight CPU devices; no test sees a real accelerator by accident."""

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
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the hub
# Less work on machine code: a train step compiles in an eighth of the time (8.0 -> 1.1 s of
# processor). The program with its collectives and its memory is decided before and stays the same.
os.environ.setdefault(
    "XLA_FLAGS",
    # Each further LLVM module costs time: 5.2 -> 3.8 s for four steps.
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
    + (
        "--xla_cpu_use_fusion_emitters=false"  # LLVM IR straight from HLO, not through MLIR
        if importlib.metadata.version("jaxlib").startswith("0.10.")
        else ""  # later ones know nothing but MLIR
    ),
)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")  # 5 % of the time of a step's tests

import jax

from jaxdist.runtime import setup_compilation_cache

CACHES = Path(tempfile.gettempdir()) / f"jaxdist-tests-{os.getuid()}"
# Tracing makes millions of objects that live on; collecting after each 700 takes a fifth of the
# time (112 -> 90 s of processor for the tests of the step and the audit).
gc.set_threshold(100_000, 50, 100)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
    # Hundreds of processes would each compile what they import (2 s): beside the other cache.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(CACHES / "pyc")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
jax.config.update("jax_num_cpu_devices", 8)
# Each program is compiled once per machine, by whichever test, worker or leg needs it first.
setup_compilation_cache(os.environ.setdefault("JAXDIST_CACHE", str(CACHES / "xla")))

from jaxdist.core import step_plan  # noqa: E402

step_plan.UNROLL_UP_TO = 0  # scanned layers: what a large model has, and quick to compile

# Fixtures of more than one file; after the devices, since this imports what uses them.
import object_servers  # noqa: E402
from damaged import pristine, run  # noqa: E402, F401


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Real data: tinyshakespeare.txt and CIFAR-10 in both forms."""
    named = os.environ.get("JAXDIST_TEST_DATA")
    path = Path(named) if named else Path(__file__).parent.parent.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no real data: set JAXDIST_TEST_DATA to a folder with tinyshakespeare.txt")
    return path


@pytest.fixture(scope="module")
def server():
    """The address of an S3 server with an empty bucket, which the environment names."""
    with pytest.MonkeyPatch.context() as patch, object_servers.s3(patch) as address:
        yield address


@pytest.fixture
def propagating(monkeypatch):
    """The logger `jaxdist` hands its records on, from before the test begins.

    A command that ran earlier in this process may have ended that; and pytest joins a logger that
    does not propagate when a test begins, which would then hear each record twice.
    """
    monkeypatch.setattr(logging.getLogger("jaxdist"), "propagate", True)


LONGEST = [
    *("mesh_matrix", "notebooks", "train_debug"),
    *("launch_elastic_train", "launch_faults", "kubernetes_pods"),
]
"""Files of few slow tests. Those that count on the time of processes come second: `.ci/run` builds
and installs beside the first."""


def pytest_collection_modifyitems(items):
    """With `--no-loadscope-reorder`: the longest files first, then those with the most tests.

    Workers take whole files (`--dist loadfile`). One of a single test that takes two minutes must
    not be the last, when the other workers have nothing left to do.
    """
    name = lambda item: item.path.stem.removeprefix("test_")
    tests = Counter(map(name, items))
    ranks = {each: place for place, each in enumerate(LONGEST)}
    items.sort(key=lambda item: (ranks.get(name(item), len(ranks)), -tests[name(item)]))


HANDLERS = {
    number: signal.getsignal(number)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
}


@pytest.fixture(autouse=True)
def signals_are_the_tests_own():
    """No command that ran earlier in this process still hears a signal.

    Training in this process for a module's tests leaves its handlers, and a thread that ends the
    process at the second Ctrl-C it has heard.
    """
    signal.set_wakeup_fd(-1)
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


STRICT = {
    f"test_{name}"
    for name in (
        "block_sums", "cnn", "collectives", "context", "context_cudnn", "losses", "model_families",
        "models", "optim", "parity", "pipeline", "precision", "sharding", "split_backward", "state",
        "step",
    )
}  # fmt: skip
"""Tests of the core, where each change of dtype must be written down."""


@pytest.fixture(scope="module", autouse=True)
def strict_promotion(request):
    """No implicit promotion of dtypes in the core.

    Elsewhere whole models are differentiated in half precision, which flax's norms and jax's own
    attention refuse without promotion.
    """
    with jax.numpy_dtype_promotion("strict" if request.module.__name__ in STRICT else "standard"):
        yield


@pytest.fixture
def users_promotion():
    """Promotion as it is outside of tests, for half precision with jax's own attention."""
    with jax.numpy_dtype_promotion("standard"):
        yield
