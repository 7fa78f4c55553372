"""Settings of a run: every room's dataclass in one table of contents, a TOML file, and flags.

    run       `RunConfig` and the rules between rooms
    reading   defaults + file + flags -> one checked dataclass, every problem in one message
    fields    what a tree of dataclasses offers, and how a value is read
    sources   the TOML file and the command line, each value with its origin
    help      `--help`
    writing   settings as TOML that reads back equal
    run       `RunConfig`, the settings of a training run, and the rules between rooms
    elastic   the same run on fewer devices than its mesh names

Importing this starts no device and imports neither flax nor orbax.
"""

from jaxdist.config.elastic import fit_devices, legal_sizes
from jaxdist.config.reading import headed, read_settings
from jaxdist.config.run import ALIASES, RunConfig, read_run, stored_run
from jaxdist.config.writing import to_table, write_toml

__all__ = [
    "ALIASES",
    "RunConfig",
    "fit_devices",
    "headed",
    "legal_sizes",
    "read_run",
    "read_settings",
    "stored_run",
    "to_table",
    "write_toml",
]
