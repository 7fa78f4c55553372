"""Train deterministically and save now and then, in processes that tests kill.

   python tests/checkpoint_worker.py SETTINGS           one run; SETTINGS is JSON like `DEFAULTS`
   python tests/checkpoint_worker.py SETTINGS STARTS    one run after another, each in a fork

STARTS is a JSON list of [crash point or "", changed settings]. The file `out` receives one JSON
object per event and line. Forks share the import of jax, which takes longer than such a run.
"""

import json
import os
import signal
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401, imported before the forks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import CheckpointConfig, Checkpointer, manifest
from jaxdist.checkpoint.checksum import checksums
from jaxdist.checkpoint.crash_points import VARIABLE
from jaxdist.core.mesh import MeshSpec
from jaxdist.runtime.storage import locate

DEFAULTS = {
    "directory": "",  # {process} is replaced by the process index
    "out": "",
    "devices": 2,
    "mesh": "fsdp=2",
    "processes": 1,
    "process": 0,
    "port": 0,
    "steps": 30,
    "every": 3,
    "width": 512,
    "pause_s": 0.02,
    "broken": [],  # the directory is missing during the saves of these steps
    "broken_on": 0,  # only on this process
    "config": {},
    "preflight": True,
}


def start_jax(settings):
    jax.config.update("jax_num_cpu_devices", settings["devices"])
    if cache := os.environ.get("JAXDIST_CACHE"):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if settings["processes"] > 1:
        address = f"127.0.0.1:{settings['port']}"
        jax.distributed.initialize(
            address,
            settings["processes"],
            settings["process"],
            coordinator_bind_address=address,
            cluster_detection_method="deactivate",
            initialization_timeout=60,
            heartbeat_timeout_seconds=20,
            shutdown_timeout_seconds=10,
        )


def make_run(settings):
    mesh = MeshSpec.parse(settings["mesh"]).build()
    split, replicated = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P())
    shape = (4, 64, settings["width"])
    rest = {"step": replicated, "key": replicated}
    placement = {"params": {"w": split}, "opt_state": {"mu": split}, "rest": rest}

    def fresh():
        key = jax.random.key(0)
        return {
            "params": {"w": jax.random.normal(key, shape)},
            "opt_state": {"mu": jnp.zeros(shape)},
            "rest": {"step": jnp.int32(0), "key": key},
        }

    # Element by element, so that the bits do not depend on a mesh's order of summation.
    def update(state):
        key, draw = jax.random.split(state["rest"]["key"])
        gradient = jax.random.normal(draw, shape) + 0.1 * state["params"]["w"]
        mu = 0.9 * state["opt_state"]["mu"] + gradient
        w = state["params"]["w"] - 0.01 * mu
        rest = {"step": state["rest"]["step"] + 1, "key": key}
        return {"params": {"w": w}, "opt_state": {"mu": mu}, "rest": rest}, w[0, 0, :2]

    state = jax.jit(fresh, out_shardings=placement)()
    step = jax.jit(update, donate_argnums=0, out_shardings=(placement, replicated))
    return state, placement, step


def work(settings):
    start_jax(settings)
    out = os.open(settings["out"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(**event):
        if settings["process"] == 0:
            os.write(out, f"{json.dumps({**event, 'time': time.monotonic()})}\n".encode())

    say(opening=True)
    directory = settings["directory"].format(process=settings["process"])
    checkpoints = Checkpointer(
        directory,
        CheckpointConfig(save_interval_steps=settings["every"], **settings["config"]),
        log=lambda line: say(log=line),
    )
    in_background = settings["config"].get("async_save", True)
    state, placement, update = make_run(settings)
    if settings["preflight"]:  # otherwise a kill during an upload would hit it
        checkpoints.preflight(state)
    step = checkpoints.choose()
    if step is not None:
        shape_of = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        target = jax.tree.map(shape_of, state, placement)
        say(restoring=step)
        state, meta, step = checkpoints.restore(target, step=step)
        assert meta == {"next": step}, meta
    start = step or 0
    say(start=start)
    for step in range(start + 1, settings["steps"] + 1):
        state, sample = update(state)
        say(step=step, loss=[float(x).hex() for x in np.asarray(sample)])
        time.sleep(settings["pause_s"])
        broken = settings["broken"] if settings["process"] == settings["broken_on"] else []
        if step in broken:  # the file system is unavailable during this save and then returns
            checkpoints.wait()
            os.rename(directory, directory + "-gone")
        if due := checkpoints.due(step):
            in_background or say(saving=step)  # the call returns after everything is written
            checkpoints.save(step, state, {"next": step}, due=due)
            in_background and say(saving=step)  # the call has waited for the previous save
        if step in broken:
            checkpoints.wait()
            os.rename(directory + "-gone", directory)
    committed = checkpoints.wait()
    checksum_values = checksums([state["params"]["w"], state["opt_state"]["mu"]])
    events = [e["event"] for e in checkpoints.pop_events()]
    say(finished=True, committed=committed, checksums=checksum_values, events=events)
    checkpoints.close()
    if settings["processes"] > 1:
        jax.distributed.shutdown()


def committed_steps(directory):
    intact = {}
    for step in manifest.steps_in(directory):
        files = json.loads((directory / step / manifest.FILE_NAME).read())["files"]
        intact[step] = not manifest.content_problems(directory / step, files, files)
    return intact


def flip_bit_of_newest(path):
    directory = locate(path)
    newest = directory / manifest.steps_in(directory)[-1]
    file = max((newest / name for name in manifest.files_of(newest)), key=lambda f: f.size())
    data = bytearray(file.read())
    data[len(data) // 2] ^= 1
    file.write(bytes(data))


def run_in_forks(settings, starts):
    for point, changes in starts:
        changed = {**settings, **changes}
        if point == "during_mark":
            in_fork(flip_bit_of_newest, changed["directory"])
        status = in_fork(work_until, point, changed)
        in_fork(record_end, changed, point, status)


def in_fork(function, *arguments):
    """Call a function in a child and return its wait status.

    Inspections are children too, because connections to an object store do not survive a fork.
    """
    if not (child := os.fork()):
        function(*arguments)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def work_until(point, settings):
    os.environ[VARIABLE] = point
    work(settings)


def record_end(settings, point, status):
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    left = committed_steps(locate(settings["directory"]))
    record = {"point": point, "killed": killed, "status": status, "left": left}
    with open(settings["out"], "a") as out:
        out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    chosen = DEFAULTS | json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        run_in_forks(chosen, json.loads(sys.argv[2]))
    else:
        work(chosen)
    sys.stdout.flush()
    os._exit(0)
