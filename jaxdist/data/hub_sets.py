"""Data sets of the Hugging Face hub as sources: `hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT]`.

Configs and splits are those in the metadata of the data set's README. Without them, a config is a
folder, and file or folder names have the splits, as in Hugging Face datasets. Only the files of one
split are downloaded, at one commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from jaxdist.data.cache import cache_folder
from jaxdist.runtime import hub
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.new_output import new_output
from jaxdist.runtime.progress import Progress, waiting
from jaxdist.settings import ConfigError

_WORD = r"[A-Za-z0-9][\w.-]{0,95}"
_SOURCE = re.compile(
    rf"hf:/+(?P<repo>{_WORD}/{_WORD})(/(?P<config>[\w.+-]+(/[\w.+-]+)*))?"
    rf"(@(?P<revision>[A-Za-z0-9][\w./-]*))?(:(?P<split>[\w.+-]+))?"
)
_FORMATS = [
    re.compile(rf".*\.({kind})(\.gz|\.zst)?") for kind in ("parquet", "jsonl|ndjson", "tar", "txt")
]
_UNREAD = re.compile(r".*\.(json|csv|tsv|arrow|zip)(\.gz|\.zst)?")
_SPLITS = {
    "train": "train|training",
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
}
_NUM_DOWNLOADS = 4


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a data set on the hub, downloaded when it is opened.

    `repo` is ORG/NAME@COMMIT, and `tag` the digest of its content. A Parquet or tar file may be
    divided into `num_parts`, of which this is number `part` (from 0).
    """

    repo: str
    path: str
    num_bytes: int
    tag: str
    part: int = 0
    num_parts: int = 1

    @property
    def name(self) -> str:
        """Last part of its path."""
        return PurePosixPath(self.path).name

    def __str__(self) -> str:
        return f"hf://{self.repo}/{self.path}"

    def download(self) -> Path:
        """Return the path of the file on this host, downloaded on first use."""
        with waiting(f"downloading {self}"):  # another thread may download it already
            return hub.fetch_file(self.repo, self.path, _counting_bar(None))

    def share(self, count: int) -> range:
        """Return which of the `count` row groups or blocks of the file belong to this part."""
        starts = [count * part // self.num_parts for part in (self.part, self.part + 1)]
        return range(*starts)

    def download_to(self, folder: Path) -> Path:
        """Download the file to a folder, unless it is in the hub's cache; return its path."""
        bar = _counting_bar(None)
        return hub.patiently(lambda: hub.fetch_file(self.repo, self.path, bar, folder))

    def create_empty(self, local: Path) -> None:
        """Create a file of the same size, which takes no space on most file systems."""
        local.parent.mkdir(parents=True, exist_ok=True)
        with local.open("wb") as new:
            new.truncate(self.num_bytes)

    def download_range(self, start: int, length: int, local: Path) -> None:
        """Download a range of bytes and write it at the same offset of an existing file."""

        def fetch() -> None:
            with local.open("r+b") as file:
                file.seek(start)
                hub.fetch_range(
                    self.repo, self.path, self.tag, start, length, file, _counting_bar(None)
                )

        hub.patiently(fetch)


@dataclasses.dataclass(frozen=True)
class HubSet:
    """The parts of a source's name; "" = the default."""

    repo: str
    config: str
    revision: str
    split: str

    @property
    def name(self) -> str:
        """Return ORG/NAME[@REVISION]."""
        return f"{self.repo}@{self.revision}" if self.revision else self.repo

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repo}{config}{revision}{f':{self.split}' if self.split else ''}"


def is_hub_set(source: str) -> bool:
    """Return whether a source names a data set on the hub."""
    return source.startswith("hf:/")


def parse_hub_set(source: str) -> HubSet:
    """Return the parts of a source's name; raises `ConfigError` for a wrong one."""
    if (match := _SOURCE.fullmatch(source)) is None:
        raise ConfigError(
            f"{source!r} is not the name of a data set on the hub. Use "
            "hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT], e.g. "
            "hf://HuggingFaceFW/fineweb-edu/sample-10BT."
        )
    return HubSet(**{name: match[name] or "" for name in ("repo", "config", "revision", "split")})


def without_commit(source: str) -> str:
    """Return a source hf://ORG/NAME@REVISION... without @REVISION."""
    return str(dataclasses.replace(parse_hub_set(source), revision=""))


def pin_commit(source: str) -> str:
    """Return a source with its revision replaced by the commit that it names in this process."""
    parts = parse_hub_set(source)
    commit = hub.with_commit(parts.name, "dataset").partition("@")[2]
    return str(dataclasses.replace(parts, revision=commit))


@functools.cache  # settings are read often
def hub_files(source: str) -> list[HubFile]:
    """Return the files of a source, sorted by path; checks that they may be read.

    Raises `ConfigError` if data set, config or split do not exist, access is denied, or a format is
    not read.
    """
    parts = parse_hub_set(pin_commit(source))
    listed = _listed(parts.name)
    paths = _select(parts, source, list(listed), hub.read_card(parts.name))
    if not paths:
        raise ConfigError(
            f"data source {source!r} has no files on the hub. Check config and split."
        )
    unread = {PurePosixPath(x).suffix for x in paths if not any(f.fullmatch(x) for f in _FORMATS)}
    if unread:
        raise ConfigError(
            f"data source {source!r} has {', '.join(sorted(unread))} files: Parquet, .jsonl, .txt "
            "and .tar are read. The hub has a Parquet copy of most data sets: use "
            f"hf://{parts.repo}/{parts.config or 'default'}@refs/convert/parquet"
        )
    hub.check_access(parts.name, paths[0])
    return [HubFile(parts.name, path, *listed[path]) for path in paths]


