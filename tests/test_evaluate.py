"""Evaluation metrics: means over all rows, each counted once, and tasks equal to the harness."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from commands import records, run_here, tiny
from data_cases import open_text, sharding_on, write_text
from decoders import FAMILIES
from hf_models import write_model, write_tokenizer
from refusals import refused

from jaxdist import evaluate as command
from jaxdist.run.evaluation_loop import evaluate
from jaxdist.run.trained_run import TrainedRun, run_at
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError
from jaxdist.tools.convert.__main__ import main as convert


@pytest.fixture
def held(tmp_path, monkeypatch):
    """Return rows with unequal weights, whose last batch of 8 is ragged."""
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path)
    dataset = open_text(text, text, packing="best_fit", eval_fraction=0.3)[1]
    weights = dataset.rows(np.arange(dataset.num_rows))["weights"].sum(1)
    assert dataset.num_rows > 16 and dataset.num_rows % 8 and len(set(weights)) > 1
    return dataset


def sums_of(_, batch):
    """Return the sums of a compiled evaluation, for a model whose loss is the target over 50."""
    targets, weights = np.asarray(batch["targets"], np.float64), np.asarray(batch["weights"])
    return {
        "loss": (weights * targets / 50).sum(),
        "correct": (weights * (targets % 2)).sum(),
        "weight": weights.sum(),
    }


def evaluated(held, unit="tokens", **options):
    step = SimpleNamespace(batch_sharding=sharding_on("dp=2"), evaluate=sums_of)
    return evaluate(step, {}, held, global_batch_size=8, unit=unit, **options)


class Stored:
    """A reader of checkpoints 100 and 200."""

    def __init__(self, *args, **options):
        pass

    choose = lambda self: 200
    steps = lambda self: [100, 200]
    weights_kind = lambda self, step, kind: "raw"


def test_checkpoint_path_selects_its_step(tmp_path, monkeypatch):
    run = tmp_path / "7"  # a run may have a numeric name
    for step in ("100", "200"):
        (run / "checkpoints" / step).mkdir(parents=True)
        (run / "checkpoints" / step / "manifest.json").write_text("{}")
    (run / "config.toml").write_text("")
    assert run_at(run) == (locate(run), None)
    path, step = run_at(run / "checkpoints" / "100")
    with pytest.raises(ConfigError, match="logs"):
        run_at(run / "logs")
    monkeypatch.setattr("jaxdist.run.trained_run.Checkpointer", Stored)
    load = lambda checkpointer, step, kind: f"weights of {step}"
    parts = SimpleNamespace(config=SimpleNamespace(checkpoint=None), load_params=load)
    opened = TrainedRun(path=path, parts=parts, step=step)
    assert opened.weights() == ("weights of 100", 100, "raw")
    assert TrainedRun(path=path, parts=parts).weights().step == 200
    with pytest.raises(ConfigError, match="checkpoint 100"):
        opened.weights(200)


ROWS = SimpleNamespace(fields=("tokens", "targets"))


class Opened:
    """A run that records its calls."""

    path = "runs/x"

    def __init__(self):
        self.calls = {}

    def open(self, path, **options):
        self.calls |= {"run": path, **options}
        return self

    def open_held_out(self, sources):
        self.calls["sources"] = sources
        return ROWS

    def weights(self, step, kind):
        self.calls["weights"] = step, kind
        return SimpleNamespace(params="params", step=7, kind="raw")

    def parts_for(self, fields):
        assert fields == ROWS.fields
        return SimpleNamespace(spec="dp=2", plan=SimpleNamespace(digest="f00d"))

    def evaluate(self, params, dataset, max_batches):
        self.calls["evaluate"] = params, dataset, max_batches
        return {"loss": 2.0, "tokens": 1e6}


ALL = [
    *("--global_batch_size=16", "--step=0", "--weights=ema", "--sources=x.txt", "--max_batches=3"),
    *("--mesh=fsdp=2", "--simulate=2"),
]


@pytest.mark.parametrize(
    ("flags", "opened", "weights", "sources", "batches"),
    [
        ([], {"step": None, "mesh": "auto", "simulate": 0, "train": {}}, (None, "auto"), [], 0),
        (
            ALL,
            {"step": 0, "mesh": "fsdp=2", "simulate": 2, "train": {"global_batch_size": 16}},
            *((0, "ema"), ["x.txt"], 3),
        ),
    ],
)
def test_command_passes_its_flags_on(monkeypatch, capsys, flags, opened, weights, sources, batches):
    run = Opened()
    monkeypatch.setattr("jaxdist.run.trained_run.open_run", run.open)
    assert command.main(["a/run", "--json", *flags]) == 0
    evaluation = {"evaluate": ("params", ROWS, batches), "weights": weights, "sources": sources}
    assert run.calls == {"run": "a/run", **opened, **evaluation}
    facts = {"run": "runs/x", "step": 7, "weights": "raw", "mesh": "dp=2", "step_plan": "f00d"}
    assert json.loads(capsys.readouterr().out) == {**facts, "loss": 2.0, "tokens": 1e6}
    assert command.main(["a/run", *flags]) == 0
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert (printed["step"], printed["loss"], printed["tokens"]) == ("7", "2", "1e+06")


def test_rows_without_weight_are_rejected(held, monkeypatch):
    nothing = lambda params, batch: {"loss": 0.0, "weight": 0.0}
    monkeypatch.setitem(globals(), "sums_of", nothing)
    with refused("data.eval_sources"):
        evaluated(held)


def test_mean_is_over_all_weights_and_not_over_batches(held):
    batches = []
    result = evaluated(held, on_batch=lambda: batches.append(1))
    sums = sums_of({}, held.rows(np.arange(held.num_rows)))
    assert result["loss"] == pytest.approx(sums["loss"] / sums["weight"], rel=1e-12)
    assert result["accuracy"] == pytest.approx(sums["correct"] / sums["weight"], rel=1e-12)
    assert result["tokens"] == sums["weight"]
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]), rel=1e-12)
    rows = held.rows(np.arange(held.num_rows))
    num_bytes = (rows["weights"] * (rows["targets"] > 0)).sum()  # byte 0 is the end token
    bits = sums["loss"] / math.log(2) / num_bytes
    assert result["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert set(result) == {"loss", "accuracy", "perplexity", "bits_per_byte", "tokens"}
    assert len(batches) == -(-held.num_rows // 8)


def test_each_named_set_has_its_own_metrics(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    files = {}
    for name in ("a", "b", "c=d"):
        files[name] = tmp_path / f"{name}.txt"
        files[name].write_text("".join(f"{name} line {n}\n" * (n % 5) for n in range(120)))
    paths = [f"{'two=' * (name == 'b')}{file}" for name, file in files.items()]
    for order in (1, -1):
        held = open_text(files["a"], seq_len=16, eval_sources=paths[::order])[1]
        result = evaluated(held)
        sets = {"": [files["a"], files["c=d"]][::order], "two": [files["b"]]}
        losses = {}
        for name, members in sets.items():
            single = open_text(files["a"], seq_len=16, eval_sources=list(map(str, members)))[1]
            sums = sums_of({}, single.rows(np.arange(single.num_rows)))
            losses[name] = sums["loss"] / sums["weight"]
        assert len(set(losses.values())) == 2
        assert result["two/loss"] == pytest.approx(losses["two"], rel=1e-12)
        assert result["loss"] == pytest.approx(losses[""], rel=1e-12)  # its first part is first
    only = evaluated(open_text(files["a"], seq_len=16, eval_sources=[paths[1]])[1])
    assert only["loss"] == only["two/loss"] and only["bits_per_byte"] == only["two/bits_per_byte"]
    monkeypatch.setitem(globals(), "sums_of", lambda params, batch: {"loss": 0.0, "weight": 0.0})
    with refused("'two'", "data.eval_sources"):
        evaluated(open_text(files["a"], seq_len=16, eval_sources=[paths[1]])[1])


def test_limited_evaluation_counts_only_its_rows(held):
    result = evaluated(held, unit="images", max_batches=2)
    sums = sums_of({}, held.rows(np.arange(16) * held.num_rows // 16))
    assert result["images"] == sums["weight"]
    assert result["loss"] == pytest.approx(sums["loss"] / sums["weight"], rel=1e-12)
    assert "perplexity" not in result


QUESTIONS = [
    {"question": "Two and two?", "choices": ["four", "five", "a thousand"], "label": 0},
    {"question": "The sky is ", "choices": ["blue", "red"], "label": 0},
    {"question": "Say yes!", "choices": ["no", "yes"], "label": 1},
]
TEXTS = ["the quick brown fox jumps over the lazy dog. " * 3, "short", "a b c d e f g h"]
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{question}} Answer:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "answers": """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["q"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: bypass}]
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
}
FLAGS = "--tasks", "choices,texts", "--json"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import dataclasses

    folder = tmp_path_factory.mktemp("tasks")
    config = dataclasses.replace(FAMILIES["llama2"], vocab_size=320, max_seq_len=32)
    write_model(folder / "model", config, scale=0.3)
    write_tokenizer(folder / "model", [*TEXTS, json.dumps(QUESTIONS)], 320)
    assert convert(["from-hf", str(folder / "model"), str(folder / "run")]) == 0
    rows = [{**q, "text": text} for q, text in zip(QUESTIONS, TEXTS, strict=True)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tasks").mkdir()
    common = COMMON.format(path=folder / "rows.jsonl")
    for name, task in TASKS.items():
        (folder / "tasks" / f"{name}.yaml").write_text(f"task: {name}{common}{task}")
    absent = COMMON.format(path=folder / "absent.jsonl")
    (folder / "tasks" / "dataless.yaml").write_text(f"task: dataless{absent}{TASKS['choices']}")
    return folder


@pytest.fixture(scope="module")
def harness(models):
    pytest.importorskip("torch", reason="needs the reference extra (torch)")
    lm_eval = pytest.importorskip("lm_eval", reason="needs the eval extra (lm-eval)")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    result = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(models / "model"), device="cpu", dtype="float32", batch_size=1),
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(models / "tasks"), include_defaults=False),
    )
    answers = [sample["resps"][0][0] for sample in result["samples"]["answers"]]
    return result["results"], answers


