"""`python -m jaxdist.convert VERB …`: inspect, verify, compare and rewrite checkpoints.

    inspect RUN              tree, shapes, dtypes, sizes, step, mesh and settings
    verify RUN               check every file of every checkpoint; --arrays=true the arrays too
    diff A B                 list the arrays that differ, and by how much
    reshard SRC DST          rewrite for another mesh or dtype; needs no GPU
    consolidate SRC OUT      safetensors, one file or shards with an index
    from-hf DIR OUT          a Hugging Face model (DIR or ORG/NAME on the hub) as a run directory
    to-hf RUN OUT            a run's weights as a Hugging Face model
    merge RUN OUT            a run's adapters and frozen weights as a run with complete weights
    from-peft DIR OUT        adapters of PEFT as a run directory
    to-peft RUN OUT          a run's adapters as a PEFT directory
    add-tokens DIR OUT       a Hugging Face model with new special tokens

RUN, SRC, A and B are a run directory, its `checkpoints`, or one checkpoint. Of several checkpoints
the newest valid one is the default (verify: all). See `python -m jaxdist.convert VERB --help`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import sys
from collections.abc import Sequence

from jaxdist.runtime import run_command
from jaxdist.settings import ConfigError, read_settings

VERBS = (
    "inspect",
    "verify",
    "diff",
    "reshard",
    "consolidate",
    "from-hf",
    "to-hf",
    "merge",
    "from-peft",
    "to-peft",
    "add-tokens",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that `argv` names; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(__doc__)
        return 0
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(VERBS)}."
        raise ConfigError(f"jaxdist.convert {words[0]}: unknown verb. {fix}")
    verb = importlib.import_module(f"jaxdist.tools.convert.{words[0].replace('-', '_')}")
    config = read_settings(
        verb.Config,
        words[1:],
        command=f"jaxdist.convert {words[0]}",
        summary=verb.__doc__ or "",
        positional=[f.name for f in dataclasses.fields(verb.Config) if f.metadata["required"]],
    )
    return int(verb.run(config))


if __name__ == "__main__":
    run_command(main)
