r"""`python -m jaxdist.launch`: start the processes of a job, watch them, and restart failures.

    python -m jaxdist.launch --nproc-per-node 4 -- --config run.toml --mesh fsdp=4
    python -m jaxdist.launch --nnodes 2 --node-rank 0 --nproc-per-node 8 \
        --coordinator-address node0:29400 -- --config run.toml
    python -m jaxdist.launch --nproc-per-node 1:8 -- --config run.toml --mesh fsdp=8
    python -m jaxdist.launch --nnodes 1:2 --node-rank 0 --nproc-per-node 8 \
        --run-dir runs/shared -- --config run.toml
    python -m jaxdist.launch slurm --nodes 2 --gpus-per-node 8 --time 24:00:00 -- --config run.toml
    python -m jaxdist.launch kubernetes --nodes 2 --gpus-per-node 8 --image registry/jaxdist:1 \
        --volume runs:/runs -- --config run.toml

Arguments after `--` go to the program. With ranges MIN:MAX the job is elastic: it continues on the
hosts and GPUs that are available, on a smaller legal mesh with the same batches, and grows again
when more return. --mesh names the largest mesh. With --program or --module the range only sets the
number of processes. All hosts of a fixed job need the same secret in JAXDIST_JOB_TOKEN.
For batch jobs see `python -m jaxdist.launch slurm --help`, and `kubernetes --help`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.settings import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job on this host, or write or submit one for a scheduler; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["slurm"]:
        from jaxdist.tools.launch import slurm

        return slurm.main(words[1:])
    if words[:1] == ["kubernetes"]:
        from jaxdist.tools.launch import kubernetes

        return kubernetes.main(words[1:])
    if words[:1] == ["skypilot"]:
        raise ConfigError(
            "`launch skypilot` was removed. Adapt the task file in docs/kubernetes.md and start it "
            "with `sky jobs launch`."
        )
    from jaxdist.tools.launch import local

    return local.main(words, summary=__doc__ or "")


if __name__ == "__main__":
    runtime.run_command(main, resumes=True)
