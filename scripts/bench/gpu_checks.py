"""Check one device's numerics: elementary operations, attention kernels, and two training runs.

    python scripts/bench/gpu_checks.py --json OUT.json [--only CHECK ...]

Checks, each in its own process with its own time limit, because an illegal access on a GPU ends a
process (`--json` is written after each):

* operations: sums, products, gathers, scatters and sorts in each dtype against numpy in float64
* rows: whether a row of a product has the same bits for different numbers of rows
* attention: cuDNN's calls against a float32 reference, by head size and window
* experts: jax's kernels against float32 blocks, and their time and that of blocks, on the shapes of
  one device of Qwen3 30B-A3B (ep=8) and Mixtral 8x7B
* zeros: bits of five steps with and without XLA's option that leaves buffers without zeros; each
  variant has its own process, because two models do not fit one
* losses: 20 losses of the default run in float32 and bfloat16 against float32 on the CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 100
LIMITS_S = {"losses": 220, "experts": 200}
LOSSES = 20
DETERMINISTIC = {"XLA_FLAGS": "--xla_gpu_exclude_nondeterministic_ops=true"}
"""Without it, sums in gradients differ between two equal programs."""
ZEROS_VARIANTS = ("with", "without", "with_again")


def main() -> int:
    """Run the checks that are named, or all; return 0 if each process returned its result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        name, _, variant = args.inside.partition(":")
        args.json.write_text(json.dumps(_zeros(variant) if variant else CHECKS[name]()))
        return 0
    results = {"conditions": _conditions()}
    for name in args.only:
        results[name] = _in_process(name)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results[name]), flush=True)
    return int(any("error" in results[name] for name in args.only))


def _in_process(name: str) -> dict[str, Any]:
    if name != "zeros":
        return _child(name, LIMITS_S.get(name, LIMIT_S), {})
    variants = {v: _child(f"zeros:{v}", LIMIT_S, DETERMINISTIC) for v in ZEROS_VARIANTS}
    failed = [result for result in variants.values() if "error" in result]
    if failed:
        return failed[0]
    one, other, again = variants.values()
    return {"equal": one == other, "equal_when_repeated": one == again, **variants}


def _child(name: str, limit_s: float, environ: dict[str, str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, "--inside", name, "--json", out.name]
        try:
            done = subprocess.run(
                command, timeout=limit_s, capture_output=True, text=True, env=os.environ | environ
            )
        except subprocess.TimeoutExpired:
            return {"error": f"more than {limit_s} s"}
        if done.returncode:
            return {"error": done.stderr[-2000:], "exit_code": done.returncode}
        return json.loads(Path(out.name).read_text())


def _conditions() -> dict[str, str]:
    command = "import json, step; print(json.dumps(step.conditions()))"
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, cwd=folder, check=True
    )
    return json.loads(done.stdout) | {"command": " ".join(sys.argv)}


