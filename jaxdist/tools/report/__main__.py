"""`python -m jaxdist.report RUN ...`: compare runs as text, JSON and a page of curves.

Exit code 2 if a run is missing or damaged.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

from jaxdist.run.metrics_log import encode
from jaxdist.runtime import run_command
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError, read_settings, setting
from jaxdist.tools.report.page import html_page
from jaxdist.tools.report.runs import read_runs
from jaxdist.tools.report.table import differences, text_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The runs to compare and the form of the output."""

    run: list[str] = setting([], "run directories", required=True)
    json: bool = setting(False, "print JSON instead of the table")
    html: str = setting(
        "", "HTML file to write with the curves of the runs; empty = none; needs matplotlib"
    )
    log_y: bool = setting(False, "draw losses, gradient norm and learning rate on logarithmic axes")
    x: Literal["step", "tokens"] = setting(
        "step",
        "x axis of the curves; tokens (or images) compares runs of different batch sizes",
    )


def main(argv: list[str] | None = None) -> int:
    """Print a comparison of runs, and write a page with `--html`; return 0."""
    config = read_settings(
        ReportConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.report",
        summary="Compare runs: outcome, speed, cost, and settings that differ.",
        positional=("run",),
    )
    runs = read_runs(config.run)
    if config.html:
        page = html_page(runs, x=config.x, log_y=config.log_y)
        try:
            locate(config.html).write(page)
        except OSError as error:
            raise ConfigError(
                f"--html {config.html} cannot be written ({error.strerror}). "
                "Name a file in a directory."
            ) from error
    if config.json:
        record = {"runs": [run.record() for run in runs], "differences": differences(runs)}
        text = encode(record, indent=2)
    else:
        text = text_table(runs)
        if config.html:
            text += f"\n\ncurves: {config.html}"
    print(text)
    return 0


if __name__ == "__main__":
    run_command(main)
