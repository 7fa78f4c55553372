"""Open sources as datasets with an identity for resuming: random access, or a user's stream."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np

from jaxdist.data.best_fit import count_long
from jaxdist.data.chat import LEARNED, SINGLE, JinjaTemplate
from jaxdist.data.config import PACKING_FORMAT, DataConfig, is_token_folder
from jaxdist.data.corpus import Corpus
from jaxdist.data.custom import CustomRows, is_custom, open_custom
from jaxdist.data.documents import is_text
from jaxdist.data.encoding import Encoder, make_encoder
from jaxdist.data.files import find_files
from jaxdist.data.hub_sets import hub_files, is_hub_set
from jaxdist.data.hub_stream import StreamedPart, StreamOrder
from jaxdist.data.images import NUM_CLASSES, is_cifar, open_cifar
from jaxdist.data.order import MixtureStage, Order
from jaxdist.data.packing import (
    Fields,
    Fitted,
    Part,
    Rows,
    Spans,
    gather_rows,
    split_text,
    text_fields,
)
from jaxdist.data.record_rows import row_kind, split_records
from jaxdist.data.stream import StreamDataset, open_stream
from jaxdist.data.token_files import open_corpus, saved_arrow_files, select_token_files
from jaxdist.data.tokenizer import OLD_TEXT_FORMAT, Tokenizer, load_tokenizer
from jaxdist.runtime.formatting.numbers import in_si
from jaxdist.settings import ConfigError, problems_of

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dataset:
    """Rows of one epoch in storage order, by random access.

    Attributes:
        parts: one per source.
        names: of each part, the source (training) or its set of `data.eval_sources` ("" = none);
            () = none.
        weights: share of each part in training; empty = in proportion to size.
        stages: mixtures that replace `weights`; () = none.
        vocab_size: number of tokens or image classes; for custom rows, the largest sampled id + 1.
        identity: JSON of `Part.fingerprint` of all parts and further facts that select rows.
        rows_per_example: adjacent rows that stay together in every order.
    """

    kind: Literal["text", "images"]
    parts: tuple[Part, ...]
    names: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    stages: tuple[MixtureStage, ...] = ()
    vocab_size: int
    tokenizer: Tokenizer | None = None
    identity: dict[str, Any]
    rows_per_example: int = 1

    @property
    def num_rows(self) -> int:
        """Number of rows of all parts; of streamed parts an upper bound."""
        return sum(part.num_rows for part in self.parts)

    @property
    def fields(self) -> Fields:
        """Name -> (shape of one row, dtype), see `Batch`."""
        return self.parts[0].fields

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of `identity`."""
        return _digest(self.identity)

    def fingerprint_at(self, sample: int) -> str:
        """Return the fingerprint without the stages of the mixture that begin after `sample`."""
        if not self.stages:
            return self.fingerprint
        return _digest(_identity_until(self.identity, sample + 1))

    def continues(self, identity: dict[str, Any], sample: int) -> bool:
        """Return whether all samples before `sample` are those of the data with this identity."""
        now, then = (_identity_until(one, sample) for one in (self.identity, identity))
        return _digest(now) == _digest(then)

    def rows(self, indices: np.ndarray, spans: Spans | None = None) -> Rows:
        """Return rows of `indices`, int64 [n] below num_rows, as `Part.rows`: name -> [n, ...]."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_rows):
            raise IndexError(f"row {indices.min()}..{indices.max()} of {self.num_rows}")
        if len(self.parts) == 1:
            return self.parts[0].rows(indices, spans)
        part_of, offsets = self.part_of(indices)
        return gather_rows(part_of, lambda part, of: self.parts[part].rows(offsets[of], spans))

    def part_of(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return part, and row number in it, of each of `indices` int64 [n]; int64 [n] each."""
        starts = np.cumsum([0] + [part.num_rows for part in self.parts])
        part_of = np.searchsorted(starts, indices, side="right") - 1
        return part_of, indices - starts[part_of]

    def sets(self) -> dict[str, Dataset]:
        """Return the evaluation sets by name, in the order of their first part."""
        parts: dict[str, list[Part]] = {}
        for name, part in zip(self.names or ("",) * len(self.parts), self.parts, strict=True):
            parts.setdefault(name, []).append(part)
        return {
            name: dataclasses.replace(self, parts=tuple(some), names=())
            for name, some in parts.items()
        }

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Number of UTF-8 bytes of each token, float32 [vocab]; None if unknown."""
        return None if self._is_custom or self.tokenizer is None else self.tokenizer.token_bytes

    @property
    def _is_custom(self) -> bool:
        return any(isinstance(part, CustomRows) for part in self.parts)

    def describe(self) -> str:
        """Return one line for the log: rows, size, tokenizer, fingerprint."""
        words = [f"{self.kind}, {self.num_rows:,} rows"]
        if self.streams:
            shards = sum(part.num_shards for part in self.streams.values())
            words = [f"{self.kind}, streamed from {shards:,} shards"]
        elif self.kind == "text":
            seq_len = self.fields["tokens"][0][0]
            words.append(f"of {seq_len} tokens ({in_si(self.num_rows * seq_len)} an epoch)")
        extra = [] if self._is_custom else [f"vocabulary {self.vocab_size:,}"]
        if self.tokenizer is not None:
            extra.append(f"tokenizer {self.tokenizer.name}")
        if "packing" in self.identity:
            extra.append(f"packing {self.identity['packing']}")
        if self.stages:
            extra.append(f"{len(self.stages)} mixtures")
        return ", ".join([" ".join(words), *extra, f"fingerprint {self.fingerprint[:8]}"])

    @property
    def streams(self) -> dict[int, StreamedPart]:
        """The streamed parts by index in `parts`."""
        return {n: part for n, part in enumerate(self.parts) if isinstance(part, StreamedPart)}

    def sample_row(self) -> Rows:
        """Return the first row; of a stream, that of a shard which is on disk."""
        return self[self.streams[0].row_at_hand() if 0 in self.streams else 0]

    def order(self, seed: int, *, ahead: bool = False) -> Order:
        """Return the order of training; with `ahead`, its use prepares shards of streamed parts."""
        sizes = [part.num_rows for part in self.parts]
        about = (sizes, self.weights, seed, self.rows_per_example, self.stages)
        return StreamOrder(self.streams, *about, ahead=ahead) if self.streams else Order(*about)

    def in_examples(self, rows_per_example: int) -> Dataset:
        """Return this dataset with orders that keep each group of adjacent rows together."""
        if any(part.num_rows % rows_per_example for part in self.parts):
            sizes = ", ".join(str(part.num_rows) for part in self.parts)
            raise ConfigError(
                f"the data has {sizes} rows by source: an example of the objective is "
                f"{rows_per_example} adjacent rows. Use a multiple of {rows_per_example} rows."
            )
        return dataclasses.replace(self, rows_per_example=rows_per_example)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Rows:
        return {name: values[0] for name, values in self.rows(np.array([index])).items()}


def _digest(identity: dict[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _with_stages(identity: dict[str, Any], stages: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return an identity with these stages, or weights if a single one uses the first parts."""
    used = 1 + max(part for _, parts, _ in stages for part in parts)
    identity = {**identity, "parts": identity["parts"][:used], "weights": []}
    identity.pop("stages", None)
    _, parts, weights = stages[0]
    if len(stages) == 1 and list(parts) == list(range(used)):
        return {**identity, "weights": list(weights)}
    return {**identity, "stages": [[n, list(parts), list(w)] for n, parts, w in stages]}


