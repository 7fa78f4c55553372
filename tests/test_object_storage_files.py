"""Files that grow on an S3 server until their process ends."""

import subprocess
import sys
import threading
import time

import object_servers
import pytest
from commands import environment
from refusals import missing


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, object_servers.s3(patch) as address:
        yield address


ENDS = """
import concurrent.futures, pathlib, sys
from jaxdist.checkpoint import lock
from jaxdist.runtime import entry_point, run_command
from jaxdist.runtime.storage import locate, parts

parts._END_S = lock.RELEASE_S = entry_point._WAY_OUT_S = 1.5

def main():
    folder = locate("s3://bucket/ends")
    file, log = (folder / "a").appender(), (folder / "log").appender()
    held = lock.DirectoryLock(folder, print)
    held.acquire()
    pathlib.Path(sys.argv[1]).touch()  # from now on the store hangs
    concurrent.futures.ThreadPoolExecutor(1, "reader").submit((folder / "b").read)
    log.append(b"last words")
    file.append(b"lost")
    try:
        file.close()
    except TimeoutError as late:
        print("late", late.filename, file.pending)
    held.release()
    return 75

run_command(main)
"""


def test_a_store_that_hangs_keeps_no_process_from_its_end(server, monkeypatch, tmp_path):
    """Each wait has an end and says what for; the exit code is that of the work."""
    hangs, over = tmp_path / "hangs", threading.Event()

    def answer(request, ask):
        if hangs.exists():
            over.wait(60)
        return ask(request)

    with object_servers.passing_on(server, answer) as way:
        monkeypatch.setenv("AWS_ENDPOINT_URL", way)
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-c", ENDS, str(hangs)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        over.set()
    assert done.returncode == 75, done.stderr
    assert time.monotonic() - begun < 30
    assert missing(done.stdout, "late s3://bucket/ends/a b'lost'") == []
    waits = ["giving up the lock of s3://bucket/ends", "are lost", "reader_0"]
    assert missing(done.stderr, *waits) == []
