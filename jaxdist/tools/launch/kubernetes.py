"""`python -m jaxdist.launch kubernetes`: write a JobSet manifest and hand it to kubectl."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.settings import read_settings
from jaxdist.tools.launch.kubernetes_manifest import KubernetesConfig, manifest_text
from jaxdist.tools.launch.legal_sizes import read_sizes

COMMAND = "jaxdist.launch kubernetes"
SUMMARY = """\
Run a training job on a Kubernetes cluster, as a JobSet.

    python -m jaxdist.launch kubernetes --nodes 2 --gpus-per-node 8 \\
        --image registry.example.org/jaxdist:1 --volume runs:/runs -- --config run.toml
"""


def main(argv: Sequence[str]) -> int:
    """Write the manifest; print it or hand it to the cluster.

    Raises:
        ConfigError: every problem of the flags.
    """
    config = read_settings(
        KubernetesConfig, argv, command=COMMAND, summary=SUMMARY, rest="arguments"
    )
    found = read_sizes(config.arguments)  # refused before anyone waits for nodes
    if isinstance(found, int):
        return found
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    text = manifest_text(config)
    if config.dry_run:
        print(text, end="")
        return runtime.EXIT_OK
    return _apply(config, text)


def _apply(config: KubernetesConfig, text: str) -> int:
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True)
    except FileNotFoundError:
        print(
            "kubectl is not on this machine: write the manifest with --dry-run, and apply it on "
            "one that has it.",
            file=sys.stderr,
        )
        return runtime.EXIT_CONFIG
    if done.returncode:
        print(
            f"kubectl refused the manifest; its reason is above. If a JobSet named {config.name} "
            f"exists, delete it first (kubectl delete jobset {config.name}). The new one continues "
            "from its run directory.",
            file=sys.stderr,
        )
        return runtime.EXIT_FAILURE
    namespace = f" -n {config.namespace}" if config.namespace else ""
    print(f"follow it with: kubectl logs -f{namespace} -l {log_selector(config.name)}")
    return runtime.EXIT_OK


def log_selector(name: str) -> str:
    """Labels of the pod with process 0, which writes the log of the run."""
    return f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
