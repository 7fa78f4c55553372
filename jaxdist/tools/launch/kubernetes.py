"""`python -m jaxdist.launch kubernetes`: write a JobSet manifest and pass it to kubectl.

Each node runs one pod with one process. JobSet gives the pods host names that do not change after a
restart, so the address of process 0 is fixed. Kubernetes reacts to exit codes:

| a process ends with | Kubernetes |
|---|---|
| 0 | ends the job after all processes have ended with 0 |
| 75: preempted | replaces the pod (Job); it does not count as a failure |
| 2, 85, 87, 130: a restart cannot help | fails the Job by its pod failure policy, and the JobSet |
| another code | restarts all pods (JobSet), up to `max_restarts` times |
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxdist import runtime
from jaxdist.checkpoint.local.copies import VARIABLE as FAILURE_DOMAIN
from jaxdist.runtime.cluster_environment import DEFAULT_PORT
from jaxdist.runtime.storage import is_url
from jaxdist.settings import read_settings, setting, split_flags, value_of
from jaxdist.settings.schema import flag_of
from jaxdist.tools.launch.membership import read_sizes

COMMAND = "jaxdist.launch kubernetes"
SUMMARY = """\
Run a training job on a Kubernetes cluster, as a JobSet.

    python -m jaxdist.launch kubernetes --nodes 2 --gpus-per-node 8 \\
        --image registry.example.org/jaxdist:1 --volume runs:/runs -- --config run.toml
