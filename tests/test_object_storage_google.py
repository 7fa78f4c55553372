"""Runs on Google Cloud Storage: an emulator of it over HTTP, see `object_servers.gcs`."""

import errno
import re
from concurrent.futures import ThreadPoolExecutor

import object_servers
import pytest
from data_cases import cache  # noqa: F401
from object_runs import history, take_a_lock_twice
from refusals import refused
from store_kills import kill_at

from jaxdist.runtime.storage import locate, objects


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, object_servers.gcs(patch) as address:
        yield address


@pytest.fixture
def folder(server, request):
    return locate(f"gs://bucket/{re.sub('[^a-z0-9]+', '-', request.node.name)}")


def test_google_storage_behaves_like_a_local_directory(folder, tmp_path):
    assert history(folder) == history(locate(tmp_path / "run"))
    assert locate("gs:/bucket/a/") == folder.parent / "a"


def test_of_two_concurrent_lock_requests_one_is_refused(folder):
    take_a_lock_twice(folder)


def test_of_many_concurrent_creations_of_an_object_one_succeeds(folder):
    with ThreadPoolExecutor(8) as pool:
        for number in range(10):
            file = folder / number
            assert sorted(pool.map(lambda _, file=file: file.create(), range(8)))[-2:] == [
                False,
                True,
            ]


def test_an_object_of_any_size_is_one_request(folder):
    content = bytes(range(256)) * (24 << 10)  # 6 MiB: more than one part of a multipart upload
    (folder / "large").write(content)
    assert (folder / "large").read() == content
    assert (folder / "large").part(5 << 20, 3) == content[5 << 20 : (5 << 20) + 3]


def test_a_tree_that_another_process_is_deleting_is_deleted_completely(folder, monkeypatch):
    for name in ("a", "b", "c"):
        (folder / name).write(name)
    below, listed = objects.ObjectLocation._below, []

    def list_and_lose_one(location):
        locations = below(location)
        if not listed:
            (folder / "a").delete()
        listed.append(locations)
        return locations

    monkeypatch.setattr(objects.ObjectLocation, "_below", list_and_lose_one)
    folder.delete_tree()
    assert below(folder) == [] and len(listed) > 1


def test_a_missing_bucket_and_missing_credentials_give_one_line_errors(server, monkeypatch):
    with refused("gs://absent-bucket/run", "no such bucket"):
        locate("gs://absent-bucket/run")
    objects._reach.cache_clear()
    monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:9")
    with refused("gs://bucket/run", "GOOGLE_APPLICATION_CREDENTIALS"):
        locate("gs://bucket/run")
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", object_servers.SECRET)
    monkeypatch.setenv("GOOGLE_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(OSError) as away:
        locate("gs://bucket/run")
    assert away.value.errno == errno.EHOSTUNREACH


@pytest.mark.slow
def test_kills_at_named_points_lose_no_complete_checkpoint_and_load_no_other(server, tmp_path):
    points = ["during_upload", "during_retention"]
    kills = kill_at("gs://bucket/kills/checkpoints", tmp_path, points, async_save=False)
    assert [kill.point for kill in kills] == points
