"""Files by a model's name on the Hugging Face hub: `ORG/NAME`, or `ORG/NAME@REVISION`.

They are fetched into the cache of `huggingface_hub`, whose variables hold here: HF_HUB_CACHE or
HF_HOME (where the cache is), HF_HUB_OFFLINE=1 (ask nobody), HF_TOKEN, HF_ENDPOINT. In a job of
several processes each one fetches. Those that share a cache wait for each other at the library's
file locks and then find the files there.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from jaxdist.runtime.progress import waiting
from jaxdist.settings.declare import ConfigError

_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"{_WORD}/{_WORD}(@[A-Za-z0-9][A-Za-z0-9._/-]{{0,200}})?")
_COMMIT = re.compile("[0-9a-f]{40}")
_FILE_ENDINGS = (".json", ".jsonl", ".safetensors", ".toml", ".txt")  # a file that is not there


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether this names a model on the hub; a path that exists is always a path."""
    text = os.fspath(path)
    repo = text.partition("@")[0]
    if not _NAME.fullmatch(text) or repo.endswith(_FILE_ENDINGS):
        return False
    return not Path(text).exists()


def short_name(name: str) -> str:
    """The last part of a hub name, without its revision."""
    return name.partition("@")[0].rpartition("/")[2]


def with_commit(name: str) -> str:
    """The hub name with the commit that its revision stands for now (no revision = main).

    Raises:
        ConfigError: there is no such model or revision, or nobody to ask.
    """
    repo, _, revision = name.partition("@")
    if _COMMIT.fullmatch(revision):
        return name
    return f"{repo}@{_download(name, ('config.json',)).name}"


def fetch(name: str, files: tuple[str, ...]) -> Path:
    """The directory of a hub name's commit in the cache, with those of these files that it has.

    `files` may be patterns; files in folders of the repository are left out.

    Raises:
        ConfigError: there is no such model or revision, or nobody to ask.
    """
    return _download(with_commit(name), files)


@functools.cache  # one answer for the whole life of a process, even if the branch moves on
def _download(name: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        with waiting(f"fetching {name} from the Hugging Face hub"):
            folder = snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=["*/*"],  # copies for other frameworks
            )
    except Exception as error:  # of the library, its HTTP client, or the disk
        raise ConfigError(_problem(name, error)) from None
    return Path(folder)


def _problem(name: str, error: Exception) -> str:
    """What was asked for, what was tried, and what to do."""
    from huggingface_hub import constants, errors

    repo, _, revision = name.partition("@")
    hub = f"the Hugging Face hub ({constants.ENDPOINT})"
    first = error.__cause__ or error
    cause = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0][:200]}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub} gives {repo!r} only to those who asked for it. Ask at "
            f"{constants.ENDPOINT}/{repo}, then set HF_TOKEN or sign in with `hf auth login`."
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{hub} has no model {repo!r}, and no such path exists here. Check the spelling; a "
            "private model needs HF_TOKEN or `hf auth login`."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return (
            f"{hub} has no revision {revision!r} of {repo!r}. Name one of its branches, tags or "
            f"commits, or leave @{revision} out."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        tried = f"{hub} gave no answer ({cause})"
        if constants.HF_HUB_OFFLINE:
            tried = f"HF_HUB_OFFLINE is set, so {hub} is not asked"
        return (
            f"no such path exists here, the cache {constants.HF_HUB_CACHE} does not hold (all of) "
            f"{name!r}, and {tried}. Get it with `hf download {repo}` where there is a network and "
            "set HF_HUB_CACHE to that cache, or name a directory."
        )
    return f"{name!r} cannot be fetched from {hub} ({cause}). Try again, or name a directory."
