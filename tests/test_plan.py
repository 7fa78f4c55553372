"""`jaxdist plan` as a user runs it: results, output formats, and rejected arguments."""

import json
import os
import re
import sys

import pytest
from commands import ROOT
from refusals import missing

from jaxdist.config.command_line import ALIASES
from jaxdist.plan import planner
from jaxdist.plan.__main__ import main
from jaxdist.plan.compiled.check import CompiledMemory, CompiledStep, NotCompiled
from jaxdist.plan.estimate.memory import estimate_memory, usable_bytes
from jaxdist.plan.estimate.remat import policies_of
from jaxdist.plan.options import PlanConfig, clusters_of, read_plan
from jaxdist.settings import ConfigError
from jaxdist.settings.schema import fields_of

SMALL = [
    *("--model.d_model=512", "--model.num_layers=8", "--model.num_heads=8"),
    *("--model.mlp_dim=2048", "--model.vocab_size=32000", "--train.seq_len=1024"),
    *("--train.global_batch_size=256", "--compile=false"),
]


def small(*flags: str) -> list[str]:
    """Return the flags of the small run with these flags, which replace those of the same name."""
    overridden = {flag.partition("=")[0] for flag in flags}
    return [flag for flag in SMALL if flag.partition("=")[0] not in overridden] + list(flags)


def plan(capsys, *flags: str) -> dict:
    assert main(small("--json", *flags)) == 0
    (report,) = json.loads(capsys.readouterr().out)["plans"]
    return report


def advice_of(report: dict, topic: str) -> list[str]:
    return [item["text"] for item in report["advice"] if item["topic"] == topic]


def test_plan_has_a_verdict_and_the_flags_to_use(capsys):
    assert main([*SMALL, "--gpus", "h100:8", "--tokens", "1e10"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^FITS: [\d.]+ GiB of 70.8 GiB \(estimated\), with --mesh dp=8", text, re.M)
    for section in ("memory of one GPU", "one step", "traffic of one GPU", "meshes", "advice"):
        assert section in text
    assert "the run: 10B tokens" in text
    settings = {field.name for field in fields_of(PlanConfig)} | ALIASES.keys()
    named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z][\w.-]*)", text)}
    assert "checkpoint.save_interval_steps" in named and named <= settings


@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh=dp=8"],
        ["--mesh=fsdp=2,tp=2,dp=2", "--train.remat=none"],
        ["--mesh=pp=2,dp=4"],
        ["--mesh=dp=4,cp=2", "--precision.compute_dtype=float32"],
    ],
    ids=["auto", "none", "pipeline", "float32"],
)
def test_the_largest_batch_fits_and_one_more_row_does_not(flags):
    """The reference are the estimates of both batches with every policy of remat."""
    config, mesh = read_plan(small("--gpus=l4:8", "--train.seq_len=4096", *flags))
    largest = planner.make_plan(config, clusters_of(config)[0], mesh).largest_batch
    train = largest.job.config.train
    count = max(1, train.num_microbatches)
    assert count == 1 or "--mesh=pp=2,dp=4" in flags
    is_named = "--train.remat=none" in flags

    def needs(rows: int) -> float:
        """Return the least share of the usable memory, with the error of the estimate."""
        sizes = {"global_batch_size": rows, "num_microbatches": count}
        jobs = [
            largest.job.changed("train", **sizes, remat=remat)
            for remat in (["none"] if is_named else policies_of(largest.job))
        ]
        return min(1.05 * estimate_memory(job).total_bytes / usable_bytes(job) for job in jobs)

    step = count * largest.job.spec.num_replicas
    assert train.global_batch_size % step == 0 and largest.job.rows > 3
    assert needs(train.global_batch_size) <= 1 < needs(train.global_batch_size + step)


def test_the_largest_batch_is_in_text_and_json(capsys):
    report = plan(capsys, "--gpus=l4:8")
    largest = report["largest_batch"]
    assert largest["global_batch_size"] == 8 * largest["rows_per_replica"] > 256
    text = advice_of(report, "batch and learning rate")[0]
    assert f"{largest['rows_per_replica']} rows on each replica" in text
    assert f"--train.global-batch-size {largest['global_batch_size']}" in text
    tiny = plan(capsys, "--gpus=l4:1", "--model.d_model=16384", "--model.mlp_dim=65536")
    assert tiny["largest_batch"] is None and not tiny["fits"]