def _identity_until(identity: dict[str, Any], sample: int) -> dict[str, Any]:
    if "stages" not in identity:
        return identity
    first, *others = identity["stages"]
    return _with_stages(identity, [first, *(stage for stage in others if stage[0] < sample)])


TrainData: TypeAlias = Dataset | StreamDataset
"""Training data of a run; evaluation needs random access."""


def open_datasets(
    config: DataConfig,
    *,
    seq_len: int,
    seed: int = 0,
    python_source: Any = None,
    samples_before: Callable[[int], int] | None = None,
    num_labels: int = 0,
) -> tuple[TrainData, Dataset | None]:
    """Return training data, and evaluation data or None; raises `ConfigError`.

    `num_labels` is that of the model, whose score head reads rows of complete records.
    `samples_before` converts the steps of mixtures to samples. `seed` is passed to a user's
    function; rows of files do not depend on it. `python_source` replaces that function.
    """
    if problems := problems_of(config, "data"):
        raise ConfigError(problems)
    if any(is_custom(source) for source in config.sources):
        return _open_custom(config, seq_len, seed, python_source)
    images = [is_cifar(source) for source in config.sources]
    if any(images) and not all(images):
        raise ConfigError(
            f"data.sources={config.sources} mixes CIFAR-10 with text. Use sources of one kind."
        )
    opened = _open_images(config) if all(images) else _open_text(config, seq_len, num_labels)
    train, held_out = opened
    if not config.stages:
        return train, held_out
    if samples_before is None:
        raise ValueError("stages in data.mixture_weights need samples_before to open the data")
    stages = tuple(
        MixtureStage(samples_before(step), parts, weights) for step, parts, weights in config.stages
    )
    identity = _with_stages(train.identity, stages)
    return dataclasses.replace(train, stages=stages, weights=(), identity=identity), held_out


