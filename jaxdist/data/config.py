"""Settings of data. Importing it is fast, so that they are checked before a device starts."""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
import re
from pathlib import Path
from typing import Any, Literal

from jaxdist.data.chat import LEARNED, SINGLE, RecordKind
from jaxdist.data.custom import is_custom
from jaxdist.data.hub_sets import hub_files, is_hub_set
from jaxdist.data.tokenizer import OLD_TEXT_FORMAT, tokenizer_file
from jaxdist.runtime.storage import is_url, locate, url_problem
from jaxdist.settings import ConfigError, setting

_NAMED_SET = re.compile(r"([A-Za-z][\w.-]*)=(.+)")

_WEIGHT = r"(?:size|\d{1,12}(?:\.\d{1,12})?(?:e-?\d{1,2})?)"
_STAGE = re.compile(rf"(\d{{1,12}}):({_WEIGHT}(?:/{_WEIGHT})*)")

_LIMIT = r"(?:-|\d{1,9}(?:\.\d{1,9})?)"
_PASSES = re.compile(rf"passes:{_LIMIT}(?:/{_LIMIT})*")

PACKING_FORMAT = 3
"""Value of `data.text_format` for which best_fit places documents by their lengths alone."""

SMALLEST_SHARE = 1e-3
"""Smallest positive weight of a source, as a share of all: mixing rounds shares to 1/65536."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Settings of sources, tokens and rows."""

    sources: list[str] = setting(
        ["stdlib"],
        'training data: "stdlib" (source text of this machine\'s Python standard library), or '
        "paths, URLs and globs of text files, folders, .jsonl[.gz|.zst], .parquet, .tar, a token "
        "folder made by `jaxdist data`, token files of other projects (docs/data.md), a CIFAR-10 "
        "folder, a data set of the Hugging Face hub as hf://ORG/NAME[/CONFIG][@REVISION][:SPLIT], "
        "or module:function for your own rows (see jaxdist/data/custom.py)",
    )
    mixture_weights: list[float | str] = setting(
        [],
        "share of rows drawn from each source, one number per source, in any unit; "
        "empty = in proportion to size, so that an epoch is one pass over everything. "
        "STEP:WEIGHT/WEIGHT/... after the numbers are the weights after this many steps "
        "(8,1,1,20000:4/3/3); 0 leaves a source out, and size in place of the other numbers means "
        "in proportion to size. passes:LIMIT/LIMIT/... rejects a run that reads a source more "
        "often than its limit (passes:4/1.5/-, - = any). A resumed run may add stages that begin "
        "after its newest checkpoint, and use sources added at the end of `sources` in them",
    )
    tokenizer: str = setting(
        "auto",
        '"code" (1,024 tokens, learned from Python), "bytes" (256 tokens), the path or URL of a '
        "tokenizer.json, or ORG/NAME[@REVISION] on the Hugging Face hub; auto = code if sources "
        "has stdlib, else bytes; a token folder in sources has its own",
    )
    eos_token: str = setting(
        "",
        "token after each document, as the tokenizer spells it; empty = the tokenizer's own "
        "end of text (byte 0 for bytes), none if it has none",
    )
    text_format: int = setting(
        PACKING_FORMAT,
        "rules of tokenization and packing. 3: best_fit places documents by their lengths alone, "
        "so that millions take less than a second; 2: it places them one by one, in another order; "
        "1: as 2, texts do not begin with the tokens of the tokenizer's post-processor, and pieces "
        "such as prompt and completion may not decode to the whole text. A resumed run keeps its "
        "value; old runs and token folders without a value have 1",
        ge=1,
        le=PACKING_FORMAT,
    )
    streaming: bool = setting(
        False,
        "train on hf:// sources while they are downloaded: shards (files, or parts of about 64 MiB "
        "of Parquet and .tar files) are tokenized ahead of training and deleted after it, so that "
        "the complete data set need not fit on the disk. Several sources need mixture_weights",
    )
    streaming_buffer: int = setting(
        8,
        "shards of a streamed source whose rows are shuffled jointly; raise it if they are small "
        "or sorted by topic. About two such buffers are on disk",
        ge=1,
    )
    text_field: str = setting(
        "text", "field of a JSON line or column of a Parquet file that holds the text"
    )
    records: RecordKind = setting(
        "text",
        "content of a JSON line or Parquet row. text: a text in text_field; chat: a conversation, "
        '{"messages": [{"role": "user", "content": "..."}, ...]}, or a record of ShareGPT '
        '("conversations") or Alpaca ("instruction", "output"); chat_last: the same, but only the '
        'last answer is learned; chat_all: every token is; completion: {"prompt": "...", '
        '"completion": "..."}; preference: {"prompt", "chosen", "rejected"} and labeled: '
        '{"prompt", "completion", "label": true}, as texts or lists of messages, for '
        'objective.kind; text_label: a text in text_field and its class, {"text": "...", "label": '
        "2}, for model.num_labels. Except with text and chat_all, only answers (and the token that "
        "ends them) count in the loss. Except with text, other fields are rejected, but not "
        "metadata such as id or source (docs/fine-tuning.md lists them). Sources of text next to "
        "chat and completion are learned completely",
    )
    long_records: Literal["cut", "drop", "reject"] = setting(
        "cut",
        "records longer than a row. cut: chat and completion continue in another row, others lose "
        "their end, and are dropped if no learned token is left; drop: leave them out; reject: "
        "stop with an error. The log counts them",
    )
    chat_template: str = setting(
        "auto",
        "format of conversations: auto = the tokenizer's template "
        "(chat_template.jinja or tokenizer_config.json next to tokenizer.json), plain if it has "
        "none; plain = <|role|>, a new line, the text, answers closed by the end token; or the "
        "path or URL of a Jinja template",
    )
    packing: Literal["auto", "stream", "documents", "best_fit"] = setting(
        "auto",
        "auto: stream for text, best_fit for conversations and completions; stream: rows are "
        "consecutive windows of all text joined together; documents: the same windows, but "
        "attention and loss stop at document boundaries; best_fit: complete documents are placed "
        "into rows, only those longer than a row are cut, and rows are padded",
    )
    eval_fraction: float = setting(
        0.02,
        "fraction at the end of each source (streamed: of its first shard) held out for "
        "evaluation, at least a row (0 = none); of CIFAR-10, the test file. Not with eval_sources "
        "or rows of a function",
        ge=0,
        lt=1,
    )
    eval_sources: list[str] = setting(
        [],
        "sources to evaluate on instead of a held-out part of `sources`. NAME=SOURCE adds a source "
        "to the set NAME, whose metrics are NAME/loss ...; sources without a name are one set. "
        "`loss`, also for early stopping and checkpoint.keep_best, is that of the first set",
    )
    image_scaling: Literal["half", "unit", "channel"] = setting(
        "half",
        "pixels x of CIFAR-10, 0 to 255, become: half = x/127.5 - 1; unit = x/255; channel = zero "
        "mean and unit variance per color over the training images",
    )
    num_workers: int = setting(
        0,
        "processes that read rows and run transforms, for each training process; 0 = a thread "
        "of the training process, which is fastest for text. Raise it if the run reports that "
        "its loader is the bottleneck",
        ge=0,
    )

    @property
    def tokenizer_name(self) -> str:
        """`tokenizer`, with "auto" resolved to "code" or "bytes"."""
        if self.tokenizer != "auto":
            return self.tokenizer
        return "code" if "stdlib" in self.sources else "bytes"

    @property
    def first_weights(self) -> list[float]:
        """The plain numbers in `mixture_weights`; [] = none."""
        return [float(item) for item in self.mixture_weights if not isinstance(item, str)]

    @property
    def stages(self) -> list[tuple[int, tuple[int, ...], tuple[float, ...]]]:
        """(Step after which it begins, indices of its sources, weights) for each mixture.

        Weights () = in proportion to size. [] if `mixture_weights` has no stages.
        """
        texts = [item.partition(":") for item in self._mixtures]
        listed = [(int(step), weights.split("/")) for step, _, weights in texts]
        if listed and listed[0][0]:
            first = [str(weight) for weight in self.first_weights]
            listed.insert(0, (0, first or ["size"] * len(self.sources)))
        stages = []
        for step, weights in listed:
            used = {i: text for i, text in enumerate(weights) if text == "size" or float(text)}
            numbers = () if "size" in used.values() else tuple(map(float, used.values()))
            stages.append((step, tuple(used), numbers))
        return stages

    @property
    def _mixtures(self) -> list[str]:
        return [x for x in self.mixture_weights if isinstance(x, str) and x[:7] != "passes:"]

    @property
    def max_passes(self) -> list[float]:
        """Largest number of passes over each source, inf = any; [] = any for all."""
        limits = [x for x in self.mixture_weights if isinstance(x, str) and x[:7] == "passes:"]
        texts = limits[-1][7:].split("/") if limits else []
        return [math.inf if text == "-" else float(text) for text in texts]

    @property
    def is_chat(self) -> bool:
        """Return whether the records are conversations."""
        return self.records in LEARNED

    @property
    def has_single_rows(self) -> bool:
        """Return whether each document has its own row, padded and not packed."""
        return self.records in SINGLE

    @functools.cached_property
    def packs_documents(self) -> bool:
        """Return whether attention and loss in rows of files stop at document boundaries."""
        if self.has_single_rows:
            return False
        if self.packing != "auto":
            return self.packing != "stream"
        weighted = ("weights" in (about_tokens(source) or {}) for source in self.sources)
        return self.records != "text" or any(weighted)

    @property
    def eval_sets(self) -> list[tuple[str, str]]:
        """(Name of the set, source) for each item of `eval_sources`; "" = no name."""
        return [split_set(item) for item in self.eval_sources]

    def problems(self) -> list[str]:
        """Return error messages of violated rules; bounds such as `ge` are checked elsewhere."""
        errors = []
        if not self.sources:
            errors.append(
                'data.sources is empty: at least one source is needed. Use ["stdlib"] or a path.'
            )
        named = [("sources", source) for source in self.sources]
        named += [("eval_sources", source) for _, source in self.eval_sets]
        errors += [p for name, source in named if (p := _missing(name, source))]
        errors += self._weight_problems() + self._record_problems() + self._streaming_problems()
        return errors + self._tokenizer_problems()

    def _tokenizer_problems(self) -> list[str]:
        if self.tokenizer in ("auto", "bytes"):
            return []
        try:
            file = tokenizer_file(self.tokenizer)
        except ConfigError as error:
            return [f"data.tokenizer={self.tokenizer!r}: {problem}" for problem in error.problems]
        if _is_file(str(file)):
            return []
        return [
            f'data.tokenizer={self.tokenizer!r} is not a file: it is "auto", "code", "bytes", the '
            "path or URL of a tokenizer.json, or ORG/NAME on the Hugging Face hub. Check the path "
            "(of a run in its config.toml), or train one with `python -m jaxdist.data SRC --out "
            "DIR --train-bpe 8192`."
        ]

    def _record_problems(self) -> list[str]:
        if self.records == "text":
            return []
        errors = []
        others = [*self.sources, *(source for _, source in self.eval_sets)]
        if "stdlib" in others and (self.has_single_rows or {*self.sources} <= {"stdlib"}):
            errors.append(
                f'data.records={self.records} with source "stdlib", which is text: records come '
                "from .jsonl, .parquet or .tar files. Set data.sources to them."
            )
        if self.has_single_rows and self.packing != "auto":
            errors.append(
                f"data.packing={self.packing} with data.records={self.records}, whose rows are not "
                "packed. Leave data.packing out."
            )
        elif self.packing == "stream":
            errors.append(
                f"data.packing=stream with data.records={self.records}: records would attend to "
                "each other. Use best_fit or documents."
            )
        if self.packing == "documents" and self.long_records == "drop":
            errors.append(
                "data.long_records=drop with data.packing=documents, whose rows cut any record. "
                "Use best_fit."
            )
        template = self.chat_template
        if problem := url_problem(template):
            errors.append(f"data.chat_template={problem}")
        elif template not in ("auto", "plain") and not _is_file(template):
            errors.append(
                f"data.chat_template={template!r} is not a file: it is auto, plain, or the path or "
                "URL of a Jinja template. Check the path."
            )
        return errors

    def _streaming_problems(self) -> list[str]:
        if not self.streaming:
            return []
        errors = []
        if not any(map(is_hub_set, self.sources)):
            errors.append(
                f"data.streaming with data.sources={self.sources}: only data sets of the hub are "
                "streamed. Use hf://ORG/NAME, or leave data.streaming out."
            )
        by_size = len(self.sources) > 1 and not all(weights for _, _, weights in self.stages)
        if by_size or (len(self.sources) > 1 and not self.mixture_weights):
            errors.append(
                "data.streaming with several sources in proportion to their size, which is unknown "
                "before they are read. Set data.mixture_weights to one number per source."
            )
        if self.num_workers:
            errors.append(
                f"data.streaming with data.num_workers={self.num_workers}: threads of the training "
                "process read streams. Leave data.num_workers out."
            )
        if self.has_single_rows or (self.records != "text" and self.long_records == "reject"):
            errors.append(
                f"data.streaming with data.records={self.records}, "
                f"data.long_records={self.long_records}: this needs all records before the first "
                "step. Leave data.streaming out; for chat or completion, long_records may also be "
                "cut or drop."
            )
        return errors

    def _weight_problems(self) -> list[str]:
        first = self.first_weights
        problems = [self._mixture_problem("data.mixture_weights", first)]
        stages = self._mixtures
        problems += self._passes_problems()
        last = 0 if first else -1
        for text in stages:
            name = f"data.mixture_weights has {text!r}"
            match = _STAGE.fullmatch(text)
            if match is None:
                problems.append(
                    f"{name}, which is neither a number nor STEP:WEIGHT/WEIGHT/... Use e.g. 2.5, "
                    "or 1000:0.5/2, or 0:size/0."
                )
                continue
            step, weights = int(match[1]), match[2].split("/")
            if step <= last:
                problems.append(f"{name} after a mixture of step {last}. Use increasing steps.")
            last = step
            if "size" in weights and any(text != "size" and float(text) for text in weights):
                problems.append(
                    f"{name}, which mixes size with numbers. Use size or 0, or only numbers."
                )
            numbers = [1.0 if text == "size" else float(text) for text in weights]
            problems.append(self._mixture_problem(name, numbers))
        if 0.0 in first and not stages:
            problems.append(
                f"data.mixture_weights={first}: a source of weight 0 is never used. Remove it, or "
                "add a stage that uses it."
            )
        if stages and (len(self.sources) == 1 or any(map(is_custom, self.sources))):
            problems.append(
                f"data.mixture_weights={self.mixture_weights} with data.sources={self.sources}: "
                "stages mix several sources of files. Leave it out."
            )
        return [problem for problem in problems if problem]

    def _passes_problems(self) -> list[str]:
        limits = [x for x in self.mixture_weights if isinstance(x, str) and x[:7] == "passes:"]
        if not limits:
            return []
        name = f"data.mixture_weights has {limits[-1]!r}"
        if len(limits) > 1 or not _PASSES.fullmatch(limits[-1]):
            return [f"{name}: use one passes:LIMIT/LIMIT/..., e.g. passes:4/1.5/-."]
        passes = self.max_passes
        problems = []
        if len(passes) != len(self.sources):
            problems.append(
                f"{name}, {len(passes)} limits for {len(self.sources)} sources. Name one per "
                "source; - = no limit."
            )
        if not all(passes):
            problems.append(f"{name}: a source with limit 0 is never used. Remove the source.")
        of_unknown_size = [
            source
            for source, limit in zip(self.sources, passes, strict=False)
            if limit < math.inf and (is_custom(source) or (self.streaming and is_hub_set(source)))
        ]
        if of_unknown_size:
            problems.append(
                f"{name}, but the number of rows of {of_unknown_size[0]!r} is unknown at the start "
                "(your own rows, or data.streaming). Use - as its limit."
            )
        return problems

    def _mixture_problem(self, name: str, weights: list[float]) -> str:
        if not weights:
            return ""
        if len(weights) != len(self.sources):
            return (
                f"{name}: {len(weights)} numbers for {len(self.sources)} sources, which need one "
                "each. Add or remove some, or leave mixture_weights empty."
            )
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
            return f"{name}: weights must be finite and 0 or more. Use such numbers."
        smallest = min((weight for weight in weights if weight), default=0.0)
        if smallest < SMALLEST_SHARE * sum(weights) or not sum(weights):
            return (
                f"{name}: {weights} needs weights above 0 of at least {SMALLEST_SHARE} of the sum. "
                f"Raise {smallest}, or remove its source."
            )
        return ""


