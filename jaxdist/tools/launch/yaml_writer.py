"""Manifests as YAML that every reader takes for the same values, with comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]  # it has no annotations

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]+")
"""What may stand without quotes: readers of YAML 1.1 and 1.2 disagree about 1e-4, y and 0o17."""


_LINE = re.compile(r"( *)(?:- )?(?:([\w.-]+):)?.*")
"""The indent of a line, and its key."""


class BlockText(str):
    """A text of several lines that is written as it is, for people to read."""

    __slots__ = ()


class _Writer(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # anchors are for machines
        return True


def _write_text(writer: Any, text: str) -> Any:
    style = None if _PLAIN.fullmatch(text) else '"'
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _write_block(writer: Any, text: str) -> Any:
    return writer.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Writer.add_representer(str, _write_text)
_Writer.add_representer(BlockText, _write_block)


def write_yaml(document: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """One document, its keys in the order given.

    Args:
        document: plain values only: mappings, lists, texts, numbers and switches.
        comments: key -> why it is there, written above the first place where the key stands.
    """
    text: str = yaml.dump(
        dict(document),
        Dumper=_Writer,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=False,
        width=float("inf"),  # a text on several lines could look like a key
    )
    waiting = dict(comments or {})
    lines: list[str] = []
    for line in text.removesuffix("\n").split("\n"):
        found = _LINE.fullmatch(line)
        indent, key = found.groups() if found else ("", "")
        for comment in waiting.pop(key or "", "").splitlines():
            lines.append(f"{indent}# {comment}")
        lines.append(line)
    return "\n".join(lines) + "\n"
