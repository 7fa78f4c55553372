"""The report: outcomes checked against manual computation, differences, curves, clear errors."""

import dataclasses
import errno
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from monitored import Clock
from refusals import missing

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.hardware import GPUS
from jaxdist.run import metrics_log
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.run_directory import RunDirectory
from jaxdist.settings import ConfigError
from jaxdist.tools.report import runs as report_runs
from jaxdist.tools.report.__main__ import main
from jaxdist.tools.report.page import draw_curves
from jaxdist.tools.report.runs import read_runs

CONFIG = """
name = "{name}"
seed = 1
[optim]
peak_lr = {peak_lr}
"""


def make_run(
    root,
    name,
    losses,
    *,
    peak_lr=0.1,
    seconds=1.0,
    evals=(),
    start_step=0,
    end="finished",
    clock=None,
    price=True,
    unit="tokens",
    config="",
):
    """Write a run of eight devices; step s has loss losses[s - start_step - 1] and 800 tokens."""
    clock = clock or Clock()
    run = RunDirectory.open(root / name)
    run.write_config(config or CONFIG.format(name=name, peak_lr=peak_lr))
    run.write_environment(
        {
            "devices": {"kind": "Tesla T4" if price else "cpu"},
            "git": [{"commit": "0123456789abcdef", "dirty": True}],
        }
    )
    monitor = Monitor(
        MonitoringConfig(tracker=[], peak_tflops=1e-6),
        run,
        total_steps=10,
        start_step=start_step,
        flops_per_token={"causal": 1000.0},
        clock=clock,
        unit=unit,
    )
    for step, loss in enumerate(losses, start=start_step + 1):
        took = 10 * seconds if step == start_step + 1 else seconds  # the first step compiles
        clock.now += took
        values = {"loss": loss, "applied": math.isfinite(loss)}
        monitor.train(step, values, tokens=800, step_time_s=took, data_wait_s=took / 4)
        for at, value in evals:
            if at == step:
                monitor.eval(at, {"loss": value})
    if end:
        monitor.summary(end)
    monitor.close()
    return str(run.path)