# The harness and its dependencies warn of what others deprecate.
@pytest.mark.filterwarnings("ignore::Warning")
def test_results_on_a_mesh_equal_those_of_the_harness(models, harness, capsys, monkeypatch):
    from lm_eval.api.instance import Instance

    from jaxdist.run.task_evaluation import harness_model
    from jaxdist.run.trained_run import open_run

    (expected, answers), mesh = harness, "fsdp=4,tp=2"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    flags = *FLAGS, "--task-folder", models / "tasks", "--global-batch-size", 4
    assert run_here("evaluate", models / "run", *flags, "--mesh", mesh) == 0
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("choices/acc", "choices/acc_norm", "texts/bits_per_byte", "texts/word_perplexity"):
        task, _, metric = name.partition("/")
        # Sums of log-probabilities near -100 in float32; the perplexity is an exponential of them.
        assert ours[name] == pytest.approx(expected[task][f"{metric},none"], rel=2e-4), name
    run = open_run(str(models / "run"), mesh=mesh, train={"global_batch_size": 4})
    model = harness_model(run.parts_for(), run.weights().params)
    options = {"until": ["q"], "max_gen_toks": 12, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (question["question"], options), 0) for question in QUESTIONS
    ]
    assert model.generate_until(requests) == answers
    assert all(answers)


