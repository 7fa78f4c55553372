"""One training job as a JobSet manifest for Kubernetes: what is asked for, its rules, its text.

Each node runs one pod with one process. JobSet gives the pods host names that stay the same after a
restart, so all of them know where process 0 listens. Kubernetes decides by exit codes what happens
next:

| a process ends with | what Kubernetes does |
|---|---|
| 0 | the job is done when all have ended so |
| 75: asked to leave, and saved | the Job replaces the pod, which does not count as a failure |
| 2, 85, 87, 130: a restart cannot help | the Job fails by its pod failure policy, the JobSet too |
| another code, or not at all | the JobSet starts all pods again, up to `max_restarts` times |
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxdist import runtime
from jaxdist.checkpoint.local.copies import VARIABLE as FAILURE_DOMAIN
from jaxdist.runtime.cluster_environment import DEFAULT_PORT
from jaxdist.runtime.storage import is_url
from jaxdist.settings import setting, split_flags, value_of
from jaxdist.settings.schema import flag_of
from jaxdist.tools.launch.yaml_writer import BlockText, write_yaml

CONFIG_PATH = "/etc/jaxdist/run.toml"
"""Where the pods see the config file."""

_JOIN_TIMEOUT_S = 1800
"""Nodes pull the image at different speeds, and without a queue pods start as nodes become free."""

_FORMS = {
    "volume": ("[^:]+:/[^:]+", "CLAIM:/PATH, e.g. runs:/runs"),
    "node_selector": ("[^=]+=.*", "KEY=VALUE"),
    "toleration": ("[^=:]+.*", "KEY, KEY=VALUE or KEY=VALUE:EFFECT"),
    "device": ("[^=]+=.+", "NAME=COUNT, e.g. rdma/hca=8"),
    "env": ("[^=]+=.*", "NAME=VALUE"),
    "secret_env": ("[^=]+=[^:]+:.+", "NAME=SECRET:KEY, e.g. WANDB_API_KEY=wandb:api-key"),
}
"""Setting -> the pattern of the texts that this module splits, and the pattern in words.

