"""The `jaxdist` program: `jaxdist train ...` is `python -m jaxdist.train ...`."""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "Train a model.",
    "evaluate": "Compute loss and perplexity, or accuracy, of a checkpoint.",
    "generate": "Generate text from a checkpoint, or chat with it (`--chat`).",
    "data": "Tokenize a corpus into memory-mapped shards.",
    "convert": "Inspect, verify, compare and rewrite checkpoints.",
    "verify": "Check that nothing trained was lost on the way to its use.",
    "plan": "Estimate if a run fits, on which mesh, how fast and at what price.",
    "audit": "Check that the train step has every reduction exactly once on a mesh.",
    "launch": "Start the processes of a job, watch them, and restart failures.",
    "sweep": "Train every combination of some settings.",
    "report": "Compare runs as text, JSON and a page of curves.",
    "compare": "Find the first difference between two runs that should be equal.",
    "doctor": "Check that this machine is ready for a long run, with fixes.",
}
"""Command -> its purpose, in the order of `jaxdist --help`."""

SUBCOMMANDS = {"data spike": "spike", "plan batch": "fit_batch"}
"""Subcommands in a module of their own, because they import higher folders than the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 2 for an unknown one. Most commands end the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(
            "usage: jaxdist COMMAND [--FLAG=VALUE ...]        (also: python -m jaxdist.COMMAND)\n"
        )
        for name, purpose in COMMANDS.items():
            print(f"  {name:<8}  {purpose}")
        print("\njaxdist COMMAND --help explains every setting of a command.")
        return 0
    if words[0] in ("-V", "--version", "version"):
        from jaxdist import __version__

        print(f"jaxdist {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fix = f"Did you mean jaxdist {near[0]}?" if near else f"Use one of {', '.join(COMMANDS)}."
        print(f"jaxdist {name}: unknown command. {fix}", file=sys.stderr)
        return 2
    own = SUBCOMMANDS.get(" ".join(words[:2]))
    sys.argv = [f"jaxdist {name}", *words[2 if own else 1 :]]
    runpy.run_module(f"jaxdist.{own or name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
