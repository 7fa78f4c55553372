"""Jobs for Kubernetes, and the parts of their manifests."""

import yaml

from jaxdist.tools.launch.kubernetes_manifest import KubernetesConfig, manifest_text


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
