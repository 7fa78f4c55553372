"""The fields of Kubernetes and JobSet that manifests use, written down from the documentation."""

import re

# Fields of batch/v1, v1 and jobset.x-k8s.io/v1alpha2 with their types, as far as they are used.
PATH, QUANTITY = str, (str, re.compile(r"[0-9]+(m|k|Ki|M|Mi|G|Gi|T|Ti)?"))
LABELS = {"*": str}
EXIT_CODES = {"containerName": str, "operator": str, "values": [int]}
REASONS = {"name": str, "action": str, "onJobFailureReasons": [str]}
SECURITY = {
    "runAsNonRoot": bool,
    "runAsUser": int,
    "runAsGroup": int,
    "fsGroup": int,
    "fsGroupChangePolicy": str,
    "seccompProfile": {"type": str},
}
VALUE_FROM = {"fieldRef": {"fieldPath": str}, "secretKeyRef": {"name": str, "key": str}}
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "env": [{"name": str, "value": str, "valueFrom": VALUE_FROM}],
    "resources": {"requests": {"*": QUANTITY}, "limits": {"*": QUANTITY}},
    "securityContext": {
        "allowPrivilegeEscalation": bool,
        "capabilities": {"drop": [str], "add": [str]},
    },
    "volumeMounts": [{"name": str, "mountPath": PATH, "readOnly": bool}],
}
TERM = {"matchExpressions": [{"key": str, "operator": str, "values": [str]}]}
POD = {
    "restartPolicy": str,
    "terminationGracePeriodSeconds": int,
    "automountServiceAccountToken": bool,
    "enableServiceLinks": bool,
    "securityContext": SECURITY,
    "imagePullSecrets": [{"name": str}],
    "nodeSelector": LABELS,
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [TERM]}
        }
    },
    "tolerations": [{"key": str, "operator": str, "value": str, "effect": str}],
    "containers": [CONTAINER],
    "volumes": [
        {
            "name": str,
            "persistentVolumeClaim": {"claimName": str},
            "emptyDir": {"medium": str, "sizeLimit": QUANTITY},
            "configMap": {"name": str},
        }
    ],
}
JOB = {
    "completionMode": str,
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "podReplacementPolicy": str,
    "podFailurePolicy": {"rules": [{"action": str, "onExitCodes": EXIT_CODES}]},
    "template": {"spec": POD},
}
JOB_SET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": LABELS},
    "spec": {
        "network": {
            "enableDNSHostnames": bool,
            "subdomain": str,
            "publishNotReadyAddresses": bool,
        },
        "failurePolicy": {"maxRestarts": int, "rules": [REASONS]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}


def misfits(value, schema, where: str = "") -> list[str]:
    """Fields that the API does not have, and values of another type than it takes."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [where]
        free = schema.get("*")
        return [
            bad
            for key, inner in value.items()
            for bad in misfits(inner, free or schema.get(key), f"{where}.{key}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [where]
        return [bad for item in value for bad in misfits(item, schema[0], f"{where}[]")]
    if isinstance(schema, tuple):
        kind, pattern = schema
        return [] if type(value) is kind and pattern.fullmatch(value) else [where]
    return [] if schema is not None and type(value) is schema else [where]