The cluster checks the parts, such as names and amounts of memory, when it receives the manifest.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """What to ask Kubernetes for, and what to run."""

    image: str = setting("", "container image with jaxdist in it", required=True)
    name: str = setting("jaxdist", "name of the JobSet")
    namespace: str = setting("", "namespace; empty = kubectl's")
    nodes: int = setting(1, "nodes; each runs one pod with one process", ge=1)
    gpus_per_node: int = setting(0, "GPUs per node; 0 = a CPU job", ge=0)
    cpus_per_node: str = setting("", "CPU cores per pod, e.g. 64; empty = the namespace's default")
    memory: str = setting("", "memory per pod, e.g. 512Gi; empty = the namespace's default")
    shared_memory: str = setting("16Gi", "size of /dev/shm, which counts as memory of the pod")
    device: tuple[str, ...] = setting(
        (), "NAME=COUNT, another resource per pod, e.g. rdma/hca=8 for RDMA"
    )
    volume: tuple[str, ...] = setting(
        (), "CLAIM:/PATH, a volume claim and its mount path; the first holds the run directory"
    )
    run_dir: str = setting(
        "",
        "run directory: in a volume, or a URL (s3://BUCKET/PATH, gs://BUCKET/PATH), which needs no "
        "volume; empty = NAME in the first volume",
    )
    queue: str = setting("", "local queue of Kueue; empty = no queue")
    node_selector: tuple[str, ...] = setting((), "KEY=VALUE, a label that the nodes must have")
    exclude_node: tuple[str, ...] = setting((), "a node that must not be used")
    toleration: tuple[str, ...] = setting(
        (), "KEY=VALUE:EFFECT, a taint to tolerate; that of GPU nodes always is"
    )
    env: tuple[str, ...] = setting((), "NAME=VALUE, an environment variable of every process")
    secret_env: tuple[str, ...] = setting(
        (), "NAME=SECRET:KEY, an environment variable that Kubernetes reads from a secret"
    )
    pull_secret: str = setting("", "secret for pulling the image")
    user_id: int = setting(1000, "user and group id that the pods run as; root is refused", ge=1)
    stop_timeout_s: int = setting(
        300,
        "seconds that a pod may take to save after a request to stop: twice the time of a save",
        ge=30,
    )
    max_restarts: int = setting(
        20, "restarts after failures; a restart after a preemption that saved does not count", ge=0
    )
    python: str = setting("python", "interpreter in the image")
    dry_run: bool = setting(False, "print the manifest and send nothing to the cluster")
    arguments: list[str] = setting([], "arguments of jaxdist.train, in every process")

    def problems(self) -> list[str]:
        """Every violated rule beyond the bounds of each setting."""
        return [*self._forms(), *self._paths(), *self._variables()]

    def _forms(self) -> Iterator[str]:
        for name, (pattern, form) in _FORMS.items():
            for text in getattr(self, name):
                if not re.fullmatch(pattern, text, re.S):
                    yield f"{flag_of(name)} {text!r} has another form. Use {form}."

    def _paths(self) -> Iterator[str]:
        form = _FORMS["volume"][0]
        paths = [_path_of(text) for text in self.volume if re.fullmatch(form, text)]
        if not self.volume and not is_url(self.run_dir):
            yield (
                "--volume is missing: checkpoints would be lost with the pods. Use "
                "--volume CLAIM:/runs with a claim that all nodes can write (ReadWriteMany), or "
                "--run-dir s3://BUCKET/PATH."
            )
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            yield f"--volume: {path} is given twice. Use another path for each claim."
        for path in paths:
            if path in ("/", "/dev", "/dev/shm", str(PurePosixPath(CONFIG_PATH).parent)):
                yield f"--volume: {path} belongs to the pod. Use another path, e.g. /runs."
        inside = any(PurePosixPath(self.run_dir).is_relative_to(path) for path in paths)
        if is_url(self.run_dir):
            if not re.fullmatch("(s3|gs)://[^/]+/.+", self.run_dir):
                yield (
                    f"--run-dir {self.run_dir} is a URL of a kind that is not known. Use "
                    "s3://BUCKET/PATH or gs://BUCKET/PATH, or a directory in a volume."
                )
        elif paths and self.run_dir and (not inside or ".." in PurePosixPath(self.run_dir).parts):
            yield (
                f"--run-dir {self.run_dir} is in no volume: a new pod would not find its "
                f"checkpoints. Use a directory in {', '.join(paths)}."
            )
        if value_of(self.arguments, "run_dir") is not None:
            yield "--run-dir stands after --, where it has no place. Give it before, or not at all."

    def _variables(self) -> Iterator[str]:
        given = [text.partition("=")[0] for text in (*self.env, *self.secret_env)]
        ours = {name for name in self.places if name != "JAXDIST_JOB_TOKEN"}
        for name in sorted(set(given) & ours):
            yield f"{name} is set by the launcher. Leave it out of --env and --secret-env."
        for name in sorted({name for name in given if given.count(name) > 1}):
            yield f"{name} is given twice in --env and --secret-env. Give it once."

    def warnings(self) -> Iterator[str]:
        """What is allowed and yet likely to hurt."""
        name = self.image.rpartition("/")[2]
        if "@" not in name and (":" not in name or name.endswith(":latest")):
            yield (
                f"--image {self.image} names no version: pods that start later may run another "
                "program than the others. Give a tag or a digest."
            )
        if self.gpus_per_node and not (self.cpus_per_node and self.memory):
            yield (
                "--cpus-per-node or --memory is not given: the namespace's default may be one core "
                "and little memory. Give those of a node, less what its own services need."
            )

    @property
    def run_directory(self) -> str:
        """The run directory as the pods see it."""
        return self.run_dir or str(PurePosixPath(_path_of(self.volume[0])) / self.name)

    @property
    def process_0(self) -> str:
        """Host name of the pod with process 0, the same after every restart."""
        return f"{self.name}-train-0-0.{self.name}"

    @property
    def places(self) -> dict[str, Any]:
        """Variable -> its value, or where Kubernetes reads it; see `runtime.resolve`."""
        label = lambda name: {"fieldRef": {"fieldPath": f"metadata.labels['{name}']"}}
        return {
            "JAX_COORDINATOR_ADDRESS": f"{self.process_0}:{DEFAULT_PORT}",
            "JAX_NUM_PROCESSES": str(self.nodes),
            "JAX_PROCESS_ID": label("batch.kubernetes.io/job-completion-index"),
            "LOCAL_WORLD_SIZE": "1",
            "JAXDIST_ATTEMPT": label("jobset.sigs.k8s.io/restart-attempt"),
            "JAXDIST_JOB_TOKEN": label("batch.kubernetes.io/controller-uid"),
            # Its own host name stays with the pod when it moves; what is lost together is the node.
            FAILURE_DOMAIN: {"fieldRef": {"fieldPath": "spec.nodeName"}},
        }


