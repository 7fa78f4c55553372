"""Jobs for Kubernetes, the parts of their manifests, and a model of how Kubernetes runs them.

The model follows the documentation of Kubernetes, independently of the code under test.
"""

import re
from collections.abc import Mapping

import yaml

from jaxdist.tools.launch.kubernetes import KubernetesConfig, manifest_text


def config(**fields) -> KubernetesConfig:
    return KubernetesConfig(**{"image": "host/jaxdist:1", "volume": ("runs:/runs",), **fields})


EVERYTHING = config(
    name="llama",
    namespace="research",
    nodes=8,
    gpus_per_node=8,
    cpus_per_node="64",
    memory="512Gi",
    shared_memory="64Gi",
    device=("rdma/hca=8",),
    volume=("runs:/runs", "corpora:/data"),
    run_dir="/runs/a/b",
    queue="team-a",
    node_selector=("cloud.example.com/fabric=a1",),
    exclude_node=("node-7", "node-9"),
    toleration=("dedicated=training:NoSchedule", "spot", "slow:NoExecute"),
    env=("NCCL_DEBUG=INFO",),
    secret_env=("WANDB_API_KEY=wandb:api-key",),
    pull_secret="registry",
    arguments=["--config", "gpt2_124m", "--mesh=dp=64"],
)


def job_set(config: KubernetesConfig) -> dict:
    *_, manifest = yaml.safe_load_all(manifest_text(config))
    return manifest


def job(manifest: dict) -> dict:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(manifest: dict) -> dict:
    return job(manifest)["template"]["spec"]


def container(manifest: dict) -> dict:
    (only,) = pod(manifest)["containers"]
    return only


def labels_of(index: int, restarts: int, uid: str) -> dict[str, str]:
    return {
        "batch.kubernetes.io/job-completion-index": str(index),
        "batch.kubernetes.io/controller-uid": uid,
        "jobset.sigs.k8s.io/restart-attempt": str(restarts),
    }


def environ_of(
    manifest: dict, labels: Mapping[str, str], node: str, secrets: Mapping[str, dict] | None = None
) -> dict[str, str]:
    """Return the variables of one pod on a node; `secrets`: the namespace's, by name and key."""
    environ = {"JOB_COMPLETION_INDEX": labels["batch.kubernetes.io/job-completion-index"]}
    for entry in container(manifest)["env"]:
        source = entry.get("valueFrom", {})
        if "fieldRef" in source:
            path = source["fieldRef"]["fieldPath"]
            key = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
            environ[entry["name"]] = labels[key[1]] if key else {"spec.nodeName": node}[path]
        elif "secretKeyRef" in source and secrets is not None:
            secret = source["secretKeyRef"]
            environ[entry["name"]] = secrets[secret["name"]][secret["key"]]
        elif "value" in entry:
            environ[entry["name"]] = unescaped(entry["value"])
    return environ


def words_of(manifest: dict) -> list[str]:
    only = container(manifest)
    return [unescaped(word) for word in (*only["command"], *only["args"])]


def unescaped(text: str) -> str:
    return text.replace("$$(", "$(")


def outcome(manifest: dict, code: int) -> str:
    """Return what Kubernetes does after a pod has ended with this exit code."""
    assert job(manifest)["backoffLimit"] == 0 and pod(manifest)["restartPolicy"] == "Never"
    reason = "BackoffLimitExceeded"
    for rule in job(manifest)["podFailurePolicy"]["rules"]:
        on_exit = rule["onExitCodes"]
        assert (
            on_exit["operator"] == "In" and on_exit["containerName"] == container(manifest)["name"]
        )
        assert on_exit["values"] == sorted(set(on_exit["values"]))  # else the API refuses them
        if code in on_exit["values"]:
            if rule["action"] == "Ignore":
                return "this pod again"
            reason = "PodFailurePolicy"
            break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return rule["action"]
    return "RestartJobSet"
