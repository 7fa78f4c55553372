"""Every flag, setting, command, extra and package named in our texts exists.

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
from jaxdist.__main__ import COMMANDS, SUBCOMMANDS
from jaxdist.config import RunConfig
from jaxdist.config.command_line import ALIASES
from jaxdist.settings.schema import fields_of, kinds_of, types_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OTHER_PACKAGES = {"pandas", "xprof"}
"""On PyPI, and not ours to install: named where a person may want it."""

FOREIGN_FLAGS = {
    "--het-group",
    "--secret",
    "--repo-type",  # of hf download
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
    *("--faint", "--ink", "--paper", "--soft"),  # colors of the stylesheet
    *("--logdir", "--preset", "--version"),  # xprof, scripts/bench/step.py, jaxdist itself
}


@functools.cache
def modules() -> list:
    names = [
        module_info.name for module_info in pkgutil.walk_packages(jaxdist.__path__, "jaxdist.")
    ]
    starts = [name for name in names if name.endswith("__main__")]  # some run on import
    guarded = [n for n in starts if "if __name__" in find_spec(n).loader.get_source(n)]
    return [importlib.import_module(name) for name in {*names} - {*starts} | {*guarded}]


@functools.cache
def flags() -> set[str]:
    """Return every flag of every command as a user can type it, with dashes."""
    result = {"--help", "--config", "--try", *(f"--{alias}" for alias in ALIASES)}
    result |= {field.flag for field in fields_of(RunConfig)}
    for module in modules():
        for thing in vars(module).values():
            if isinstance(thing, type) and dataclasses.is_dataclass(thing):
                fields = [f.name for f in dataclasses.fields(thing) if "doc" in f.metadata]
                result |= {f"--{name.replace('_', '-')}" for name in fields}
    return result


def messages(path) -> list[str]:
    """Return the strings of a source, except docstrings; interpolated values become \0."""
    tree = ast.parse(path.read_text())
    inner = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    docs = {id(n.body[0].value) for n in inner if isinstance(n.body[0], ast.Expr)}
    parts = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    result = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            texts = (v.value if isinstance(v, ast.Constant) else "\0" for v in node.values)
            result.append("".join(texts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            result += [node.value] if id(node) not in docs | parts else []
    return result


@functools.cache
def texts() -> dict[str, str]:
    sources = {
        path.relative_to(ROOT).as_posix(): "\n".join(messages(path))
        for folder in ("jaxdist", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "configs").glob("*.toml")]
    return sources | {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages}


def wrong_flags(text: str) -> set[str]:
    named = re.findall(r"(?<![\w\0-])--[a-z][\w.-]*\w(?![\w\0-])", text)
    spelled = {flag.replace("_", "-") for flag in named if not flag.startswith("--xla_")}
    return spelled - flags() - FOREIGN_FLAGS


def wrong_settings(text: str) -> set[str]:
    sections = [name for name, kind in types_of(RunConfig).items() if kinds_of(kind)]
    valid_names = {field.name for field in fields_of(RunConfig)} | {f"{s}.kind" for s in sections}
    valid_names |= {*RunConfig.REMOVED, *ALIASES}
    named = re.findall(rf"(?<![\w./\0-])((?:{'|'.join(sections)})\.[a-z]\w*)(?![\w.(\0]*\()", text)
    names = [module.__name__ for module in modules()]
    valid_names |= {name for name in named if any(module.endswith(f".{name}") for module in names)}
    return {name for name in named if name not in valid_names and not name.endswith(".py")}


def wrong_commands(text: str) -> set[str]:
    named = set(re.findall(r"python -m jaxdist\.([a-z_]+)(?![\w\0.])", text))
    named |= set(re.findall(r"`jaxdist ([a-z][\w-]*)", text))
    return named - set(COMMANDS) - set(SUBCOMMANDS.values())


def wrong_packages(text: str) -> set[str]:
    extras = set(re.findall(r"\.\[([\w,]+)\]", text)) | set(re.findall(r"extra `(\w+)`", text))
    wrong = {f"[{extra}]" for extra in extras if extra not in EXTRAS}
    if re.search(r"jaxdist\[\w", text):
        wrong.add("jaxdist is on no index: install from a checkout")
    required = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    valid_names = {re.match(r"[\w-]+", line)[0] for line in required} | OTHER_PACKAGES
    for options in re.findall(r"pip install ([^\n`&)]*)", text):
        words = re.findall(r"[\w.-]+", re.sub(r"--[a-z-]+|-[ce] \S+|-q", "", options))
        wrong |= {words[0].partition("==")[0]} - valid_names - {"jaxdist"} if words else set()
    return wrong


CHECKS = [wrong_flags, wrong_settings, wrong_commands, wrong_packages]


@pytest.mark.parametrize("check", CHECKS)
def test_names_in_texts_exist(check):
    named = texts().items()
    if check is wrong_settings:  # names of tensors look like settings
        named = [(name, text) for name, text in named if "huggingface" not in name]
    problems = {name: wrong for name, text in named if (wrong := check(text))}
    assert problems == {}


def test_nonexistent_names_are_detected():
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