def manifest_text(config: KubernetesConfig) -> str:
    """What `kubectl apply -f -` reads: the job, and the config file where a file was named."""
    arguments, file = take_config_file(config.arguments)
    config = dataclasses.replace(config, arguments=arguments)
    documents = [write_yaml(_job_set(config, file is not None), _comments(config))]
    if file is not None:
        documents.insert(0, write_yaml(_config_map(config, file.read_text())))
    return "---\n".join(documents)


def take_config_file(arguments: Sequence[str]) -> tuple[list[str], Path | None]:
    """Send a config file along: the arguments with its path over there, and its path here.

    None where no file is named, or one of the package's by name.
    """
    words: list[str] = []
    file: Path | None = None
    for flag in split_flags(arguments):
        if flag.name == "config" and flag.value and Path(flag.value).is_file():
            file = Path(flag.value)
            words.append(f"--config={CONFIG_PATH}")
        else:
            words += flag.words
    return words, file


# --- the documents --------------------------------------------------------------------------------


def _comments(config: KubernetesConfig) -> dict[str, str]:
    pods = "1 pod" if config.nodes == 1 else f"{config.nodes} pods"
    return {
        "apiVersion": f"A training job of jaxdist: {pods}, one process in each.",
        "network": "A headless service: the pods find each other by name before they are ready.",
        "failurePolicy": (
            "A job that its own policy below has ended stays ended. After any other failure all\n"
            "pods start again from the newest checkpoint."
        ),
        "backoffLimit": (
            "The processes of a job live and die together: the first failure ends this attempt."
        ),
        "podReplacementPolicy": "Never two pods with one process id.",
        "podFailurePolicy": (
            f"{runtime.EXIT_CONFIG}: bad settings. {runtime.EXIT_SDC}: a device computes wrongly. "
            f"{runtime.EXIT_DIVERGED}: NaN.\n"
            f"{runtime.EXIT_INTERRUPTED}: ended by hand. A restart\n"
            f"would repair none. {runtime.EXIT_PREEMPTED}: asked to leave, and saved: a new pod "
            "goes on."
        ),
        "terminationGracePeriodSeconds": "Time for the last save after a request to leave.",
        "automountServiceAccountToken": "Training talks to no part of the cluster.",
        "enableServiceLinks": "Variables of the namespace's services could look like a launcher's.",
        "medium": "NCCL and data workers pass arrays through it; the default is 64 MB.",
    }


