"""Check GPUs and the links between them with nvidia-smi."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

from jaxdist.runtime.formatting.numbers import MIB, in_bytes
from jaxdist.tools.doctor.findings import Finding, error, note, ok, warning

_ECC = "ecc.errors.uncorrected.volatile.total"
QUERY = (
    *("index", "name", "uuid", "driver_version", "memory.total", "memory.used"),
    *("temperature.gpu", _ECC),
    *("pcie.link.width.current", "pcie.link.width.max"),
)
"""Fields of nvidia-smi."""

_TAKEN_MIB = 1024
_HOT = 80
"""Degrees Celsius from which on an idle GPU is hot; data-center GPUs throttle at 83 to 90."""


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; "" if it is missing or fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def examine_gpus() -> tuple[list[Finding], int]:
    """Return the findings about this host's GPUs, and the number of GPUs."""
    rows = read_query(nvidia_smi(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))
    if not rows:
        return [], 0
    return [*check_gpus(rows), *check_topology(read_topology(nvidia_smi("topo", "-m")))], len(rows)


def read_query(text: str) -> list[dict[str, str]]:
    """Return field -> text for each GPU, from nvidia-smi's CSV output without header."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [dict(zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]


def check_gpus(rows: Sequence[dict[str, str]]) -> list[Finding]:
    """Return findings: the GPUs, and which are of another model, unhealthy or in use."""
    kinds = Counter(row["name"] for row in rows)
    text = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    results = [ok("GPUs", f"{text}, driver {rows[0]['driver_version']}")]
    if len(kinds) > 1:
        mixed = f"GPUs of several kinds: {text}; each step waits for the slowest"
        results.append(warning("GPUs", mixed, "use GPUs of one kind: CUDA_VISIBLE_DEVICES"))
    return results + [finding for row in rows for finding in _check_gpu(row)]


def _check_gpu(row: dict[str, str]) -> Iterator[Finding]:
    name = f"GPU {row['index']} ({row['uuid']})"
    used, errors = _number(row["memory.used"]), _number(row[_ECC])
    if used is not None and used > _TAKEN_MIB:
        yield warning(
            "GPUs",
            f"{in_bytes(used * MIB)} of {name} are already in use",
            "find the process with `nvidia-smi` and end it, or use other GPUs",
        )
    if errors:
        yield error(
            "GPUs",
            f"{name} has {errors:.0f} uncorrectable memory error(s)",
            "drain the host and reset the GPU; replace it if they come back",
        )
    now, most = _number(row["pcie.link.width.current"]), _number(row["pcie.link.width.max"])
    if now and most and now < most:
        yield warning(
            "GPUs",
            f"{name} uses only {now:.0f} of {most:.0f} PCIe lanes",
            "reseat the card; its copies to and from the host are slower",
        )
    degrees = _number(row["temperature.gpu"])
    if degrees and degrees >= _HOT:
        yield warning(
            "GPUs",
            f"{name} is at {degrees:.0f} °C before the run",
            "check its cooling, or find a program that still uses it",
        )


def _number(text: str) -> float | None:
    """Return the number in a text; None for "[N/A]" and "[Not Supported]"."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


@dataclasses.dataclass(frozen=True)
class Topology:
    """Links of the GPUs of a host.

    Attributes:
        gpus: names, "GPU0" first.
        links: pair of GPUs in that order -> "NV18" (bonded NVLinks) or the PCIe distance:
            "PIX" < "PXB" < "PHB" < "NODE" < "SYS".
        nics: GPU -> distance to its nearest network card.
    """

    gpus: tuple[str, ...]
    links: dict[tuple[str, str], str]
    nics: dict[str, str]


_FAR = ("PIX", "PXB", "PHB", "NODE", "SYS")