def split_set(item: str) -> tuple[str, str]:
    """Return (name of the set, source) of an item of `data.eval_sources`; "" = no name."""
    match = _NAMED_SET.fullmatch(item)
    if match is None or Path(item).expanduser().exists():  # a path with an equals sign
        return "", item
    return match[1], match[2]


def _missing(name: str, source: str) -> str:
    if is_hub_set(source):
        try:
            hub_files(source)
        except ConfigError as error:
            return f"data.{name} has {source!r}: {error.problems[0]}"
        return ""
    if is_url(source):
        problem = url_problem(source)
        if not problem and not source_exists(source):
            problem = f"{source!r} does not exist in the bucket. Check the path."
        return problem and f"data.{name}: {problem}"
    if source == "stdlib" or is_custom(source) or source_exists(source):
        return ""
    from jaxdist.data.prepare import prepare_command  # imports much, for this message alone

    if command := prepare_command(source):
        return f"data.{name} has {source!r}, which does not exist. Make it with `{command}`."
    return (
        f'data.{name} has {source!r}, which does not exist: a source is "stdlib", a file, folder, '
        "glob, URL, hf://ORG/NAME or module:function. Check the path (relative paths start at the "
        "current directory)."
    )


def _is_file(path: str) -> bool:
    location = locate(path)
    return (
        location.exists() and not location.is_directory() if is_url(path) else Path(path).is_file()
    )


