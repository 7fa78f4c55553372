"""What the README says is true today: commands run, drawings are the code's, the tour exists."""

import dataclasses
import json
import re
import shlex
import subprocess
import sys

import pytest
from commands import ROOT, TINY, environment, tiny
from decoders import FAMILIES
from hf_models import CHATML, write_model, write_tokenizer

README = (ROOT / "README.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.S)
    for line in block.splitlines()
    if line.startswith("python ")
]
# What makes a command small enough for a test; it must still parse, start and end as printed.
SMALLER = ["--steps=2", *TINY, "--eval.interval_steps=0"]
NEEDS_GPUS = [
    line
    for line in COMMANDS
    if "jaxdist.plan" not in line and ("configs/gpt2" in line or "configs/llama3" in line)
]


def test_there_are_commands_to_run():
    assert len(COMMANDS) >= 12


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A directory like a checkout, with one finished run named runs/NAME."""
    home = tmp_path_factory.mktemp("home")
    for name in ("configs", "scripts", "examples", "README.md"):
        (home / name).symlink_to(ROOT / name)
    run_in(home, ["python", "-m", "jaxdist.train", *SMALLER, "--run-dir", "runs/NAME"])
    write_model(home / "models" / "NAME", dataclasses.replace(FAMILIES["qwen3"], vocab_size=320))
    write_tokenizer(home / "models" / "NAME", ["a text"], 320, CHATML)
    says = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello " * 9}]
    (home / "chats.jsonl").write_text((json.dumps({"messages": says}) + "\n") * 300)
    return home


def run_in(home, words: list[str]) -> str:
    assert words[0] == "python"
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=home,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def smaller(line: str) -> list[str]:
    """The command as printed, with a tiny model and two steps where it trains."""
    words = shlex.split(line.replace(" --steps 20", ""))
    if words[2] == "jaxdist.generate":
        return [*words, "--max_new_tokens", "4"]
    if words[2] == "jaxdist.evaluate":
        return [*words, "--max_batches", "1"]
    if words[1] == "scripts/bench/step.py":
        return [*words[:2], "--preset", "cpu-256", "--batch", "1", "--blocks", "1", "--no-bare"]
    alone = ("jaxdist.convert", "jaxdist.report", "jaxdist.data", "jaxdist.plan", "jaxdist.doctor")
    if "slurm" in words or words[2] in alone:
        return words
    if "pp=4" in line:
        deep = tiny("--model.num_layers=4", "--train.global_batch_size=16")
        return [*words, "--steps=2", *deep, "--eval.interval_steps=0"]
    if "--resume" in words:
        return [*words, "--steps=3"]
    if "--init-from" in words:
        given = lambda flag: flag.partition("=")[0] in words or flag.startswith("--model.")
        return [*words, *(flag for flag in SMALLER if not given(flag))]
    return [*words, *SMALLER]


@pytest.mark.parametrize("line", [c for c in COMMANDS if c not in NEEDS_GPUS])
def test_command_runs_as_printed(home, line):
    run_in(home, smaller(line))


@pytest.mark.parametrize("line", NEEDS_GPUS)
def test_command_for_gpus_reads_its_settings(line, monkeypatch):
    """Too large to run here: what it asks for must be legal on the GPUs that it names."""
    from jaxdist.config import read_run
    from jaxdist.core.mesh import MeshSpec

    monkeypatch.chdir(ROOT)
    data = ["--data.sources=stdlib", "--data.tokenizer=bytes"]  # the corpus is the reader's to make
    config = read_run([*shlex.split(line)[3:], *data], command="jaxdist.train")
    shape = config.mesh.shape
    spec = MeshSpec(fsdp=8) if shape == "auto" else MeshSpec.parse(shape, 8)
    assert config.mesh_problems(spec) == []


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b × 2", "1f1b_lean", "zero_bubble"])
def test_schedule_drawings_are_the_codes_own(name):
    from jaxdist.core.parallel.pipeline.schedules import make_schedule
    from jaxdist.core.parallel.pipeline.simulation import draw

    printed = re.search(rf"<!-- drawing: {name} -->\n```\n(.*?)\n```", README, flags=re.S)
    schedule_name, _, chunks = name.partition(" × ")
    schedule = make_schedule(schedule_name, 4, 8, int(chunks or 1))
    lines = lambda text: [line.rstrip() for line in text.strip().splitlines()]
    assert lines(printed[1]) == lines(draw(schedule))


def test_the_reading_tour_leads_to_what_is_there():
    tour = README[README.index("**A reading tour**") : README.index("## Measuring")]
    stops = re.findall(r"`((?:jaxdist|tests)/[\w/.]+)`(?:\s+\(([^)]*)\))?", tour)
    assert len(stops) >= 8
    for path, names in stops:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(class|def) {name}\b|^{name}\b", source, re.M), (path, name)


def test_the_file_tree_and_tables_name_files_that_exist():
    for path in re.findall(r"`((?:configs|scripts|examples|tests)/[\w./]*\w)`", README):
        assert (ROOT / path).exists(), path
    tree = re.search(r"## The house.*?```\n(.*?)```", README, flags=re.S)[1]
    for line in tree.splitlines()[1:]:
        for name in re.findall(r"(?:^|\s)(\w+(?:\.py|/))(?=\s|$)", line[:39]):
            base = (
                ROOT
                if name in ("configs/", "examples/", "scripts/", "tests/")
                else ROOT / "jaxdist"
            )
            assert (base / name).exists(), name


def test_install_commands_are_those_that_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    for extra in ("-c constraints.txt -e '.[dev]'", "-m 'not slow'"):
        assert extra in README
        assert extra in ci
