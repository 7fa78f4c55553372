"""Tasks of the lm-evaluation-harness: equal to its own backend for transformers."""

import json

import pytest
from commands import records, run_here, tiny
from decoders import FAMILIES
from hf_models import write_model, write_tokenizer
from refusals import refused

from jaxdist.tools.convert.__main__ import main as convert

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
    with refused("nonexistent"):
        run_here("evaluate", models / "run", "--tasks", "nonexistent")
    task = (models / "tasks/choices.yaml").read_text().replace("rows.jsonl", "absent.jsonl")
    (tmp_path / "choices.yaml").write_text(task.replace("task: choices", "task: dataless"))
    with refused("dataless", "absent.jsonl"):
        run_here("evaluate", models / "run", "--tasks", "dataless", "--task-folder", tmp_path)
    with refused("task_folder=", num_problems=1):
        run_here("evaluate", models / "run", "--tasks", "choices", "--task-folder", "absent")
    with refused("tasks"):
        run_here("evaluate", models / "run", "--limit", 3)
    start = ["--init-from", models / "model", "--run-dir", tmp_path / "run"]
    job = [flag for flag in tiny() if not flag.startswith("--model")]
    with refused("tasks=nonexistent"):
        run_here("train", *job, *start, "--eval.tasks=nonexistent", "--mesh=dp=8")
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
