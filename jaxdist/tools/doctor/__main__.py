"""`python -m jaxdist.doctor`: check that this machine is ready for a long run, with fixes.

    python -m jaxdist.doctor
    python -m jaxdist.doctor --config configs/llama3_8b.toml --mesh fsdp=8
    python -m jaxdist.launch --nproc-per-node 8 --module jaxdist.doctor -- --mesh fsdp=8
    srun python -m jaxdist.doctor --config configs/pipeline_64gpu.toml

Checks software, GPUs and their links, environment variables, disk, shared memory and limits against
the settings of a run. With several processes, started in the same way as training, it also checks
that all run the same code, reach each other, agree on the time and share the run directory. It
times an all-reduce over each mesh axis and reports slow or wrong devices.

Exit code: 0, 1 after an error (with --strict also after a warning), 2 on bad flags.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxdist import runtime


def main(argv: Sequence[str] | None = None) -> int:
    """Check machine or job, print findings; return the exit code."""
    # Imported here, so that `run_command` reports a failed import of jax.
    from jaxdist.tools.doctor.checks import read_doctor, run

    return run(read_doctor(sys.argv[1:] if argv is None else argv, summary=__doc__ or ""))


if __name__ == "__main__":
    runtime.run_command(main)
