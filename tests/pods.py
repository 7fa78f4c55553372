"""Simulate the pods of a JobSet: real processes in separate network namespaces.

Environment and command come from the manifest. Each pod has a network with a new address, a host
name, process 1, an empty disk (/mnt), the manifest's volumes, and no capability. Its name resolves
shortly after it has started. It runs as root nevertheless, because no other user may read the
checkout.

| here | in a cluster |
|---|---|
| `Cluster.start` | JobSet creates the Job of an attempt, which creates its pods |
| `Cluster.delete` | a drain, a preemption or `kubectl delete pod`: SIGTERM, grace, SIGKILL |
| `Cluster.kill` | the container is killed, for example by the OOM killer |
| `Cluster.lose` | the node is lost: its network is cut, and its pod is never reported again |
| `Cluster.settle` | controllers react to the pods that have ended, by the manifest's policies |
| `Cluster.restart_containers` | containers start again in pods that stay |
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kubernetes_cases import container, environ_of, job, labels_of, outcome, pod, words_of
from network_hosts import Hosts

DISK = "/mnt"
"""Directory of each pod's own disk."""
NAMED_AFTER_S = 0.5
PATIENCE_S = 400.0  # on a loaded machine; seconds were measured
_IMAGE = {"PATH": os.environ["PATH"], "HOME": DISK, "TMPDIR": DISK, "LANG": "C.UTF-8"}
_CONTAINER = [
    *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-ec"),
    'eval "$MOUNTS"; unset MOUNTS; cd /mnt; exec setpriv --bounding-set=-all --inh-caps=-all'
    ' --no-new-privs -- "$@"',
    "pod",
]
# Address of the cluster's own API: every pod has these variables, though ours never use it.
_SERVICE = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