"""

CONFIG_PATH = "/etc/jaxdist/run.toml"
"""Path of the config file in the pods."""

_JOIN_TIMEOUT_S = 1800
"""Long: nodes pull images at different speeds, and unqueued pods wait for nodes to become free."""

_FORMS = {
    "volume": ("[^:]+:/[^:]+", "CLAIM:/PATH, e.g. runs:/runs"),
    "node_selector": ("[^=]+=.*", "KEY=VALUE"),
    "toleration": ("[^=:]+.*", "KEY, KEY=VALUE or KEY=VALUE:EFFECT"),
    "device": ("[^=]+=.+", "NAME=COUNT, e.g. rdma/hca=8"),
    "env": ("[^=]+=.*", "NAME=VALUE"),
    "secret_env": ("[^=]+=[^:]+:.+", "NAME=SECRET:KEY, e.g. WANDB_API_KEY=wandb:api-key"),
}
"""Setting -> pattern of the values that this module splits, and its description."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """Resources of the job and the training command."""

    image: str = setting("", "container image in which jaxdist is installed", required=True)
    name: str = setting("jaxdist", "name of the JobSet")
    namespace: str = setting("", "namespace; empty = kubectl's")
    nodes: int = setting(1, "number of nodes; each runs one pod with one process", ge=1)
    gpus_per_node: int = setting(0, "GPUs per node; 0 = a CPU job", ge=0)
    cpus_per_node: str = setting("", "CPU cores per pod, e.g. 64; empty = the namespace's default")
    memory: str = setting("", "memory per pod, e.g. 512Gi; empty = the namespace's default")
    shared_memory: str = setting("16Gi", "size of /dev/shm, which counts as memory of the pod")
    device: tuple[str, ...] = setting(
        (), "NAME=COUNT, another resource per pod, e.g. rdma/hca=8 for RDMA"
    )
    volume: tuple[str, ...] = setting(
        (),
        "CLAIM:/PATH, volume claim and mount path; the first is the default for the run directory",
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
        (), "KEY=VALUE:EFFECT, a taint to tolerate; GPU jobs also tolerate that of GPU nodes"
    )
    env: tuple[str, ...] = setting((), "NAME=VALUE, an environment variable of every process")
    secret_env: tuple[str, ...] = setting(
        (), "NAME=SECRET:KEY, an environment variable that Kubernetes reads from a secret"
    )
    pull_secret: str = setting("", "name of the Kubernetes secret for pulling the image")
    user_id: int = setting(1000, "user and group id of the pods; root is rejected", ge=1)
    stop_timeout_s: int = setting(
        300,
        "seconds that a pod may take to save after a stop request: use twice the save time",
        ge=30,
    )
    max_restarts: int = setting(
        20, "maximum restarts after failures; those after exit code 75 do not count", ge=0
    )
    python: str = setting("python", "Python interpreter in the image")
    dry_run: bool = setting(False, "print the manifest and send nothing to the cluster")
    arguments: list[str] = setting([], "arguments of jaxdist.train, in every process")

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        return [*self._forms(), *self._paths()]

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
        inside = any(PurePosixPath(self.run_dir).is_relative_to(path) for path in paths)
        if is_url(self.run_dir):
            if not re.fullmatch("(s3|gs)://[^/]+/.+", self.run_dir):
                yield (
                    f"--run-dir {self.run_dir} is not a supported URL. Use s3://BUCKET/PATH or "
                    "gs://BUCKET/PATH, or a directory in a volume."
                )
        elif paths and self.run_dir and (not inside or ".." in PurePosixPath(self.run_dir).parts):
            yield (
                f"--run-dir {self.run_dir} is in no volume, so a new pod could not read its "
                f"checkpoints. Use a directory in {', '.join(paths)}."
            )
        if value_of(self.arguments, "run_dir") is not None:
            yield "--run-dir is set after --. Set it before --, or leave it out."

    def warnings(self) -> list[str]:
        """Return a warning if the settings are legal but likely to be slow."""
        if not self.gpus_per_node or (self.cpus_per_node and self.memory):
            return []
        return [
            "--cpus-per-node or --memory is not set: the namespace's default may be one core and "
            "little memory. Use those of a node, less the needs of its own services."
        ]

    @property
    def run_directory(self) -> str:
        """Path of the run directory in the pods, or its URL."""
        return self.run_dir or str(PurePosixPath(_path_of(self.volume[0])) / self.name)

    @property
    def job_environ(self) -> dict[str, Any]:
        """Variable that `runtime.resolve` reads -> value, or the source of its value in the pod."""
        label = lambda name: {"fieldRef": {"fieldPath": f"metadata.labels['{name}']"}}
        return {
            "JAX_COORDINATOR_ADDRESS": f"{self.name}-train-0-0.{self.name}:{DEFAULT_PORT}",
            "JAX_NUM_PROCESSES": str(self.nodes),
            "JAX_PROCESS_ID": label("batch.kubernetes.io/job-completion-index"),
            "LOCAL_WORLD_SIZE": "1",
            "JAXDIST_ATTEMPT": label("jobset.sigs.k8s.io/restart-attempt"),
            "JAXDIST_JOB_TOKEN": label("batch.kubernetes.io/controller-uid"),
            # A pod keeps its host name when it moves; the node is the unit of failure.
            FAILURE_DOMAIN: {"fieldRef": {"fieldPath": "spec.nodeName"}},
        }


def main(argv: Sequence[str]) -> int:
    """Print the manifest or pass it to kubectl; return 0, 1 if rejected, 2 without kubectl."""
    config = read_settings(
        KubernetesConfig, argv, command=COMMAND, summary=SUMMARY, rest="arguments"
    )
    sizes = read_sizes(config.arguments)  # reject bad arguments before anyone waits for nodes
    if isinstance(sizes, int):
        return sizes
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    text = manifest_text(config)
    if config.dry_run:
        print(text, end="")
        return runtime.EXIT_OK
    try:
        done = subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True)
    except FileNotFoundError:
        print(
            "kubectl is not installed here: write the manifest with --dry-run, and apply it on a "
            "machine that has kubectl.",
            file=sys.stderr,
        )
        return runtime.EXIT_CONFIG
    if done.returncode:
        print(
            f"kubectl rejected the manifest; its reason is above. If a JobSet named {config.name} "
            f"exists, delete it first (kubectl delete jobset {config.name}). The new one continues "
            "from its run directory.",
            file=sys.stderr,
        )
        return runtime.EXIT_FAILURE
    namespace = f" -n {config.namespace}" if config.namespace else ""
    selector = f"jobset.sigs.k8s.io/jobset-name={config.name}"
    first = "batch.kubernetes.io/job-completion-index=0"  # process 0 writes the log of the run
    print(f"follow the log with: kubectl logs -f{namespace} -l {selector},{first}")
    return runtime.EXIT_OK


def manifest_text(config: KubernetesConfig) -> str:
    """Return the YAML for `kubectl apply`: the job, and the local config file if one is named."""
    import jinja2

    file, words = None, [f"--run-dir={config.run_directory}"]
    for flag in split_flags(config.arguments):
        if flag.name == "config" and flag.value and Path(flag.value).is_file():
            file = Path(flag.value)  # sent as a ConfigMap, unlike a config that the package ships
            words.append(f"--config={CONFIG_PATH}")
        else:
            words += flag.words
    if value_of(words, "runtime.join_timeout_s") is None:
        words.append(f"--runtime.join-timeout-s={_JOIN_TIMEOUT_S}")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    # JSON is YAML that every reader parses to the same value: YAML 1.1 and 1.2 differ on 1e-4 or y.
    environment.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    cpus = {"cpu": config.cpus_per_node} if config.cpus_per_node else {}
    memory = {"memory": config.memory} if config.memory else {}
    gpus = {"nvidia.com/gpu": str(config.gpus_per_node)} if config.gpus_per_node else {}
    devices = dict(_split(text) for text in config.device)
    return environment.from_string(_MANIFEST).render(
        config=config,
        runtime=runtime,
        settings=None if file is None else file.read_text(),
        config_path=PurePosixPath(CONFIG_PATH),
        tolerations=_tolerations(config),
        words=[_escape(word) for word in words],
        environ=_environ(config),
        requests={**cpus, **memory},
        limits={**memory, **gpus, **devices},
        devices=devices,
        volumes=[(text.partition(":")[0], _path_of(text)) for text in config.volume],
        selector=dict(_split(text) for text in config.node_selector),
    )


def _tolerations(config: KubernetesConfig) -> list[dict[str, str]]:
    tolerations = []
    for text in [*(["nvidia.com/gpu"] if config.gpus_per_node else []), *config.toleration]:
        taint, _, effect = text.partition(":")
        key, equals, value = taint.partition("=")
        kind = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **kind, **({"effect": effect} if effect else {})})
    return tolerations


def _environ(config: KubernetesConfig) -> dict[str, Any]:
    environ = {**config.job_environ, "PYTHONUNBUFFERED": "1"}
    if config.volume:  # restarts reuse compiled programs
        environ["JAXDIST_CACHE"] = f"{PurePosixPath(_path_of(config.volume[0]))}/.cache/jaxdist"
    environ |= {name: _escape(value) for name, value in map(_split, config.env)}
    for name, source in map(_split, config.secret_env):
        secret, _, key = source.partition(":")
        environ[name] = {"secretKeyRef": {"name": secret, "key": key}}
    return environ


def _split(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _path_of(volume: str) -> str:
    return str(PurePosixPath(volume.partition(":")[2]))


def _escape(word: str) -> str:
    """Return a word in which $(NAME) is escaped, because Kubernetes would replace it."""
    return word.replace("$(", "$$(")


_MANIFEST = """\
{% macro metadata(name) %}
metadata:
  name: {{ name | json }}
{% if config.namespace %}
  namespace: {{ config.namespace | json }}
{% endif %}
{% endmacro %}
{% if settings is not none %}
apiVersion: v1
kind: ConfigMap
{{ metadata(config.name ~ "-config") -}}
data:
  {{ config_path.name }}: |2
    {{ settings | indent(4) }}
