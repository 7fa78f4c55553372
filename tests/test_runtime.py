"""Exit codes and messages of commands, and a single process that joins without a launcher."""

import importlib
import inspect
import os
import signal
import subprocess
import sys
import textwrap
import time
import types
import warnings

import pytest
from refusals import missing, refused

from jaxdist import runtime
from jaxdist.runtime import backend
from jaxdist.runtime.cluster_environment import RuntimeConfig
from jaxdist.runtime.distributed import DeviceRow
from jaxdist.runtime.entry_point import advice_for


def run(body: str, **environ: str) -> subprocess.CompletedProcess:
    code = "import os, signal, sys, time\nfrom jaxdist import runtime\n\ndef main():\n"
    code += textwrap.indent(textwrap.dedent(body), "    ") + "\n\nruntime.run_command(main)\n"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environ},
    )


REFUSE = "from jaxdist.settings import ConfigError\nraise ConfigError(['first', 'second'])"


@pytest.mark.parametrize(
    ("body", "code", "errors"),
    [
        ("pass", 0, []),
        ("return runtime.EXIT_PREEMPTED", 75, []),
        ("sys.exit(7)", 7, []),
        ("raise KeyboardInterrupt", 130, ["interrupted"]),
        (REFUSE, 2, ["first", "second"]),
    ],
)
def test_exit_codes_and_lines(body, code, errors):
    done = run(body)
    assert done.returncode == code and done.stderr.split() == errors


def test_failure_prints_one_block_with_cause_location_and_advice():
    done = run("raise OSError(28, 'No space left on device')")
    names = ("failed:", "where:", "to do:")
    block = dict(x.split(":", 1) for x in done.stderr.splitlines() if x.startswith(names))
    assert block["failed"].split()[:3] == ["OSError:", "[Errno", "28]"]
    assert "process 0 of 1" in block["where"] and "--run-dir" in block["to do"]
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1


def test_full_disk_with_a_path_is_one_line():
    done = run("raise OSError(28, 'No space left on device', '/full/file')")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("/full/file: No space left") and "free" in line


@pytest.mark.parametrize("body", ["print('x' * 100_000)", "print('x')", "print('x'); sys.exit()"])
def test_full_standard_output_is_one_line(body):
    full = f"os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n{body}"
    done = run(full, PYTHONUNBUFFERED="")  # lines are written when the command ends
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("standard output: No space left on device; ")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("raise ValueError", 1),
        (REFUSE, 2),
    ],
)
def test_full_standard_error_keeps_the_exit_code(body, code):
    assert run(f"os.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n{body}").returncode == code


def test_full_disk_in_an_output_names_its_path(tmp_path):
    done = run(f"""
        from pathlib import Path
        from jaxdist.runtime.new_output import new_output
        with new_output(Path({str(tmp_path / "out")!r})) as partial:
            raise OSError(28, "No space left on device")
    """)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'out'}: No space left on device; ")


def test_failure_is_recorded_for_the_launcher(tmp_path):
    import json

    path = tmp_path / "error.json"
    run(
        "raise ValueError('boom')",
        JAXDIST_ERROR_FILE=str(path),
        JAXDIST_PROCESS_ID="3",
        JAXDIST_NUM_PROCESSES="4",
    )
    record = json.loads(path.read_text())
    assert record["process"] == 3 and record["num_processes"] == 4
    assert record["exit_code"] == 1
    assert "ValueError: boom" in record["error"]


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate", "out of memory"),
        ("Gloo AllGather failed: Connection reset by peer", "another process died"),
        ("OSError: [Errno 28] No space left on device", "disk of the path in the message is full"),
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: [Errno 28] No space left on device", "disk of"),
        ("CheckpointError: /r/checkpoints is gone: is its file system still mounted?", "--run-dir"),
        ("ModuleNotFoundError: No module named 'torch'", "library is not installed"),
        ("ValueError: boom", "resumes from the newest valid checkpoint"),
    ],
)
def test_advice_matches_the_error(message, advice):
    assert advice in advice_for(message)


def test_simulate_creates_cpu_devices_and_rejects_a_running_backend():
    done = run(
        """
        runtime.simulate(3)
        import jax
        print(len(jax.devices()), jax.devices()[0].platform)
        runtime.simulate(3)
        runtime.simulate(5)
        """
    )
    assert done.stdout.split() == ["3", "cpu"]
    assert done.returncode == 2
    assert missing(done.stderr, "--simulate 5", "3 cpu") == []


def test_simulate_requires_at_least_one_device():
    with refused("--simulate 0"):
        runtime.simulate(0)


