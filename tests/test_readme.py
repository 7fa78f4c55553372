"""Check README.md and docs/: commands run, drawings match the code, files exist."""

import dataclasses
import json
import re
import runpy
import shlex
import subprocess
import sys

import pytest
from commands import ROOT, TINY, environment, run
from decoders import FAMILIES
from hf_models import CHATML, write_model, write_tokenizer

README = (ROOT / "README.md").read_text()
PAGES = {
    path.name: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
}
COMMANDS = sorted(
    {
        line
        for page in PAGES.values()
        for block in re.findall(r"```bash\n(.*?)```", page, flags=re.S)
        for line in block.splitlines()
        if line.startswith("python ") and "s3://BUCKET" not in line  # see test_object_storage
    }
)
# Flags that make a command small enough for a test; it must still parse, start and end as printed.
SMALLER = ["--steps=2", *TINY, "--eval.interval_steps=0"]
LONG = "scripts/bench/step.py", "--nproc-per-node 1:2", "--gpus h100:16x8", "--deadline 5d"
SAME_PROGRAM = (
    "configs/pipeline_64cpu.toml --mesh", "--mesh fsdp=2,cp=2,tp=2", "--mesh dp=-1,tp=2",
    "jaxdist.train --debug", "--mesh cp=4", "--mesh dp=4 --mesh.zero 2", "--simulate 4 --mesh pp=4",
    "--precision.matmul-dtype", "--mesh fsdp=2,ep=4", "--lora.rank", "--mesh fsdp=4,tp=2",
    "--objective.kind", "--train.batch-schedule",
)  # fmt: skip
"""Words of commands that train with other settings, which other tests run."""
ONLY_SETTINGS = [
    line
    for line in COMMANDS
    if "jaxdist.plan" not in line
    and "slurm" not in line
    and any(word in line for word in ("configs/gpt2", "configs/llama3", *SAME_PROGRAM))
]