def _listed(name: str) -> dict[str, tuple[int, str]]:
    """Return path -> (size in bytes, digest) of a data set; stored for use without a network."""
    key = hashlib.sha256(name.encode()).hexdigest()[:24]
    stored = cache_folder() / f"hub-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return {path: tuple(about) for path, about in json.loads(stored.read_text()).items()}
    listed = hub.list_files(name)
    if not hub.is_offline():  # else only the cached files are listed
        with contextlib.suppress(OSError), new_output(stored) as partial:  # another was first
            partial.write_text(json.dumps(listed))
    return listed


def _select(parts: HubSet, source: str, paths: list[str], card: dict[str, Any]) -> list[str]:
    """Return those of `paths` that belong to config and split; `card` is README metadata."""
    entries = [e for e in card.get("configs") or [] if "data_files" in e or "data_dir" in e]
    names = [str(entry.get("config_name", "default")) for entry in entries]
    folder = parts.config
    if entries and (not folder or folder in names):
        if not folder and len(entries) > 1:
            defaults = [n for n, e in zip(names, entries, strict=True) if e.get("default")]
            folder = next(iter([*defaults, *[n for n in names if n == "default"]]), "")
            if not folder:
                raise ConfigError(
                    f"data source {source!r} has several configs. Name one of them, e.g. "
                    f"hf://{parts.repo}/{names[0]}: {few(names, 20)}"
                )
        entry = entries[names.index(folder) if folder else 0]
        if "data_files" in entry:
            declared = _declared(entry["data_files"], paths, str(entry.get("data_dir") or ""))
            return _chosen(parts, source, declared)
        root, folder = str(entry["data_dir"]).strip("/"), ""
        paths = [path for path in paths if PurePosixPath(path).is_relative_to(root)]
    inside = [path for path in paths if not folder or f"/{path}".find(f"/{folder}/") >= 0]
    by_kind = ([path for path in inside if kind.fullmatch(path)] for kind in (*_FORMATS, _UNREAD))
    data = next(filter(None, by_kind), [])
    if not data:
        choices = names or sorted({path.rpartition("/")[0] for path in paths if "/" in path})
        what = f"data files of config {folder!r}" if folder else "data files"
        why = ", as HF_HUB_OFFLINE is set and the cache has none" if hub.is_offline() else ""
        raise ConfigError(
            f"data source {source!r} has no {what}{why}. It has: "
            f"{few(choices or sorted(paths), 20)}."
        )
    splits: dict[str, list[str]] = {}
    for path in data:
        splits.setdefault(_split_of(path), []).append(path)
    if splits.keys() == {""}:
        splits = {"train": splits[""]}
    return _chosen(parts, source, splits)


def _declared(data_files: Any, paths: list[str], folder: str) -> dict[str, list[str]]:
    """Return split -> paths for `data_files` of a README, which are relative to `folder`."""
    if not isinstance(data_files, list) or not all(isinstance(x, dict) for x in data_files):
        data_files = [{"split": "train", "path": data_files}]
    splits: dict[str, list[str]] = {}
    for entry in data_files:
        patterns = entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
        fits = [re.compile(regex_of(str(PurePosixPath(folder, str(one))))) for one in patterns]
        chosen = [path for path in sorted(paths) if any(fit.fullmatch(path) for fit in fits)]
        splits.setdefault(str(entry.get("split", "train")), []).extend(chosen)
    return splits


def _split_of(path: str) -> str:
    if match := re.fullmatch(r"(.*/)?([\w.]+)-\d{5}-of-\d{5}.*", path):
        return match[2]
    for part in reversed(path.split("/")):
        for split, words in _SPLITS.items():
            if re.search(rf"(^|[^a-z0-9])({words})($|[^a-z])", part.lower()):
                return split
    return ""


def _chosen(parts: HubSet, source: str, splits: dict[str, list[str]]) -> list[str]:
    split = parts.split or "train"
    if split not in splits:
        raise ConfigError(
            f"data source {source!r} has no split {split!r}. Name one of its splits with :SPLIT: "
            f"{few(sorted(filter(None, splits)), 20)}"
        )
    return sorted(splits[split])


def regex_of(pattern: str) -> str:
    """Return a regular expression for a pattern with *, **, ? and [...], as in `glob`."""
    words = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    return "".join(
        words.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part))
        for part in parts
    )


@contextlib.contextmanager
def downloading(files: Sequence[Any]) -> Iterator[None]:
    """In this block, download the hub's files among `files` in order, in the background.

    Errors are reported when a file is opened. A kill keeps the finished part of each file.
    """
    waiting_files = [file for file in files if isinstance(file, HubFile)]
    if not waiting_files:
        yield
        return
    queue, stopped = iter(waiting_files), threading.Event()
    lock = threading.Lock()
    with Progress("downloading", sum(file.num_bytes for file in waiting_files), "B") as progress:
        bar = _counting_bar(progress)

        def work() -> None:
            while not stopped.is_set():
                with lock:
                    file = next(queue, None)
                if file is None:
                    return
                with contextlib.suppress(ConfigError):
                    hub.fetch_file(file.repo, file.path, bar)

        for number in range(_NUM_DOWNLOADS):
            threading.Thread(target=work, name=f"download {number}", daemon=True).start()
        try:
            yield
        finally:
            stopped.set()


def _counting_bar(progress: Progress | None) -> type[Any]:
    """Return a class of hidden bars that add their bytes to `progress`."""
    lock = threading.Lock()

    class Bar(tqdm):
        monitor_interval = 0  # else each class has a thread

        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if progress is not None:
                with lock:
                    progress.advance(int(n or 0))

    return Bar