def operations() -> dict[str, Any]:
    """Return the largest error of each operation and dtype, relative to the largest result."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((512, 768)) for _ in range(2))
    index = rng.integers(0, 512, 4096)
    cases: dict[str, tuple[Callable, Callable]] = {
        "sum": (lambda x, y: x.sum(), lambda x, y: x.sum()),
        "sum_rows": (lambda x, y: x.sum(1), lambda x, y: x.sum(1)),
        "max": (lambda x, y: x.max(0), lambda x, y: x.max(0)),
        "product": (
            lambda x, y: jnp.matmul(x, y.T, preferred_element_type=jnp.float32),
            lambda x, y: x @ y.T,
        ),
        "gather": (lambda x, y: x[index], lambda x, y: x[index]),
        "scatter_add": (
            lambda x, y: jnp.zeros((512,), jnp.float32).at[index].add(x[index, 0]),
            lambda x, y: np.bincount(index, x[index, 0], 512),
        ),
        "cumsum": (lambda x, y: jnp.cumsum(x, 1), lambda x, y: np.cumsum(x, 1)),
        "sort": (lambda x, y: jnp.sort(x, 1), lambda x, y: np.sort(x, 1)),
        "argmax": (lambda x, y: jnp.argmax(x, 1), lambda x, y: np.argmax(x, 1)),
        "softmax": (
            lambda x, y: jax.nn.softmax(x.astype(jnp.float32), -1),
            lambda x, y: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
        ),
    }
    deviations: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16", "float16"):
        x, y = (jnp.asarray(v, jnp.dtype(dtype)) for v in (a, b))
        wide = [np.asarray(v.astype(jnp.float32), np.float64) for v in (x, y)]
        for name, (ours, reference) in cases.items():
            got = np.asarray(jax.jit(ours)(x, y).astype(jnp.float32), np.float64)
            right = reference(*wide)
            deviations[f"{name}_{dtype}"] = float(
                np.max(np.abs(got - right)) / np.max(np.abs(right))
            )
    with jax.default_matmul_precision("highest"):
        x, y = jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32)
        got = np.asarray(jax.jit(lambda x, y: x @ y.T)(x, y), np.float64)
    right = np.asarray(x, np.float64) @ np.asarray(y, np.float64).T
    deviations["product_float32_highest"] = float(
        np.max(np.abs(got - right)) / np.max(np.abs(right))
    )
    numbers = rng.integers(-1000, 1000, (512, 768)).astype(np.int32)
    deviations["sum_int32"] = int(jax.jit(jnp.sum)(numbers)) - int(numbers.sum())
    return deviations


def rows() -> dict[str, Any]:
    """Return for each dtype the row counts for which the first row has other bits than alone."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(1)
    deviations = {}
    for dtype in ("float32", "bfloat16"):
        x = jnp.asarray(rng.standard_normal((4096, 2048)), dtype)
        w = jnp.asarray(rng.standard_normal((2048, 2048)), dtype)
        product = jax.jit(lambda x, w: x @ w)
        sizes = (1, 2, 7, 8, 64, 100, 512, 4096)
        first = [np.asarray(product(x[:n], w)[0].astype(jnp.float32)) for n in sizes]
        deviations[dtype] = {
            "differ": [n for n, row in zip(sizes, first, strict=True) if (row != first[0]).any()],
            "largest": max(float(np.max(np.abs(row - first[0]))) for row in first),
        }
    return deviations


def attention() -> dict[str, Any]:
    """Return the result of `validate_kernel`, and the error of the ordinary call, for each case."""
    import jax
    import jax.numpy as jnp

    from jaxdist.core.attention import kernel_check

    deviations: dict[str, Any] = {}
    device = jax.devices()[0]
    for head_dim, heads, kv_heads in ((64, 12, 12), (128, 16, 8), (96, 8, 8)):
        sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=jnp.bfloat16)
        shapes = kernel_check.Shapes(rows=2, seq_len=2048, windows=(0, 512), **sizes)
        for use in ("packed", "ring", "packed_ring"):
            one = shapes if use == "packed" else dataclasses.replace(shapes, windows=(0,))
            check = kernel_check.validate_kernel(use, one, device)
            deviations[f"{use}_{head_dim}"] = check.rejection_reason or check.errors
        deviations[f"ordinary_{head_dim}"] = _ordinary(shapes)
    return deviations


def _ordinary(shapes: Any) -> dict[str, Any]:
    import jax

    from jaxdist.core.attention import kernel_check

    segments = np.ones((2, shapes.seq_len), np.int32)
    inputs = kernel_check._sample_inputs(shapes, segments)
    errors: dict[str, Any] = {}
    for window in shapes.windows:
        attend = lambda q, k, v, window=window: jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            local_window_size=(window - 1, 0) if window else None,
            implementation="cudnn",
        )
        try:
            computed = kernel_check._vjp(attend, inputs)
        except Exception as error:  # any failure of cuDNN, the compiler or jax
            errors[f"failed_{window}"] = str(error)[:500]
            continue
        pair = computed, kernel_check._reference(inputs, segments, window)
        for name, a, b in zip(("out", "dq", "dk", "dv"), *pair, strict=True):
            errors[f"{name}_{window}"] = kernel_check._error(a, b)
    return errors