def test_wrong_tasks_are_rejected(models, tmp_path):
    pytest.importorskip("lm_eval", reason="needs the eval extra (lm-eval)")
    folder = "--task-folder", models / "tasks"
    with refused("nonexistent"):
        run_here("evaluate", models / "run", "--tasks", "nonexistent", *folder)
    with refused("dataless", "absent.jsonl"):
        run_here("evaluate", models / "run", "--tasks", "dataless", *folder)
    with refused("task_folder=", num_problems=1):
        run_here("evaluate", models / "run", "--tasks", "choices", "--task-folder", "absent")
    with refused("tasks"):
        run_here("evaluate", models / "run", "--limit", 3)
    start = ["--init-from", models / "model", "--run-dir", tmp_path / "run"]
    job = [flag for flag in tiny() if not flag.startswith("--model")]
    with refused("tasks=nonexistent"):
        tasks = "--eval.tasks=nonexistent", f"--eval.task_folder={models / 'tasks'}"
        run_here("train", *job, *start, *tasks, "--mesh=dp=8")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_training_evaluates_tasks(models, tmp_path, capsys):
    """The values after the last step are those of the command on its checkpoint."""
    pytest.importorskip("lm_eval", reason="needs the eval extra (lm-eval)")
    run, folder = tmp_path / "run", models / "tasks"
    job = [flag for flag in tiny("--train.steps=2") if not flag.startswith(("--model", "--eval"))]
    texts = ["--data.sources", models / "rows.jsonl", "--eval.interval_steps=1"]
    tasks = ["--eval.tasks=choices,texts", f"--eval.task_folder={folder}"]
    start = ["--init-from", models / "model", "--run-dir", run, "--mesh=dp=2,fsdp=2,tp=2"]
    assert run_here("train", *job, *texts, *tasks, *start, "--data.eval_fraction=0") == 0
    evals = records(run, "eval")
    assert [e["step"] for e in evals] == [1, 2]
    assert evals[0]["task/texts/bits_per_byte"] != evals[1]["task/texts/bits_per_byte"]
    capsys.readouterr()
    assert run_here("evaluate", run, *FLAGS, "--task-folder", folder) == 0
    after = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("choices/acc", "texts/bits_per_byte"):
        assert evals[1][f"task/{name}"] == pytest.approx(after[name], rel=1e-5)
