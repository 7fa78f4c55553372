"""A new mesh axis needs one object and one list entry; this file adds one as an example."""

import json
import shutil

import pytest
from commands import losses, records, tiny
from refusals import missing, refused

from jaxdist import train
from jaxdist.config import fit_devices, read_run
from jaxdist.core.axis import Axis, Workload
from jaxdist.core.mesh import MeshSpec, factorisations
from jaxdist.core.parallel import axes
from jaxdist.plan.__main__ import main as plan
from jaxdist.settings import ConfigError


def _problems(size: int, workload: Workload) -> list[str]:
    del workload
    return [f"mesh rp={size}: not a multiple of 2."] if size % 2 else []


REPLICA = Axis(
    name="replica",
    short="rp",
    help="replicas, as along data",
    moves="gradients, once per step",
    weights="replicated",
    splits_rows=True,
    sums_gradients="always",
    sums_loss=True,
    shrinks=True,
    problems=_problems,
)


@pytest.fixture(autouse=True)
def axes_with_replica(monkeypatch):
    pipeline, data, *others = axes.AXES
    monkeypatch.setattr(axes, "AXES", (pipeline, data, REPLICA, *others))


FLAGS = ["--steps=4", "--checkpoint.save_interval_steps=2", "--zero=1", "--eval.interval_steps=0"]


def run(run_dir, mesh: str) -> None:
    assert train.main(tiny(*FLAGS, f"--mesh={mesh}", f"--run-dir={run_dir}")) == 0


def test_new_axis_trains_as_data_parallel_and_resumes_bit_identically(tmp_path):
    run(tmp_path / "data", "dp=4,fsdp=2")
    run(tmp_path / "replica", "dp=2,rp=2,fsdp=2")
    expected = [r["loss"] for r in records(tmp_path / "data", "train")]
    actual = [r["loss"] for r in records(tmp_path / "replica", "train")]
    assert actual[0] == pytest.approx(expected[0], rel=1e-6)
    assert actual == pytest.approx(expected, rel=2e-5)
    assert actual != [actual[0]] * len(actual)

    before = losses(tmp_path / "replica")
    shutil.rmtree(tmp_path / "replica" / "checkpoints" / "4")
    run(tmp_path / "replica", "dp=2,rp=2,fsdp=2")
    steps = [r["step"] for r in records(tmp_path / "replica", "train")]
    assert steps == [1, 2, 3, 4, 3, 4]
    assert losses(tmp_path / "replica") == before


def test_plan_treats_new_axis_as_data_parallel(capsys):
    def planned(mesh: str) -> dict:
        flags = ["--gpus=h100:8", "--compile=false", "--json", f"--mesh={mesh}"]
        assert plan([*flags, "--train.global_batch_size=256", "--zero=1"]) == 0
        (candidate,) = json.loads(capsys.readouterr().out)["plans"]
        return candidate

    data, replica = planned("dp=8"), planned("rp=8")
    assert replica["flags"]["mesh"] == "rp=8"
    assert {axis for flow in replica["traffic"] for axis in flow["axes"]} == {"replica"}
    for key in ("memory", "step"):
        assert replica[key] == data[key]
    moved = lambda plan: [(f["kind"], f["purpose"], f["bytes"]) for f in plan["traffic"]]
    assert moved(replica) == moved(data) and moved(data)


def test_bad_axis_size_reports_every_problem_and_legal_meshes():
    with pytest.raises(ConfigError) as caught:
        read_run(["--simulate=6", "--mesh=rp=3,dp=2"], command="jaxdist.train")
    text = str(caught.value)
    assert missing(text, "mesh rp=3", "multiple of 2", "Legal with") == []
    assert "not a multiple of 6 (dp=2 × rp=3 × fsdp=1 × microbatches=1)" in text
    with refused("rp = replicas"):
        MeshSpec.parse("replicas=2")


def test_new_axis_shrinks_in_an_elastic_job():
    config = read_run(["--mesh=dp=2,rp=4", "--mesh.elastic=true"], command="jaxdist.train")
    assert fit_devices(config, 4).mesh.spec == MeshSpec(replica=4)
    assert len(factorisations(8)) == 84  # 2³ as an ordered product of seven powers of two
