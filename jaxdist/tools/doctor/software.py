"""Check that package versions fit together, in one process and between all processes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from jaxdist.runtime.distributed import odd_ones
from jaxdist.runtime.formatting.tables import few
from jaxdist.tools.doctor.findings import Finding, error, ok, warning

CHECK = "software"

_OLDEST_DRIVER = {"13": 580, "12": 525}
"""CUDA's major version -> the first driver that runs it (CUDA release notes, table 2)."""

_SUMMARY = ("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

_MUST_BE_EQUAL = ("code", "jax", "jaxlib", "jaxdist", "flax", "optax", "orbax-checkpoint", "numpy")
"""Different versions compile different programs or write different checkpoints."""


def check_versions(versions: Mapping[str, str], nvidia: Mapping[str, str]) -> list[Finding]:
    """Rate the packages of one process; arguments as in `run.monitoring.environment`."""
    main = ", ".join(f"{n} {versions[n]}" for n in _SUMMARY if n in versions)
    cuda = ", ".join(f"{n} {v}" for n, v in nvidia.items() if re.search("driver|nccl|cudnn", n))
    facts = ok(CHECK, "; ".join(filter(None, (main, cuda))), **versions, **nvidia)
    return [facts, *_version_problems(versions, nvidia)]


def _version_problems(versions: Mapping[str, str], nvidia: Mapping[str, str]) -> Iterator[Finding]:
    jaxlib, driver = versions.get("jaxlib", ""), nvidia.get("driver", "")
    for name, version in nvidia.items():
        if name.startswith("jax-cuda") and version != jaxlib:
            yield error(
                CHECK,
                f"{name} {version} next to jaxlib {jaxlib}: jax will not use the GPUs",
                "pip install -c constraints.txt -e '.[cuda13]'",
            )
    if jaxlib and versions.get("jax") != jaxlib:
        yield error(
            CHECK,
            f"jax {versions.get('jax')} with jaxlib {jaxlib}",
            "install the same version of both: pip install -c constraints.txt -e .",
        )
    majors = sorted({m[1] for n in nvidia if (m := re.match(r"jax-cuda(\d+)-plugin", n))})
    if len(majors) > 1:
        yield error(
            CHECK,
            f"jax plugins for CUDA {' and '.join(majors)} are installed together",
            f"pip uninstall jax-cuda{majors[0]}-plugin jax-cuda{majors[0]}-pjrt",
        )
    for major in majors:
        oldest = _OLDEST_DRIVER.get(major, 0)
        if driver and int(driver.partition(".")[0]) < oldest:
            yield error(
                CHECK,
                f"driver {driver} is too old for CUDA {major}, which needs {oldest} or newer",
                "update the driver",
            )


def compare(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> list[Finding]:
    """Return differences between processes; `everyone` is (host, name -> version) by process id."""
    code = everyone[0][1].get("code", "?")
    agreed = ok("same software", f"{len(everyone)} processes, code {code}")
    return list(_differences(everyone)) or [agreed]


def _differences(everyone: Sequence[tuple[str, Mapping[str, str]]]) -> Iterator[Finding]:
    for name in sorted({name for _, versions in everyone for name in versions}):
        values = [versions.get(name, "none") for _, versions in everyone]
        common, odd = odd_ones(values)
        if not odd:
            continue
        which = few([f"process {i} on {everyone[i][0]}" for i in odd], 4)
        what = "the code of jaxdist" if name == "code" else name
        make = error if name in _MUST_BE_EQUAL else warning
        yield make(
            "same software",
            f"{what} is {common} in {len(values) - len(odd)} processes, but {values[odd[0]]} in "
            f"{which}",
            "use one environment and one checkout on all hosts",
        )