def _open_text(config: DataConfig, seq_len: int, num_labels: int) -> tuple[Dataset, Dataset | None]:
    if seq_len < 1:
        raise ConfigError(f"seq_len={seq_len} is below 1: a row needs a token. Use 64 or more.")
    encoder = make_encoder(
        load_tokenizer(config.tokenizer_name, config.eos_token, config.text_format),
        records=config.records,
        text_field=config.text_field,
        chat_template=config.chat_template,
    )
    held = 0.0 if config.eval_sources else config.eval_fraction
    streamed = [config.streaming and is_hub_set(source) for source in config.sources]
    stored = [s for s, is_one in zip(config.sources, streamed, strict=True) if not is_one]
    sources = [*stored, *(source for _, source in config.eval_sets)]
    texts = _text_sources(config, sources)
    plain = make_encoder(encoder.tokenizer, text_field=config.text_field)
    corpora = [open_corpus(x, plain if x in texts else encoder) for x in sources]
    _check_tokenizers(encoder.tokenizer, sources, corpora)
    _warn_of_old_rules(config, encoder, sources, corpora)
    packing, split = _splitter(config, corpora, seq_len, num_labels)
    train: list[Part] = []
    rest: list[Part] = []
    opened, others = iter(corpora[: len(stored)]), corpora[len(stored) :]
    for source, is_streamed in zip(config.sources, streamed, strict=True):
        if is_streamed:
            stream = StreamedPart(
                source,
                hub_files(source),
                encoder,
                split,
                held=held,
                buffer_shards=config.streaming_buffer,
                fields=text_fields(seq_len, packed=packing != "stream"),
                label=f"{packing}-{seq_len}-{config.long_records}-{config.text_format}",
            )
            train.append(stream)
            rest += stream.held_out
            continue
        corpus = next(opened)
        rows, held_rows = split(corpus, held)
        train.append(_with_rows(rows, "data.sources", source, corpus, seq_len))
        if held_rows is not None:
            rest.append(_with_rows(held_rows, "held-out part of", source, corpus, seq_len, held))
    for (_, source), corpus in zip(config.eval_sets, others, strict=True):
        rows, _ = split(corpus, 0.0)
        rest.append(_with_rows(rows, "data.eval_sources", source, corpus, seq_len))
    used = corpora[0].tokenizer if stored else encoder.tokenizer
    about = {"seq_len": seq_len, "packing": packing, "tokenizer": used.fingerprint}
    dataset = functools.partial(
        _dataset, "text", vocab_size=used.vocab_size, tokenizer=used, about=about
    )
    held_out = dataset(rest, names=[name for name, _ in config.eval_sets]) if rest else None
    return dataset(train, config.first_weights, names=config.sources), held_out


