"""`python -m jaxdist.generate RUN`: generate text from a checkpoint, or talk to it with `--chat`.

Prompts of any lengths are continued together; a single one is printed as it grows. It runs on any
legal mesh, whatever mesh the run was trained on.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxdist.run.text_settings import TextSettings
from jaxdist.runtime import run_command
from jaxdist.runtime.new_output import new_output
from jaxdist.runtime.storage import file_system_problem, read_url
from jaxdist.settings import ConfigError, setting

if TYPE_CHECKING:
    import numpy as np

    from jaxdist.run.text_generation import Writer


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig(TextSettings):
    """What to continue, how, and where."""

    run: str = setting("", "run directory, or one of its checkpoints", required=True)
    prompt: tuple[str, ...] = setting(
        (),
        "text to continue, or with --chat what the user says; may be given several times; without "
        "any, text begins with a new line and a chat reads its turns from the terminal",
    )
    prompt_file: str = setting(
        "",
        'file with one prompt per line, or .jsonl with {"prompt": "..."} or, with --chat, '
        '{"messages": [{"role": "user", "content": "..."}, ...]} per line; instead of --prompt',
    )
    out: str = setting(
        "",
        "new .jsonl file for the answers: what was asked, what was answered, and whether the text "
        "ended (stop) or max_new_tokens did (length); empty = print them",
    )
    chat: bool = setting(
        False,
        "prompts are what a user says, written with the chat template of the run's data settings, "
        "and the model answers",
    )
    system: str = setting("", "system message that each conversation begins with; needs --chat")
    batch_size: int = setting(32, "prompts continued together", ge=1)
    step: int = setting(-1, "step of the checkpoint; -1 = the newest valid one", ge=-1)
    weights: Literal["auto", "ema", "raw"] = setting(
        "auto",
        "ema = the moving average of the weights, raw = as trained, auto = the average where the "
        "run keeps one",
    )
    mesh: str = setting("auto", "mesh axes, e.g. tp=2; auto = one device")
    simulate: int = setting(
        0, "simulated CPU devices; 0 = the machine's own devices", ge=0, le=4096
    )

    def problems(self) -> list[str]:
        """Violated rules beyond the bounds of each setting."""
        problems = []
        if self.prompt and self.prompt_file:
            problems.append(
                f"prompt and prompt_file={self.prompt_file!r} are both given: one of them holds "
                "the prompts. Leave one out."
            )
        if self.prompt_file and (
            problem := file_system_problem(self.prompt_file, "prompts are read")
        ):
            problems.append(f"prompt_file={problem}")
        elif self.prompt_file and not Path(self.prompt_file).is_file():
            problems.append(f"prompt_file={self.prompt_file!r} is no file. Name a text file.")
        if self.system and not self.chat:
            problems.append("system without chat: text has no system message. Add --chat.")
        if self.out and (problem := file_system_problem(self.out, "answers are written")):
            problems.append(f"out={problem}")
        elif self.out and Path(self.out).exists():
            problems.append(f"out={self.out!r} exists and is never overwritten. Name another.")
        if self.out and self.is_interactive:
            problems.append("out without prompts: a talk is not kept. Give --prompt-file.")
        return problems

    @property
    def is_interactive(self) -> bool:
        """Whether a person talks to the model."""
        return self.chat and not self.prompt and not self.prompt_file

    def requests(self) -> Iterator[dict[str, Any]]:
        """What to continue or answer: {"prompt"}, or {"messages"} of a chat."""
        from jaxdist.data.chat import BadRecord, checked_messages
        from jaxdist.data.documents import read_pieces, read_records
        from jaxdist.data.files import kind_of

        start = [{"role": "system", "content": self.system}] if self.system else []
        prompts = list(self.prompt) or ["\n"]
        records = [({"prompt": text}, f"prompt {n}") for n, text in enumerate(prompts, 1)]
        if kind_of(Path(self.prompt_file)) in ("lines", "parquet"):
            read = read_records(Path(self.prompt_file), ["prompt", "messages"])
            records = [(record.value, record.place) for record in read]
        elif self.prompt_file:
            text = "".join(piece.text for piece in read_pieces(Path(self.prompt_file), "prompt"))
            lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
            records = [({"prompt": text}, f"prompt {n}") for n, text in enumerate(lines, 1)]
        for record, place in records:
            try:
                if self.chat and "messages" in record:
                    messages = checked_messages(record, answered=False)
                    yield {**record, "messages": [*start, *messages]}
                elif isinstance(record.get("prompt"), str):
                    said = {"role": "user", "content": record["prompt"]}
                    yield {"messages": [*start, said]} if self.chat else record
                else:
                    raise BadRecord("has no text 'prompt'. With --chat 'messages' are read too.")
            except BadRecord as error:
                raise ConfigError([f"{place} {error}"]) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Load a checkpoint and write continuations to stdout or a file."""
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
        raise ConfigError("there is no prompt. Give --prompt TEXT, or a prompt_file with lines.")
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
    """One prompt streams as it grows; several are printed one after another.

    `prompts` are token ids, int [length] each.
    """
    asked = [
        f"> {request['messages'][-1]['content']}\n" if "messages" in request else request["prompt"]
        for request in requests
    ]
    if len(prompts) == 1:
        print("" if "messages" in requests[0] else asked[0], end="", flush=True)
        writer.write(prompts, stream=True)
        return
    for first in range(0, len(prompts), batch_size):
        answers = writer.write(prompts[first : first + batch_size], stream=False)
        for number, (text, _) in enumerate(answers, first):
            print(f"--- {number + 1} ---\n{asked[number]}{text}\n")


def _write_file(
    writer: Writer,
    requests: list[dict[str, Any]],
    prompts: list[np.ndarray],
    config: GenerateConfig,
) -> None:
    """A line of JSON per request, in the form that `data.records` trains on.

    `prompts` are token ids, int [length] each.
    """
    with new_output(Path(config.out)) as partial, partial.open("x") as file:
        for first in range(0, len(prompts), config.batch_size):
            asked = requests[first : first + config.batch_size]
            answers = writer.write(prompts[first : first + config.batch_size], stream=False)
            for request, (text, why) in zip(asked, answers, strict=True):
                record = {**request, "finish_reason": why}
                if "messages" in request:
                    answer = {"role": "assistant", "content": text}
                    record["messages"] = [*request["messages"], answer]
                else:
                    record["completion"] = text
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            print(f"{first + len(asked)} of {len(prompts)} answers", file=sys.stderr)
    print(f"{len(prompts)} answers: {config.out}")


def _converse(writer: Writer, config: GenerateConfig) -> None:
    """Lines of stdin are turns of one conversation, until it ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("each line is a turn; /new begins again, Ctrl-D ends", file=sys.stderr)
    start = [{"role": "system", "content": config.system}] if config.system else []
    messages = start
    while True:
        try:
            said = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if said == "/new":
            messages = start
        if not said or said == "/new":
            continue
        asked = [*messages, {"role": "user", "content": said}]
        try:
            prompts = writer.encode([{"messages": asked}])
        except ConfigError as error:
            print(f"{error} Or begin again with /new.", file=sys.stderr)
            continue
        ((answer, _),) = writer.write(prompts, stream=True)
        messages = [*asked, {"role": "assistant", "content": answer}]


if __name__ == "__main__":
    run_command(main)