def experts() -> dict[str, Any]:
    """Return the errors by result and load, and the ms of forward and backward by kernel."""
    import jax
    import jax.numpy as jnp

    from jaxdist.core.matmul import grouped_check

    results: dict[str, Any] = {}
    for name, rows, groups, widths in (
        ("30b_a3b", 81_920, 16, ((2048, 1536), (768, 2048))),
        ("mixtral", 65_536, 8, ((4096, 28_672), (14_336, 4096))),
    ):
        shapes = grouped_check.GroupedShapes(
            rows=rows, groups=groups, widths=widths, dtype=jnp.bfloat16
        )
        check = grouped_check.validate_grouped(shapes, jax.devices()[0])
        results[name] = check.rejection_reason or check.errors
        for width_in, width_out in widths:
            make = lambda *shape: jnp.ones(shape, jnp.bfloat16)
            inputs = [make(rows, width_in), make(groups, width_in, width_out)]
            inputs.append(make(rows, width_out))
            sizes = jnp.full(groups, rows // groups, jnp.int32)
            for kernel in ("mosaic", "blocks"):
                run = grouped_check.make_vjp(kernel)
                spent = []
                for _ in range(6):  # the first compiles
                    begin = time.perf_counter()
                    jax.block_until_ready(run(*inputs, sizes))
                    spent.append(1e3 * (time.perf_counter() - begin))
                results[f"{name}_{width_in}_{width_out}_{kernel}_ms"] = min(spent[1:])
    return results


def _zeros(variant: str) -> dict[str, Any]:
    """Return losses and a digest of the parameters after five steps of one variant."""
    import jax
    import step

    from jaxdist.core.step import compiler_options

    shape = step.bare.Shape(8192, 512, 8, 8, 4, 1536, 1024)
    options = argparse.Namespace(documents=0, moments="float32", matmul_dtype="auto")
    choose = compiler_options.choose_options
    if variant == "without":
        _replace_everywhere(
            "choose_options",
            lambda *args: tuple(o for o in choose(*args) if o.name != compiler_options.NO_ZEROS),
        )
    results: dict[str, Any] = {}
    for remat in ("dots", "full"):
        parts = step.assemble(step.run_config(shape, 8, remat, options), jax.devices()[:1])
        batches = step.make_batches(8192, 8, 1024, parts.step.batch_sharding, 0)
        state = parts.init_state()
        losses = []
        for i in range(5):
            state, metrics = parts.step.train(state, batches[i % 4], np.inf)
            losses.append(float(metrics["loss"]))
        digest = hashlib.sha256()
        for leaf in jax.tree.leaves(state.params):
            digest.update(np.asarray(leaf).tobytes())
        results[remat] = {"losses": losses, "params": digest.hexdigest()}
        del parts, state, batches
    return results


def _replace_everywhere(name: str, value: Any) -> None:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("jaxdist") and hasattr(module, name):
            setattr(module, name, value)


def losses() -> dict[str, Any]:
    """Return the largest relative difference of 20 losses, by dtype, to float32 on the CPU."""
    runs = {
        "cpu": ("cpu", "float32"),
        "float32": ("", "float32"),
        "float32_highest": ("", "float32"),
        "bfloat16": ("", "bfloat16"),
    }
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (platform, dtype) in runs.items():
            run = Path(folder) / name
            environ = os.environ | ({"JAX_PLATFORMS": platform} if platform else {})
            if name.endswith("highest"):
                environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
            command = [sys.executable, "-m", "jaxdist.train", "--run-dir", str(run)]
            command += ["--train.steps", str(LOSSES), "--train.global-batch-size", "8"]
            command += ["--precision.compute-dtype", dtype, "--monitoring.log-interval-steps", "1"]
            done = subprocess.run(command, env=environ, capture_output=True, text=True)
            if done.returncode:
                return {"error": done.stderr[-2000:], "run": name}
            lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
            results[name] = [x["loss"] for x in lines if x["kind"] == "train"]
    cpu = np.array(results["cpu"])
    for name in runs:
        results[f"difference_{name}"] = float(np.max(np.abs(np.array(results[name]) / cpu - 1)))
    return results


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "operations": operations,
    "rows": rows,
    "attention": attention,
    "experts": experts,
    "zeros": lambda: {v: _zeros(v) for v in ZEROS_VARIANTS},
    "losses": losses,
}

if __name__ == "__main__":
    sys.exit(main())
