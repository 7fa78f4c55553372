"""Pages of HTML that load nothing and run no script, readable in light and dark."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #8884; --soft: #667; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --soft: #9aa; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 960px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } pre { font-size: 12px; overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--faint);
         white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; color: var(--soft); }
.text { text-align: left; white-space: normal; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
svg .grid { stroke: var(--faint); } svg .limit { stroke: #d00; stroke-dasharray: 4 3; }
svg text.bad { fill: #d00; font-size: 15px; }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 4; }
.note, .legend { color: var(--soft); } .legend { margin: .2rem 0 0; }
.key { margin-right: 1.2em; display: inline-block; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
          margin-right: .4em; }
.verdict { font-size: 1.1rem; font-weight: 600; }
"""

escape = html.escape


def page(title: str, body: Sequence[str]) -> str:
    """A whole page: a title in plain text, and HTML part by part."""
    title = escape(title)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            *body,
            "</body></html>\n",
        ]
    )


def write(path: str, text: str) -> None:
    """Write a page to the file that `--html` names.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        locate(Path(path)).write(text)
    except OSError as error:
        raise ConfigError(
            f"--html {path} cannot be written ({error.strerror}). Name a file in a directory."
        ) from error


def table(head: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """A table whose first column holds labels; cells are plain text.

    Colours, where given, are those of the columns after the first, shown next to their names.
    Columns of numbers stand to the right, those with a sentence to the left.
    """
    keys = ["", *(swatch(colour) for colour in colours)] if colours else [""] * len(head)
    kinds = ["", *(_kind(cells) for cells in list(zip(*rows, strict=True))[1:])]
    kinds += [""] * (len(head) - len(kinds))  # of a table without rows
    names = "".join(
        f"<th{kind}>{key}{escape(name)}</th>"
        for kind, key, name in zip(kinds, keys, head, strict=True)
    )
    body = [
        f"<tr><th>{escape(label)}</th>"
        + "".join(
            f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds[1:], cells, strict=True)
        )
        + "</tr>"
        for label, *cells in rows
    ]
    return "\n".join(['<div class="scroll"><table>', f"<tr>{names}</tr>", *body, "</table></div>"])


def _kind(cells: Sequence[str]) -> str:
    """The class of a column."""
    return ' class="text"' if any(len(text) > 40 for text in cells) else ""


def swatch(colour: str) -> str:
    """A small square of a colour."""
    return f'<span class="swatch" style="background:{colour}"></span>'
