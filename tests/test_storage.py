"""The storage of a run directory: guarantees of each operation, and that no code bypasses it."""

import ast
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxdist.runtime import storage as room
from jaxdist.runtime.storage import Location, Locked, locate


@pytest.fixture
def folder(tmp_path) -> Location:
    return locate(tmp_path)


def test_a_location_is_a_path(folder, tmp_path):
    file = folder / "a" / 7 / "b.json"
    assert str(file) == os.fspath(file) == f"{tmp_path}/a/7/b.json"
    assert (file.name, file.parent) == ("b.json", folder / "a" / "7")
    assert locate(file) is file and locate(str(file)) == file


def test_files_are_listed_in_order_and_missing_folders_are_empty(folder):
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


def test_new_file_has_a_durable_name_and_is_not_executable(folder, monkeypatch):
    synced = []
    monkeypatch.setattr(room.os, "fsync", lambda file: synced.append(os.fstat(file).st_ino))
    monkeypatch.chdir(folder)
    (folder / "a").make_directory()
    for file in (folder / "a" / "b", locate("c")):
        assert file.create() and os.stat(file).st_mode & 0o111 == 0
        synced.clear()
        file.write("1")
        assert os.stat(os.path.dirname(file) or ".").st_ino in synced


def test_unavailable_storage_is_an_error_and_not_an_empty_directory(folder, monkeypatch):
    """A truncated listing would commit a checkpoint with missing files."""
    (folder / "b").make_directory()
    (folder / "b/1").write("1")

    def stale(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(room.os, "scandir", stale)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            folder.files()
    with monkeypatch.context() as patch:
        patch.setattr(room.os, "stat", stale)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            folder.is_directory()
    assert not (folder / "none").is_directory() and not (folder / "b/1/c").is_directory()


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


def test_write_is_atomic_if_killed_at_any_operation(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout.splitlines()
    assert set(seen) == {"old 1", "new 1"} and len(seen) >= 6
    assert len(locate(tmp_path).entries()) == 2  # files that a kill leaves behind are not listed


def test_failed_write_keeps_the_old_content(folder, monkeypatch):
    file = folder / "a"
    file.write("old")

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(room.os, "fsync", full)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as failure:
        file.write("new")
    assert failure.value.filename == str(file)
    assert file.text() == "old" and os.listdir(folder) == ["a"]


FORKED = """
import os, sys
from jaxdist.runtime.storage import locate
child = os.fork()
for _ in range(300):
    locate(sys.argv[1]).write("x", durable=False)
sys.exit(child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_processes_may_write_one_file_concurrently(tmp_path):
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path / "file")], check=True)


def test_only_one_of_many_concurrent_creators_succeeds(folder):
    made = []
    threads = [
        threading.Thread(target=lambda: made.append((folder / "a").create())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made.count(True) == 1 and (folder / "a").size() == 0


def test_version_increases_with_every_write(folder):
    file = folder / "a"
    versions = [file.version()]
    for i in range(3):
        file.write(str(i))
        os.utime(file, ns=(0, 10**18 + i))  # file systems with coarse clocks
        versions.append(file.version())
    assert versions == sorted(set(versions))


def test_appender_removes_a_torn_line_and_keeps_rejected_data(folder, monkeypatch):
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


def test_lock_excludes_other_processes_and_names_its_holder(folder):
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


PACKAGE = Path(__file__).parent.parent / "jaxdist"

# Modules that open other files, none of them in a run directory, and a description of these files.
OTHER_FILES = {
    "core/trials.py": "verdicts of trials next to the compilation cache, never a run directory",
    "checkpoint/moment_files.py": "moments on the user's local disk, outside of run directories",
    "runtime/storage": "the room itself",
    "settings/sources.py": "looks for the user's TOML files",
    "data": "data sources, tokenizers and the cache of encoded corpora",
    "runtime/hub.py": "lists the cache of the Hugging Face hub",
    "models/huggingface": "model directories of Hugging Face",
    "hardware": "descriptions of GPUs",
    "runtime/backend.py": "jax's compilation cache and /proc",
    "runtime/host_memory.py": "/proc and /dev/fd, for memory and open files of this process",
    "runtime/new_output.py": "outputs that the user named, outside of run directories",
    "runtime/coordination/failure_broadcast.py": "/proc, for the signals that are caught",
    "runtime/entry_point.py": "/dev/null, when nobody reads stdout any more",
    "runtime/start_times.py": "/proc, for when this process began",
    "runtime/distributed.py": "the package's own sources, equal in all processes",
    "run/monitoring/environment.py": "/proc/driver",
    "evaluate.py": "the user's folder of tasks",
    "tools/verify/exports.py": "temporary tokenizer files and adapters to compare with an export",
    "generate.py": "the user's file of prompts",
    "tools/compiler.py": "dumps of XLA, in a temporary folder",
    "tools/convert/consolidate.py": "makes the folder of weights that the user named",
    "tools/convert/add_tokens.py": "writes a model directory of Hugging Face",
    "tools/convert/to_hf.py": "writes a model directory of Hugging Face",
    "tools/convert/to_peft.py": "writes a directory of PEFT",
    "tools/doctor/host.py": "measures a file system: size, speed, damaged bytes",
    "tools/doctor/checks.py": "which parent of a run directory exists, to measure it",
    "tools/doctor/variables.py": "NCCL's libraries on the library path",
    "tools/launch/worker_group.py": "logs of workers, which the launcher opens on the local disk",
    "tools/launch/fork_server.py": "/dev/null, which workers read as their input",
    "tools/launch/kubernetes.py": "the config file that goes along with the job",
    "tools/launch/slurm.py": "the batch script that the user asked for",
}
METHODS = {"read_text", "write_text", "read_bytes", "write_bytes", "mkdir", "iterdir", "glob"}
METHODS |= {
    "rglob",
    "unlink",
    "rename",
    "rmdir",
    "touch",
    "stat",
    "is_file",
    "is_dir",
    "symlink_to",
}
FUNCTIONS = {"open", "replace", "rename", "listdir", "scandir", "remove", "unlink", "makedirs"}
FUNCTIONS |= {"mkdir", "stat", "fsync", "link", "truncate", "walk"}
SHUTIL = {"copyfile", "copy", "copytree", "rmtree", "move", "disk_usage"}


def file_system_calls(source: str) -> list[str]:
    """Return calls that access the file system without a `Location`."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, called = ast.unparse(node.func), node.func
        attribute = called.attr if isinstance(called, ast.Attribute) else ""
        module = ast.unparse(called.value) if isinstance(called, ast.Attribute) else ""
        if (
            name == "open"
            or (module == "os" and attribute in FUNCTIONS)
            or (module == "shutil" and attribute in SHUTIL)
            or (module not in ("os", "shutil") and attribute in METHODS)
        ):
            calls.append(f"line {node.lineno}: {name}")
    return calls


def test_run_directories_are_accessed_only_through_storage():
    past, unused = {}, set(OTHER_FILES)
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        calls = file_system_calls(path.read_text())
        room = next((r for r in OTHER_FILES if name == r or name.startswith(f"{r}/")), None)
        if calls and room is None:
            past[name] = calls
        if calls:
            unused.discard(room)
    assert past == {}, "use jaxdist.runtime.storage"
    assert unused == set(), "these open no file any more"


def test_calls_that_bypass_storage_are_detected():
    planted = "open(p); p.read_text(); os.replace(a, b); shutil.rmtree(d); (d / 'x').mkdir()"
    assert len(file_system_calls(planted)) == 5
    assert file_system_calls("file.read(); text.replace('a', 'b'); os.getpid()") == []


def test_only_one_module_imports_orbax():
    importing = {"orbax": set(), "tensorstore": set()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names]
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for library in importing:
                    if any(name.partition(".")[0] == library for name in names):
                        importing[library].add(path.relative_to(PACKAGE).as_posix())
    assert set.union(*importing.values()) == {"checkpoint/orbax_io.py"}
