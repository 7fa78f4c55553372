"""Every flag, setting, command, extra and package that a text of ours names is a real one.

Texts are the messages and help lines of the package, the README, docs, configs and examples.
"""

import ast
import dataclasses
import functools
import importlib
import pkgutil
import re
import tomllib
from importlib.util import find_spec

import pytest
from commands import ROOT

import jaxdist
from jaxdist.__main__ import find_commands
from jaxdist.config import RunConfig
from jaxdist.config.command_line import ALIASES
from jaxdist.settings.schema import fields_of, kinds_of, types_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHER_PACKAGES = {"pandas", "xprof"}
"""On PyPI, and not ours to install: named where a person may want it."""

FOREIGN_FLAGS = {
    *("--bind", "--shm-size", "--ipc", "--nv"),  # of docker and apptainer
    *("--container-image", "--container-mounts", "--container-workdir"),  # pyxis
    *("--cd", "--nvidia", "--set-env", "--write"),  # Charliecloud
    *("--kill-on-bad-exit", "--ntasks-per-node", "--cpus-per-task", "--requeue", "--signal"),
    *(
        "--time",
        "--gpus-per-task",
        "--ulimit",
        "--nodes",
        "--noheader",
        "--jobs",
        "--wait",
    ),  # SLURM
    *("--format", "--query-gpu", "--status"),  # nvidia-smi
    "--no-compile",  # pip
    *("--server-side", "--from-literal"),  # kubectl
    "--dist",  # pytest-xdist
    *("--error-unmatch", "--porcelain", "--show-toplevel", "--untracked-files"),  # git
    *("--faint", "--ink", "--paper", "--soft"),  # colours of the stylesheet
    *("--logdir", "--preset", "--version"),  # xprof, scripts/bench/step.py, jaxdist itself
}


@functools.cache
def modules() -> list:
    names = [found.name for found in pkgutil.walk_packages(jaxdist.__path__, "jaxdist.")]
    starts = [name for name in names if name.endswith("__main__")]  # some run when imported
    guarded = [n for n in starts if "if __name__" in find_spec(n).loader.get_source(n)]
    return [importlib.import_module(name) for name in {*names} - {*starts} | {*guarded}]


@functools.cache
def flags() -> set[str]:
    """Every flag of every command, as it may be typed: with dashes."""
    found = {"--help", "--config", *(f"--{alias}" for alias in ALIASES)}
    found |= {field.flag for field in fields_of(RunConfig)}
    for module in modules():
        for thing in vars(module).values():
            if isinstance(thing, type) and dataclasses.is_dataclass(thing):
                fields = [f.name for f in dataclasses.fields(thing) if "doc" in f.metadata]
                found |= {f"--{name.replace('_', '-')}" for name in fields}
    return found


def messages(path) -> list[str]:
    """Texts in a source that are no docstring of a function or class; what is filled in is \\0."""
    tree = ast.parse(path.read_text())
    inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    docs = {id(n.body[0].value) for n in inner if isinstance(n.body[0], ast.Expr)}
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
            found.append("".join(texts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if id(node) not in docs | parts else []
    return found


@functools.cache
def texts() -> dict[str, str]:
    """File -> its texts."""
    found = {
        path.relative_to(ROOT).as_posix(): "\n".join(messages(path))
        for folder in ("jaxdist", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.toml")]
    return found | {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages}


def wrong_flags(text: str) -> set[str]:
    named = re.findall(r"(?<![\w\0-])--[a-z][\w.-]*\w(?![\w\0-])", text)
    spelled = {flag.replace("_", "-") for flag in named if not flag.startswith("--xla_")}
    return spelled - flags() - FOREIGN_FLAGS


def wrong_settings(text: str) -> set[str]:
    """`section.name` that is no setting."""
    sections = [name for name, kind in types_of(RunConfig).items() if kinds_of(kind)]
    known = {field.name for field in fields_of(RunConfig)} | {f"{s}.kind" for s in sections}
    known |= set(RunConfig.REMOVED)
    named = re.findall(rf"(?<![\w./\0-])((?:{'|'.join(sections)})\.[a-z]\w*)(?![\w.(\0]*\()", text)
    names = [module.__name__ for module in modules()]
    known |= {name for name in named if any(module.endswith(f".{name}") for module in names)}
    return {name for name in named if name not in known and not name.endswith(".py")}


def wrong_commands(text: str) -> set[str]:
    named = set(re.findall(r"python -m jaxdist\.([a-z_]+)(?![\w\0.])", text))
    named |= set(re.findall(r"`jaxdist ([a-z][\w-]*)", text))
    return named - set(find_commands())


def wrong_packages(text: str) -> set[str]:
    extras = set(re.findall(r"\.\[([\w,]+)\]", text)) | set(re.findall(r"extra `(\w+)`", text))
    wrong = {f"[{extra}]" for extra in extras if extra not in EXTRAS}
    if re.search(r"jaxdist\[\w", text):
        wrong.add("jaxdist is on no index: install from a checkout")
    required = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    known = {re.match(r"[\w-]+", line)[0] for line in required} | OTHER_PACKAGES
    for options in re.findall(r"pip install ([^\n`&)]*)", text):
        words = re.findall(r"[\w.-]+", re.sub(r"--[a-z-]+|-[ce] \S+|-q", "", options))
        wrong |= {words[0].partition("==")[0]} - known - {"jaxdist"} if words else set()
    return wrong


CHECKS = [wrong_flags, wrong_settings, wrong_commands, wrong_packages]


@pytest.mark.parametrize("check", CHECKS)
def test_what_a_text_names_exists(check):
    named = texts().items()
    if check is wrong_settings:  # names of tensors look like settings
        named = [(name, text) for name, text in named if "huggingface" not in name]
    found = {name: wrong for name, text in named if (wrong := check(text))}
    assert found == {}


def test_names_that_do_not_exist_are_seen():
    assert wrong_flags("set --checkpoint.interval_steps 5, or --mesh") == {
        "--checkpoint.interval-steps"
    }
    assert wrong_settings("raise optim.lr or optim.peak_lr") == {"optim.lr"}
    assert wrong_commands("python -m jaxdist.tune, `jaxdist report`") == {"tune"}
    assert wrong_packages("pip install 'jaxdist[plan]'\npip install tensorbored '.[gpu]'") == {
        "jaxdist is on no index: install from a checkout",
        "[gpu]",
        "tensorbored",
    }
