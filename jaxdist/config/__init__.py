"""Settings of a run: every room's dataclass in one table of contents, a TOML file, and flags.

    fields    what a tree of dataclasses offers, and how a value is read
    sources   the TOML file and the command line, each value with its origin
    reading   defaults + file + flags -> one checked dataclass, every problem in one message
    help      `--help`
    writing   settings as TOML that reads back equal
    run       `RunConfig`, the settings of a training run, and the rules between rooms

Importing this starts no device.
"""

from jaxdist.config.reading import headed, read_settings
from jaxdist.config.run import RunConfig, read_run
from jaxdist.config.writing import write_toml

__all__ = ["RunConfig", "headed", "read_run", "read_settings", "write_toml"]
