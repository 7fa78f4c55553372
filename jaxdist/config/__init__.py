"""Settings of a run: every room's dataclass in one table of contents, a TOML file, and flags.

    run            `RunConfig`, the settings of a training run, and the rules between rooms
    elastic        the same run on fewer devices than its mesh names
    command_line   a run's settings as commands are given them
    reading        defaults + file + flags -> one checked dataclass, every problem in one message
    sources        the TOML file and the flags, each value with its origin
    fields         what a tree of dataclasses offers, and how a value is read
    help           `--help`
    writing        settings as TOML that reads back equal

Importing this starts no device and imports neither flax nor orbax.
"""

from jaxdist.config.command_line import ALIASES, read_run, stored_run
from jaxdist.config.elastic import fit_devices, legal_sizes
from jaxdist.config.parser import headed, read_settings
from jaxdist.config.run_config import RunConfig
from jaxdist.config.toml_writer import to_table, write_toml

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
