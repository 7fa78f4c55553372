"""`python -m jaxdist.generate RUN`: generate text from a checkpoint, or chat with it (`--chat`).

Prompts of different lengths are batched; the text for a single prompt is streamed unless it goes to
a file. It runs on any legal mesh, independent of the mesh of the training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.run.command_settings import CheckpointSettings, TextSettings
from jaxdist.runtime import run_command
from jaxdist.runtime.new_output import new_output
from jaxdist.runtime.storage import file_system_problem, read_url
from jaxdist.settings import ConfigError, setting

if TYPE_CHECKING:
    import numpy as np

    from jaxdist.run.text_generation import Writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(CheckpointSettings, TextSettings):
    """Checkpoint, prompts, output and devices."""

    prompt: tuple[str, ...] = setting(
        (),
        "text to continue, or with --chat a user message; may be repeated; without any prompt, a "
        "line break is continued, and a chat reads its turns from standard input",
    )
    prompt_file: str = setting(
        "",
        'file with one prompt per line, or .jsonl or .parquet with {"prompt": "..."} or, with '
        '--chat, {"messages": [{"role": "user", "content": "..."}, ...]} per row; instead of '
        "--prompt",
    )
    out: str = setting(
        "",
        "new .jsonl file for prompts, answers and finish reasons: stop = the text ended, length = "
        "max_new_tokens reached; empty = print the answers",
    )
    chat: bool = setting(
        False,
        "prompts are user messages (or conversations of a file), in the chat template of the run's "
        "data settings, and the model answers",
    )
    system: str = setting("", "system message at the start of each conversation; needs --chat")
    batch_size: int = setting(32, "number of prompts per batch", ge=1)

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        problems = []
        if self.prompt and self.prompt_file:
            problems.append(
                f"prompt and prompt_file={self.prompt_file!r} are both set. Leave one out."
            )
        if self.prompt_file and (
            problem := file_system_problem(self.prompt_file, "prompts are read")
        ):
            problems.append(f"prompt_file={problem}")
        elif self.prompt_file and not Path(self.prompt_file).is_file():
            problems.append(f"prompt_file={self.prompt_file!r} is not a file. Name a text file.")
        if self.system and not self.chat:
            problems.append("system needs --chat. Add --chat, or leave --system out.")
        if self.out and (problem := file_system_problem(self.out, "answers are written")):
            problems.append(f"out={problem}")
        elif self.out and Path(self.out).exists():
            problems.append(f"out={self.out!r} exists and is not overwritten. Name another file.")
        if self.out and self.is_interactive:
            problems.append("out needs prompts: a terminal chat is not saved. Use --prompt-file.")
        return problems

    @property
    def is_interactive(self) -> bool:
        """Return whether a chat reads its turns from standard input."""
        return self.chat and not self.prompt and not self.prompt_file

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield a record for each prompt, with "prompt", or with "messages" for a chat."""
        from jaxdist.data.chat import BadRecord, checked_messages
        from jaxdist.data.documents import read_pieces, read_records
        from jaxdist.data.files import kind_of

        start = [{"role": "system", "content": self.system}] if self.system else []
        records = [({"prompt": x}, f"prompt {n}") for n, x in enumerate(self.prompt or ["\n"], 1)]
        if kind_of(Path(self.prompt_file)) in ("lines", "parquet"):
            is_other = lambda name: name not in ("prompt", "messages")
            file = Path(self.prompt_file)
            records = [(one.value, one.source) for one in read_records(file, [], is_other)]
        elif self.prompt_file:
            text = "".join(piece.text for piece in read_pieces(Path(self.prompt_file), "prompt"))
            lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
            records = [({"prompt": text}, f"prompt {n}") for n, text in enumerate(lines, 1)]
        for record, origin in records:
            try:
                if self.chat and record.get("messages"):
                    messages = checked_messages(record, answered=False)
                    yield {**record, "messages": [*start, *messages]}
                elif isinstance(record.get("prompt"), str):
                    message = {"role": "user", "content": record["prompt"]}
                    yield {"messages": [*start, message]} if self.chat else record
                else:
                    raise BadRecord("has no text 'prompt' (--chat also accepts 'messages').")
            except BadRecord as error:
                raise ConfigError([f"{origin} {error}"]) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint, write generated text to stdout or a file, and return 0."""
    from jaxdist.settings import read_settings

    config = read_settings(
        GenerateConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.generate",
        summary=__doc__ or "",
        positional=("run",),
        read_url=read_url,
    )
    from jaxdist.run.text_generation import make_decoder, open_writer
    from jaxdist.run.trained_run import open_run

    step = None if config.step < 0 else config.step
    run = open_run(config.run, step=step, mesh=config.mesh, simulate=config.simulate)
    parts = run.parts_for()
    writer = open_writer(parts, config, chat=config.chat)
    requests = [] if config.is_interactive else list(config.requests())
    if not requests and not config.is_interactive:
        raise ConfigError("there is no prompt. Use --prompt TEXT, or a prompt_file with lines.")
    prompts = writer.encode(requests)
    weights = run.weights(step, config.weights)
    writer.decoder = make_decoder(parts, weights.params, config)
    of = "EMA weights of " if weights.kind == "ema" else ""
    where = f"mesh {parts.spec}, step plan {parts.plan.digest}"
    print(f"{of}checkpoint {weights.step} of {run.path}, {where}", file=sys.stderr)
    if config.is_interactive:
        _converse(writer, config)
    elif config.out:
        _write_file(writer, requests, prompts, config)
    else:
        _print(writer, requests, prompts, config.batch_size)
    return 0


def _print(
    writer: Writer, requests: list[dict[str, Any]], prompts: list[np.ndarray], batch_size: int
) -> None:
    """Stream the text of one prompt, or print the texts of several; token ids are int [length]."""
    headings = [
        f"> {request['messages'][-1]['content']}\n" if "messages" in request else request["prompt"]
        for request in requests
    ]
    if len(prompts) == 1:
        print("" if "messages" in requests[0] else headings[0], end="", flush=True)
        writer.write(prompts, stream=True)
        return
    for first in range(0, len(prompts), batch_size):
        answers = writer.write(prompts[first : first + batch_size], stream=False)
        for number, (text, _) in enumerate(answers, first):
            print(f"--- {number + 1} ---\n{headings[number]}{text}\n")


def _write_file(
    writer: Writer,
    requests: list[dict[str, Any]],
    prompts: list[np.ndarray],
    config: GenerateConfig,
) -> None:
    """Write a JSON line per request, as `data.records` reads them; token ids are int [length]."""
    with new_output(Path(config.out)) as partial, partial.open("x") as file:
        for first in range(0, len(prompts), config.batch_size):
            batch = requests[first : first + config.batch_size]
            answers = writer.write(prompts[first : first + config.batch_size], stream=False)
            for request, (text, why) in zip(batch, answers, strict=True):
                record = {**request, "finish_reason": why}
                if "messages" in request:
                    answer = {"role": "assistant", "content": text}
                    record["messages"] = [*request["messages"], answer]
                else:
                    record["completion"] = text
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{first + len(batch)} of {len(prompts)} answers", file=sys.stderr)
    print(f"{len(prompts)} answers: {config.out}")


def _converse(writer: Writer, config: GenerateConfig) -> None:
    """Read turns from stdin, one per line, and stream the answers."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("each line is a turn; /new restarts, Ctrl-D ends", file=sys.stderr)
    start = [{"role": "system", "content": config.system}] if config.system else []
    messages = start
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if line == "/new":
            messages = start
        if not line or line == "/new":
            continue
        turns = [*messages, {"role": "user", "content": line}]
        try:
            prompts = writer.encode([{"messages": turns}])
        except ConfigError as error:
            print(f"{error} Or restart with /new.", file=sys.stderr)
            continue
        ((answer, _),) = writer.write(prompts, stream=True)
        messages = [*turns, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    run_command(main)
