"""What nvidia-smi says: the GPUs themselves, and the links between them."""

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
"""Fields that nvidia-smi has kept the names of for a decade."""

_TAKEN_MIB = 1024
_HOT = 80
"""Degrees Celsius of an idle GPU that will throttle under load (data-center GPUs: at 83 to 90)."""


def ask(*arguments: str) -> str:
    """What nvidia-smi prints; "" where there is none or it fails."""
    try:
        return subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def examine_gpus() -> tuple[list[Finding], int]:
    """What there is to say of this host's GPUs, and how many there are."""
    rows = read_query(ask(f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"))
    if not rows:
        return [], 0
    return [*check_gpus(rows), *check_topology(read_topology(ask("topo", "-m")))], len(rows)


def read_query(text: str) -> list[dict[str, str]]:
    """One mapping per GPU from `--format=csv,noheader,nounits`."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines())]
    return [dict(zip(QUERY, row, strict=True)) for row in rows if len(row) == len(QUERY)]


def check_gpus(rows: Sequence[dict[str, str]]) -> list[Finding]:
    """Alike, healthy and free?"""
    kinds = Counter(row["name"] for row in rows)
    text = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    found = [ok("GPUs", f"{text}, driver {rows[0]['driver_version']}")]
    if len(kinds) > 1:
        found.append(
            warning(
                "GPUs",
                f"GPUs of several kinds: {text}; each step waits for the slowest",
                "use equal ones: CUDA_VISIBLE_DEVICES",
            )
        )
    return found + [finding for row in rows for finding in _check_gpu(row)]


def _check_gpu(row: dict[str, str]) -> Iterator[Finding]:
    name = f"GPU {row['index']} ({row['uuid']})"
    used, errors = _number(row["memory.used"]), _number(row[_ECC])
    if used is not None and used > _TAKEN_MIB:
        yield warning(
            "GPUs",
            f"{in_bytes(used * MIB)} of {name} are already taken",
            "see who by `nvidia-smi`, and end it or use other GPUs",
        )
    if errors:
        yield error(
            "GPUs",
            f"{name} has met {errors:.0f} memory error(s) that could not be corrected",
            "drain the host and reset the GPU; it is replaced if they come back",
        )
    now, most = _number(row["pcie.link.width.current"]), _number(row["pcie.link.width.max"])
    if now and most and now < most:
        yield warning(
            "GPUs",
            f"{name} has {now:.0f} of {most:.0f} PCIe lanes",
            "have the card reseated; its copies to and from the host are slower",
        )
    degrees = _number(row["temperature.gpu"])
    if degrees and degrees >= _HOT:
        yield warning(
            "GPUs",
            f"{name} is at {degrees:.0f} °C before the run",
            "look after its cooling, or for a program that still uses it",
        )


def _number(text: str) -> float | None:
    """None for "[N/A]" and "[Not Supported]"."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else None


@dataclasses.dataclass(frozen=True)
class Topology:
    """How the GPUs of a host are joined.

    Attributes:
        gpus: their names, "GPU0" first.
        links: (gpu, gpu) in that order -> "NV18" (bonded NVLinks), or the longest way over PCIe:
            "PIX" < "PXB" < "PHB" < "NODE" < "SYS".
        nics: per GPU, the way to its nearest network card; absent where there is none.
    """

    gpus: tuple[str, ...]
    links: dict[tuple[str, str], str]
    nics: dict[str, str]


_FAR = ("PIX", "PXB", "PHB", "NODE", "SYS")


def read_topology(text: str) -> Topology:
    """The matrix of `nvidia-smi topo -m`; without GPUs for text that holds none."""
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
        ways = [row[column] for column in columns if not column.startswith("GPU")]
        known = [way for way in ways if way in _FAR]
        if known:
            nics[name] = min(known, key=_FAR.index)
    return Topology(gpus, links, nics)


def check_topology(topology: Topology) -> list[Finding]:
    """Whether all GPUs of a host are joined alike, and fast."""
    if len(topology.gpus) < 2:
        return []
    found = [_check_links(topology)]
    far = sorted(gpu for gpu, way in topology.nics.items() if way in ("NODE", "SYS"))
    if far and len(far) < len(topology.gpus):
        found.append(
            note("GPU links", f"{', '.join(far)}: the nearest network card is across the host")
        )
    return found


def _check_links(topology: Topology) -> Finding:
    counts = Counter(topology.links.values())
    num_fast = sum(kind.startswith("NV") for kind in topology.links.values())
    if not num_fast:
        ways = ", ".join(f"{count} pairs {kind}" for kind, count in counts.most_common())
        return note(
            "GPU links",
            f"no NVLink between the {len(topology.gpus)} GPUs ({ways}): tensor parallelism over "
            "PCIe is slow",
            "prefer dp and fsdp to tp on this host",
        )
    if num_fast < len(topology.links):
        islands = _islands(topology)
        shown = " and ".join("+".join(island) for island in islands)
        return warning(
            "GPU links",
            f"NVLink joins only {shown}; other pairs go over PCIe",
            f"keep tp at {max(map(len, islands))} or less, so that its groups stay inside one",
        )
    if len(counts) > 1:
        return _lame_link(topology, counts)
    return ok("GPU links", f"{next(iter(counts))} between all {len(topology.gpus)} GPUs")


def _lame_link(topology: Topology, counts: Counter[str]) -> Finding:
    """All pairs have NVLink, some have fewer lanes: the GPU that is in all of those is suspect."""
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
    """GPUs that NVLink joins, directly or through others."""
    islands: list[set[str]] = [{gpu} for gpu in topology.gpus]
    for (a, b), kind in topology.links.items():
        if kind.startswith("NV"):
            joined = [island for island in islands if a in island or b in island]
            islands = [island for island in islands if island not in joined]
            islands.append(set().union(*joined))
    order = topology.gpus.index
    return sorted((sorted(i, key=order) for i in islands if len(i) > 1), key=lambda i: order(i[0]))