def test_single_process_joins_without_connecting():
    job = runtime.join(environ={})
    assert (job.process_id, job.num_processes) == (0, 1)
    assert (job.num_devices, job.platform, job.source) == (8, "cpu", "alone")
    assert len(job.host_of) == 1
    assert job.table().splitlines()[1].split()[2:] == ["0-7", "cpu", "-"]


def test_table_has_a_line_per_gpu():
    rows = tuple(
        DeviceRow(process=p, host=f"n{p}", device=d, kind="NVIDIA H200", uuid=f"GPU-{p}{d}")
        for p in range(2)
        for d in range(2)
    )
    job = runtime.JoinedJob(
        process_id=1,
        num_processes=2,
        host="n1",
        local_devices=(),
        devices=rows,
        host_runs=(("n0", 1), ("n1", 1)),
        platform="gpu",
        source="SLURM job 7",
        attempt=0,
    )
    lines = job.table().splitlines()
    assert len(lines) == 5
    assert lines[-1].split() == ["1", "n1", "1", "NVIDIA", "H200", "GPU-11"]
    assert job.host_of == {0: "n0", 1: "n1"}


def test_console_is_for_process_0_and_c_output_goes_to_the_file(tmp_path):
    body = """
    import ctypes
    log = runtime.setup_logging(int(os.environ["INDEX"]), os.environ["LOG"])
    log.info("step 1")
    log.warning("careful")
    ctypes.CDLL(None).puts(b"[Gloo] chatter")
    ctypes.CDLL(None).fflush(None)
    print("printed")
    """
    first = run(body, INDEX="0", LOG=str(tmp_path / "logs/0.log"))
    second = run(body, INDEX="1", LOG=str(tmp_path / "logs/1.log"))
    assert first.stdout.splitlines() == ["step 1", "warning: careful", "printed"]
    assert second.stdout.splitlines() == ["printed"]
    for i in range(2):
        text = (tmp_path / f"logs/{i}.log").read_text()
        assert f"p{i} INFO step 1" in text and "[Gloo] chatter" in text


def test_compile_cache_is_separate_for_each_machine_type(tmp_path):
    body = """
    runtime.simulate(1)
    folder = runtime.setup_compilation_cache()
    import jax
    jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(4)).block_until_ready()
    print(folder, len(list(folder.iterdir())) if folder else 0)
    """
    environ = {"JAXDIST_CACHE": str(tmp_path / "cache"), "JAX_COMPILATION_CACHE_DIR": ""}
    folder, entries = run(body, **environ).stdout.split()
    assert folder.startswith(str(tmp_path / "cache"))
    assert int(entries) > 0
    assert run(body, JAXDIST_CACHE="off", JAX_COMPILATION_CACHE_DIR="").stdout.split()[0] == "None"


def test_compile_cache_of_another_user_is_not_used(tmp_path, caplog, propagating, monkeypatch):
    import jax

    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        assert runtime.setup_compilation_cache(tmp_path / "mine") is not None
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        assert runtime.setup_compilation_cache(tmp_path / "open") is None
        assert missing(caplog.messages[-1], tmp_path / "open", "every user") == []
        (tmp_path / "open").chmod(0o1777)  # like /tmp: other users cannot replace a folder in it
        assert runtime.setup_compilation_cache(tmp_path / "open") is not None
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        monkeypatch.setattr(os, "access", lambda *_: True)
        monkeypatch.setattr(backend, "_TRUSTED", ())
        assert runtime.setup_compilation_cache(tmp_path / "mine") is None
        assert missing(caplog.messages[-1], tmp_path / "mine", "another user") == []
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_at_any_time_requests_a_stop_and_a_second_has_no_effect(number):
    done = run(
        f"""
        stop = runtime.Preemption()
        print(stop.preempted())
        os.kill(os.getpid(), {int(number)})
        print(stop.preempted())
        os.kill(os.getpid(), {int(number)})
        print(stop.preempted())
        return runtime.EXIT_PREEMPTED
        """
    )
    assert done.stdout.splitlines() == ["False", "True", "True"]
    assert done.returncode == 75


def test_first_ctrl_c_requests_a_save_and_second_ends_immediately():
    """During a compilation the main thread computes and therefore runs no Python signal handler."""
    body = """
    import hashlib, threading
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test may run in the background
    stop = runtime.Preemption()
    interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
    interrupt()
    print(stop.preempted(), flush=True)
    threading.Timer(0.2, interrupt).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000_000)
    """
    begun = time.monotonic()
    done = run(body)
    assert time.monotonic() - begun < 20  # the sum takes a minute
    assert (done.returncode, done.stdout) == (130, "True\n")
    assert done.stderr.count("saving after") == 1


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"coordinator_address": "n1:29400"}, "num_processes"),
        (
            {"coordinator_address": "n1:29400", "num_processes": 2, "process_id": 2},
            "process_id=2",
        ),
        (
            {"coordinator_address": "n1", "num_processes": 2, "process_id": 1},
            "'n1'",
        ),
    ],
)
def test_invalid_settings_are_reported(fields, text):
    assert any(text in line for line in RuntimeConfig(**fields).problems())