class Pod:
    """One pod: it keeps its index and node for its life; its containers may restart in it."""

    def __init__(self, cluster: Cluster, index: int, node: str, labels: Mapping[str, str]):
        self.cluster, self.index, self.node = cluster, index, node
        self.name = f"{cluster.name}-train-0-{index}"
        serial = len(cluster.hosts.pids)
        self.disk = cluster.folder / f"disk-{serial}"
        self.disk.mkdir()
        self.host = cluster.hosts.add(self.name)
        variables = environ_of(cluster.manifest, labels, node, cluster.secrets)
        self.environ = {**_IMAGE, **_SERVICE, "HOSTNAME": self.name, **variables}
        self.start()

    def start(self) -> None:
        folder = self.cluster.folder
        self.console = folder / f"console-{len(list(folder.glob('console-*')))}-{self.name}.log"
        command = [*_CONTAINER, *words_of(self.cluster.manifest)]
        environ = {**self.environ, "MOUNTS": "; ".join(self._mounts())}
        self.process = self.cluster.hosts.start(self.host, command, self.console, env=environ)
        self.named_at = time.monotonic() + NAMED_AFTER_S

    def _mounts(self) -> Iterator[str]:
        manifest = self.cluster.manifest
        mount_paths = {
            mount["name"]: mount["mountPath"] for mount in container(manifest)["volumeMounts"]
        }
        yield f"mount --bind {shlex.quote(str(self.disk))} {DISK}"
        for volume in pod(manifest)["volumes"]:
            mount_path = mount_paths[volume["name"]]
            if claim := volume.get("persistentVolumeClaim"):
                shared = self.cluster.folder / claim["claimName"]
                shared.mkdir(exist_ok=True)
                yield f"mount --bind {shlex.quote(str(shared))} {mount_path}"
            else:
                assert volume["emptyDir"]["medium"] == "Memory", volume
                yield f"mount -t tmpfs tmpfs {mount_path}"

    def signal(self, number: int) -> None:
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        for child in Path(path).read_text().split():
            os.kill(int(child), number)

    def code(self) -> int | None:
        """Return the container's exit code as Kubernetes reports it; None while it runs."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    def output(self) -> str:
        return self.console.read_text(errors="replace")


class Cluster:
    """Nodes and controllers for one JobSet.

    Args:
        manifest: the JobSet.
        folder: directory for the pods' disks and consoles.
        secrets: secrets of the namespace, by name and key.

    Attributes:
        log: actions of the controllers.
    """

    def __init__(self, hosts: Hosts, manifest: dict, folder: Path, secrets: Mapping[str, dict]):
        self.hosts, self.manifest, self.folder, self.secrets = hosts, manifest, folder, secrets
        self.name = manifest["metadata"]["name"]
        self.size = job(manifest)["completions"]
        self.nodes = [f"node-{k}" for k in range(self.size)]
        self.pods: dict[int, Pod] = {}
        self.restarts, self.log = 0, []
        folder.mkdir()

    def start(self) -> None:
        self._labels = [self.restarts, str(uuid.uuid4())]
        self.pods = {}
        for index in range(self.size):
            if self.nodes[index]:
                self.create(index)

    def create(self, index: int) -> None:
        node = self.nodes[index]
        self.pods[index] = Pod(self, index, node, labels_of(index, *self._labels))

    def delete(self, index: int) -> None:
        """Send SIGTERM to a pod; `settle` waits, and kills it after its grace period."""
        self.pods[index].signal(signal.SIGTERM)

    def kill(self, index: int) -> None:
        self.pods[index].signal(signal.SIGKILL)

    def lose(self, index: int, instead: str) -> None:
        """Remove a node; new pods of this index use the node `instead`, or none if it is ""."""
        self.hosts.cut(self.pods[index].host)
        self.kill(index)
        self.nodes[index] = instead
        del self.pods[index]

    def restart_containers(self) -> None:
        self._wait_for_ends(PATIENCE_S)
        self.log.append("in place")
        for one in self.pods.values():
            one.start()

    def settle(self) -> None:
        """Wait until a pod ends, then apply the manifest's policies until all have ended."""
        grace_s = pod(self.manifest)["terminationGracePeriodSeconds"]
        self.wait(
            lambda: any(one.code() is not None for one in self.pods.values()), "an end", PATIENCE_S
        )
        first = self._actions()
        if "this pod again" not in first:  # the Job has failed: its other pods are deleted
            for one in self.pods.values():
                if one.code() is None:
                    one.signal(signal.SIGTERM)
        self._wait_for_ends(grace_s)
        codes = {index: one.code() for index, one in sorted(self.pods.items())}
        self.log.append(f"{codes}: {' '.join(sorted(first))}")
        if self._actions() == {"this pod again"}:
            for index in codes:
                self.create(index)
        elif "RestartJobSet" in first:
            self.restarts += 1
            assert self.restarts <= self.manifest["spec"]["failurePolicy"]["maxRestarts"]
            self.start()

    def wait_for_line(self, index: int, pattern: str) -> None:
        def has_printed() -> bool:
            matches = re.search(pattern, self.pods[index].output()) is not None
            assert matches or self.pods[index].code() is None, self.outputs()
            return matches

        self.wait(has_printed, pattern, PATIENCE_S)

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float) -> None:
        """Wait for a condition; meanwhile publish the names of new pods."""
        until = time.monotonic() + timeout_s
        while not condition():
            self._publish_names()
            assert time.monotonic() < until, f"not within {timeout_s} s: {what}\n{self.outputs()}"
            time.sleep(0.05)

    def outputs(self) -> str:
        ends = [f"{one.console.name}\n{one.output()[-3000:]}" for one in self.pods.values()]
        return "\n".join([*self.log, *ends])

    def _wait_for_ends(self, timeout_s: float) -> None:
        ended = lambda: all(one.code() is not None for one in self.pods.values())
        self.wait(ended, "all pods have ended", timeout_s)

    def _actions(self) -> set[str]:
        codes = {one.code() for one in self.pods.values()} - {None}
        return {outcome(self.manifest, code) if code else "done" for code in codes}

    def _publish_names(self) -> None:
        subdomain = self.manifest["spec"]["network"]["subdomain"]
        for index in range(self.size):
            name = f"{self.name}-train-0-{index}"
            one = self.pods.get(index)
            is_there = one and one.code() is None and time.monotonic() > one.named_at
            self.hosts.know([name, f"{name}.{subdomain}"], one.host if is_there else None)
