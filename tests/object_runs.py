"""Checks of runs and operations for any object store of `object_servers`."""

import signal
from pathlib import Path

import pytest
from commands import Fork, run_here
from object_servers import SECRET
from refusals import missing

from jaxdist.checkpoint import manifest
from jaxdist.runtime.storage import Location, Locked, locate


def upload(folder: Path, url: str) -> Location:
    for file in folder.rglob("*"):
        if file.is_file():
            (locate(url) / file.relative_to(folder)).write(file.read_bytes())
    return locate(url)


def history(folder) -> list:
    answers = [folder.entries(), folder.files(), folder.exists(), (folder / "a").version()]
    (folder / "b" / "c").make_directory()
    for name in ("b/c/2", "b/1", "a", "ab"):
        (folder / name).write(name * 3)
    (folder / "a").write(b"new")
    answers += [folder.entries(), folder.files(), (folder / "b").entries(), folder.sizes()]
    of_tags = [(folder / name).tags() for name in ("b", "a", "none")]
    answers += [{name: size for name, (size, _) in tags.items()} for tags in of_tags]
    answers += [(folder / name).exists() for name in ("a", "b", "b/c", "c", "b/c/2/x")]
    answers += [(folder / name).is_directory() for name in ("a", "b", "c")]
    answers += [(folder / "ab").size(), (folder / "ab").read(), (folder / "b" / "1").part(1, 4)]
    answers += [b"".join((folder / "ab").stream()), (folder / "a").text(), (folder / "a").name]
    answers += [(folder / "new").create(), (folder / "new").create(), (folder / "new").read()]
    for name in ("lines", "lines"):  # a first start, and a resumed one
        appender = (folder / name).appender()
        answers.append(appender.cut_torn_tail())
        appender.append(b"one\n")
        appender.append(b"two\n")
        appender.close()
        appender.close()
    answers += [(folder / "lines").read(), (folder / "lines").size(), (folder / "lines").exists()]
    answers += [folder.entries(), folder.files(), folder.sizes()["lines"]]
    (folder / "a").delete()
    (folder / "a").delete()
    (folder / "b").delete_tree()
    (folder / "b").delete_tree()
    answers.append(folder.files())
    (folder / "lines").delete_tree()
    with pytest.raises(FileNotFoundError):
        (folder / "lines").read()
    with pytest.raises(FileNotFoundError):
        (folder / "lines").size()
    return [*answers, folder.files()]


def take_a_lock_twice(folder) -> None:
    """Take a lock twice at once: the second fails, also after the holder's next heartbeat."""
    one, two = (folder / ".lock").lock(), (folder / ".lock").lock()
    assert not one.is_exclusive and one.read() == two.read() == b""
    one.write(b"one")
    with pytest.raises(Locked) as taken:
        two.write(b"two")
    assert taken.value.holder == b"one" and (folder / ".lock").read() == b"one"
    one.write(b"still one")  # its next heartbeat
    assert two.read() == b"still one"
    two.write(b"two")  # takes over a lock whose content it has read
    with pytest.raises(Locked):
        one.write(b"back again")


RUN = """
import os, sys
import jaxdist
from jaxdist.runtime import simulate

def crash(record):
    if record["kind"] == "train" and record["step"] == 3:
        os.environ["JAXDIST_CRASH_POINT"] = "during_upload"

SETTINGS = {
    "model": {"d_model": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 64},
    "train": {"seq_len": 32, "global_batch_size": 8},
    "mesh": "dp=4,fsdp=2",
    "eval": {"interval_steps": 0, "final_max_batches": 2},
    "optim.warmup_steps": 2,
    "checkpoint": {"save_interval_steps": 2, "max_to_keep": 1},
}

def train(path, steps=4, **program):
    return jaxdist.train(SETTINGS, steps=steps, run_dir=path, progress=False, **program)

if __name__ == "__main__":
    jaxdist.train({**SETTINGS, "simulate": 8}, steps=4, run_dir=sys.argv[1], progress=False,
                  callbacks=crash)
"""


def kill_and_resume(url: str, tmp_path) -> None:
    """Kill a run while it uploads a checkpoint, and check that it resumes bit-identically."""
    program = {"__name__": "in this process"}
    exec(RUN, program)
    killed = Fork("-c", RUN, url)
    _, errors = killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL, errors[-3000:]
    checkpoints = locate(url) / "checkpoints"
    complete = manifest.steps_in(checkpoints)
    uploaded = {name for name in checkpoints.entries() if name.isdecimal()}
    assert complete and {str(step) for step in complete} < uploaded, "no upload was cut short"
    assert all(manifest.damage(checkpoints / step) == "" for step in complete)

    resumed, local = program["train"](url), program["train"](tmp_path / "local")
    assert resumed.exit_reason == local.exit_reason == "finished"
    bits = [[float(loss).hex() for loss in run.losses] for run in (resumed, local)]
    assert bits[0] == bits[1] and len(bits[0]) == 4
    assert '"event": "restore"' in (locate(url) / "metrics.jsonl").text()
    assert manifest.steps_in(checkpoints) == [4]

    compared = run_here("tools.compare.__main__", url, tmp_path / "local", "--rerun=false")
    assert compared == 0

    stored, written = checkpoints / 4, locate(tmp_path / "local" / "checkpoints" / "4")
    checksums = [(path / "meta" / "metadata").json()["arrays"] for path in (stored, written)]
    assert checksums[0] == checksums[1]  # a checksum for each array
    (chunk,) = [name for name in stored.files() if name.endswith("params/embed.table/0.0")]
    data = bytearray((stored / chunk).read())
    data[7] ^= 1
    (stored / chunk).write(data)
    assert missing(manifest.damage(stored), chunk) == []
    data[7] ^= 1
    (stored / chunk).write(data)
    for name in locate(url).files():
        assert SECRET.encode() not in (locate(url) / name).read(), name
    assert [n for n in locate(url).files() if n.startswith("tensorboard/")]
    assert (locate(url) / "logs" / "process-0.log").size() > 0
