"""Declaring, reading and checking settings: every command declares them as dataclasses.

    declare  a setting with its default, help and bounds; checks of values
    schema   fields, sections and kinds of a dataclass; parsing of one value; `--help`
    sources  the TOML file and the flags, each value with its origin; settings as TOML
    reader   defaults + file + flags -> one checked dataclass, with all problems in one message

Importing this does not import jax, because the launcher must not.
"""

from jaxdist.settings.declare import Bounds, ConfigError, Removed, problems_of, setting
from jaxdist.settings.reader import read_settings, read_with_origins
from jaxdist.settings.sources import split_flags, to_table, value_of, without_flags, write_toml
