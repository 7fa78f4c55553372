"""Print the settings reference, generated from the code.

python scripts/bench/settings_reference.py > docs/settings.md
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config.command_line import ALIASES
from jaxdist.config.run_config import RunConfig
from jaxdist.settings.schema import Field, default_text, flag_of, groups_of, kind_of_value


def reference() -> str:
    """Return docs/settings.md: every setting of a run with type, bounds, default and meaning."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Settings of a run"
    yield ""
    yield "For looking up a setting of a run; `--help` of a command prints the same."
    yield "Made by `python scripts/bench/settings_reference.py > docs/settings.md`; do not edit it."
    yield ""
    yield "A flag has dashes, a TOML key underscores: `--train.global-batch-size 64` is"
    yield "`global_batch_size = 64` under `[train]`. Flags win over the file, the file wins over"
    yield "the defaults. A list is `a,b,c` as a flag. Short flags: " + ", ".join(
        f"`{flag_of(short)}` for `{name}`" for short, name in ALIASES.items()
    )
    for heading, (doc, fields) in groups_of(RunConfig):
        yield ""
        yield f"## {heading or 'General'}"
        yield ""
        yield doc
        yield ""
        yield "| setting | takes | default | meaning |"
        yield "|---|---|---|---|"
        yield from map(_row, fields)


def _row(field: Field) -> str:
    takes = kind_of_value(field.type)
    if field.bounds is not None:
        takes += f", {field.bounds}"
    cells = (f"`{field.name}`", f"`{takes}`", f"`{default_text(field)}`", field.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
