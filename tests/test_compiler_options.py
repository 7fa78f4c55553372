"""GPU compiler options: which are set, which the compiler rejects, and user flags first."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import model_of

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.core.step import TrainConfig, compiler_options
from jaxdist.core.step.compiler_options import (
    MEMORY_LIMIT,
    NO_ZEROS,
    OVERLAPS,
    choose_options,
    memory_limit,
)
from jaxdist.core.step_plan import Device, StepSettings, plan_step
from jaxdist.hardware import GIB, GPUS
from jaxdist.tools.doctor import variables

H100 = GPUS["h100"].memory_bytes


@pytest.mark.parametrize("fraction", [0.75, 0.92])
@pytest.mark.parametrize("arguments", [0, 11 * GIB, 50 * GIB])
def test_memory_limit_excludes_scratch_memory(fraction, arguments):
    """XLA takes this percentage of the memory that 0.8 leaves next to the arguments."""
    option = memory_limit(H100, fraction, arguments)
    room = 0.8 * H100 - arguments
    schedule = arguments + room * option.value / 100
    usable = (fraction - 0.02) * H100
    assert usable - room / 100 < schedule <= usable


def test_no_limit_is_set_if_arguments_leave_no_memory():
    assert memory_limit(H100, 0.92, int(0.8 * H100) + 1) is None
    assert memory_limit(H100, 0.5, int(0.5 * H100)) is None
    assert memory_limit(H100, 0.92, int(0.8 * H100) - 1).value == 10_000


def layout_of(platform, kind, stages):
    device = SimpleNamespace(platform=platform, device_kind=kind)
    mesh = SimpleNamespace(devices=np.array([device]), local_devices=[device])
    return SimpleNamespace(mesh=mesh, size=lambda axis: stages)


def options_of(platform, kind, make_state, stages=1):
    spec = MeshSpec.parse("1")
    plain = Layout(mesh=spec.build(jax.devices()[:1]))
    settings = StepSettings(TrainConfig())
    plan = plan_step(model_of("learned"), plain, Device(platform, kind=kind), False, settings)
    return choose_options(plan, layout_of(platform, kind, stages), make_state)


def state_of(gib):
    replicated = SimpleNamespace(shard_shape=lambda shape: shape)
    leaf = SimpleNamespace(shape=(gib * GIB // 4,), dtype=jnp.dtype("float32"), sharding=replicated)
    return lambda: [leaf]


@pytest.fixture
def refuses(monkeypatch):
    """Make the compiler reject these options, name -> its message."""
    words = {}
    monkeypatch.setattr(compiler_options, "_refused", lambda device, options: words)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    return words


def names_of(options):
    return [option.name for option in options]


def test_gpu_limit_depends_on_its_memory_and_the_state(refuses):
    zeros, limit = options_of("gpu", "NVIDIA H100 80GB HBM3", state_of(11))
    assert limit == memory_limit(H100, 0.92, 11 * GIB)
    assert limit.name == MEMORY_LIMIT and limit.value == 115
    assert (zeros.name, zeros.value) == (NO_ZEROS, True)
    assert zeros.describe().startswith(f"compiler option {NO_ZEROS}=true: ")


def test_options_that_the_compiler_rejects_are_dropped_with_one_log_line(refuses, caplog):
    refuses[MEMORY_LIMIT] = "No such compile option"
    assert names_of(options_of("gpu", "h100", state_of(11))) == [NO_ZEROS]
    (record,) = caplog.records
    assert MEMORY_LIMIT in record.args


@pytest.mark.parametrize(
    "user_flag, kept", [(f"--{MEMORY_LIMIT}=80", NO_ZEROS), (f"--{NO_ZEROS}=false", MEMORY_LIMIT)]
)
def test_xla_flags_take_precedence(refuses, monkeypatch, user_flag, kept):
    monkeypatch.setenv("XLA_FLAGS", f"--a=1 {user_flag}")
    assert names_of(options_of("gpu", "h100", state_of(11))) == [kept]


@pytest.mark.parametrize(
    "platform, kind, names", [("cpu", "cpu", []), ("gpu", "NVIDIA Unheard-Of", [NO_ZEROS])]
)
def test_cpus_get_no_options_and_gpus_of_unknown_memory_no_limit(refuses, platform, kind, names):
    assert names_of(options_of(platform, kind, state_of(1))) == names


def test_options_are_checked_with_the_compiler_first():
    """XLA:CPU accepts the names of the GPU options too."""
    options = (("xla_gpu_no_such_option", 1), (MEMORY_LIMIT, 115), (NO_ZEROS, True))
    assert list(compiler_options._refused(jax.devices()[0], options)) == ["xla_gpu_no_such_option"]


def test_set_options_pass_the_xla_flags_check():
    flags = f"--{MEMORY_LIMIT}=115 --{NO_ZEROS}=true"
    findings = variables.check_variables({"XLA_FLAGS": flags}, num_gpus=8)
    assert {finding.severity for finding in findings} == {"ok"}


def test_exchanges_between_stages_overlap_on_gpus(refuses):
    assert OVERLAPS in names_of(options_of("gpu", "h100", state_of(1), stages=4))
    assert OVERLAPS not in names_of(options_of("gpu", "h100", state_of(1)))
    assert options_of("cpu", "cpu", state_of(1), stages=4) == ()
