"""Trials of a GPU in a child process, whose failure cannot end the run.

They try cuDNN's attention kernels (`attention/kernel_check.py`), the kernels of experts
(`matmul/grouped_check.py`), basic operations, and offloaded activations. A kernel with an illegal
access destroys the CUDA context of its process. Results are cached next to the compiled programs,
except failures of the child.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core.attention import cudnn, kernel_check, zigzag
from jaxdist.core.attention.kernel_check import KernelCheck, Shapes, Use
from jaxdist.core.matmul import grouped, grouped_check, hopper
from jaxdist.core.matmul.grouped_check import GroupedShapes
from jaxdist.runtime.progress import waiting

log = logging.getLogger("jaxdist")

TIMEOUT_S = 300
"""Time limit of a trial: jax starts in 10 s, and compiling a kernel takes 5 to 20 s."""

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13")
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"

Result = dict[str, Any]


def try_kernel(use: Use, shapes: Shapes | GroupedShapes, device: jax.Device) -> KernelCheck:
    """Return how a kernel compares with its reference, from a child, the cache or this process."""
    request = {"use": use} | dataclasses.asdict(shapes) | {"dtype": jnp.dtype(shapes.dtype).name}
    name = f"{kernel_check.kernel_of(use)} ({use.replace('_', ' ')})"
    result = _trial("kernel", request, device, name)
    if "failed" not in result:
        return KernelCheck(**result)
    if _OUT_OF_MEMORY in result["failed"]:
        return _validate(use, shapes, device)
    reason = f"{kernel_check.kernel_of(use)} failed in a child process ({result['failed']})"
    return KernelCheck(errors={}, rejection_reason=reason, use=use)


def _validate(use: Use, shapes: Shapes | GroupedShapes, device: jax.Device) -> KernelCheck:
    if isinstance(shapes, GroupedShapes):
        return grouped_check.validate_grouped(shapes, device)
    return kernel_check.validate_kernel(use, shapes, device)


def wrong_operations(device: jax.Device, kind: str = "operations") -> list[str]:
    """Return a line per operation that a GPU computes wrongly, or why its trial failed.

    `kind`: "operations" for basic ones, "offload" for a loop with activations in host memory.
    """
    what = {"operations": "basic operations", "offload": "gradients with offload"}[kind]
    result = _trial(kind, {}, device, what)
    if "failed" in result:
        return [f"{what} failed in a child process ({result['failed']})"]
    return [
        f"{name}: error {error:.1e} relative to the largest value, at most {limit:.0e} is rounding"
        for name, (error, limit) in result.items()
        if not error <= limit
    ]


def _trial(kind: str, request: Mapping[str, Any], device: jax.Device, name: str) -> Result:
    """Return the cached result of a trial, else that of a child; {"failed": reason} if it fails."""
    key = json.dumps([kind, request, device.device_kind, _versions()], sort_keys=True)
    folder = getattr(jax.config, "jax_compilation_cache_dir", None)
    path = Path(folder or ".") / "trials" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if folder and path.exists():
        try:
            return json.loads(path.read_text())["result"]
        except (OSError, ValueError, KeyError):
            log.warning(
                "checking %s again: the file with the result, %s, is unreadable", name, path
            )
    with waiting(f"trying {name} in a child process"):
        result = _in_child(kind, request, _child_environ(device))
    if folder and "failed" not in result:
        try:
            path.parent.mkdir(exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"key": key, "result": result}))
            partial.replace(path)
        except OSError as error:
            log.warning("the result of checking %s could not be stored: %s", name, error)
    return result


def _in_child(kind: str, request: Mapping[str, Any], environ: Mapping[str, str]) -> Result:
    command = [sys.executable, "-m", "jaxdist.core.trials", kind]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            env=environ,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no result after {TIMEOUT_S} s"}
    except OSError as error:
        return {"failed": str(error)}
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and last.startswith("{"):
        return json.loads(last)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    cause = next((line for line in lines if _OUT_OF_MEMORY in line), lines[-1] if lines else "")
    code = done.returncode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return {"failed": f"{how}: {cause.strip()[:200]}" if cause else how}


def _child_environ(device: jax.Device) -> dict[str, str]:
    """Return the environment of a child that uses only this GPU, and memory only as needed."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    index = getattr(device, "local_hardware_id", None) or 0
    names = [name for name in visible.split(",") if name.strip()]
    own = names[index] if index < len(names) else str(index)
    return dict(os.environ) | {
        "CUDA_VISIBLE_DEVICES": own,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _versions() -> dict[str, str]:
    """Return name -> version of packages, driver and this code, on which a result depends."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    checks, kernels = (kernel_check, grouped_check), (cudnn, zigzag, grouped, hopper)
    modules = (*checks, *kernels, sys.modules[__name__])
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in modules)
    return versions | {
        "driver": driver.read_text() if driver.exists() else "",
        "code": hashlib.sha256(code).hexdigest()[:16],
    }


def operation_errors() -> dict[str, tuple[float, float]]:
    """Return operation and dtype -> (error relative to the largest value, limit), against numpy."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((2, 193, 257))
    index = rng.integers(0, 193, 1024)
    results = {}
    for dtype, unit in (("float32", 2.0**-23), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        x, y = (jnp.asarray(array, dtype) for array in inputs)
        wide = [np.asarray(array.astype(jnp.float32), np.float64) for array in (x, y)]
        computed = jax.jit(
            lambda x, y: {n: f(jnp, x, y, index) for n, (f, _) in _OPERATIONS.items()}
        )
        for name, value in computed(x, y).items():
            operation, factor = _OPERATIONS[name]
            right = np.asarray(operation(np, *wide, index), np.float64)
            error = np.max(np.abs(np.asarray(value.astype(jnp.float32), np.float64) - right))
            limit = 2.0**-10 if name.startswith("product") and dtype == "float32" else factor * unit
            results[f"{name} in {dtype}"] = (float(error / np.max(np.abs(right))), limit)
    return results


def _scatter(m: Any, x: Any, y: Any, index: Any) -> Any:
    """Return the sums of x[index, 0] at `index`, float32 [rows]."""
    if m is np:
        return np.bincount(index, x[index, 0], len(x))
    return jnp.zeros(len(x), jnp.float32).at[index].add(x[index, 0])


def _loop(m: Any, x: Any, y: Any, index: Any) -> Any:
    """Return x + y [rows, columns]; jax writes it row by row into a buffer, last row first."""

    def body(buffer: Any, row: Any) -> Any:
        return buffer.at[row].set(x[row] + y[row]), None

    return x + y if m is np else jax.lax.scan(body, m.zeros_like(x), m.arange(len(x))[::-1])[0]


# Name -> (jax.numpy or numpy, x, y, indices) -> result, and the limit in units of rounding.
_OPERATIONS: dict[str, tuple[Callable, float]] = {
    "sum": (lambda m, x, y, i: m.sum(x * x), 8),
    "sum of rows": (lambda m, x, y, i: m.sum(abs(x), 1), 8),
    "sum of columns": (lambda m, x, y, i: m.sum(abs(x), 0), 8),
    "largest": (lambda m, x, y, i: m.max(x, 1), 0),
    "index of the largest": (lambda m, x, y, i: m.argmax(x, 1), 0),
    "product": (lambda m, x, y, i: x @ y.T, 8),
    "product of transposed": (lambda m, x, y, i: x.T @ y, 8),
    "gather": (lambda m, x, y, i: x[i], 0),
    "scatter of sums": (_scatter, 8),
    "running sum": (lambda m, x, y, i: m.cumsum(x, 1), 64),
    "sort": (lambda m, x, y, i: m.sort(x, 1), 0),
    "exponential": (lambda m, x, y, i: m.exp(x), 8),
    "hyperbolic tangent": (lambda m, x, y, i: m.tanh(x), 8),
    "select": (lambda m, x, y, i: m.where(x > y, x, y), 0),
    "loop that writes rows": (_loop, 2),
}


def offload_errors() -> dict[str, tuple[float, float]]:
    """Return name -> (error, limit) of gradients with offload, against those without."""
    policies, layers = jax.checkpoint_policies, jax.random.normal(jax.random.key(0), (6, 64, 64))
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def gradients(policy: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            x = checkpoint_name(x, "x")
            return x + jnp.tanh(x @ w), None

        def loss(layers: Any) -> Any:
            run = jax.checkpoint(layer, policy=policy, prevent_cse=False)
            return jnp.mean(jax.lax.scan(run, jnp.ones((64, 64)), layers)[0] ** 2)

        return jax.jit(jax.grad(loss))(layers)

    right = gradients(policies.nothing_saveable)
    error = jnp.max(jnp.abs(gradients(offload) - right)) / jnp.max(jnp.abs(right))
    return {"gradients of layers with activations in host memory": (float(error), 2.0**-10)}


def _main(kind: str) -> None:
    request = json.load(sys.stdin)
    if kind == "kernel":
        use, dtype = request.pop("use"), jnp.dtype(request.pop("dtype"))
        make: Any = GroupedShapes if use == "grouped" else Shapes
        tuples = {name: tuple(v) for name, v in request.items() if isinstance(v, list)}
        check = _validate(use, make(**request | tuples, dtype=dtype), jax.devices()[0])
        print(json.dumps(dataclasses.asdict(check)))
    else:
        print(json.dumps(offload_errors() if kind == "offload" else operation_errors()))


if __name__ == "__main__":
    _main(sys.argv[1])