def as_json(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def rows_of(text):
    rows = {}
    for line in text.splitlines():
        label, *cells = re.split(r"\s{2,}", line.rstrip())
        rows[label] = cells
    return rows


def test_outcome_equals_the_manual_computation(tmp_path, capsys):
    path = make_run(
        tmp_path, "one", [5.0, 4.0, 3.0, 2.0], evals=[(2, 3.5), (3, 2.25), (4, 2.5)], seconds=2.0
    )
    (run,) = as_json(capsys, path)["runs"]
    seconds = 20 + 3 * 2  # on eight devices at 2 an hour
    assert run["exit_reason"] == "finished" and run["step"] == 4 and run["total_steps"] == 10
    assert run["train_loss"] == 2.0 and run["eval_loss"] == 2.5
    assert (run["best_eval_loss"], run["best_eval_step"]) == (2.25, 3)
    assert run["units"] == 3200 and run["units_per_s"] == 400.0  # without the step that compiles
    assert run["units_per_s_per_device"] == 50.0 and run["step_time_s"] == 2.0
    assert run["mfu"] == pytest.approx(0.05, rel=1e-12)  # 50 tokens/s × 1000 / 1e6
    assert run["device_hours"] == pytest.approx(8 * seconds / 3600, rel=1e-9)
    assert run["cost"] == pytest.approx(GPUS["t4"].price_per_hour * 8 * seconds / 3600, rel=1e-9)
    assert run["commit"] == "012345678 dirty" and run["num_devices"] == 8


def test_table_compares_runs_and_marks_the_best_with_a_star(tmp_path, capsys):
    one = make_run(tmp_path, "one", [3.0, 2.0, 1.5], evals=[(3, 1.75)], peak_lr=0.1)
    two = make_run(tmp_path, "two", [3.0, 2.5, 2.0], evals=[(3, 1.25)], peak_lr=0.2, seconds=2.0)
    assert main([one, two]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert text.splitlines()[0].split() == ["one", "two"]
    assert rows["eval loss"] == ["1.7500", "1.2500 *"]
    assert rows["speed"] == ["800 tok/s *", "400 tok/s"]
    assert rows["train loss"] == ["1.5000", "2.0000"]  # data of different steps: no star
    assert rows["MFU"] == ["10.0 % *", "5.0 %"]
    assert rows["devices"] == ["8 × Tesla T4"] * 2
    assert rows["cost"] == ["0.0140", "0.0281"]
    assert rows["optim.peak_lr"] == ["0.1", "0.2"]
    assert "name" not in rows  # always differs and explains nothing


def test_config_differences_include_unset_settings(tmp_path, capsys):
    one, two = make_run(tmp_path, "one", [1.0]), make_run(tmp_path, "two", [1.0])
    (tmp_path / "two" / "config.toml").write_text('[optim]\npeak_lr = 0.1\nkind = "lion"\n')
    differences = as_json(capsys, one, two)["differences"]
    assert differences["optim.kind"] == {"one": None, "two": "lion"}
    assert differences["seed"] == {"one": 1, "two": None}
    assert "optim.peak_lr" not in differences
    main([one, two])
    assert rows_of(capsys.readouterr().out)["optim.kind"] == ["not set", "lion"]


def test_resumed_run_is_reported_as_one_run(tmp_path, capsys):
    clock = Clock()
    lost = {"evals": [(2, 9.0), (5, 0.1)], "end": None, "clock": clock}
    make_run(tmp_path, "one", [9.0, math.nan, 9.0, math.nan, 9.0], **lost)
    clock.now += 5000.0  # nothing ran
    path = make_run(tmp_path, "one", [4.0, 3.0, 2.0], start_step=3, clock=clock, evals=[(6, 2.5)])
    (run,) = as_json(capsys, path)["runs"]
    assert run["step"] == 6 and run["starts"] == 2 and run["exit_reason"] == "finished"
    assert run["units"] == 6 * 800 and run["train_loss"] == 2.0
    assert run["best_eval_loss"] == 2.5  # the 0.1 of step 5 belongs to a discarded state
    assert run["skipped_steps"] == 1  # the skip of step 4 likewise
    assert run["device_hours"] == pytest.approx(8 * (14 + 12) / 3600, rel=1e-9)
    assert run["step_time_s"] == 1.0  # neither step that compiles counts


def test_killed_run_is_readable_without_its_other_files(tmp_path, capsys):
    path = make_run(tmp_path, "one", [3.0, 2.0], end=None)
    for name in ("config.toml", "environment.json"):
        (tmp_path / "one" / name).unlink()
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    (run,) = as_json(capsys, path)["runs"]
    assert run["exit_reason"] == "unfinished" and run["train_loss"] == 2.0
    assert run["cost"] is None and "commit" not in run


def test_run_without_a_step_is_readable(tmp_path, capsys):
    path = make_run(tmp_path, "one", [], end="error", price=False)
    page = tmp_path / "page.html"
    assert main([path, "--html", str(page)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["ended"] == ["error"] and "train loss" not in rows and "cost" not in rows
    assert "<svg" not in page.read_text()


def test_diverged_runs_are_compared(tmp_path, capsys):
    good = make_run(tmp_path, "good", [3.0, 2.0], evals=[(2, 2.0)])
    bad = make_run(tmp_path, "bad", [3.0, math.nan], evals=[(1, 3.0), (2, math.nan)])
    report = as_json(capsys, good, bad)
    assert report["runs"][1]["train_loss"] == "NaN" and report["runs"][1]["best_eval_loss"] == 3.0
    assert report["runs"][1]["skipped_steps"] == 1
    main([good, bad])
    assert rows_of(capsys.readouterr().out)["eval loss"] == ["2.0000", "nan"]


def test_image_runs_report_images_instead_of_tokens(tmp_path, capsys):
    main([make_run(tmp_path, "one", [3.0, 2.0], evals=[(2, 1.0)], unit="images")])
    text = capsys.readouterr().out
    assert rows_of(text)["speed"] == ["800 img/s"] and "*" not in text  # one run: no star


def test_runs_of_the_same_name_get_unique_names(tmp_path, capsys):
    paths = [make_run(tmp_path / root, "run", [1.0]) for root in ("a", "b")]
    assert main(paths) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[0].split() == ["a/run", "b/run"] and "no difference" in text


def charts_of(run, **options):
    return {axes.get_title(): axes for axes in draw_curves([run], ["black"], **options).axes}


def points_of(axes):
    (line,) = (
        line for line in axes.lines if line.get_color() == "black" and line.get_linestyle() != ":"
    )
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def test_page_has_curves_and_tables_and_no_external_resources(tmp_path):
    one = make_run(tmp_path, "one", [3.0, 2.0, 1.0], evals=[(1, 3.0), (3, 1.0)])
    two = make_run(tmp_path, "<b>&run", [3.5, 2.5, 1.5], peak_lr=0.2)
    page = tmp_path / "page.html"
    assert main([one, two, "--html", str(page)]) == 0
    text = page.read_text()
    (svg,) = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    labels = [element.text for element in ET.fromstring(svg).iter() if element.tag.endswith("text")]
    assert {"training loss", "evaluation loss", "tokens per second", "MFU (%)"} <= {*labels}
    assert not re.search(r"<script|src=|href=\"[^#]|@import|url\([^#]", text)
    assert "optim.peak_lr" in text and "1.0000 at 3" in text
    assert "<b>&run" not in text and "&lt;b&gt;&amp;run" in text


def test_charts_match_the_records_of_a_run(tmp_path):
    evals = [(1, 3.5), (4, 1.5)]
    (run,) = read_runs([make_run(tmp_path, "one", [100.0, 10.0, math.nan, 1.0], evals=evals)])
    extra = {"memory_bytes": 2**31, "gpu_power_w": 640.0, "gpu_temperature_c": 70.0}
    run = dataclasses.replace(run, train=[r | extra for r in run.train], restarts=[2])
    charts = charts_of(run, log_y=True)
    loss, evaluation = charts["training loss"], charts["evaluation loss"]
    assert loss.get_yscale() == "log" and charts["MFU (%)"].get_yscale() == "linear"
    np.testing.assert_array_equal(points_of(evaluation), evals)
    drawn, crosses, restart = [line.get_xydata().tolist() for line in loss.lines]
    np.testing.assert_array_equal(drawn, [(1, 100), (2, 10), (3, math.nan), (4, 1)])
    assert crosses == [[3.0, 0.95]] and [x for x, _ in restart] == [2, 2]
    for title, value in (("memory", 2.0), ("power", 640.0), ("temperature", 70.0)):
        (axes,) = (axes for label, axes in charts.items() if title in label)
        assert {y for _, y in points_of(axes)} == {value}
    (wait,) = (axes for label, axes in charts.items() if "waiting" in label)
    assert {y for _, y in points_of(wait)} == {25.0}


def test_curves_can_use_tokens_as_x_axis(tmp_path):
    (run,) = read_runs([make_run(tmp_path, "one", [3.0, 2.0, 1.0], evals=[(3, 1.0)])])
    charts = charts_of(run, x="tokens")
    assert charts["training loss"].get_xlabel() == "tokens"
    assert points_of(charts["training loss"]) == [(800, 3), (1600, 2), (2400, 1)]
    assert points_of(charts["evaluation loss"]) == [(2400, 1)]


def test_page_without_matplotlib_is_an_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    one = make_run(tmp_path, "one", [1.0])
    assert missing(refused(capsys, one, "--html=page.html"), "--html", "matplotlib") == []


def test_long_run_is_drawn_from_a_bounded_number_of_records(tmp_path, monkeypatch):
    losses = [2.0 + math.sin(step) / 10 for step in range(2000)]
    losses[777], losses[1234], losses[1500] = 9.0, 0.5, math.nan
    make_run(tmp_path, "long", losses, evals=[(1900, 1.75)], end="")
    make_run(tmp_path, "long", [1.5, 1.25], start_step=1990)  # ten steps are repeated
    (full,) = read_runs([str(tmp_path / "long")])
    monkeypatch.setattr(report_runs, "MAX_RECORDS", 64)
    decoded, decode = [], metrics_log.decode
    monkeypatch.setattr(metrics_log, "decode", lambda text: decoded.append(text) or decode(text))
    (run,) = read_runs([str(tmp_path / "long")])
    assert len(decoded) < 200  # decoding all lines dominates the time for a long run
    assert len(full.train) == 1992 and len(run.train) <= 128
    assert run.outcome == full.outcome
    assert {9.0, 0.5, 1.5, 1.25} <= {r["loss"] for r in run.train}
    assert any(math.isnan(r["loss"]) for r in run.train)
    assert [r["step"] for r in run.train] == sorted({r["step"] for r in run.train})


def refused(capsys, *arguments):
    with pytest.raises(ConfigError) as caught:
        main(list(arguments))
    assert capsys.readouterr().out == ""
    return str(caught.value)


def test_all_missing_runs_are_reported_together(tmp_path, capsys):
    one = make_run(tmp_path, "one", [1.0])
    assert "listed twice" in refused(capsys, one, one + "/")
    message = refused(capsys, str(tmp_path / "none"), one, str(tmp_path))
    first, second = message.splitlines()
    assert missing(first, tmp_path / "none", "not a directory") == []
    assert missing(second, tmp_path, "no metrics.jsonl") == []


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.toml", "[model\n", r"config\.toml cannot be read \(.*\)\. Fix it"),
        ("environment.json", "{", r"environment\.json cannot be read \(.*\)\. Fix it"),
        ("environment.json", "[]", r"environment\.json is not a table of values\. Fix it"),
        ("metrics.jsonl", "hello\n", r"metrics\.jsonl, line 1 is not JSON"),
    ],
)
def test_damaged_file_is_reported(tmp_path, capsys, name, content, match):
    one = make_run(tmp_path, "one", [1.0])
    (tmp_path / "one" / name).write_text(content)
    assert re.search(match, refused(capsys, one))


def test_unwritable_page_is_an_error(tmp_path, capsys):
    one = make_run(tmp_path, "one", [1.0])
    message = refused(capsys, one, "--html", str(tmp_path / "nowhere" / "page.html"))
    assert missing(message, "nowhere/page.html", os.strerror(errno.ENOENT)) == []


def test_command_reports_errors(tmp_path):
    module = [sys.executable, "-m", "jaxdist.report"]
    done = subprocess.run([*module, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert missing(line, tmp_path / "none", "not a directory") == []
