"""Download and upload files on the Hugging Face hub: `ORG/NAME` or `ORG/NAME@REVISION`.

Variables of `huggingface_hub` apply: HF_HUB_CACHE or HF_HOME (location of its cache, which
processes share by file locks), HF_HUB_OFFLINE=1 (no network), HF_TOKEN, HF_ENDPOINT.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar

from jaxdist.runtime.progress import waiting
from jaxdist.settings.declare import ConfigError

log = logging.getLogger("jaxdist")

T = TypeVar("T")

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"{_WORD}/{_WORD}(@[A-Za-z0-9][A-Za-z0-9._/-]{{0,200}})?")
_COMMIT = re.compile("[0-9a-f]{40}")
_CARD = "README.md"
_FILE_ENDINGS = (".json", ".jsonl", ".safetensors", ".toml", ".txt")  # not hub names

Kind = Literal["model", "dataset"]
"""Kind of a repository."""


class Unreachable(ConfigError):
    """Raised if a download failed, but a later try may succeed."""


RETRY_S = (1, 2, 4, 8, 16, 32, 60, 60)
"""Seconds between tries of a download."""


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a hub name and not an existing path."""
    text = os.fspath(path)
    repo = text.partition("@")[0]
    if not _NAME.fullmatch(text) or repo.endswith(_FILE_ENDINGS):
        return False
    return not Path(text).exists()


def short_name(name: str) -> str:
    """Return the last part of a hub name, without its revision."""
    return name.partition("@")[0].rpartition("/")[2]


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE is set, so that only the cache is used."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def with_commit(name: str, kind: Kind = "model") -> str:
    """Return ORG/NAME@COMMIT for a name's revision (default: main), fixed in this process."""
    repo, _, revision = name.partition("@")
    if _COMMIT.fullmatch(revision):
        return name
    small = _CARD if kind == "dataset" else "config.json"
    return f"{repo}@{_download(name, (small,), kind).name}"


def fetch(name: str, files: tuple[str, ...]) -> Path:
    """Download those top-level `files` (names or patterns) that exist; return their directory."""
    return _download(with_commit(name), files)


@functools.cache  # pins the commit in this process, even if the branch changes
def _download(name: str, files: tuple[str, ...], kind: Kind = "model") -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    with _errors(name, kind), waiting(f"downloading {name} from the Hugging Face hub"):
        folder = snapshot_download(
            repo,
            repo_type=kind,
            revision=revision or None,
            allow_patterns=list(files),
            ignore_patterns=["*/*"],  # copies for other frameworks
        )
    return Path(folder)


def read_card(name: str) -> dict[str, Any]:
    """Return the metadata in a data set's README; {} without. `name` is ORG/NAME@COMMIT."""
    from huggingface_hub.repocard import metadata_load

    card = _download(name, (_CARD,), "dataset") / _CARD
    try:
        return (metadata_load(card) if card.exists() else None) or {}
    except ValueError:  # not YAML
        return {}


def list_files(name: str) -> dict[str, tuple[int, str]]:
    """Return path -> (bytes, digest) of a data set's files (offline: those in the cache)."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    repo, _, commit = name.partition("@")
    if is_offline():
        root = _download(name, (_CARD,), "dataset")
        paths = [path for path in root.rglob("*") if path.is_file()]
        blob = lambda path: (path.stat().st_size, path.resolve().name)
        return {path.relative_to(root).as_posix(): blob(path) for path in paths}
    with _errors(name, "dataset"), waiting(f"listing {name} on the Hugging Face hub"):
        tree = HfApi().list_repo_tree(repo, recursive=True, revision=commit, repo_type="dataset")
        files = [entry for entry in tree if isinstance(entry, RepoFile)]
    return {f.path: (f.size, f.lfs.sha256 if f.lfs else f.blob_id) for f in files}


@functools.cache
def check_access(name: str, path: str) -> None:
    """Raise `ConfigError` if the hub refuses a data set's file that is not in the cache."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url

    repo, _, commit = name.partition("@")
    if in_cache(name, path):
        return
    try:
        get_hf_file_metadata(hf_hub_url(repo, path, repo_type="dataset", revision=commit))
    except (errors.GatedRepoError, errors.RepositoryNotFoundError) as error:
        raise ConfigError(_problem(name, error, "dataset")) from None
    except Exception:  # the download reports a missing network
        return


def fetch_file(
    name: str, path: str, bar: type[Any] | None = None, folder: Path | None = None
) -> Path:
    """Download a file of a data set, ORG/NAME@COMMIT; return its path on this host.

    An interrupted download is continued. `bar` is the class of its progress bar, as in
    `hf_hub_download`. With `folder`, a file that the cache does not have is stored there.
    """
    from huggingface_hub import hf_hub_download

    repo, _, commit = name.partition("@")
    options: dict[str, Any] = {"repo_type": "dataset", "revision": commit}
    if folder is not None and not in_cache(name, path):
        options["local_dir"] = folder
    with _errors(name, "dataset"):
        return Path(hf_hub_download(repo, path, tqdm_class=bar, **options))


def in_cache(name: str, path: str) -> bool:
    """Return whether a file of ORG/NAME@COMMIT is in the cache, or HF_HUB_OFFLINE is set."""
    from huggingface_hub import try_to_load_from_cache as cached

    repo, _, commit = name.partition("@")
    return is_offline() or isinstance(cached(repo, path, repo_type="dataset", revision=commit), str)


