"""Download files from the Hugging Face hub by model name: `ORG/NAME` or `ORG/NAME@REVISION`.

They are stored in the cache of `huggingface_hub`, whose variables apply: HF_HUB_CACHE or HF_HOME
(location), HF_HUB_OFFLINE=1 (no network), HF_TOKEN, HF_ENDPOINT. Processes share it by file locks.
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
_FILE_ENDINGS = (".json", ".jsonl", ".safetensors", ".toml", ".txt")  # not hub names


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


def with_commit(name: str) -> str:
    """Return the hub name with the current commit of its revision (default: main)."""
    repo, _, revision = name.partition("@")
    if _COMMIT.fullmatch(revision):
        return name
    return f"{repo}@{_download(name, ('config.json',)).name}"


def fetch(name: str, files: tuple[str, ...]) -> Path:
    """Download those of `files` (names or patterns) that exist; return their directory."""
    return _download(with_commit(name), files)


@functools.cache  # pins the commit in this process, even if the branch changes
def _download(name: str, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    try:
        with waiting(f"downloading {name} from the Hugging Face hub"):
            folder = snapshot_download(
                repo,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=["*/*"],  # copies for other frameworks
            )
    except Exception as error:  # from the library, its HTTP client, or the disk
        raise ConfigError(_problem(name, error)) from None
    return Path(folder)


def _problem(name: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    repo, _, revision = name.partition("@")
    hub = f"the Hugging Face hub ({constants.ENDPOINT})"
    first = error.__cause__ or error
    cause = f"{type(first).__name__}: {(str(first).splitlines() or [''])[0][:200]}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub} requires access to {repo!r} to be requested. Request it at "
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
        tried = f"{hub} did not answer ({cause})"
        if constants.HF_HUB_OFFLINE:
            tried = f"HF_HUB_OFFLINE is set, so {hub} is not used"
        return (
            f"no such path exists here, the cache {constants.HF_HUB_CACHE} does not have (all of) "
            f"{name!r}, and {tried}. Run `hf download {repo}` on a machine with a network and "
            "set HF_HUB_CACHE to that cache, or name a directory."
        )
    return f"{name!r} cannot be downloaded from {hub} ({cause}). Try again, or name a directory."
