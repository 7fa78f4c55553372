"""A package installed from a wheel works without a checkout."""

import configparser
import json
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ROOT, environment, tiny

pytestmark = pytest.mark.slow

BUILD = "from setuptools.build_meta import build_wheel; build_wheel({!r})"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    skip = shutil.ignore_patterns("__pycache__", ".*", "build", "*.egg-info", "tests", "runs")
    shutil.copytree(ROOT, source, symlinks=True, ignore=skip)
    build = [sys.executable, "-c", BUILD.format(str(work))]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel, tmp_path) -> Path:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    (site,) = home.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin" / "python"


def run(python: Path, cwd: Path, *words: object) -> str:
    environ = {k: v for k, v in environment().items() if k != "PYTHONPATH"}
    words = [str(python), *map(str, words)]
    done = subprocess.run(words, cwd=cwd, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_commands_configs_and_the_example_work_without_a_checkout(installed, tmp_path):
    site = Path(
        run(installed, tmp_path, "-c", "import jaxdist; print(jaxdist.__path__[0])").strip()
    )
    assert site.is_relative_to(installed.parent.parent)
    assert (site / "py.typed").exists()
    names = {path.name for path in (ROOT / "configs").glob("*.toml")}
    assert {path.name for path in (site / "config" / "named").iterdir()} == names
    scripts = configparser.ConfigParser()
    (about,) = site.parent.glob("jaxdist-*.dist-info")
    scripts.read(about / "entry_points.txt")
    assert scripts["console_scripts"]["jaxdist"] == "jaxdist.__main__:main"
    plan = ["plan", "--config", "llama3_8b", "--gpus", "h100:8", "--compile=false", "--json"]
    plan += ["--data.tokenizer=bytes", "--data.sources=stdlib"]
    (candidate,) = json.loads(run(installed, tmp_path, "-m", "jaxdist", *plan))["plans"]
    assert (candidate["name"], candidate["fits"]) == ("llama3_8b", True)
    small = [flag for flag in tiny("--steps=1") if not flag.startswith("--model.")]
    model = ["--model=custom", "--model.factory=jaxdist.models.example:build"]
    train = run(installed, tmp_path, "-m", "jaxdist", "train", *model, *small, "--run-dir=run")
    assert "custom" in train and (tmp_path / "run" / "summary.json").exists()


def test_pip_installs_the_wheel_into_an_empty_environment_which_trains(wheel, tmp_path):
    """The packages that the wheel requires are all that training imports."""
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    install = ["-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel]
    done = subprocess.run(
        [home / "bin" / "python", *install], capture_output=True, text=True, timeout=900
    )
    if "Failed to establish a new connection" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    small = tiny("--steps=2", "--run-dir=run")
    run(home / "bin" / "jaxdist", tmp_path, "train", *small)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["exit_reason"], summary["step"]) == ("finished", 2)