def test_flags_of_a_plan_reproduce_the_plan(capsys):
    free = plan(capsys, "--gpus", "h100:8")
    flags = [word for name, value in free["flags"].items() for word in (f"--{name}", value)]
    repeated = plan(capsys, "--gpus", "h100:8", *flags)
    assert repeated["step"] == free["step"]
    assert repeated["total_bytes"] == free["total_bytes"]


def test_parts_add_up_to_the_reported_totals(capsys):
    flags = ["--gpus", "h100:8", "--mesh", "fsdp=2,tp=2,pp=2", "--failures_per_day", "0"]
    report = plan(capsys, *flags)
    memory, step = report["memory"], report["step"]
    assert sum(memory["parts"].values()) == pytest.approx(memory["total_bytes"])
    assert sum(step["parts"].values()) == pytest.approx(step["seconds"])
    assert step["tokens_per_s"] == pytest.approx(256 * 1024 / step["seconds"])
    cost = report["cost"]
    hours = cost["on_demand"]["gpu_hours"]
    assert cost["on_demand"]["money"] == pytest.approx(hours * cost["price_per_gpu_hour"])
    assert report["checkpoints"]["interval_s"] is None  # JSON has no infinity


def test_run_that_does_not_fit_gets_the_smallest_change(capsys):
    flags = ["--gpus", "l4:1", "--mesh", "dp=1", "--train.remat", "none"]
    report = plan(capsys, *flags, "--train.global_batch_size=128")
    assert not report["fits"]
    advice = advice_of(report, "make it fit")
    assert "--train.num-microbatches" in advice[0]
    flag, value = re.match(r"(--\S+) (\d+)", advice[0]).groups()
    changed = plan(capsys, *flags, "--train.global_batch_size=128", flag, value)
    assert changed["fits"]