def test_repeated_cache_setup_does_not_stack_handlers(tmp_path, monkeypatch, propagating, caplog):
    """Other warnings reach the previous handler; an entry that cannot be removed ends nothing."""
    forwarded = []
    monkeypatch.setattr(
        warnings, "showwarning", lambda message, *args, **kw: forwarded.append(message)
    )
    for number in range(1100):
        warnings.showwarning = backend._DamageWatch(tmp_path / str(number))
    warnings.showwarning("another", UserWarning, "file.py", 1)
    assert forwarded == ["another"]
    (tmp_path / "1099" / "jit_f-1").mkdir(parents=True)  # unlink raises IsADirectoryError
    damaged = "Error reading persistent compilation cache entry for 'jit_f': no"
    warnings.showwarning(damaged, UserWarning, "file.py", 1)
    assert len(forwarded) == 1 and [record.args[1] for record in caplog.records] == ["jit_f"]


@pytest.mark.filterwarnings("default:Error reading persistent compilation cache entry")
@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[: len(b) // 2], lambda b: b"no" + b])
def test_damaged_compile_cache_entries_are_reported_and_replaced(
    tmp_path, monkeypatch, propagating, caplog, damage
):
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    names = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back at the end
    try:
        folder = runtime.setup_compilation_cache(tmp_path / "cache")
        compilation_cache.reset_cache()
        use = lambda: jax.jit(lambda x: x * 41 + 1)(jax.numpy.ones(3))  # compiled at each call
        use()
        [entry] = [
            e for e in folder.iterdir() if e.name.startswith("jit__lambda") and "-cache" in e.name
        ]
        intact = entry.read_bytes()
        entry.write_bytes(damage(intact))
        caplog.clear()
        assert use()[0] == 42
        assert [record.args[1] for record in caplog.records] == ["jit__lambda"]
        assert entry.read_bytes() != damage(intact)
        caplog.clear()
        use()
        assert not caplog.records
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_full_compile_cache_is_reported_once(tmp_path):
    """A limit of the size of files has the effect of a full disk: no entry is written."""
    done = run(
        f"""
        import resource
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        runtime.setup_logging()
        runtime.simulate(1)
        runtime.setup_compilation_cache({str(tmp_path / "cache")!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))
        import jax
        for factor in range(3):
            jax.jit(lambda x: x * factor + 1)(jax.numpy.ones(4)).block_until_ready()
        """
    )
    [line] = [line for line in done.stdout.splitlines() if "compile cache" in line]
    assert missing(line, tmp_path / "cache", "File too large", "JAXDIST_CACHE") == []
    assert done.returncode == 0 and "compilation cache" not in done.stderr


@pytest.mark.parametrize(
    ("platform", "process_id", "kept"), [("cpu", 1, 1), ("gpu", 1, 0), ("gpu", 0, 1)]
)
def test_every_process_caches_its_programs_on_cpus(monkeypatch, platform, process_id, kept):
    """On CPUs a program's cache key depends on the process; elsewhere process 0 writes for all."""
    compiler = importlib.import_module("jax._src.compiler")
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)  # restored afterwards
    backend._keep_programs_of_every_process()
    written = []
    monkeypatch.setattr(
        compiler.compilation_cache, "put_executable_and_time", lambda *args: written.append(args)
    )
    monkeypatch.setattr(compiler.distributed.global_state, "process_id", process_id)
    original = compiler._cache_write.by_process_0
    callbacks = [[]] * (len(inspect.signature(original).parameters) - 5)  # jax 0.10 has them
    client = types.SimpleNamespace(platform=platform)
    compiler._cache_write("key", 9.0, "jit_step", client, "program", *callbacks)
    assert len(written) == kept


@pytest.mark.parametrize(
    ("address", "valid"),
    [
        ("n0:29400", True),
        ("[fd00::10]:29400", True),
        ("fd00::10", False),
        ("fd00::10:29400", False),
        ("n0", False),
        ("n0:0", False),
    ],
)
def test_coordinator_is_a_host_and_a_port(address, valid):
    settings = RuntimeConfig(coordinator_address=address, num_processes=2, process_id=0)
    problems = settings.problems()
    assert not problems if valid else missing(problems[0], address, "host:port") == []