def read_topology(text: str) -> Topology:
    """Return the links in the matrix that `nvidia-smi topo -m` prints."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the header is underlined
    lines = [line for line in plain.splitlines() if line.strip()]
    heads = [
        i for i, line in enumerate(lines) if line.split()[:1] == ["GPU0"] and line[0].isspace()
    ]
    if not heads:
        return Topology((), {}, {})
    # Columns after the devices ("CPU Affinity" ...) have names of two words.
    columns = re.findall(r"\b(?:GPU|NIC|mlx\w*_?)\d+\b", lines[heads[0]].split("CPU")[0])
    gpus = tuple(name for name in columns if name.startswith("GPU"))
    links: dict[tuple[str, str], str] = {}
    nics: dict[str, str] = {}
    for line in lines[heads[0] + 1 :]:
        name, *cells = line.split()
        if name not in gpus or len(cells) < len(columns):
            continue
        row = dict(zip(columns, cells, strict=False))
        links |= {
            (name, other): row[other] for other in gpus if gpus.index(other) > gpus.index(name)
        }
        distances = [row[column] for column in columns if not column.startswith("GPU")]
        if distances := [distance for distance in distances if distance in _FAR]:
            nics[name] = min(distances, key=_FAR.index)
    return Topology(gpus, links, nics)


def check_topology(topology: Topology) -> list[Finding]:
    """Return findings about the links between GPUs and to network cards; [] below two GPUs."""
    if len(topology.gpus) < 2:
        return []
    far = sorted(gpu for gpu, distance in topology.nics.items() if distance in ("NODE", "SYS"))
    if not far or len(far) == len(topology.gpus):
        return [_check_links(topology)]
    text = f"{', '.join(far)}: the nearest network card is across the host"
    return [_check_links(topology), note("GPU links", text)]


def _check_links(topology: Topology) -> Finding:
    counts = Counter(topology.links.values())
    num_fast = sum(kind.startswith("NV") for kind in topology.links.values())
    if not num_fast:
        pairs = ", ".join(f"{count} pairs {kind}" for kind, count in counts.most_common())
        return note(
            "GPU links",
            f"no NVLink between the {len(topology.gpus)} GPUs ({pairs}): tensor parallelism over "
            "PCIe is slow",
            "prefer dp and fsdp to tp on this host",
        )
    if num_fast < len(topology.links):
        islands = _islands(topology)
        names = " and ".join("+".join(island) for island in islands)
        return warning(
            "GPU links",
            f"NVLink connects only {names}; other pairs use PCIe",
            f"keep tp at {max(map(len, islands))} or less, so that its groups stay inside one",
        )
    if len(counts) > 1:
        return _slow_link(topology, counts)
    return ok("GPU links", f"{next(iter(counts))} between all {len(topology.gpus)} GPUs")


def _slow_link(topology: Topology, counts: Counter[str]) -> Finding:
    """Return a warning with the GPU that is part of most pairs with fewer NVLinks."""
    lanes = lambda kind: int(re.sub(r"\D", "", kind) or 0)
    best = max(counts, key=lanes)
    slow = [pair for pair, kind in topology.links.items() if kind != best]
    share = Counter(itertools.chain.from_iterable(slow))
    gpu, times = share.most_common(1)[0]
    suspect = f"{gpu} is in {times} of them" if times > 1 else " and ".join(slow[0])
    return warning(
        "GPU links",
        f"{len(slow)} of {len(topology.links)} pairs of GPUs have fewer NVLinks than {best} "
        f"({', '.join(sorted(set(topology.links[p] for p in slow)))}): {suspect}",
        "see `nvidia-smi nvlink --status`; a link that is down slows every collective of the host",
    )


def _islands(topology: Topology) -> list[list[str]]:
    """Return groups of two or more GPUs that NVLink connects, directly or through others."""
    islands: list[set[str]] = [{gpu} for gpu in topology.gpus]
    for (a, b), kind in topology.links.items():
        if kind.startswith("NV"):
            joined = [island for island in islands if a in island or b in island]
            islands = [island for island in islands if island not in joined]
            islands.append(set().union(*joined))
    order = topology.gpus.index
    return sorted((sorted(i, key=order) for i in islands if len(i) > 1), key=lambda i: order(i[0]))