def test_several_clusters_are_planned_at_once(capsys):
    assert main([*SMALL, "--json", "--gpus", "h100:8,a100-40:4,l4:2x4"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [(p["gpu"], p["num_gpus"], p["num_nodes"]) for p in plans] == [
        ("h100", 8, 1),
        ("a100-40", 4, 1),
        ("l4", 8, 2),
    ]


def other_gpus(report: dict) -> list[tuple[int, str]]:
    (text,) = advice_of(report, "other GPUs")
    return [(int(count), gpu) for count, gpu in re.findall(r"(\d+)× ([\w-]+) \(", text)]


def test_custom_prices_and_hardware_are_used(capsys, tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[ours]\nlike = "h100"\nmemory_gib = 40\nprice_per_hour = 0.01\n')
    hardware = ["--hardware", str(file)]
    own = plan(capsys, "--gpus", "ours:8", *hardware)
    assert own["usable_bytes"] == pytest.approx((0.92 - 0.025) * 40 * 2**30, rel=1e-6)
    assert own["cost"]["price_per_gpu_hour"] == 0.01
    cheap = plan(capsys, "--gpus", "h100:1", *hardware, "--price", "0.001")
    assert cheap["cost"]["price_per_gpu_hour"] == 0.001
    assert cheap["cost"]["spot_price_per_gpu_hour"] == pytest.approx(0.0005)
    assert other_gpus(cheap)[:2] == [(1, "h100"), (1, "ours")]


def test_a_deadline_takes_more_gpus_and_a_budget_excludes_expensive_ones(capsys):
    """Days decrease with the GPU count, so the fewest in time are more than the fewest at all."""
    common_flags = ["--gpus", "h100:1", "--tokens", "1e10"]
    free = plan(capsys, *common_flags)
    days, dollars = free["cost"]["on_demand"]["days"], free["cost"]["on_demand"]["money"]
    assert (1, "h100") in other_gpus(free)
    assert not free["cost"]["late"] and not free["cost"]["dear"]
    late = plan(capsys, *common_flags, "--deadline", f"{0.4 * days:.9f}d")
    assert late["cost"]["late"] and (4, "h100") in other_gpus(late)
    in_time = plan(capsys, *common_flags, "--deadline", f"{24 * 1.1 * days:.9f}h")
    assert not in_time["cost"]["late"] and (1, "h100") in other_gpus(in_time)
    dear = plan(capsys, *common_flags, "--budget", str(0.9 * dollars))
    assert dear["cost"]["dear"] and "h100" not in [gpu for _, gpu in other_gpus(dear)]
    (neither,) = advice_of(plan(capsys, *common_flags, "--budget", "0.01"), "other GPUs")
    assert neither.startswith("Impossible") and "--budget" in neither


def test_gpus_without_the_number_format_are_not_advised(capsys):
    report = plan(capsys, "--gpus", "b200:1", "--precision.matmul_dtype", "mxfp8")
    assert {gpu for _, gpu in other_gpus(report)} == {"b200"}


def test_advice_without_a_deadline_is_limited_to_90_days(capsys):
    """Fewer GPUs would fit the run too, but take years."""
    (text,) = advice_of(plan(capsys, "--gpus", "h100:64", "--tokens", "1e12"), "other GPUs")
    days = [float(d) for d in re.findall(r"(\d+)d\d+h", text)]
    assert days and max(days) <= 90


def test_run_shorter_than_the_best_interval_saves_at_its_end(capsys):
    flags = ["--gpus", "h100:8", "--train.steps", "200", "--optim.warmup_steps", "10"]
    short = plan(capsys, *flags)
    run_s = short["cost"]["on_demand"]["days"] * 86400
    assert short["checkpoints"]["interval_s"] > run_s
    for item in short["advice"]:
        for steps in re.findall(r"save-interval-steps (\d+)", item["text"]):
            assert int(steps) <= 200


def test_8b_fits_on_one_gpu_with_its_moments_on_a_disk(capsys):
    config = [
        "--config",
        str(ROOT / "configs" / "llama3_8b_one_gpu.toml"),
        "--compile=false",
        "--json",
    ]

    def planned(*flags: str, gpus: str = "h100:1", mesh: str = "dp=1") -> dict:
        assert main([*config, f"--gpus={gpus}", f"--mesh={mesh}", *flags]) == 0
        (report,) = json.loads(capsys.readouterr().out)["plans"]
        return report

    kept, disk = planned("--train.offload-optimizer=none"), planned("--disk-gb-per-s=5")
    moments = 8 * 8_030_261_248  # two float32 numbers each
    assert kept["memory"]["parts"]["optimizer moments"] == moments
    assert disk["memory"]["disk_bytes"] == moments and disk["memory"]["host_bytes"] == 0
    assert disk["step"]["parts"]["moments to and from the disk"] == 2 * moments / 5e9
    assert disk["step"]["seconds"] == pytest.approx(kept["step"]["seconds"] + 2 * moments / 5e9)
    assert disk["checkpoints"]["bytes"] == kept["checkpoints"]["bytes"] == 1.5 * moments
    assert 0 < disk["memory"]["phases"]["update"]["fetched moments"] <= 0.1 * moments
    assert kept["fits"] is False and disk["fits"] is True
    two = planned("--train.global_batch_size=2", gpus="h100:2x1", mesh="fsdp=2")
    assert two["memory"]["disk_bytes"] == pytest.approx(moments / 2, rel=1e-3)  # on each node


def test_offloaded_moments_cost_time_and_are_on_the_gpu_only_for_the_update(capsys):
    flags = ["--gpus", "h100:8", "--mesh", "dp=8"]
    kept, moved = plan(capsys, *flags), plan(capsys, *flags, "--train.offload_optimizer=true")
    moments = kept["memory"]["parts"]["optimizer moments"]
    assert moved["memory"]["host_bytes"] == moments
    held = {
        name: parts.get("fetched moments", 0) for name, parts in moved["memory"]["phases"].items()
    }
    assert {name: size for name, size in held.items() if size} == {"update": moments}
    seconds = moved["step"]["parts"]["moments to and from host memory"]
    # PCIe 4.0, all GPUs of a node and both directions at once.
    assert seconds == pytest.approx(moments / 10e9)


def test_smaller_batch_is_suggested_if_only_accumulated_gradients_do_not_fit(capsys):
    """With two microbatches or more, a second float32 gradient of every parameter is stored."""
    flags = [
        "--gpus",
        "l4:1",
        "--mesh",
        "dp=1",
        "--train.global_batch_size=2",
        "--train.remat=full",
    ]
    model = ["--model.d_model=2048", "--model.num_layers=17", "--model.mlp_dim=8192"]
    report = plan(capsys, *flags, *model, "--train.num_microbatches=2")
    assert not report["fits"]
    advice = advice_of(report, "make it fit")
    assert any("--train.global-batch-size 1" in text for text in advice), advice


def test_more_preemptions_make_spot_more_expensive_and_saves_more_frequent(capsys):
    few = plan(capsys, "--gpus", "h100:8", "--preemptions_per_day", "1")
    many = plan(capsys, "--gpus", "h100:8", "--preemptions_per_day", "50")
    assert few["cost"]["spot"]["money"] < many["cost"]["spot"]["money"]
    assert few["spot_checkpoints"]["interval_s"] > many["spot_checkpoints"]["interval_s"]
    assert few["checkpoints"] == many["checkpoints"]


def test_spot_and_the_axes_of_the_mesh_have_advice(capsys):
    report = plan(capsys, "--gpus", "h100:8", "--train.remat", "none")
    (spot,) = advice_of(report, "spot")
    assert missing(spot, "2 preemptions a day", "--checkpoint.save-interval-steps") == []
    (mesh,) = advice_of(report, "mesh")
    assert missing(mesh, "Data parallelism alone", "fsdp", "tp", "pp", "Use cp") == []


def test_unsupported_number_format_is_reported(capsys):
    report = plan(capsys, "--gpus", "t4:4")
    (text,) = advice_of(report, "number format")
    assert missing(text, "t4", "no bfloat16", " float16") == []


def test_advice_has_only_settings_that_the_run_allows(capsys):
    argv = ["--config=llama3_8b", "--gpus=h100:2", "--model.num_experts=2", "--compile=false"]
    assert main([*argv, "--train.batch_schedule=0:32,9:128", "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["plans"]
    assert advice_of(report, "number format") == []  # products of experts have no narrow format
    assert "--train.global-batch-size" not in json.dumps(report["advice"])


def test_custom_model_has_a_plan(capsys, monkeypatch):
    """Memory, traffic, time and every mesh; the plan reports which formulas only decoders have."""
    monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path])
    argv = ["--model=custom", "--model.factory=jaxdist.models.example:build", "--gpus", "h100:8"]
    argv += ["--compile=false", "--train.seq_len=32", "--mesh", "fsdp=4,tp=2"]
    assert main([*argv, "--json"]) == 0
    (report,) = json.loads(capsys.readouterr().out)["plans"]
    assert report["mesh"] == "fsdp=4,tp=2" and report["step"]["tokens_per_s"] > 0
    assert report["memory"]["is_upper_bound"]
    assert {flow["purpose"] for flow in report["traffic"]} >= {"weights", "gradients"}
    assert len(report["meshes"]) > 4 and report["refused"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "upper bound" in text and "over tensor: unknown" in text


def test_schedules_are_drawn_with_their_bubble_and_stash(capsys):
    assert main(["--show-schedule", "--stages", "4", "--microbatches", "8"]) == 0
    text = capsys.readouterr().out
    # F = 1, B = 2: (p - 1) / (m + p - 1) of the time waits, in 22 ticks.
    facts = re.findall(r"^22 ticks, bubble 27.3 % at F=1 B=2, stash per stage ([\d ]+)", text, re.M)
    assert facts == ["7 5 3 1", "8 8 8 8"]
    assert "4 stages, 8 microbatches, 2 virtual stages each" in text
    assert "F0" in text and "B7" in text


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ([], ["--gpus h100:8"]),
        (["--gpus", "h101:8"], ["'h101'", "mean h100"]),
        (["--gpus", "h100:12"], ["12 GPUs", "nodes of 8"]),
        (["--gpus", "h100:8", "--price", "-3"], ["price=-3.0", "-1 or more"]),
        (["--gpus", "h100:8", "--tokens", "-1"], ["tokens=-1.0", "0 or more"]),
        (["--gpus", "h100:8", "--hardware", "no.toml"], ["no.toml'", "read"]),
        (["--gpus", "h100:8", "--stagse", "3"], ["--stagse", "--stages"]),
        (["--gpus", "h100:8", "--model.num_heads", "7"], ["num_heads=7", "d_model"]),
        (["--gpus", "h100:8", "--mesh", "tp=16"], ["16 devices", "8 are available"]),
        (["--gpus", "h100:8", "--html", "plan.html"], ["--html", "--json"]),
        (["--show-schedule", "--stages", "128", "--microbatches", "128"], ["--stages 128"]),
        (["--gpus", "h100:1", "--deadline=0d"], ["deadline='0d'", "14d"]),
        (["--gpus", "h100:1", "--deadline=3m"], ["deadline='3m'", "14d"]),
    ],
)
def test_bad_arguments_are_rejected_with_a_fix(flags, facts):
    with pytest.raises(ConfigError) as caught:
        main(small(*flags))
    assert missing(str(caught.value), *facts) == []


def test_data_can_be_missing_and_mesh_of_the_file_is_ignored(capsys, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[data]\nsources = ["nowhere"]\ntokenizer = "nowhere.json"\n[mesh]\nshape = "fsdp=64"\n'
    )
    assert main(["--config", str(file), "--gpus", "h100:8", "--compile=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["num_gpus"] == 8


def step_of(total: int) -> CompiledStep:
    return CompiledStep(
        memory=CompiledMemory(
            argument_bytes=total,
            output_bytes=0,
            alias_bytes=0,
            temporary_bytes=0,
            workspace_bytes=0,
            host_bytes=0,
        ),
        buffers=(),
        collectives=(),
        branch_shares={},
        program="",
        attention="cudnn",
        offload=(),
        remarks=(),
        compile_s=1.0,
        versions={"jaxlib": "0"},
        target="",
    )


def compiled_plan(monkeypatch, capsys, compile_step, *flags: str) -> dict:
    """Return the plan of the small run with this function instead of the compiler."""
    monkeypatch.setattr(planner, "compile_step", compile_step)
    return plan(capsys, "--gpus", "h100:8", "--compile=true", *flags)


def test_compiler_verdict_overrides_the_estimate(monkeypatch, capsys):
    """A mesh that the compiler rejects is replaced by the next best, and reported."""
    compiled_meshes = []

    def compile_step(config, mesh, cluster, *, timeout_s):
        compiled_meshes.append(str(mesh))
        return step_of(10**12 if len(compiled_meshes) == 1 else 10**9)

    report = compiled_plan(monkeypatch, capsys, compile_step)
    assert len(compiled_meshes) == 2 and report["mesh"] == compiled_meshes[1] != compiled_meshes[0]
    assert (report["fits"], report["verdict_by"]) == (True, "compiler")
    assert report["total_bytes"] == 10**9
    assert len(advice_of(report, "refuted")) == 1


def test_verdict_is_the_compilers_if_nothing_fits(monkeypatch, capsys):
    report = compiled_plan(monkeypatch, capsys, lambda *a, **k: step_of(10**12))
    assert (report["fits"], report["verdict_by"]) == (False, "compiler")


def test_missing_extra_falls_back_to_the_estimate_and_reports_it(monkeypatch, capsys):
    without = NotCompiled(kind="missing", reason="no_compiler", fix="install_it")
    monkeypatch.setattr(planner, "compile_step", lambda *a, **k: without)
    assert main(small("--gpus", "h100:8", "--compile=true")) == 0
    text = capsys.readouterr().out
    assert "(estimated), with" in text
    assert missing(text, "not compiled", "no_compiler", "install_it") == []


def test_requested_mesh_is_compiled(monkeypatch, capsys):
    compiled_runs = []

    def compile_step(config, mesh, cluster, *, timeout_s):
        compiled_runs.append((str(mesh), config.train.remat, cluster.num_gpus))
        return step_of(10**9)

    compiled_plan(monkeypatch, capsys, compile_step, "--mesh", "fsdp=8", "--train.remat", "full")
    assert compiled_runs == [("fsdp=8", "full", 8)]
