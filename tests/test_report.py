"""The report: outcomes by hand, differences, curves at the right pixels, clear errors."""

import dataclasses
import errno
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from refusals import missing

from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.run import metrics_log
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.run_directory import RunDirectory
from jaxdist.runtime.formatting.charts import Line, chart, thin, ticks
from jaxdist.settings import ConfigError
from jaxdist.tools.report import runs as report_runs
from jaxdist.tools.report.__main__ import main
from jaxdist.tools.report.page import html_page
from jaxdist.tools.report.runs import read_runs

CONFIG = """
name = "{name}"
[optim]
peak_lr = {peak_lr}
[monitoring]
price_per_device_hour = 2.0
"""


class Clock:
    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now


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
):
    """A run of eight devices whose step s has loss losses[s - start_step - 1], 800 tokens each."""
    clock = clock or Clock()
    run = RunDirectory.open(root / name)
    text = CONFIG.format(name=name, peak_lr=peak_lr)
    run.write_config(text if price else text.replace("2.0", "0.0"))
    run.write_environment(
        {"devices": {"kind": "cpu"}, "git": [{"commit": "0123456789abcdef", "dirty": True}]}
    )
    config = MonitoringConfig(tensorboard=False, peak_tflops=1e-6)
    monitor = Monitor(
        config,
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
    """Label -> cells, of the text table."""
    found = {}
    for line in text.splitlines():
        label, *cells = re.split(r"\s{2,}", line.rstrip())
        found[label] = cells
    return found


def test_outcome_equals_the_hand_computation(tmp_path, capsys):
    path = make_run(
        tmp_path, "one", [5.0, 4.0, 3.0, 2.0], evals=[(2, 3.5), (3, 2.25), (4, 2.5)], seconds=2.0
    )
    (run,) = as_json(capsys, path)["runs"]
    seconds = 20 + 3 * 2  # on eight devices at 2 an hour
    assert run["exit_reason"] == "finished" and run["step"] == 4 and run["total_steps"] == 10
    assert run["train_loss"] == 2.0 and run["eval_loss"] == 2.5
    assert (run["best_eval_loss"], run["best_eval_step"]) == (2.25, 3)
    assert run["units"] == 3200 and run["units_per_s"] == 400.0  # without the compiling step
    assert run["units_per_s_per_device"] == 50.0 and run["step_time_s"] == 2.0
    assert run["mfu"] == pytest.approx(0.05, rel=1e-12)  # 50 tokens/s × 1000 / 1e6
    assert run["device_hours"] == pytest.approx(8 * seconds / 3600, rel=1e-9)
    assert run["cost"] == pytest.approx(2 * 8 * seconds / 3600, rel=1e-9)
    assert run["commit"] == "012345678 dirty" and run["num_devices"] == 8


def test_table_compares_runs_and_stars_the_best(tmp_path, capsys):
    one = make_run(tmp_path, "one", [3.0, 2.0, 1.5], evals=[(3, 1.75)], peak_lr=0.1)
    two = make_run(tmp_path, "two", [3.0, 2.5, 2.0], evals=[(3, 1.25)], peak_lr=0.2, seconds=2.0)
    assert main([one, two]) == 0
    text = capsys.readouterr().out
    rows = rows_of(text)
    assert text.splitlines()[0].split() == ["one", "two"]
    assert rows["eval loss"] == ["1.7500", "1.2500 *"]
    assert rows["speed"] == ["800 tok/s *", "400 tok/s"]
    assert rows["train loss"] == ["1.5000", "2.0000"]  # of different steps' data: no star
    assert rows["MFU"] == ["10.0 % *", "5.0 %"]
    assert rows["devices"] == ["8 \u00d7 cpu", "8 \u00d7 cpu"]
    assert rows["cost"] == ["0.0533", "0.1067"]
    assert rows["optim.peak_lr"] == ["0.1", "0.2"]
    assert "name" not in rows  # differs always, explains nothing


def test_one_run_has_no_stars(tmp_path, capsys):
    assert main([make_run(tmp_path, "one", [1.0, 2.0], evals=[(2, 1.0)])]) == 0
    assert "*" not in capsys.readouterr().out


def test_config_differences_name_what_is_not_set(tmp_path, capsys):
    one, two = make_run(tmp_path, "one", [1.0]), make_run(tmp_path, "two", [1.0])
    (tmp_path / "two" / "config.toml").write_text('[optim]\npeak_lr = 0.1\nkind = "lion"\n')
    found = as_json(capsys, one, two)["differences"]
    assert found["optim.kind"] == {"one": None, "two": "lion"}
    assert found["monitoring.price_per_device_hour"] == {"one": 2.0, "two": None}
    assert "optim.peak_lr" not in found
    main([one, two])
    assert rows_of(capsys.readouterr().out)["optim.kind"] == ["not set", "lion"]


def test_equal_configs_are_said_to_be_equal(tmp_path, capsys):
    main([make_run(tmp_path, "one", [1.0]), make_run(tmp_path, "two", [1.0])])
    assert "no difference" in capsys.readouterr().out


def test_a_resumed_run_is_one_run(tmp_path, capsys):
    clock = Clock()
    lost = {"evals": [(2, 9.0), (5, 0.1)], "end": None, "clock": clock}
    make_run(tmp_path, "one", [9.0, math.nan, 9.0, math.nan, 9.0], **lost)
    clock.now += 5000.0  # nothing ran
    path = make_run(tmp_path, "one", [4.0, 3.0, 2.0], start_step=3, clock=clock, evals=[(6, 2.5)])
    (run,) = as_json(capsys, path)["runs"]
    assert run["step"] == 6 and run["starts"] == 2 and run["exit_reason"] == "finished"
    assert run["units"] == 6 * 800 and run["train_loss"] == 2.0
    assert run["best_eval_loss"] == 2.5  # the 0.1 of step 5 belongs to a state that is no more
    assert run["skipped_steps"] == 1  # likewise the skip of step 4
    assert run["device_hours"] == pytest.approx(8 * (14 + 12) / 3600, rel=1e-9)
    assert run["step_time_s"] == 1.0  # neither compiling step counts


def test_a_run_that_was_killed_is_readable(tmp_path, capsys):
    path = make_run(tmp_path, "one", [3.0, 2.0], end=None)
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')
    (run,) = as_json(capsys, path)["runs"]
    assert run["exit_reason"] == "unfinished" and run["step"] == 2


def test_a_run_without_a_step_is_readable(tmp_path, capsys):
    path = make_run(tmp_path, "one", [], end="error", price=False)
    page = tmp_path / "page.html"
    assert main([path, "--html", str(page)]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert rows["ended"] == ["error"] and "train loss" not in rows and "cost" not in rows
    assert svgs(page.read_text()) == []


def test_a_bare_metrics_file_is_enough(tmp_path, capsys):
    path = make_run(tmp_path, "one", [3.0, 2.0])
    for name in ("config.toml", "environment.json", "summary.json"):
        (tmp_path / "one" / name).unlink()
    (run,) = as_json(capsys, path)["runs"]
    assert run["train_loss"] == 2.0 and run["cost"] is None and "commit" not in run


def test_diverged_runs_keep_their_place(tmp_path, capsys):
    good = make_run(tmp_path, "good", [3.0, 2.0], evals=[(2, 2.0)])
    bad = make_run(tmp_path, "bad", [3.0, math.nan], evals=[(1, 3.0), (2, math.nan)])
    report = as_json(capsys, good, bad)
    assert report["runs"][1]["train_loss"] == "NaN" and report["runs"][1]["best_eval_loss"] == 3.0
    assert report["runs"][1]["skipped_steps"] == 1
    main([good, bad])
    assert rows_of(capsys.readouterr().out)["eval loss"] == ["2.0000", "nan"]


def test_images_are_not_called_tokens(tmp_path, capsys):
    path = make_run(tmp_path, "one", [3.0, 2.0], unit="images")
    main([path])
    assert rows_of(capsys.readouterr().out)["speed"] == ["800 img/s"]


def test_runs_of_the_same_name_are_told_apart(tmp_path, capsys):
    paths = [make_run(tmp_path / root, "run", [1.0]) for root in ("a", "b")]
    assert [run["name"] for run in as_json(capsys, *paths)["runs"]] == ["a/run", "b/run"]


# -- the page --------------------------------------------------------------------------------------


def svgs(page):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def test_page_holds_curves_tables_and_nothing_from_outside(tmp_path):
    one = make_run(tmp_path, "one", [3.0, 2.0, 1.0], evals=[(1, 3.0), (3, 1.0)])
    two = make_run(tmp_path, "two", [3.5, 2.5, 1.5], peak_lr=0.2)
    page = tmp_path / "page.html"
    assert main([one, two, "--html", str(page)]) == 0
    text = page.read_text()
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert titles[:4] == ["training loss", "evaluation loss", "tokens per second", "MFU (%)"]
    assert len(svgs(text)) == len(titles)
    assert [len(svg.findall("polyline")) for svg in svgs(text)][:3] == [2, 1, 2]
    assert len(svgs(text)[1].findall("circle")) == 2
    assert not re.search(r"<script|src=|https?://|@import|url\(", text)
    assert "optim.peak_lr" in text and "1.0000 at 3" in text


def test_the_page_draws_what_the_gpus_said_and_logarithmic_losses(tmp_path):
    (run,) = read_runs([make_run(tmp_path, "one", [100.0, 10.0, 1.0])])
    said = {"memory_bytes": 2**31, "gpu_power_w": 640.0, "gpu_temperature_c": 70.0}
    run = dataclasses.replace(run, train=[record | said for record in run.train])
    drawn = {svg.get("aria-label"): svg for svg in svgs(html_page([run], log_y=True))}
    for title, tick in (("memory", "2"), ("power", "640"), ("temperature", "70")):
        (svg,) = (svg for label, svg in drawn.items() if title in label)
        assert tick in [text.text for text in svg.findall("text")]
    (first, middle, last) = points_of(drawn["training loss"])[0]
    assert middle[1] - first[1] == pytest.approx(last[1] - middle[1], abs=0.2)


def test_curves_can_run_over_tokens(tmp_path):
    one = make_run(tmp_path, "one", [3.0, 2.0, 1.0], evals=[(3, 1.0)])
    page = tmp_path / "page.html"
    main([one, "--html", str(page), "--x", "tokens"])
    labels = [text.text for text in svgs(page.read_text())[0].findall("text")]
    assert "tokens" in labels and "1k" in labels and "2k" in labels  # 800 ... 2400 tokens


def test_a_long_run_is_shown_by_a_bounded_number_of_records(tmp_path, monkeypatch):
    losses = [2.0 + math.sin(step) / 10 for step in range(2000)]
    losses[777], losses[1234], losses[1500] = 9.0, 0.5, math.nan
    make_run(tmp_path, "long", losses, evals=[(1900, 1.75)], end="")
    make_run(tmp_path, "long", [1.5, 1.25], start_step=1990)  # ten steps are done again
    (whole,) = read_runs([str(tmp_path / "long")])
    monkeypatch.setattr(report_runs, "MAX_RECORDS", 64)
    decoded, decode = [], metrics_log.decode
    monkeypatch.setattr(metrics_log, "decode", lambda text: decoded.append(text) or decode(text))
    (run,) = read_runs([str(tmp_path / "long")])
    assert len(decoded) < 200  # decoding all lines takes most of the time of a long run
    assert len(whole.train) == 1992 and len(run.train) <= 128
    assert run.outcome == whole.outcome
    assert {9.0, 0.5, 1.5, 1.25} <= {r["loss"] for r in run.train}
    assert any(math.isnan(r["loss"]) for r in run.train)
    assert [r["step"] for r in run.train] == sorted({r["step"] for r in run.train})


def test_names_from_outside_are_escaped(tmp_path):
    path = make_run(tmp_path, "<b>&run", [2.0, 1.0])
    page = tmp_path / "page.html"
    main([path, "--html", str(page)])
    assert "<b>&run" not in page.read_text() and "&lt;b&gt;&amp;run" in page.read_text()


def points_of(svg, tag="polyline"):
    return [
        [tuple(map(float, pair.split(","))) for pair in element.get("points").split()]
        for element in svg.findall(tag)
    ]


def drawn(line):
    return ET.fromstring(re.search(r"<svg.*</svg>", chart("t", [line], x_label="x"), re.S)[0])


def test_a_line_lies_where_its_axes_say():
    svg = drawn(Line("l", "red", [(0.0, 0.0), (5.0, 2.5), (10.0, 10.0)]))
    (first, middle, last) = points_of(svg)[0]
    (y_labels, x_labels) = {}, {}
    for text in svg.findall("text"):
        try:
            value = float(text.text)
        except ValueError:
            continue
        side = y_labels if text.get("text-anchor") == "end" else x_labels
        side[value] = float(text.get("y")) - 4 if side is y_labels else float(text.get("x"))
    assert first == (x_labels[0.0], y_labels[0.0]) and last == (x_labels[10.0], y_labels[10.0])
    assert middle[0] == pytest.approx((first[0] + last[0]) / 2, abs=0.1)  # drawn to 0.1 pixels
    assert middle[1] == pytest.approx(first[1] + (last[1] - first[1]) / 4, abs=0.1)
    assert last[1] < first[1]  # up is up


def test_values_that_are_not_finite_leave_a_gap_and_a_cross():
    svg = drawn(Line("l", "red", [(1, 1.0), (2, 2.0), (3, math.nan), (4, math.inf), (5, 3.0)]))
    assert [len(points) for points in points_of(svg)] == [2, 1]
    crosses = [t for t in svg.findall("text") if t.get("class") == "bad"]
    assert [t.find("title").text for t in crosses] == ["l: nan at 3", "l: inf at 4"]


def test_a_spike_stays_visible_in_a_long_line():
    points = [(float(i), 1000.0 if i == 5_003 else 1.0) for i in range(10_000)]
    svg = drawn(Line("l", "red", points))
    assert len(points_of(svg)[0]) == 250
    (band,) = points_of(svg, "polygon")
    middle_of_line = min(y for _, y in points_of(svg)[0])
    assert min(y for _, y in band) < middle_of_line - 100  # the band reaches up, the median not


def test_thinning_takes_medians_and_extremes():
    assert thin([(0, 1.0), (1, 9.0), (2, 2.0), (3, 5.0)], 3) == [
        (1.0, 2.0, 1.0, 9.0),
        (3.0, 5.0, 5.0, 5.0),
    ]


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (2.79, 10.83), (1e-5, 3e-4), (0, 7e11), (-3, 4), (5, 5), (0, 0)]
)
def test_ticks_are_few_round_and_span_the_data(low, high):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 9
    step = found[1] - found[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(mantissa == pytest.approx(m, rel=1e-6) for m in (1, 2, 2.5, 5))


# -- bad input -------------------------------------------------------------------------------------


def refused(capsys, *arguments):
    with pytest.raises(ConfigError) as caught:
        main(list(arguments))
    assert capsys.readouterr().out == ""
    return str(caught.value)


def test_every_missing_run_is_named_at_once(tmp_path, capsys):
    one = make_run(tmp_path, "one", [1.0])
    said = refused(capsys, str(tmp_path / "none"), one, str(tmp_path))
    first, second = said.splitlines()
    assert missing(first, tmp_path / "none", "no directory", f"there: {one}.") == []
    assert missing(second, tmp_path, "no metrics.jsonl", f"there: {one}.") == []


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("config.toml", "[model\n", r"config\.toml cannot be read \(.*\)\. Mend it"),
        ("environment.json", "{", r"environment\.json cannot be read \(.*\)\. Mend it"),
        ("environment.json", "[]", r"environment\.json holds no table of values\. Mend it"),
        ("metrics.jsonl", "hello\n", r"metrics\.jsonl, line 1 is no JSON"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, capsys, name, content, match):
    one = make_run(tmp_path, "one", [1.0])
    (tmp_path / "one" / name).write_text(content)
    assert re.search(match, refused(capsys, one))


def test_a_run_named_twice_is_refused(tmp_path, capsys):
    one = make_run(tmp_path, "one", [1.0])
    assert "named twice" in refused(capsys, one, one + "/")


def test_a_page_that_cannot_be_written_is_refused(tmp_path, capsys):
    one = make_run(tmp_path, "one", [1.0])
    said = refused(capsys, one, "--html", str(tmp_path / "nowhere" / "page.html"))
    assert missing(said, "nowhere/page.html", os.strerror(errno.ENOENT)) == []


def test_the_command_says_what_is_wrong_and_starts_no_device(tmp_path):
    module = [sys.executable, "-m", "jaxdist.report"]
    done = subprocess.run([*module, str(tmp_path / "none")], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert missing(line, tmp_path / "none", "no directory") == []
    assert subprocess.run(module, capture_output=True).returncode == 2
    code = (
        "from jaxdist.tools.report.__main__ import main; from jax._src import xla_bridge\n"
        f"main([{make_run(tmp_path, 'one', [1.0])!r}, '--json'])\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