def source_exists(source: str) -> bool:
    """Return whether a path or URL exists; True for globs and hub names, checked elsewhere."""
    if glob.has_magic(source) or is_hub_set(source):
        return True
    return locate(source).exists() if is_url(source) else Path(source).expanduser().exists()


def is_token_folder(source: str) -> bool:
    """Return whether a source is a folder of tokens made by `jaxdist data`."""
    if is_hub_set(source) or (is_url(source) and glob.has_magic(source)):
        return False
    return (locate(source) / "corpus.json").exists()


def about_tokens(source: str) -> dict[str, Any] | None:
    """Return a token folder's metadata, None without valid ones; raise errors of a store."""
    if is_hub_set(source) or (is_url(source) and (glob.has_magic(source) or url_problem(source))):
        return None
    try:
        return _stored_about(source) if is_url(source) else _about(source)
    except (OSError, ValueError) as error:  # opening the source reports the error
        if is_url(source) and not isinstance(error, FileNotFoundError | ValueError):
            raise
        return None


def _about(source: str) -> dict[str, Any]:
    return (locate(source) / "corpus.json").json()


_stored_about = functools.lru_cache(_about)  # settings are read often, and each read is a request


def settings_of_tokens(source: str) -> tuple[dict[str, Any], int] | None:
    """Return settings to read a token folder, and its vocabulary size (0 = unknown); or None."""
    about = about_tokens(source)
    if about is None:
        return None
    made_with = about.get("tokenizer", {})
    file = str(locate(source) / "tokenizer.json")
    settings: dict[str, Any] = {
        "tokenizer": "bytes" if made_with.get("name") == "bytes" else file,
        "eos_token": made_with.get("eos_token", ""),
        "text_format": PACKING_FORMAT if "text_format" in about else OLD_TEXT_FORMAT,
        **{name: about[name] for name in ("records", "chat_template") if name in about},
    }
    return settings, about.get("vocab_size", 0)
