"""Settings of a run: the sections of all packages in one dataclass, and how commands read them.

Importing this starts no device and imports neither flax nor orbax.
"""

from jaxdist.config.command_line import (
    ALIASES,
    parse_run,
    read_run,
    replaced_head,
    settings_before,
    settings_of_run,
    stored_run,
)
from jaxdist.config.elastic import fit_device_list, fit_devices, legal_sizes
from jaxdist.config.run_config import RunConfig