def _job_set(config: KubernetesConfig, has_config: bool) -> dict[str, Any]:
    labels = {"kueue.x-k8s.io/queue-name": config.queue} if config.queue else {}
    job = {
        "completionMode": "Indexed",
        "completions": config.nodes,
        "parallelism": config.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                _on_exit_codes("FailJob", runtime.FINAL_CODES),
                _on_exit_codes("Ignore", [runtime.EXIT_PREEMPTED]),
            ]
        },
        "template": {"spec": _pod(config, has_config)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(config, config.name, labels),
        "spec": {
            "network": {
                "enableDNSHostnames": True,
                "subdomain": config.name,
                "publishNotReadyAddresses": True,
            },
            "failurePolicy": {
                "maxRestarts": config.max_restarts,
                "rules": [
                    {
                        "name": "restartCannotHelp",
                        "action": "FailJobSet",
                        "onJobFailureReasons": ["PodFailurePolicy"],
                    }
                ],
            },
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _config_map(config: KubernetesConfig, settings: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(config, f"{config.name}-config", {}),
        "data": {PurePosixPath(CONFIG_PATH).name: BlockText(settings)},
    }


def _metadata(config: KubernetesConfig, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return _given({"name": name, "namespace": config.namespace, "labels": labels})


def _on_exit_codes(action: str, codes: Sequence[int]) -> dict[str, Any]:
    chosen = {"containerName": "train", "operator": "In", "values": list(codes)}
    return {"action": action, "onExitCodes": chosen}


def _pod(config: KubernetesConfig, has_config: bool) -> dict[str, Any]:
    user = config.user_id
    secrets = [{"name": config.pull_secret}] if config.pull_secret else []
    return _given(
        {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": config.stop_timeout_s,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": user,
                "runAsGroup": user,
                "fsGroup": user,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "imagePullSecrets": secrets,
            "nodeSelector": dict(_split(text) for text in config.node_selector),
            "affinity": _affinity(config.exclude_node),
            "tolerations": _tolerations(config),
            "containers": [_container(config, has_config)],
            "volumes": _volumes(config, has_config),
        }
    )


def _affinity(excluded: Sequence[str]) -> dict[str, Any]:
    if not excluded:
        return {}
    other = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(excluded)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [other]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _tolerations(config: KubernetesConfig) -> list[dict[str, str]]:
    texts = [*(["nvidia.com/gpu"] if config.gpus_per_node else []), *config.toleration]
    found = []
    for text in texts:
        taint, _, effect = text.partition(":")
        key, equals, value = taint.partition("=")
        kind = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        found.append({"key": key, **kind, **({"effect": effect} if effect else {})})
    return found


def _container(config: KubernetesConfig, has_config: bool) -> dict[str, Any]:
    words = [f"--run-dir={config.run_directory}", *config.arguments]
    if value_of(words, "runtime.join_timeout_s") is None:
        words.append(f"--runtime.join-timeout-s={_JOIN_TIMEOUT_S}")
    asked = {"cpu": config.cpus_per_node, "memory": config.memory}
    devices = dict(_split(text) for text in config.device)
    gpus = {"nvidia.com/gpu": str(config.gpus_per_node)} if config.gpus_per_node else {}
    # RDMA registers memory, which must stay where it is.
    added = {"add": ["IPC_LOCK"]} if devices else {}
    return _given(
        {
            "name": "train",
            "image": config.image,
            "command": [config.python, "-m", "jaxdist.train"],
            "args": [_verbatim(word) for word in words],
            "env": _environment(config),
            "resources": _given(
                {
                    "requests": _given(asked),
                    "limits": _given({"memory": config.memory, **gpus, **devices}),
                }
            ),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"], **added},
            },
            "volumeMounts": _mounts(config, has_config),
        }
    )


def _environment(config: KubernetesConfig) -> list[dict[str, Any]]:
    found: dict[str, Any] = {**config.places, "PYTHONUNBUFFERED": "1"}
    if config.volume:  # a restart compiles nothing again
        cache = PurePosixPath(_path_of(config.volume[0])) / ".cache" / "jaxdist"
        found["JAXDIST_CACHE"] = str(cache)
    for name, value in map(_split, config.env):
        found[name] = _verbatim(value)
    for name, place in map(_split, config.secret_env):
        secret, _, key = place.partition(":")
        found[name] = {"secretKeyRef": {"name": secret, "key": key}}
    kind = lambda value: "value" if isinstance(value, str) else "valueFrom"
    return [{"name": name, kind(value): value} for name, value in found.items()]


def _mounts(config: KubernetesConfig, has_config: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": f"volume-{index}", "mountPath": _path_of(text)}
        for index, text in enumerate(config.volume)
    ]
    found.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    if has_config:
        folder = str(PurePosixPath(CONFIG_PATH).parent)
        found.append({"name": "config", "mountPath": folder, "readOnly": True})
    return found


def _volumes(config: KubernetesConfig, has_config: bool) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {
            "name": f"volume-{index}",
            "persistentVolumeClaim": {"claimName": text.partition(":")[0]},
        }
        for index, text in enumerate(config.volume)
    ]
    shared = {"medium": "Memory", "sizeLimit": config.shared_memory}
    found.append({"name": "shared-memory", "emptyDir": shared})
    if has_config:
        found.append({"name": "config", "configMap": {"name": f"{config.name}-config"}})
    return found


def _given(table: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty; numbers and switches stay."""
    return {key: value for key, value in table.items() if value not in ("", [], {})}


def _split(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _path_of(volume: str) -> str:
    return str(PurePosixPath(volume.partition(":")[2]))


def _verbatim(word: str) -> str:
    """A text that Kubernetes, which replaces $(NAME), passes on as it is."""
    return word.replace("$(", "$$(")
