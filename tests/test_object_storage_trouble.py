"""A store that hangs, is busy, or whose credentials expire during a command or a run."""

import contextlib
import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import object_servers
import pytest
from commands import run_here
from data_cases import cache  # noqa: F401
from object_runs import RUN
from object_servers import SECRET, Message
from refusals import missing

from jaxdist.checkpoint import lock, manifest
from jaxdist.checkpoint.events import CheckpointError
from jaxdist.data.corpus import Corpus
from jaxdist.runtime import entry_point
from jaxdist.runtime.storage import flush_appended, locate, objects
from jaxdist.settings import ConfigError

EXPIRED = ["expired", "AWS_SESSION_TOKEN"]


@pytest.fixture
def limits(server, monkeypatch):
    """Set time limits of clients that are created from now on."""

    def set_limits(address: str, **seconds: int) -> None:
        for name, value in seconds.items():
            monkeypatch.setattr(objects, name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        objects._store.cache_clear()

    yield set_limits
    objects._store.cache_clear()


def test_hanging_store_times_out_after_retries(server, limits):
    """With a limit of two seconds: one silent request, and a second one within the limit."""
    over, location = threading.Event(), locate("s3://bucket/hangs")
    calls = {"read": (), "part": (0, 5), "files": (), "write": ("text",), "delete": ()}

    def answer(request: Message, ask) -> Message:
        over.wait(120)
        return ask(request)

    def seconds_of(name: str) -> float:
        begun = time.monotonic()
        with pytest.raises(OSError) as away:
            getattr(location, name)(*calls[name])
        assert away.value.errno == errno.EHOSTUNREACH
        return time.monotonic() - begun

    with object_servers.passing_on(server, answer) as address:
        limits(address, _TIMEOUT_S=1, _RETRY_S=2)
        with ThreadPoolExecutor(len(calls)) as pool:
            took_s = dict(zip(calls, pool.map(seconds_of, calls), strict=True))
        over.set()
    for name, each in took_s.items():
        tries = 1 if name == "delete" else 2  # the library does not retry a silent POST
        assert 0.95 * tries < each < 100, (name, each)  # of the 120 s that it hangs


def test_store_that_refuses_connections_is_retried_for_the_complete_time(server, limits):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # it does not listen
        limits(f"http://127.0.0.1:{unused.getsockname()[1]}", _RETRY_S=7)
        begun = time.monotonic()
        with pytest.raises(OSError):
            locate("s3://bucket/away").read()
    assert time.monotonic() - begun > 6.9  # ten retries took 2.4 to 5.4 s


@pytest.mark.slow
def test_save_survives_a_store_that_is_away(server, limits, train, monkeypatch):
    """For 8 s it refuses connections and closes those it has; ten retries took 2.4 to 5.4 s."""
    away, address = threading.Event(), []

    def answer(request: Message, ask) -> Message:
        if away.is_set():
            raise ConnectionError
        return ask(request)

    with contextlib.ExitStack() as proxies:
        first = proxies.enter_context(contextlib.ExitStack())
        address = first.enter_context(object_servers.passing_on(server, answer))
        port = int(address.rpartition(":")[2])
        limits(address)

        def come_back() -> None:
            listening = socket.create_server(("127.0.0.1", port))
            away.clear()
            proxies.enter_context(object_servers.passing_on(server, answer, listening))

        def leave(record) -> None:
            if record["kind"] == "train" and record["step"] == 2:
                away.set()
                first.close()
                threading.Timer(8.0, come_back).start()

        run = train("s3://bucket/away", callbacks=leave)
    assert run.exit_reason == "finished" and run.last_step == 4
    saves = [event for event in run.events if event["event"].startswith("save")]
    assert {save["event"] for save in saves} == {"save"} and saves[-1]["step"] == 4
    assert max(save["written_s"] for save in saves) > 5


def test_upload_timeout_grows_with_its_size(server, limits):
    """A server that responds after it has received everything is silent until then."""
    content, folder = bytes(4 << 20), locate("s3://bucket/uploads")  # limit: 9 s, per part 1.5 s
    with object_servers.slow(server, seconds=3.0) as address:
        limits(address, _TIMEOUT_S=1, _RETRY_S=1, MIN_BYTES_PER_S=1 << 20)
        with pytest.raises(OSError):
            (folder / "small").write(content[: 1 << 20])
        (folder / "large").write(content)
    limits(server, _TIMEOUT_S=30)
    assert (folder / "large").size() == len(content)


def test_large_uploads_of_similar_size_share_a_client():
    seconds = [objects._upload_timeout_s(size) for size in (0, 1 << 20, 9 << 20, 16 << 20)]
    assert seconds == [30, 30, 158, 158]  # 16 MiB at 128 KiB/s take 128 s


@pytest.mark.parametrize("name", ["read", "write", "delete"])
def test_busy_store_is_retried_beyond_the_library_retries(server, monkeypatch, name):
    location, methods = locate(f"s3://bucket/busy-{name}"), []
    location.write("text")

    def answer(request: Message, ask) -> Message:
        methods.append(request.start[0])
        if len(methods) < 3:
            return Message((503,), {}, b"<Error><Code>SlowDown</Code></Error>")
        return ask(request)

    with object_servers.passing_on(server, answer) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        store = objects._make_store("s3", "bucket", max_retries=0)
        monkeypatch.setattr(objects, "_store", lambda *location: store)
        getattr(location, name)(*{"write": ("text",)}.get(name, ()))
    assert len(methods) == 3


@pytest.fixture
def expiring(server, limits):
    with object_servers.expiring(server) as (address, left):
        limits(address)
        yield left


@pytest.fixture(scope="module")
def train():
    program = {"__name__": "in this process"}
    exec(RUN, program)
    return program["train"]


@pytest.fixture(scope="module")
def trained(server, train):
    train("s3://bucket/trained")
    flush_appended()
    return "s3://bucket/trained"


def error_of(command) -> str:
    with pytest.raises((OSError, ConfigError)) as end:
        command()
    assert not isinstance(end.value, OSError) or end.value.filename.startswith("s3://")
    return str(end.value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("reshard", 0.9), ("data", 0.3), ("data", 0.9)])
