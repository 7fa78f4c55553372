"""`python -m jaxdist.report RUN [RUN ...]`: what runs came to, side by side, and their curves.

    runs    one run read from its directory: outcome, config, curves   (read_runs)
    table   the comparison as text                                      (differences, text_table)
    page    one HTML file that needs nothing else                       (html_page)

Reads only; touches no device. Exit code 2 when a run is missing or damaged.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from jaxdist.core.settings import ConfigError
from jaxdist.run.metrics_log import encode
from jaxdist.runtime.storage import locate
from jaxdist.tools.report.page import html_page
from jaxdist.tools.report.runs import read_runs
from jaxdist.tools.report.table import differences, text_table


def main(argv: list[str] | None = None) -> int:
    """Read the runs, print the comparison, write the page; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        runs = read_runs(arguments.run)
        if arguments.html is not None:
            _write_page(arguments.html, html_page(runs, x=arguments.x))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json:
        record = {"runs": [run.record() for run in runs], "differences": differences(runs)}
        text = encode(record, indent=2)
    else:
        text = text_table(runs)
        if arguments.html is not None:
            text += f"\n\ncurves: {arguments.html}"
    _print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxdist.report",
        description="Compare runs: outcome, speed, cost, and what differs in their configs.",
    )
    parser.add_argument("run", nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page with the curves of the runs"
    )
    parser.add_argument(
        "--x",
        choices=("step", "tokens"),
        default="step",
        help="what the curves run over; tokens (or images) compares runs of different batch size",
    )
    return parser


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `... | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_page(path: Path, page: str) -> None:
    try:
        locate(path).write(page)
    except OSError as error:
        raise ConfigError(
            [f"--html {path} cannot be written ({error.strerror}). Name a file in a directory."]
        ) from error