---
{% endif %}
# A training job of jaxdist on {{ config.nodes }} pod(s) with one process each.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
{{ metadata(config.name) -}}
{% if config.queue %}
  labels: {{ {"kueue.x-k8s.io/queue-name": config.queue} | json }}
{% endif %}
spec:
  # A headless service: pods resolve each other's names before they are ready.
  network:
    enableDNSHostnames: true
    subdomain: {{ config.name | json }}
    publishNotReadyAddresses: true
  # After a failure all pods restart from the newest checkpoint, unless the podFailurePolicy below
  # has failed the job.
  failurePolicy:
    maxRestarts: {{ config.max_restarts }}
    rules:
    - name: restartCannotHelp
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: train
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        completions: {{ config.nodes }}
        parallelism: {{ config.nodes }}
        # The first failure ends this attempt, because the processes depend on each other.
        backoffLimit: 0
        # Two pods never have the same process id.
        podReplacementPolicy: Failed
        podFailurePolicy:
          rules:
          # Bad settings ({{ runtime.EXIT_CONFIG }}), silent data corruption ({{ runtime.EXIT_SDC
            }}), NaN ({{ runtime.EXIT_DIVERGED }}), Ctrl-C ({{ runtime.EXIT_INTERRUPTED }}).
          - action: FailJob
            onExitCodes:
              containerName: train
              operator: In
              values: {{ runtime.FINAL_CODES | list }}
          # Preempted: a new pod continues.
          - action: Ignore
            onExitCodes:
              containerName: train
              operator: In
              values: [{{ runtime.EXIT_PREEMPTED }}]
        template:
          spec:
            restartPolicy: Never
            # Time for the last save after a stop request.
            terminationGracePeriodSeconds: {{ config.stop_timeout_s }}
            # Training does not use the Kubernetes API.
            automountServiceAccountToken: false
            # Variables of the namespace's services could look like a launcher's.
            enableServiceLinks: false
            securityContext:
              runAsNonRoot: true
              runAsUser: {{ config.user_id }}
              runAsGroup: {{ config.user_id }}
              fsGroup: {{ config.user_id }}
              fsGroupChangePolicy: OnRootMismatch
              seccompProfile:
                type: RuntimeDefault
{% if config.pull_secret %}
            imagePullSecrets:
            - name: {{ config.pull_secret | json }}
{% endif %}
{% if selector %}
            nodeSelector: {{ selector | json }}
{% endif %}
{% if config.exclude_node %}
            affinity:
              nodeAffinity:
                requiredDuringSchedulingIgnoredDuringExecution:
                  nodeSelectorTerms:
                  - matchExpressions:
                    - key: kubernetes.io/hostname
                      operator: NotIn
                      values: {{ config.exclude_node | json }}
{% endif %}
{% if tolerations %}
            tolerations:
{% for toleration in tolerations %}
            - {{ toleration | json }}
{% endfor %}
{% endif %}
            containers:
            - name: train
              image: {{ config.image | json }}
              command: [{{ config.python | json }}, "-m", "jaxdist.train"]
              args:
{% for word in words %}
              - {{ word | json }}
{% endfor %}
              env:
{% for name, value in environ.items() %}
              - name: {{ name | json }}
                {{ "value" if value is string else "valueFrom" }}: {{ value | json }}
{% endfor %}
              resources:
                requests: {{ requests | json }}
                limits: {{ limits | json }}
              securityContext:
                allowPrivilegeEscalation: false
                capabilities:
                  drop: [ALL]
              volumeMounts:
{% for _, path in volumes %}
              - name: volume-{{ loop.index0 }}
                mountPath: {{ path | json }}
{% endfor %}
              - name: shared-memory
                mountPath: /dev/shm
{% if settings is not none %}
              - name: config
                mountPath: {{ config_path.parent }}
                readOnly: true
{% endif %}
            volumes:
{% for claim, _ in volumes %}
            - name: volume-{{ loop.index0 }}
              persistentVolumeClaim:
                claimName: {{ claim | json }}
{% endfor %}
            - name: shared-memory
              emptyDir:
                # NCCL and data workers pass arrays through it; the default is 64 MB.
                medium: Memory
                sizeLimit: {{ config.shared_memory | json }}
{% if settings is not none %}
            - name: config
              configMap:
                name: {{ (config.name ~ "-config") | json }}
{% endif %}
"""