def _dataset(
    kind: Literal["text", "images"],
    parts: Sequence[Part],
    weights: Sequence[float] = (),
    *,
    names: Sequence[str] = (),
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> Dataset:
    """Combine parts into one dataset; `about` adds other facts that identify its rows."""
    prints = {"parts": [part.fingerprint for part in parts], "weights": list(weights)}
    return Dataset(
        kind=kind,
        parts=tuple(parts),
        names=tuple(names),
        weights=tuple(weights),
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        identity={"kind": kind, **about, **prints},
    )


_Split: TypeAlias = Callable[[Corpus, float], tuple[Part, Part | None]]
"""(corpus, held-out fraction) -> training rows, and held-out rows or None."""


def _splitter(
    config: DataConfig, corpora: list[Corpus], seq_len: int, num_labels: int
) -> tuple[str, _Split]:
    long_records = config.long_records
    problems = [
        f"{str(corpus.folder)!r} has tokens of {corpus.records} records, and data.records is "
        f"{config.records}. Set data.records={corpus.records}, or name other data."
        for corpus in corpora
        if len(kinds := {corpus.records, config.records}) == 2
        and (kinds & {*SINGLE} or kinds <= {*LEARNED})
    ]
    if problems:
        raise ConfigError(problems)
    if config.has_single_rows:
        kind = row_kind(config.records, num_labels)
        return config.records, lambda corpus, held: split_records(
            corpus,
            seq_len=seq_len,
            held=held,
            kind=kind,
            num_labels=num_labels,
            long_records=long_records,
        )
    packing = _packing(config, corpora, seq_len)
    drop = long_records == "drop"
    rows = lambda corpus, held: split_text(
        corpus,
        packing,
        seq_len,
        held,
        drop_long=drop and corpus.weighted,
        one_by_one=config.text_format < PACKING_FORMAT,
    )
    return packing, rows


def _packing(
    config: DataConfig, corpora: list[Corpus], seq_len: int
) -> Literal["stream", "documents", "best_fit"]:
    weighted = [corpus for corpus in corpora if corpus.weighted]
    if weighted and config.packing == "stream":
        raise ConfigError(
            "data.packing=stream with conversations or completions: they would attend to "
            "each other. Use best_fit or documents."
        )
    counted = [count_long(corpus, seq_len) for corpus in weighted]
    long, total = sum(n for n, _ in counted), sum(corpus.num_documents for corpus in weighted)
    if long and config.long_records == "reject":
        raise ConfigError(
            f"{long} of {total} records are longer than train.seq_len={seq_len} "
            f"(the longest has {max(n for _, n in counted)} tokens). Raise it, or set "
            "data.long_records to cut or drop."
        )
    if long:
        fate = "cut: tokens after the cut are learned without the context before it"
        log.info(
            "%d of %d records are longer than train.seq_len=%d and are %s",
            long, total, seq_len,
            "dropped" if config.long_records == "drop" else fate,
        )  # fmt: skip
    if config.packing != "auto":
        return config.packing
    return "best_fit" if weighted or config.records != "text" else "stream"


def _text_sources(config: DataConfig, sources: list[str]) -> set[str]:
    """Return the sources of plain text (`is_text`) among sources of records."""
    if config.records == "text" or config.has_single_rows:
        return set()

    def is_plain(source: str) -> bool:
        if is_token_folder(source) or saved_arrow_files(source):
            return False
        files = find_files(source)
        return not select_token_files(files, source) and is_text(files[0], config.text_field)

    texts = set(filter(is_plain, sources))
    return set() if texts >= {*config.sources} else texts  # without records, opening rejects them


def _check_tokenizers(tokenizer: Tokenizer, sources: list[str], corpora: list[Corpus]) -> None:
    problems = [
        f"{source!r} was made with tokenizer {made.name!r} (end token {made.end_id}), and "
        f"data.tokenizer is {tokenizer.name!r} (end token {tokenizer.end_id}): token numbers or "
        f"ends of documents differ. Set data.tokenizer={made.name!r} and its data.eos_token, or "
        "leave both out."
        for source, corpus in zip(sources, corpora, strict=True)
        if (made := corpus.tokenizer).fingerprint != tokenizer.fingerprint
    ]
    if problems:
        raise ConfigError(problems)


def _warn_of_old_rules(
    config: DataConfig, encoder: Encoder, sources: list[str], corpora: list[Corpus]
) -> None:
    new = load_tokenizer(config.tokenizer_name, config.eos_token)
    for source, corpus in zip(sources, corpora, strict=True):
        used, old = corpus.tokenizer, []
        if used.begin_ids != new.begin_ids:
            old.append(f"do not begin with token {' '.join(map(str, new.begin_ids))}")
        if corpus.weighted and used.marks_start != new.marks_start:
            old.append("have an extra space before each answer")
        if isinstance(encoder.template, JinjaTemplate) and used.text_format == OLD_TEXT_FORMAT:
            old.append("may have no loss on the template's text before an answer (<think>)")
        if old:
            log.warning(
                "the texts of source %s %s, unlike the tokenizer's files specify, because they "
                "were tokenized with data.text_format=%d. To change that, use a new run or token "
                "folder",
                source, " and ".join(old), OLD_TEXT_FORMAT,
            )  # fmt: skip


def _with_rows(
    part: Part, role: str, source: str, corpus: Corpus, seq_len: int, held: float | None = None
) -> Part:
    if part.num_rows:
        return part
    needs = "Use a smaller seq_len or more text."
    if held is not None:
        needs = f"Raise data.eval_fraction={held}, set it to 0, or use a smaller seq_len."
    if corpus.weighted and isinstance(part, Fitted):
        needs = "All are longer than a row: raise seq_len, or set data.long_records=cut."
    raise ConfigError(
        f"{role} {source!r} holds no row of seq_len={seq_len}: the source has "
        f"{corpus.num_tokens} tokens in {corpus.num_documents} documents. {needs}"
    )


def _open_images(config: DataConfig) -> tuple[Dataset, Dataset | None]:
    both = [open_cifar(folder, config.image_scaling) for folder in config.sources]
    held = [test for _, test in both] if config.eval_fraction else []
    if config.eval_sources:
        named = [source for _, source in config.eval_sets]
        if not all(map(is_cifar, named)):
            raise ConfigError(
                f"data.eval_sources={config.eval_sources} are not all CIFAR-10 folders, as "
                "data.sources are. Name folders, or leave eval_sources empty to use the test "
                "files."
            )
        held = [open_cifar(folder, config.image_scaling)[1] for folder in named]

    dataset = functools.partial(_dataset, "images", vocab_size=NUM_CLASSES)
    train = dataset([images for images, _ in both], config.first_weights, names=config.sources)
    names = [name for name, _ in config.eval_sets]
    return train, dataset(held, names=names) if held else None


def _open_custom(
    config: DataConfig, seq_len: int, seed: int, python_source: Any
) -> tuple[TrainData, Dataset | None]:
    source = config.sources[0]
    if len(config.sources) > 1 or config.eval_sources:
        raise ConfigError(
            f"data.sources={config.sources}, data.eval_sources={config.eval_sources}: a function "
            "must be the only source. Mix sources inside the function, and return evaluation rows."
        )
    opened, held_rows, divides = open_custom(
        source, seq_len=seq_len, seed=seed, python_source=python_source
    )
    tokenizer = load_tokenizer(config.tokenizer_name, config.eos_token, config.text_format)

    def dataset(part: CustomRows) -> Dataset:
        used = tokenizer if part.kind == "text" else None
        about, size = {"seq_len": seq_len}, part.vocab_size
        return _dataset(part.kind, [part], vocab_size=size, tokenizer=used, about=about)

    held = None if held_rows is None else dataset(held_rows)
    if isinstance(opened, CustomRows):
        return dataset(opened), held
    stream = open_stream(
        source,
        opened,
        divides=divides,
        tokenizer=tokenizer,
        seq_len=seq_len,
    )
    return stream, held
