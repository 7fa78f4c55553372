"""Jobs for Kubernetes, the parts of their manifests, and what Kubernetes makes of them.

What it does is written down from its documentation, apart from the code under test.
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
    *_, found = yaml.safe_load_all(manifest_text(config))
    return found


def job(found: dict) -> dict:
    (replicated,) = found["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(found: dict) -> dict:
    return job(found)["template"]["spec"]


def container(found: dict) -> dict:
    (only,) = pod(found)["containers"]
    return only


# --- what Kubernetes makes of it ------------------------------------------------------------------


def labels_of(index: int, restarts: int, uid: str) -> dict[str, str]:
    """The labels of one pod as Job (1.28) and JobSet set them; `uid` is the Job's."""
    return {
        "batch.kubernetes.io/job-completion-index": str(index),
        "batch.kubernetes.io/controller-uid": uid,
        "jobset.sigs.k8s.io/restart-attempt": str(restarts),
    }


def environ_of(
    found: dict, labels: Mapping[str, str], node: str, secrets: Mapping[str, dict] | None = None
) -> dict[str, str]:
    """The variables of one pod on a node; `secrets` are the namespace's, by name and key."""
    environ = {"JOB_COMPLETION_INDEX": labels["batch.kubernetes.io/job-completion-index"]}
    for entry in container(found)["env"]:
        place = entry.get("valueFrom", {})
        if "fieldRef" in place:
            path = place["fieldRef"]["fieldPath"]
            key = re.fullmatch(r"metadata\.labels\['(.*)'\]", path)
            environ[entry["name"]] = labels[key[1]] if key else {"spec.nodeName": node}[path]
        elif "secretKeyRef" in place and secrets is not None:
            secret = place["secretKeyRef"]
            environ[entry["name"]] = secrets[secret["name"]][secret["key"]]
        elif "value" in entry:
            environ[entry["name"]] = unescaped(entry["value"])
    return environ


def words_of(found: dict) -> list[str]:
    """What one pod runs."""
    only = container(found)
    return [unescaped(word) for word in (*only["command"], *only["args"])]


def unescaped(text: str) -> str:
    return text.replace("$$(", "$(")


def outcome(found: dict, code: int) -> str:
    """What happens after a pod has ended with this exit code."""
    assert job(found)["backoffLimit"] == 0 and pod(found)["restartPolicy"] == "Never"
    reason = "BackoffLimitExceeded"
    for rule in job(found)["podFailurePolicy"]["rules"]:
        wanted = rule["onExitCodes"]
        assert wanted["operator"] == "In" and wanted["containerName"] == container(found)["name"]
        assert wanted["values"] == sorted(set(wanted["values"]))  # else the API refuses them
        if code in wanted["values"]:
            if rule["action"] == "Ignore":
                return "this pod again"
            reason = "PodFailurePolicy"
            break
    for rule in found["spec"]["failurePolicy"]["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return rule["action"]
    return "RestartJobSet"