# A separate process would prove nothing.
IN_PROCESS = ("jaxdist.convert", "jaxdist.report", "jaxdist.data", "jaxdist.plan", "jaxdist.verify")


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150
    assert len(COMMANDS) >= 12


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Create a directory like a checkout, with one finished run named runs/NAME."""
    home = tmp_path_factory.mktemp("home")
    for name in ("configs", "scripts", "examples", "README.md"):
        (home / name).symlink_to(ROOT / name)
    run_in(home, ["python", "-m", "jaxdist.train", *SMALLER, "--run-dir", "runs/NAME"])
    model = home / "models" / "NAME"
    write_model(model, dataclasses.replace(FAMILIES["qwen3"], vocab_size=320))
    write_tokenizer(model, ["a text"], 320, CHATML)
    for name in ("SMALL", "LARGE"):
        (home / "models" / name).symlink_to(model)
    says = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello " * 9}]
    (home / "chats.jsonl").write_text((json.dumps({"messages": says}) + "\n") * 300)
    pair = {"prompt": "Say hi.", "chosen": " Hi!", "rejected": " No."}
    (home / "pairs.jsonl").write_text((json.dumps(pair) + "\n") * 300)
    labeled = [json.dumps({"text": f"text {i}", "label": i % 3}) + "\n" for i in range(300)]
    (home / "texts.jsonl").write_text("".join(labeled))
    (home / "books").mkdir()
    (home / "books" / "a.txt").write_text("Once upon a time there was a test. " * 900)
    adapt = "python -m jaxdist.train --init-from models/NAME --data.records chat --lora.rank 4"
    words = shlex.split(f"{adapt} --data.sources chats.jsonl --run-dir runs/ADAPTED")
    flags = [flag for flag in SMALLER if not flag.startswith("--model.")]
    run_in(home, [*words, "--data.eval_fraction=0.1", *flags])
    run_in(home, shlex.split("python -m jaxdist.convert to-peft runs/ADAPTED models/ADAPTER"))
    return home


def run_in(home, words: list[str]) -> None:
    assert words[0] == "python"
    if words[2] in IN_PROCESS:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
            patch.chdir(home)
            patch.setattr(sys, "argv", words[2:])
            # Another test may have imported the module that runs here as a program.
            patch.delitem(sys.modules, f"{words[2]}.__main__", raising=False)
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        assert left.value.code in (0, None)
        return
    if words[1] == "-m":
        done = run(words[2].removeprefix("jaxdist."), *words[3:], cwd=home, timeout_s=600)
    else:
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=home,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"


def smaller(line: str) -> list[str]:
    """Return the command as printed, with a tiny model and two steps if it trains."""
    words = shlex.split(line.replace(" --steps 20", ""))
    if words[2] == "jaxdist.generate":
        return [*words, "--max_new_tokens", "4"]
    if words[2] == "jaxdist.evaluate":
        return [*words, "--max_batches", "1"]
    if words[1] == "scripts/bench/step.py":
        return [*words[:2], "--preset", "cpu-256", "--batch", "1", "--blocks", "1", "--no-bare"]
    if words[2] in (*IN_PROCESS, "jaxdist.doctor") or {"slurm", "kubernetes"} & set(words):
        return words
    if "--resume" in words:
        return [*words, "--steps=3"]
    if "--model.kind=custom" in words:
        return [*words, *(flag for flag in SMALLER if not flag.startswith("--model."))]
    if "--init-from" in words:
        names = {word.replace("-", "_") for word in words}
        name = lambda flag: flag.partition("=")[0].replace("-", "_")
        is_set = lambda flag: name(flag) in names or flag.startswith("--model.")
        return [*words, *(flag for flag in SMALLER if not is_set(flag))]
    return [*words, *SMALLER]


def marked(lines: list[str]) -> list:
    """Mark the commands to run: long ones `slow`, the first other one of each kind `smoke`."""
    long = lambda line: any(word in line for word in LONG)
    kinds = {line.split()[2]: line for line in reversed(lines) if not long(line)}
    marks = lambda line: (
        [pytest.mark.slow] * long(line) + [pytest.mark.smoke] * (line in kinds.values())
    )
    return [pytest.param(line, marks=marks(line)) for line in lines]


@pytest.mark.parametrize("line", marked([c for c in COMMANDS if c not in ONLY_SETTINGS]))
def test_command_runs_as_printed(home, line):
    run_in(home, smaller(line))


@pytest.mark.parametrize("line", ONLY_SETTINGS)
def test_command_reads_its_settings(home, line, monkeypatch):
    """The settings must be valid on the devices that the command names."""
    from jaxdist.config import read_run
    from jaxdist.core.mesh import MeshSpec

    monkeypatch.chdir(home)
    flags = shlex.split(line)[3:]
    if "--init-from" not in flags:  # the reader creates the corpus
        flags += ["--data.sources=stdlib", "--data.tokenizer=bytes"]
    config = read_run(flags, command="jaxdist.train")
    shape, number = config.mesh.shape, config.simulate or 8
    spec = MeshSpec(fsdp=number) if shape == "auto" else MeshSpec.parse(shape, number)
    assert config.mesh_problems(spec) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b × 2"])
def test_schedule_drawings_are_generated_by_the_code(name):
    from jaxdist.core.parallel.pipeline.schedules import make_schedule
    from jaxdist.core.parallel.pipeline.simulation import draw

    page = PAGES["pipelines.md"]
    printed = re.search(rf"<!-- drawing: {name} -->\n```\n(.*?)\n```", page, flags=re.S)
    schedule_name, _, virtual = name.partition(" × ")
    schedule = make_schedule(schedule_name, 4, 8, int(virtual or 1))
    lines = lambda text: [line.rstrip() for line in text.strip().splitlines()]
    assert lines(printed[1]) == lines(draw(schedule))


def test_names_in_the_reading_order_exist():
    tour = README[README.index("To read it in an hour") :]
    stops = re.findall(r"`((?:jaxdist|tests)/[\w/.]+)`(?:\s+\(([^)]*)\))?", tour)
    assert len(stops) >= 8
    for path, names in stops:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b|^{name}\b", source, re.M), (path, name)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_pages_named_by_a_page_exist(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for path in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", PAGES[page]):
        assert (folder / path).exists(), path
    for path in re.findall(
        r"`((?:jaxdist|configs|scripts|examples|tests|docs)/[\w./]*\w)`", PAGES[page]
    ):
        assert (ROOT / path).exists(), path


def test_the_file_tree_matches_the_package():
    tree = re.search(r"## The code.*?jaxdist/\n(.*?)```", README, flags=re.S)[1]
    named = re.findall(r"(?:^|\s)([a-z]\w*(?:\.py|(?:/\w+)*/))", tree)
    there = {p.name for p in (ROOT / "jaxdist").iterdir() if not p.name.startswith("__")}
    assert there - {"py.typed"} <= {name.rstrip("/") for name in named}
    for name in named:
        folders = (ROOT, ROOT / "jaxdist", *(ROOT / "jaxdist").glob("**/"))
        assert any((folder / name).exists() for folder in folders), name


def test_ci_runs_the_install_commands():
    ci = (ROOT / ".ci" / "run").read_text()
    for extra in ("-c constraints.txt -e '.[dev]'", "-n 2 --dist loadfile -m 'not slow'"):
        assert extra in README
        assert extra in ci
