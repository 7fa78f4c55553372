"""Settings of a run: every room's dataclass in one table of contents, and how commands read them.

    run_config     `RunConfig`, the settings of a training run, and the rules between rooms
    elastic        the same run on fewer devices than its mesh names
    command_line   a run's settings as commands are given them

Importing this starts no device and imports neither flax nor orbax.
"""

from jaxdist.config.command_line import (
    ALIASES,
    parse_run,
    read_run,
    settings_of_run,
    stored_run,
)
from jaxdist.config.elastic import fit_devices, legal_sizes
from jaxdist.config.run_config import RunConfig
