"""Worker processes of the loader: same batches, no devices, no signals, no orphans."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grain
import numpy as np
import pytest
from data_cases import cache, open_case, sharding_on, write_sources, write_text  # noqa: F401

from jaxdist.config import read_run
from jaxdist.data import DataConfig, Loader, Position, open_datasets
from jaxdist.settings import ConfigError

ROWS = """
import os
import numpy as np
from jax._src import xla_bridge

def row(i):
    tokens = np.full(4, i)
    about = np.array([os.getpid(), len(xla_bridge._backends)])
    return {"tokens": tokens, "targets": tokens, "weights": np.ones(4), "about": about}

def rows(*, seq_len, seed):
    import grain
    return grain.MapDataset.range(100).map(row)
"""

KILLED = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxdist.core.mesh import MeshSpec
from jaxdist.data import DataConfig, Loader, open_datasets

if __name__ == "__main__":
    import multiprocessing, time
    jax.config.update("jax_platforms", "cpu")
    train, _ = open_datasets(DataConfig(sources=[sys.argv[1]]), seq_len=16)
    sharding = NamedSharding(MeshSpec.parse("dp=1").build(jax.devices()[:1]), PartitionSpec())
    loader = Loader(train, global_batch_size=8, seed=0, sharding=sharding, num_workers=1)
    next(loader)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def gone(pids) -> bool:
    until = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_workers_make_equal_batches_use_no_device_and_survive_signals(tmp_path, monkeypatch):
    (tmp_path / "worker_rows.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    config = DataConfig(sources=["worker_rows:rows"])
    train, _ = open_datasets(config, seq_len=4)
    settings = {"global_batch_size": 8, "seed": 1, "sharding": sharding_on("dp=2")}
    settings["start"] = Position(16, ((32, 40),))
    here = Loader(train, **settings)
    expected = [np.asarray(next(here)["tokens"]) for _ in range(12)]
    here.close()
    loader = Loader(train, **settings, num_workers=2)
    pids = set()
    for number, tokens in enumerate(expected):
        batch = next(loader)
        np.testing.assert_array_equal(batch["tokens"], tokens)
        about = np.asarray(batch["about"])
        assert (about[:, 1] == 0).all(), "a worker started jax's devices"
        pids |= set(about[:, 0].tolist())
        if number == 3:
            for pid in pids:
                os.kill(pid, signal.SIGINT)
                os.kill(pid, signal.SIGTERM)
    assert loader.state()["next_sample"] == 16 + 8 * 13
    assert len(pids) == 2 and os.getpid() not in pids
    loader.close()
    assert gone(pids)
    shared = grain.multiprocessing.SharedMemoryArray
    # By type: reading the class of another library's deprecated object causes a warning.
    assert not any(issubclass(type(instance), shared) for instance in gc.get_objects())
    sys.modules.pop("worker_rows", None)


def test_worker_maps_the_corpus_instead_of_receiving_it(tmp_path, monkeypatch):
    write_sources(tmp_path)
    monkeypatch.chdir(tmp_path)
    train = open_case("mixture")
    import cloudpickle

    sent = cloudpickle.dumps(train)
    assert len(sent) < 20_000
    rows = np.arange(0, train.num_rows, 7)
    for name, values in cloudpickle.loads(sent).rows(rows).items():
        np.testing.assert_array_equal(values, train.rows(rows)[name])


def test_worker_exits_if_its_training_process_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    text = write_text(tmp_path)
    process = subprocess.Popen(
        [sys.executable, str(script), str(text)],
        env=dict(os.environ, PYTHONPATH=str(Path(__file__).parent.parent)),
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1 and alive(pids[0])
        process.kill()
        assert gone(pids)
    finally:
        process.kill()
        process.communicate()


def test_negative_number_of_workers_is_rejected():
    with pytest.raises(ConfigError, match="num_workers=-1"):
        read_run(["--data.num_workers=-1"], command="train", summary="")
