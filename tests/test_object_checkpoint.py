"""Checkpoints in object stores: what blocks training, and concurrent requests."""

import threading
import time

import jax.numpy as jnp
import numpy as np
import object_servers
import pytest
from refusals import missing

from jaxdist.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    lock,
    manifest,
    object_io,
    save,
)
from jaxdist.checkpoint.object_io import ObjectWriter, open_array
from jaxdist.runtime.storage import locate, objects


def test_nothing_is_uploaded_before_all_is_copied(server, monkeypatch):
    happened = []
    chunks_of = object_io._chunks_of
    monkeypatch.setattr(
        object_io, "_chunks_of", lambda *args: happened.append("copy") or chunks_of(*args)
    )
    upload = ObjectWriter._upload
    monkeypatch.setattr(
        ObjectWriter, "_upload", lambda *args: happened.append("upload") or upload(*args)
    )
    writer = ObjectWriter()
    arrays = {f"w{i}": jnp.full((64, 256), i, jnp.float32) for i in range(12)}
    writer.start(locate("s3://bucket/copied"), {"state": arrays})
    writer.wait()
    writer.close()
    assert happened == ["copy"] * 12 + ["upload"] * 24


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float32"])
def test_chunks_keep_the_bits_of_the_array(server, monkeypatch, dtype):
    """The chunks split both dims, so that they are not contiguous; one array has no dims."""
    monkeypatch.setattr(object_io, "CHUNK_BYTES", 16)
    folder = locate(f"s3://bucket/bits-{dtype}")
    arrays = {"w": jnp.arange(3 * 64).reshape(3, 64).astype(dtype), "n": jnp.asarray(7, dtype)}
    writer = ObjectWriter()
    writer.start(folder, {"state": arrays})
    writer.wait()
    writer.close()
    for name, array in arrays.items():
        restored = open_array(folder, "state", [name]).read()
        assert restored.dtype == array.dtype
        np.testing.assert_array_equal(restored, np.asarray(array))
    assert all(size <= 16 for name, size in folder.sizes().items() if ".zarray" not in name)


def test_a_save_does_not_overwrite_pending_uploads_of_a_failed_one(server, monkeypatch):
    """Memory of copies is reused, except for uploads that still run."""
    begun, goes_on, read = threading.Event(), threading.Event(), []
    store = type(locate("s3://bucket/a")).write

    def write(self, data, **how):
        if "/first/" not in str(self):
            return store(self, data, **how)
        if str(self).endswith("/a/0"):
            begun.wait(20)
            raise OSError(5, "Input/output error")
        if str(self).endswith("/b/0"):
            begun.set()
            goes_on.wait(20)
        read.append(bytes(data))

    monkeypatch.setattr(type(locate("s3://bucket/a")), "write", write)
    writer = ObjectWriter()
    ones, twos = ({name: jnp.full(8, x, jnp.float32) for name in "ab"} for x in (1, 2))
    writer.start(locate("s3://bucket/first"), {"state": ones})
    with pytest.raises(OSError, match="Input/output"):
        writer.wait()
    writer.start(locate("s3://bucket/second"), {"state": twos})
    goes_on.set()
    writer.wait()
    writer.close()
    assert np.asarray(ones["b"]).tobytes() in read and np.asarray(twos["b"]).tobytes() not in read


def test_a_multipart_upload_equals_a_single_request(server, monkeypatch):
    content = bytes(range(256)) * (24 << 10)  # 6 MiB
    folder = locate("s3://bucket/parts")
    (folder / "one").write(memoryview(content))
    monkeypatch.setitem(objects._ONE_REQUEST_BYTES, "s3", 1 << 20)
    (folder / "parts").write(memoryview(content))
    assert (folder / "one").read() == (folder / "parts").read() == content


def test_files_are_verified_concurrently(server, monkeypatch):
    """Eight requests wait for each other: if they were sequential, none would be answered."""
    names = [f"{i}" for i in range(8)]
    folder = locate("s3://bucket/verified")
    for name in names:
        (folder / name).write(name)
    files = {name: [1, manifest.fingerprint(folder / name)[1]] for name in names}
    files["3"][1] ^= 1
    together = threading.Barrier(8, timeout=30)

    def answer(request, ask):
        if request.start[0] == "HEAD":
            together.wait()
        return ask(request)

    with object_servers.passing_on(server, answer) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = objects._make_store("s3", "bucket", max_retries=0)
        monkeypatch.setattr(objects, "_store", lambda *args: store)
        (problem,) = manifest.content_problems(folder, files, names)
    assert problem.startswith("3 ")


def test_a_store_that_hangs_after_a_commit_does_not_block_the_run(server, monkeypatch, caplog):
    """Checkpoints that retention would delete stay; the next run deletes them."""
    hangs, over = threading.Event(), threading.Event()

    def answer(request, ask):
        if hangs.is_set():
            over.wait(300)
        return ask(request)

    def log(line):
        if "2 saved" in line:
            hangs.set()

    monkeypatch.setattr(save, "RETENTION_S", 0.5)
    monkeypatch.setattr(lock, "RELEASE_S", 0.5)
    with object_servers.passing_on(server, answer) as way:
        monkeypatch.setenv("AWS_ENDPOINT_URL", way)
        object_servers.forget_clients()
        config = CheckpointConfig(max_to_keep=1)
        checkpointer = Checkpointer(locate("s3://bucket/hangs"), config, log=log)
        begun = time.monotonic()
        for step in (1, 2):
            checkpointer.save(step, {"w": jnp.zeros(4)}, {}, force=True)
        assert hangs.is_set() and checkpointer.wait()
        checkpointer.close()
        assert time.monotonic() - begun < 200  # of the 300 s that it hangs
        over.set()
    object_servers.forget_clients()
    assert missing(caplog.text, "deleting old checkpoints of s3://bucket/hangs: not finished") == []
