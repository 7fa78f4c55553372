"""The Python API as a notebook uses it, without mocks and in one process."""

import inspect
import json
import logging
import pydoc
import re
import signal
import sys
from types import SimpleNamespace

import grain
import jax
import numpy as np
import optax
import pytest
from commands import ROOT
from refusals import missing, refused

import jaxdist
from jaxdist import api, runtime
from jaxdist.checkpoint import CheckpointError
from jaxdist.models import example
from jaxdist.plan.__main__ import main as plan_main
from jaxdist.run.setup import Parts
from jaxdist.runtime import progress

TINY = {
    "model": {"d_model": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 64},
    "train": {"seq_len": 32, "global_batch_size": 16},
    "eval": {"interval_steps": 0, "final_max_batches": 2},
    "optim.warmup_steps": 2,
    "monitoring.tracker": [],
}
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.S)


def train(path, **settings):
    base = {name: value for name, value in TINY.items() if name not in settings}
    return jaxdist.train(base, run_dir=path, progress=False, **settings)


@pytest.fixture(scope="module")
def records():
    return []


@pytest.fixture(scope="module")
def run(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("api") / "run"
    return train(path, steps=4, callbacks=records.append)


def test_run_records_are_a_table_of_metrics(run, records):
    assert run.exit_reason == "finished" and run.last_step == 4
    assert [r["step"] for r in run.metrics] == [1, 2, 3, 4]
    assert run.losses == [r["loss"] for r in run.metrics] and run.losses[-1] < run.losses[0]
    assert {"grad_norm", "learning_rate", "tokens_per_s"} <= run.metrics[0].keys()
    assert run.config.train.steps == 4 and run.config.model.d_model == 32
    assert [(r["kind"], r["step"]) for r in records] == [
        *(("train", step) for step in (1, 2, 3, 4)),
        ("eval", 4),
    ]
    assert records == run.metrics + run.evaluations
    assert run.summary["loss"] == run.losses[-1]


def test_reopened_run_generates_evaluates_and_exports(run, tmp_path):
    opened = jaxdist.open(run.path / "checkpoints" / "4")
    assert (opened.path, opened.step, opened.exit_reason) == (run.path, 4, "finished")
    with refused("step=2", "checkpoint 4"):
        jaxdist.open(run.path / "checkpoints" / "4", step=2)
    assert sum(leaf.size for leaf in jax.tree.leaves(opened.params)) > 10_000
    greedy = {"max_new_tokens": 5, "temperature": 0.0}
    one, *_ = both = opened.generate(["def f", "import "], **greedy)
    assert len(both) == 2 and opened.generate("def f", **greedy) == one
    assert opened.evaluate(max_batches=2)["loss"] == pytest.approx(
        run.evaluations[-1]["loss"], rel=1e-6
    )
    out = opened.export_hf(tmp_path / "hf")
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 32
    with pytest.raises(jaxdist.ConfigError, match="max_tokens"):
        opened.generate("a", max_tokens=3)


def test_all_problems_are_in_one_exception_and_no_file_is_created(tmp_path):
    with pytest.raises(jaxdist.ConfigError) as refused:
        train(tmp_path / "run", steps=-1, optim={"peek_lr": 1.0}, simulated=2, opti={"x": 1})
    text = str(refused.value)
    assert all(
        name in text for name in ("train.steps=-1", "optim.peak_lr", "simulated", "keyword opti")
    )
    assert not (tmp_path / "run").exists()
    with pytest.raises(jaxdist.ConfigError, match=r"metrics\.jsonl|not a directory"):
        jaxdist.open(tmp_path / "none")


USER = {"role": "user", "content": "Hi"}
WRONG = [
    ("config", [3, b"x", ["a"]], lambda run, value: jaxdist.train(value)),
    ("model", [3, ["cnn"]], lambda run, value: jaxdist.train(model=value)),
    ("callbacks", [3, [3], "x"], lambda run, value: jaxdist.train(callbacks=value)),
    ("progress", [3, "no"], lambda run, value: jaxdist.train(progress=value)),
    ("optimizer", [3, "adam"], lambda run, value: jaxdist.train(optimizer=value)),
    ("schedule", [3, "cosine"], lambda run, value: jaxdist.train(schedule=value)),
    ("1", [{1: 2}], lambda run, value: jaxdist.train(value)),
    ("model.1", [{1: 2}], lambda run, value: jaxdist.train(model=value)),
    ("path", [3, None, b"x"], lambda run, value: jaxdist.open(value)),
    ("step", ["x", 1.0, True], lambda run, value: jaxdist.open(run.path, step=value)),
    ("mesh", [3, None, {"dp": 2}], lambda run, value: jaxdist.open(run.path, mesh=value)),
    ("weights", [3, "mean", None], lambda run, value: jaxdist.open(run.path, weights=value)),
    ("model", [3, "cnn", {"d_model": 8}], lambda run, value: jaxdist.open(run.path, model=value)),
    ("data", ["a.txt", ["a.txt"], {}], lambda run, value: jaxdist.open(run.path, data=value)),
    ("gpus", [3, None, ["h100:8"]], lambda run, value: jaxdist.plan(value)),
    ("config", [3, ["a"]], lambda run, value: jaxdist.plan("h100:8", value)),
    ("1", [{1: 2}], lambda run, value: jaxdist.plan("h100:8", value)),
    ("prompt", [3, None, {}, {"a"}, [3]], lambda run, value: run.generate(value)),
    ("message", [[[]], [[{}]], [{**USER, "content": 3}]], lambda run, value: run.generate(value)),
    ("top_k", ["x", 1.5, {1: 2}], lambda run, value: run.generate("a", top_k=value)),
    ("sources", [3, None, [3], {"a"}], lambda run, value: run.evaluate(value)),
    ("max_batches", ["x", 1.5], lambda run, value: run.evaluate(max_batches=value)),
    ("path", [3, None, b"x"], lambda run, value: run.export_hf(value)),
    ("dtype", [3, None, {1: 2}], lambda run, value: run.export_hf("hf", dtype=value)),
]


def test_arguments_of_wrong_types_are_rejected(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for argument, values, call in WRONG:
        for value in values:
            with pytest.raises(jaxdist.ConfigError) as error:
                call(run, value)
            assert re.search(rf"\b{argument}", str(error.value)), (argument, value)
    assert not [*tmp_path.iterdir()]


def test_failed_final_save_raises(monkeypatch, tmp_path):
    def failing(config, program, stop, request):
        program.on_start(SimpleNamespace(path=tmp_path))
        return runtime.EXIT_FAILURE

    monkeypatch.setattr(api, "run_training", failing)
    with pytest.raises(CheckpointError, match="last checkpoint"):
        train(tmp_path / "run", steps=1)


def test_run_stopped_by_callback_resumes_bit_identically(run, tmp_path):
    stop = lambda reason: [lambda record: None, lambda record: record["step"] == 1 and reason]
    for name, reason, stored in (("run", True, ""), ("other", "low enough", "low enough")):
        stopped = train(tmp_path / name, steps=4, callbacks=stop(reason))
        assert stopped.exit_reason == "stopped_by_callback" and stopped.last_step < 4
        assert stopped.summary["stop_reason"] == stored
    went_on = train(tmp_path / "run", steps=4)
    assert went_on.exit_reason == "finished" and went_on.losses == run.losses


def test_callback_receives_the_state(tmp_path):
    seen = {}

    def look(record, state):
        now = state()
        seen[record["kind"], record["step"]] = int(now.step), jax.device_get(now.params)

    run = train(tmp_path / "run", steps=3, mesh="pp=2,dp=4", callbacks=look)
    steps = {key: step for key, (step, _) in seen.items()}
    assert steps[("eval", 3)] == 3 and all(0 <= n - at <= 1 for (_, at), n in steps.items())
    final = seen["eval", 3][1]
    for one, two in zip(jax.tree.leaves(final), jax.tree.leaves(run.params), strict=True):
        np.testing.assert_array_equal(one, two)


RATES = optax.linear_schedule(1e-2, 1e-3, 6)
RULE = optax.chain(optax.scale_by_adam(b1=0.8, b2=0.9), optax.scale(-1))


@pytest.mark.parametrize(
    ("objects", "settings"),
    [
        ({"optimizer": optax.sgd(0.1)}, {"optimizer": "sgd", "momentum": 0, "peak_lr": 0.1}),
        (
            {"optimizer": optax.adam(1e-2, b1=0.8, b2=0.9)},
            {"optimizer": "adamw", "beta1": 0.8, "beta2": 0.9, "peak_lr": 1e-2},
        ),
        (
            {"optimizer": RULE, "schedule": RATES},
            {"beta1": 0.8, "beta2": 0.9, "schedule": "linear", "peak_lr": 1e-2},
        ),
        ({"schedule": RATES}, {"schedule": "linear", "peak_lr": 1e-2}),
    ],
    ids=["sgd", "adam", "both", "schedule"],
)
def test_objects_of_optax_train_like_the_settings(tmp_path, objects, settings):
    rule = {"warmup_steps": 0, "weight_decay": 0, "schedule": "constant"} | settings
    rule |= {"decay_steps": 6, "min_lr_ratio": 0.1} if rule["schedule"] == "linear" else {}
    base = {name: value for name, value in TINY.items() if not name.startswith("optim.")}
    start = lambda name, mesh, optim, **more: jaxdist.train(
        base, run_dir=tmp_path / name, mesh=mesh, steps=6, optim=optim, progress=False, **more
    )
    expected = start("settings", "dp=8", rule)
    used = rule if "optimizer" not in objects else {"max_grad_norm": 1.0}
    for mesh in ("dp=8", "dp=2,fsdp=2,tp=2"):
        own = start(mesh, mesh, used, **objects)
        np.testing.assert_allclose(own.losses, expected.losses, rtol=2e-5)
        rates = [r["learning_rate"] for r in own.metrics]
        same = [r["learning_rate"] for r in expected.metrics] if "schedule" in objects else [1] * 6
        np.testing.assert_allclose(rates, same, rtol=1e-6)


def test_run_with_an_optimizer_resumes_with_it_only(tmp_path):
    rule = {"optimizer": optax.sgd(0.1, momentum=0.9)}
    undisturbed = train(tmp_path / "one", steps=4, **rule)
    train(tmp_path / "two", steps=4, callbacks=lambda record: record["step"] == 1, **rule)
    with refused("optimizer", "optax", "--run-dir"):
        train(tmp_path / "two", steps=4)
    assert train(tmp_path / "two", steps=4, **rule).losses == undisturbed.losses
    offload = {"train": {**TINY["train"], "offload_optimizer": "host"}}
    losses = train(tmp_path / "three", steps=4, **offload, **rule).losses
    np.testing.assert_allclose(losses, undisturbed.losses, rtol=2e-5)


def test_failing_callback_closes_the_loader(monkeypatch, tmp_path):
    opened, open_loader = [], Parts.open_loader
    monkeypatch.setattr(
        Parts, "open_loader", lambda *args: opened.append(open_loader(*args)) or opened[-1]
    )
    with pytest.raises(ZeroDivisionError):
        train(tmp_path / "other", steps=4, callbacks=lambda record: 1 / 0)
    with pytest.raises(RuntimeError, match="closed"):
        next(opened[0])


def test_first_ctrl_c_saves_and_second_raises(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt(record):
        if record["step"] == 1:
            signal.raise_signal(signal.SIGINT)

    try:
        left = train(tmp_path / "once", steps=4, callbacks=interrupt)
        assert left.exit_reason == "preempted" and left.last_step < 4
        assert (left.path / "checkpoints" / str(left.last_step)).is_dir()
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "twice", steps=4, callbacks=[interrupt, interrupt])
        assert jaxdist.open(tmp_path / "twice").exit_reason == "interrupted"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def numbered(row: int) -> dict:
    tokens = (row + np.arange(33)) % 256
    return {"tokens": tokens[:-1], "targets": tokens[1:], "weights": np.ones(32)}


def test_datasets_and_models_can_be_python_objects(tmp_path):
    rows = grain.MapDataset.source(range(100)).map(numbered)
    model = example.build(seq_len=32)
    options = {"model": model, "override": ["audit"]}  # test_audit_custom_models has the audit
    run = train(tmp_path / "run", steps=2, data=(rows[10:], rows[:10]), **options)
    with pytest.raises(jaxdist.ConfigError, match="model=MODEL"):
        jaxdist.open(run.path).evaluate()
    with pytest.raises(jaxdist.ConfigError, match="data=ROWS"):
        jaxdist.open(run.path, model=model).evaluate()
    again = jaxdist.open(run.path, model=model, data=(rows[10:], rows[:10]))
    assert again.evaluate()["tokens"] == 10 * 32
    stream = rows.to_iter_dataset()
    assert train(tmp_path / "stream", steps=2, data=stream).exit_reason == "finished"


def test_importable_function_is_recorded_by_name(tmp_path):
    run = train(tmp_path / "run", steps=1, model=example.build, override=["audit"])
    assert run.config.model.factory == "jaxdist.models.example:build"
    assert jaxdist.open(run.path).evaluate(max_batches=1)["loss"] > 0


def test_run_draws_its_curves_and_shows_its_results(run):
    pytest.importorskip("matplotlib", reason="needs the dev extra (matplotlib)")
    figure = run.plot()
    assert list(figure.axes[0].lines[0].get_ydata()) == run.losses
    assert figure._repr_png_().startswith(b"\x89PNG")  # what a notebook displays
    table = run._repr_html_()
    assert table.count("<table>") == 1 and run.exit_reason in table


def test_command_modules_are_callable():
    for name in ("train", "plan"):
        module = getattr(jaxdist, name)
        assert module is sys.modules[f"jaxdist.{name}"] and callable(module)
        function = getattr(api, name)
        assert inspect.signature(module) == inspect.signature(function)
        text = pydoc.render_doc(module)
        assert all(argument in text for argument in inspect.signature(function).parameters)
    assert not callable(sys.modules["jaxdist.runtime"])
    with pytest.raises(AttributeError):
        _ = jaxdist.trane


def test_plan_equals_output_of_the_command(capsys):
    flags = ["--config", "gpt2_124m", "--gpus", "h100:8", "--mesh=tp=4,dp=2", "--steps=10"]
    plan_main([*flags, "--compile=false", "--json"])
    (printed,) = json.loads(capsys.readouterr().out)["plans"]
    (plan,) = jaxdist.plan("h100:8", "gpt2_124m", mesh="tp=4,dp=2", steps=10, compile=False)
    assert json.loads(json.dumps(plan)) == printed


def test_progress_bar_replaces_lines_of_steps_and_evaluations(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("jaxdist.runtime.progress.SHORT_S", 0.0)  # compiling may take less
    bars = []
    make = progress.make_bar
    monkeypatch.setattr(api, "make_bar", lambda **options: bars.append(make(**options)) or bars[-1])
    settings = {**TINY, "run_dir": tmp_path, "steps": 2}
    jaxdist.train(settings, progress=True)
    jaxdist.train(settings, progress=True, steps=4)
    assert [(bar.initial, bar.n, bar.total) for bar in bars] == [(0, 2, 2), (2, 4, 4)]
    assert {"loss", "eval_loss"} == {part.split("=")[0] for part in bars[0].postfix.split(", ")}
    printed = capsys.readouterr().out
    assert missing(printed, "\nmesh ", "compiling the train step", "\nended ", "\nrun ") == []
    assert not re.search(r"^(step|eval) +\d+/", printed, re.M), printed
    assert not logging.getLogger("jaxdist").handlers


@pytest.mark.slow
def test_snippets_of_python_page_run(monkeypatch, tmp_path):
    small = {k: v for k, v in TINY.items() if k not in ("model", "train")}
    small["override"] = ["audit"]
    real = api.train

    def train_small(*args, **settings):
        sizes = {} if "model" in settings else {"model": TINY["model"]}
        rows = {"global_batch_size": 16, "seq_len": 32, **settings.pop("train", {})}
        settings["steps"] = min(settings.get("steps", 2), 2)
        return real(*args, **{**small, **sizes, "train": rows, **settings})

    monkeypatch.setattr(api, "train", train_small)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for snippet in SNIPPETS:
        exec(snippet, names)
    assert names["run"].exit_reason == "finished" and (tmp_path / "exported").is_dir()
    assert len(names["texts"]) == 2 and len(SNIPPETS) >= 8
