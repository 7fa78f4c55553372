"""The grammar of settings: every command declares dataclasses and reads them here.

    declare      a setting with its default, help and bounds; which settings break theirs
    schema       what a tree of dataclasses offers, and how one value is read
    sources      the TOML file and the flags, each value with its origin
    reader       defaults + file + flags -> one checked dataclass, every problem in one message
    help         `--help`
    toml_writer  settings as TOML that reads back equal

Importing this imports no jax: the launcher, which must not, reads its flags with it too.
"""

from jaxdist.settings.declare import Bounds, ConfigError, Removed, problems_of, setting
from jaxdist.settings.reader import read_settings, read_with_origins
from jaxdist.settings.sources import split_flags, value_of, without_flags
from jaxdist.settings.toml_writer import to_table, write_toml