def test_command_with_expired_credentials_ends_and_can_be_repeated(
    trained, expiring, name, share, monkeypatch
):
    monkeypatch.setattr(lock, "HEARTBEAT_S", 1.0)  # both starts run in this process, which lives
    folder = locate(f"s3://bucket/expired/{name}-{share}")
    (locate("s3://bucket/words") / "a.txt").write("some words\n" * 1000)
    command = {
        "reshard": ("tools.convert.__main__", "reshard", trained, "--mesh=dp=2,fsdp=4"),
        "data": ("data.__main__", "s3://bucket/words/*.txt", "--out"),
    }[name]
    start = lambda out: run_here(*command, out)
    expiring[0] = many = 10_000
    assert start(folder / "whole") == 0
    expiring[0] = int(share * (many - expiring[0]))
    message = error_of(lambda: start(folder / "cut"))
    assert missing(message, *EXPIRED) == [] and SECRET not in message and "AKIATEST" not in message
    expiring[0] = float("inf")  # new credentials are available
    assert (share < 0.5) or (folder / "cut").entries(), "nothing was written before"
    assert not manifest.steps_in(folder / "cut" / "checkpoints")
    assert not (folder / "cut" / "corpus.json").exists()
    assert start(folder / "cut") == 0
    assert (folder / "cut").files() == (folder / "whole").files()
    if name == "reshard":
        assert run_here("tools.convert.__main__", "diff", trained, folder / "cut") == 0
    else:
        assert Corpus(folder / "cut").fingerprint == Corpus(folder / "whole").fingerprint


@pytest.mark.slow
def test_run_with_expired_credentials_ends_and_resumes_with_new_ones(expiring, train, monkeypatch):
    # The run could not release its lock, whose owner is a live process.
    monkeypatch.setattr(lock, "HEARTBEAT_S", 1.0)

    def expire(record):
        if record["kind"] == "train" and record["step"] == 3:
            expiring[0] = 0

    url = "s3://bucket/expires"
    with pytest.raises(CheckpointError) as end:
        train(url, steps=20, callbacks=expire)
    assert missing(str(end.value), *EXPIRED) == [] and SECRET not in str(end.value)
    assert "new credentials" in entry_point.advice_for(str(end.value))
    expiring[0] = float("inf")
    checkpoints = locate(url) / "checkpoints"
    complete = manifest.steps_in(checkpoints)
    assert complete and not any(manifest.damage(checkpoints / step) for step in complete)
    resumed = train(url, steps=6)
    assert resumed.exit_reason == "finished" and len(resumed.losses) == 6
    assert '"event": "restore"' in (locate(url) / "metrics.jsonl").text()
