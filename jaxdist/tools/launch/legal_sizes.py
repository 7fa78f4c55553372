"""The device counts with which the arguments of a training command are legal, as a process.

It prints one line of JSON. It runs as a process of its own because reading the settings of a run
imports jax, and a process that has imported jax should not fork.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.tools.launch.membership import LegalSizes


def read_sizes(arguments: Sequence[str]) -> LegalSizes | int:
    """What `jaxdist.train` with these arguments may be started with.

    Returns:
        The exit code instead where the arguments are refused; what is wrong is on stderr then.
    """
    command = [sys.executable, "-m", "jaxdist.tools.launch.legal_sizes", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    try:
        return done.returncode or LegalSizes(**json.loads(done.stdout))
    except (ValueError, TypeError):
        print(done.stdout, end="")
        asked_for_help = {"-h", "--help"} & set(arguments)
        return runtime.EXIT_OK if asked_for_help else runtime.EXIT_FAILURE


def main() -> int:
    """Print the sizes."""
    from jaxdist.config import legal_sizes, read_run
    from jaxdist.settings import ConfigError, problems_of

    # Rules about this machine's devices are checked by the processes that have the devices.
    config = read_run(sys.argv[1:], command="jaxdist.train", check_rules=False)
    sections = {"mesh": config.mesh, "train": config.train, "pipeline": config.pipeline}
    problems = [p for name, section in sections.items() for p in problems_of(section, name)]
    if problems:
        raise ConfigError(problems, asked="jaxdist.train")
    legal = None
    if config.mesh.elastic and config.mesh.spec is not None:
        config.check_mesh(config.mesh.spec)
        legal = legal_sizes(config)
    print(json.dumps({"legal": legal, "simulate": config.simulate}))
    return runtime.EXIT_OK


if __name__ == "__main__":
    runtime.run_command(main)
