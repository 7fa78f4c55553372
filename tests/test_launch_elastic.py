"""Elastic launches without training: the chosen hosts and the rejected commands."""

import subprocess
import sys
import types

import pytest
from commands import ROOT
from launched import sizes_here
from refusals import missing

from jaxdist.settings import ConfigError
from jaxdist.tools.launch.__main__ import read_config
from jaxdist.tools.launch.membership import (
    ElasticConfig,
    LegalSizes,
    Range,
    choose_members,
    impossible,
    read_sizes,
)
from jaxdist.tools.launch.rendezvous import Host


def a_host(rank: int, devices: int, nproc_per_node: int | None = None, gpus: bool = True) -> Host:
    nproc_per_node = devices if nproc_per_node is None else nproc_per_node
    return Host(
        rank=rank,
        uuid=f"u{rank}",
        address=f"n{rank}",
        max_processes=nproc_per_node,
        devices=devices,
        gpus=gpus,
    )


def a_plan(nproc_per_node: str = "1:8", nnodes: str = "1:4", **fields) -> ElasticConfig:
    ranges = {
        "nproc_per_node": Range.parse("nproc-per-node", nproc_per_node),
        "nnodes": Range.parse("nnodes", nnodes),
    }
    return ElasticConfig(**{"address": "n", **ranges, **fields})


@pytest.mark.parametrize(
    ("gpus", "nproc_per_node", "nnodes", "legal", "expected"),
    [
        ([8, 8], "1:8", "1:2", [4, 8, 16], ([0, 1], 8, 1)),
        ([8, 7], "1:8", "1:2", [4, 8, 16], ([0], 8, 1)),  # 14 is not legal; one host beats two
        ([4, 4], "1:8", "1:2", [4], ([0], 4, 1)),  # among equal choices the fewest hosts
        ([4, 4, 4], "1:4", "2:3", [4, 8], ([0, 1], 4, 1)),
        ([4, 8, 8], "1:8", "1:3", [4, 8, 16], ([1, 2], 8, 1)),  # the small one is excluded
        ([7], "1:8", "1:1", [2, 4, 8], ([0], 4, 1)),
        ([8, 8], "1:1", "1:2", [4, 8, 16], ([0, 1], 1, 8)),  # one process uses all GPUs of a host
        ([6, 6], "1:1", "1:2", [4, 8, 16], ([0, 1], 1, 4)),  # and may see fewer
        ([7], "1:4", "1:1", [4, 6, 8], ([0], 3, 2)),  # 6 GPUs for 3 processes, not 4 for 4
        ([7], "1:4", "1:1", None, ([0], 4, 1)),  # of a custom program, the most processes
        ([7], "1:8", "1:1", None, ([0], 7, 1)),
        ([3], "4:8", "1:1", None, None),
        ([8], "1:8", "2:4", None, None),
        ([3], "1:8", "1:2", [4, 8], None),
    ],
)
def test_largest_legal_job_is_chosen(gpus, nproc_per_node, nnodes, legal, expected):
    hosts = [
        a_host(rank, count, min(count, int(nproc_per_node[-1]))) for rank, count in enumerate(gpus)
    ]
    choice = choose_members(hosts, a_plan(nproc_per_node, nnodes), LegalSizes(legal=legal))
    if expected is None:
        assert choice is None
    else:
        assert ([h.rank for h in choice.members], choice.nproc_per_node, choice.devices) == expected


def test_host_without_gpus_is_excluded():
    hosts = [a_host(0, 8, gpus=False), a_host(1, 2)]
    choice = choose_members(hosts, a_plan(), LegalSizes())
    assert [h.rank for h in choice.members] == [1]


def test_simulated_devices_are_not_divided_among_processes():
    hosts = [a_host(0, 8, nproc_per_node=2, gpus=False)]  # 2 processes simulate 4 each
    assert choose_members(hosts, a_plan("1:2"), LegalSizes(legal=[6], simulate=4)) is None
    choice = choose_members(hosts, a_plan("1:2"), LegalSizes(legal=[4, 6], simulate=4))
    assert (choice.nproc_per_node, choice.devices) == (1, 4)
    # One process may leave devices idle: training uses the first ones.
    choice = choose_members(hosts, a_plan("1:2"), LegalSizes(legal=[3, 6], simulate=4))
    assert (choice.nproc_per_node, choice.devices) == (1, 4)
    # It may not have more than the mesh names: training rejects that.
    assert choose_members(hosts, a_plan("1:1"), LegalSizes(legal=[1, 2], simulate=4)) is None


