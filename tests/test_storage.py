"""The storage of a run directory: what each operation guarantees, and that nothing goes past it."""

import os
import subprocess
import sys
import threading

import pytest

from jaxdist.runtime.storage import Location, Locked, locate
from jaxdist.runtime.storage import posix as room


@pytest.fixture
def folder(tmp_path) -> Location:
    return locate(tmp_path)


def test_a_location_is_a_path(folder, tmp_path):
    file = folder / "a" / 7 / "b.json"
    assert str(file) == os.fspath(file) == f"{tmp_path}/a/7/b.json"
    assert (file.name, file.parent) == ("b.json", folder / "a" / "7")
    assert locate(file) is file and locate(str(file)) == file


def test_files_are_listed_in_order_and_absent_ones_are_empty(folder):
    assert (folder / "none").entries() == (folder / "none").files() == []
    assert not (folder / "none").exists() and (folder / "none").version() == 0
    (folder / "b" / "c").make_directory()
    for name in ("b/c/2", "b/1", "a"):
        (folder / name).write(name)
    assert folder.entries() == ["a", "b"]
    assert folder.files() == ["a", "b/1", "b/c/2"]
    assert (folder / "b").is_directory() and not (folder / "a").is_directory()
    assert (folder / "b/c/2").size() == 5 and b"".join((folder / "a").stream()) == b"a"
    (folder / "a").delete()
    (folder / "a").delete()
    (folder / "b").delete_tree()
    (folder / "b").delete_tree()
    assert folder.entries() == []


KILLED_WHILE_WRITING = """
import itertools, os, sys
from jaxdist.runtime.storage import locate

for durable in (True, False):
    file = locate(sys.argv[1]) / str(durable)
    for moment in itertools.count():
        file.write("old")
        if not (child := os.fork()):
            events = itertools.count()
            sys.addaudithook(lambda *_: next(events) == moment and os._exit(9))
            file.write("new", durable=durable)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(file.text(), file.parent.entries().count(file.name), flush=True)
        if status == 0:
            break
"""


def test_killed_at_any_operation_a_write_is_done_or_not(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout.splitlines()
    assert set(seen) == {"old 1", "new 1"} and len(seen) >= 6
    assert len(locate(tmp_path).entries()) == 2  # what a kill left behind is not listed


def test_a_write_that_fails_leaves_the_old_content(folder, monkeypatch):
    file = folder / "a"
    file.write("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(room.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        file.write("new")
    assert file.text() == "old" and os.listdir(folder) == ["a"]


def test_of_many_that_create_a_file_one_succeeds(folder):
    made = []
    threads = [
        threading.Thread(target=lambda i=i: made.append((folder / "a").create(str(i))))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count(True) == 1 and (folder / "a").text() in map(str, range(8))


def test_a_version_grows_with_every_write(folder):
    file = folder / "a"
    versions = [file.version()]
    for i in range(3):
        file.write(str(i))
        os.utime(file, ns=(0, 10**18 + i))  # file systems with coarse clocks
        versions.append(file.version())
    assert versions == sorted(set(versions))


def test_an_appender_cuts_a_torn_line_and_keeps_what_is_refused(folder, monkeypatch):
    file = folder / "a.jsonl"
    file.write(b"one\ntw")
    appender = file.appender()
    assert appender.cut_torn_tail() == 2
    real = os.write
    monkeypatch.setattr(room.os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        appender.append(b"two\n")
    assert appender.pending == b"two\n"
    monkeypatch.setattr(room.os, "write", real)
    appender.append(b"three\n")
    appender.close()
    appender.close()
    assert file.text() == "one\ntwo\nthree\n" and appender.pending == b""


def test_a_lock_keeps_other_processes_out_and_names_its_holder(folder):
    code = (
        "import sys; from jaxdist.runtime.storage import locate; "
        "held = locate(sys.argv[1]).lock(); held.write(b'me'); print('held', flush=True); "
        "sys.stdin.read()"
    )
    file = folder / ".lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(Locked) as refused:
        file.lock()
    assert refused.value.holder == b"me"
    holder.kill()
    holder.communicate()
    held = file.lock()
    assert held.is_exclusive and held.read() == b"me"
    held.write(b"i")
    assert file.text() == "i"
    held.close()