def fetch_range(
    name: str, path: str, tag: str, start: int, length: int, file: BinaryIO, bar: type[Any]
) -> None:
    """Download `length` bytes from `start` of a data set's file to the position of `file`.

    `name` is ORG/NAME@COMMIT. Raises `ConfigError` if the ETag of the complete file is not `tag`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    repo, _, commit = name.partition("@")
    url = hf_hub_url(repo, path, repo_type="dataset", revision=commit)
    with _errors(name, "dataset"):
        etag = get_hf_file_metadata(url).etag
    check_digest(f"hf://{name}/{path}", etag or "", tag)
    with _errors(name, "dataset"):
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}"}
        http_get(url, file, headers=headers, expected_size=length, tqdm_class=bar)


def check_digest(name: str, digest: str, listed: str) -> None:
    """Raise `ConfigError` if the digest of file `name` is not the one that the hub lists."""
    if digest != listed:
        raise ConfigError(
            f"{name} has digest {digest}, and the hub lists {listed} for this commit: its content "
            "was changed or damaged. Start again to download it again; if that fails, check the "
            "mirror (HF_ENDPOINT) or the cache (HF_HUB_CACHE)."
        )


def patiently(fetch: Callable[[], T]) -> T:
    """Return the result of a download; try again for minutes if the hub does not answer."""
    for number, delay in enumerate(RETRY_S, start=1):
        try:
            return fetch()
        except Unreachable as error:
            log.warning(
                "%s (attempt %d of %d failed, next one in %g s)",
                error.problems[0], number, len(RETRY_S) + 1, delay,
            )  # fmt: skip
            time.sleep(delay)
    return fetch()


def open_for_push(name: str) -> None:
    """Create a private repository of a model unless it exists; "" = none. Raises `ConfigError`."""
    if not name:
        return
    from huggingface_hub import HfApi, get_token

    if not _NAME.fullmatch(name) or "@" in name:
        raise ConfigError(f"--push {name!r} is not ORG/NAME. Use e.g. my-team/my-model.")
    if is_offline():
        raise ConfigError(f"--push {name}: HF_HUB_OFFLINE is set. Unset it to use the network.")
    if not get_token():
        raise ConfigError(
            f"--push {name} needs a token with write access. Set HF_TOKEN, or sign in with `hf "
            "auth login`."
        )
    with _push_errors(name, "Nothing was written."):
        HfApi().create_repo(name, private=True, exist_ok=True)


def push(name: str, folder: str) -> str:
    """Upload the files of a folder as one commit of a model; return its URL."""
    from huggingface_hub import HfApi

    again = f"{folder} is complete: run `hf upload {name} {folder}` to try again."
    with _push_errors(name, again), waiting(f"uploading {folder} to {name}"):
        return HfApi().upload_folder(repo_id=name, folder_path=folder).commit_url


@contextlib.contextmanager
def _push_errors(name: str, fix: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # from the library, its HTTP client, or the disk
        from huggingface_hub import constants

        code = getattr(getattr(error, "response", None), "status_code", None)
        cause = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        if code in (401, 403):
            cause = f"the token is refused (HTTP {code}); set one with write access in HF_TOKEN"
        raise ConfigError(
            f"{name!r} cannot be written on the Hugging Face hub ({constants.ENDPOINT}): {cause}. "
            f"{fix}"
        ) from None


@contextlib.contextmanager
def _errors(name: str, kind: Kind) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # from the library, its HTTP client, or the disk
        from huggingface_hub import errors

        lasting = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)
        raised = ConfigError if is_offline() or isinstance(error, lasting) else Unreachable
        raise raised(_problem(name, error, kind)) from None


def _problem(name: str, error: Exception, kind: Kind) -> str:
    from huggingface_hub import constants, errors

    repo, _, revision = name.partition("@")
    hub = f"the Hugging Face hub ({constants.ENDPOINT})"
    is_model = kind == "model"
    first = error.__cause__ or error
    cause = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0][:200]}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub} requires access to {repo!r} to be requested. Request it at "
            f"{constants.ENDPOINT}/{'' if is_model else 'datasets/'}{repo}, then set HF_TOKEN or "
            "sign in with `hf auth login`."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{hub} has no {'model' if is_model else 'data set'} {repo!r}"
            f"{', and no such path exists here' if is_model else ''}. Check the spelling; a "
            f"private one needs HF_TOKEN or `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{hub} has no revision {revision!r} of {repo!r}. Name one of its branches, tags or "
            f"commits, or leave @{revision} out."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        tried = f"{hub} did not answer ({cause})"
        if is_offline():
            tried = f"HF_HUB_OFFLINE is set, so {hub} is not used"
        return (
            f"{'no such path exists here, ' if is_model else ''}the cache "
            f"{constants.HF_HUB_CACHE} does not have (all of) {name!r}, and {tried}. Run "
            f"`hf download {repo}{'' if is_model else ' --repo-type dataset'}` on a machine with a "
            "network and set HF_HUB_CACHE to that cache, or name a directory."
        )
    return f"{name!r} cannot be downloaded from {hub} ({cause}). Try again, or name a directory."