def test_ranges_without_a_legal_job_are_rejected():
    plan = a_plan("3:3", "1:1")
    (line,) = impossible(plan, LegalSizes(legal=[1, 2, 4], simulate=1))
    assert "--nnodes 1:1 × --nproc-per-node 3:3" in line and "1, 2, 4 devices" in line
    assert impossible(a_plan("1:4", "1:1"), LegalSizes(legal=[1, 2, 4], simulate=1)) == []
    assert impossible(plan, LegalSizes()) == []


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--nproc-per-node=8:4"], ["--nproc-per-node 8:4", "--nproc-per-node 4:8"]),
        (["--nproc-per-node=0:4"], ["--nproc-per-node 0:4", "1 or more"]),
        (["--nproc-per-node=a:b"], ["--nproc-per-node 'a:b'", "a range"]),
        (["--nnodes=1:", "--nproc-per-node=1"], ["--nnodes '1:'", "a range"]),
        (
            ["--nnodes=1:2", "--nproc-per-node=1", "--coordinator-address=n0:1", "--run-dir=x"],
            ["--coordinator-address n0:1", "a range", "--address"],
        ),
        (["--nnodes=1:2", "--nproc-per-node=1"], ["--nnodes 1:2 without --run-dir"]),
        (["--nnodes=1:2", "--run-dir=x"], ["--nnodes 1:2 without --nproc-per-node"]),
        (
            ["--nnodes=3:2", "--nproc-per-node=0:1", "--max-restarts=-1"],
            ["--nnodes 3:2", "--nproc-per-node 0:1", "max_restarts=-1"],
        ),
        (["--nproc-per-node=2", "--address=n0"], ["--address n0 is for elastic jobs"]),
        (
            ["--nproc-per-node=1:2", "--heartbeat-timeout-s=1"],
            ["heartbeat_timeout_s=1.0", "3 or more"],
        ),
    ],
)
def test_bad_range_errors_list_allowed_values(flags, facts):
    with pytest.raises(ConfigError) as caught:
        read_config(flags)
    assert missing(str(caught.value), *facts) == []


def test_training_receives_the_elastic_flag():
    plan = read_config(["--nproc-per-node", "1:2", "--", "--mesh", "dp=2"])
    assert plan.command[-1] == "--mesh.elastic=true"
    plan = read_config(["--nproc-per-node", "1:2", "--", "--mesh", "dp=2", "--mesh.elastic=true"])
    assert plan.command.count("--mesh.elastic=true") == 1
    plan = read_config(["--nproc-per-node", "1:2", "--program", "python worker.py"])
    assert plan.command == ["python", "worker.py"]
    plan = read_config(["--nproc-per-node", "2", "--", "--mesh", "dp=2"])
    assert "--mesh.elastic=true" not in plan.command and not plan.is_elastic


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--simulate=1", "--mesh=dp=5"], "global_batch_size=16"),
        (["--simulate=1", "--mesh=tp=4"], "--nnodes 1:1 × --nproc-per-node 1:2"),
    ],
)
def test_impossible_training_is_rejected_before_start(tmp_path, flags, text):
    words = ["--nproc-per-node=1:2", f"--run-dir={tmp_path / 'run'}", "--", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist.launch", *words], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 2 and text in done.stderr
    assert not (tmp_path / "run").exists()


def test_legal_sizes_match_an_elastic_mesh():
    train = ["--simulate=2", "--mesh=dp=4,tp=2"]
    assert sizes_here([*train, "--mesh.elastic=true"]) == LegalSizes(legal=[2, 4, 8], simulate=2)
    assert sizes_here(train) == LegalSizes(legal=None, simulate=2)


def test_legal_sizes_cut_no_example_of_a_users_objective(tmp_path, monkeypatch):
    """12 rows are 6 pairs, which 4 devices cannot share."""
    (tmp_path / "paired.py").write_text(
        "import dataclasses, types\nfrom jaxdist.models import example\n\n"
        "def build(*, seq_len):\n    pairs = types.SimpleNamespace(rows_per_example=2)\n"
        "    return dataclasses.replace(example.build(seq_len=seq_len), objective=pairs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--mesh=dp=6", "--mesh.elastic=true", "--train.global-batch-size=12"]
    sizes = {
        factory: sizes_here([*flags, "--model=custom", f"--model.factory={factory}"]).legal
        for factory in ("jaxdist.models.example:build", "paired:build")
    }
    assert [*sizes.values()] == [[1, 2, 3, 4, 6], [1, 2, 3, 6]]


@pytest.mark.parametrize(("flag", "code"), [("--help", 0), ("--steps=1", 1)])
def test_unexpected_output_is_an_error_except_for_help(monkeypatch, flag, code):
    done = types.SimpleNamespace(returncode=0, stdout="something else")
    monkeypatch.setattr(subprocess, "run", lambda *args, **settings: done)
    assert read_sizes([flag]) == code
