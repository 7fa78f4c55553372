"""Layers of the package: folders import only lower ones, no modules import each other."""

import ast
import re
import runpy
from pathlib import Path

import jax.numpy as jnp
import jaxtyping
import pytest

from jaxdist.objectives import classification

PACKAGE = Path(__file__).parent.parent / "jaxdist"
SIZE = runpy.run_path(str(PACKAGE.parent / "scripts" / "size.py"))
ENGLISH = runpy.run_path(str(PACKAGE.parent / "scripts" / "english.py"))

LAYERS = (
    "settings",
    "runtime",
    "hardware",
    "core",
    "objectives",
    "optim",
    "data",
    "checkpoint",
    "models",
    "config",
    "plan",
    "run",
    "tools",
)
"""Folders of the package from the bottom; each imports only folders to its left."""
ENTRY_POINTS = {"__init__", "__main__", "api", "evaluate", "generate", "results", "train"}
"""Files above all folders. A folder's `__main__` belongs to the folder."""
FORBIDDEN = {"models": ("core.parallel", "core.mesh", "core.mesh_choice", "core.sharding")}
"""Lower modules that a folder must not import: models name dims, never a mesh."""
MAX_POSITIONAL = 7


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module: str) -> int:
    folder = module.partition(".")[0]
    return len(LAYERS) if folder in ENTRY_POINTS else LAYERS.index(folder)


def imported_modules(source: str) -> set[str]:
    """Return the modules that a source imports, counting every import.

    Includes imports inside functions and for type checkers, and names given to `import_module`.
    """
    assert not [n for n in ast.walk(ast.parse(source)) if getattr(n, "level", 0)], "relative import"
    names = {name.removeprefix("jaxdist.") for name in SIZE["imported_names"](source)}
    modules = {name if name in MODULES else name.rpartition(".")[0] for name in names}
    return {name for name in modules if name in MODULES}


def violations(module: str, source: str) -> list[str]:
    folder = module.partition(".")[0]
    return [
        f"{module} imports {other}"
        for other in sorted(imported_modules(source))
        if (layer_of(other) >= layer_of(module) and folder != other.partition(".")[0])
        or other.startswith(FORBIDDEN.get(folder, ()))
    ]


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules that import each other in a ring; empty if there is none."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return trail[trail.index(module) :]
        if module in done:
            return []
        rings = (visit(other, [*trail, module]) for other in sorted(graph.get(module, ())))
        first_ring = next((ring for ring in rings if ring), [])
        done.add(module)
        return first_ring

    return next((ring for module in graph if (ring := visit(module, []))), [])


def test_folders_import_only_lower_ones():
    below = {name: path for name, path in MODULES.items() if layer_of(name) < len(LAYERS)}
    assert [line for name in below for line in violations(name, below[name].read_text())] == []


def test_no_modules_import_each_other():
    graph = {name: imported_modules(path.read_text()) for name, path in MODULES.items()}
    assert cycle({name: others - {name} for name, others in graph.items() if name}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c"]


def test_planted_imports_are_detected():
    lazy = "def f():\n    from jaxdist.checkpoint import lock"
    for_types = "if TYPE_CHECKING:\n    from jaxdist.plan.planner import Plan"
    by_name = "import_module('jaxdist.run.session')"
    assert violations("core.step.model_context", lazy)
    assert violations("core.mesh", for_types)
    assert violations("core.mesh", by_name)
    assert violations("models.decoder", "import jaxdist.core.parallel.tensor")
    assert violations("run.session", "from jaxdist import train")
    assert violations("data.__main__", "def main():\n    from jaxdist.run import session")


def probes_of_models(source: str) -> list[str]:
    """Return the expressions of a source that test the kind of a model or probe its settings.

    These are `isinstance` of a kind's settings, `.kind` compared with a kind, and `getattr` or
    `hasattr` of a model with a literal name.
    """
    kinds = r"isinstance\([^()]*(Decoder|Cnn|Resnet|Custom|Model)Config"
    compared = r"\.kind (==|!=|in) \(?['\"](decoder|cnn|resnet|custom)"
    fields = r"(getattr|hasattr)\([\w.]*\b(model|settings), ['\"]"
    patterns = f"{kinds}|{compared}|{fields}"
    return [match.group() for match in re.finditer(patterns, ast.unparse(ast.parse(source)))]


def test_only_models_package_distinguishes_model_kinds():
    """Other packages read facts from the settings or the built model, as for a user's model."""
    probes = {name: probes_of_models(path.read_text()) for name, path in MODULES.items()}
    assert {n: p for n, p in probes.items() if p and n.partition(".")[0] != "models"} == {}
    assert probes["models"]
    assert probes_of_models("getattr(parts.config.model, 'sliding_window', 0)")
    assert probes_of_models("if run.model.kind == 'decoder': pass")
    assert not probes_of_models("getattr(parts.config.model, field.name)")


SHARED_NAMES = {
    "Block": "models",  # each model has its own
    "Config": "tools.convert",  # the options of each of its commands
}
"""Class names that several files use, and the package that contains them all."""


def test_class_names_are_unique():
    """Two classes with one name are confusing or duplicate code."""
    definitions: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                definitions.setdefault(node.name, []).append(module)
    several = {name: modules for name, modules in definitions.items() if len(modules) > 1}
    assert set(several) == set(SHARED_NAMES)
    for name, package in SHARED_NAMES.items():
        assert all(module.startswith(package) for module in several[name]), several[name]


def test_the_package_holds_its_layers_and_entry_points():
    entries = {path.stem for path in PACKAGE.iterdir()} - {"__pycache__", "py"}
    assert entries == {*LAYERS, *ENTRY_POINTS}


def too_many_positional(source: str) -> list[str]:
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
            count = len([name for name in names if name not in ("self", "cls")])
        elif isinstance(node, ast.ClassDef):
            made = " ".join(map(ast.unparse, node.decorator_list))
            if "dataclass" not in made or "kw_only=True" in made:
                continue
            count = sum(isinstance(line, ast.AnnAssign) for line in node.body)
        else:
            continue
        if count > MAX_POSITIONAL:
            problems.append(f"{node.name} takes {count} positional arguments")
    return problems


def test_nothing_takes_many_positional_arguments():
    results = {name: too_many_positional(path.read_text()) for name, path in MODULES.items()}
    assert {name: lines for name, lines in results.items() if lines} == {}


def test_many_positional_arguments_are_detected():
    names = "abcdefgh"
    assert too_many_positional(f"def f({', '.join(names)}): ...")
    assert not too_many_positional(f"def f(a, b, *, {', '.join(names[2:])}): ...")
    fields = "".join(f"    {name}: int\n" for name in names)
    assert too_many_positional(f"@dataclass\nclass A:\n{fields}")
    assert not too_many_positional(f"@dataclass(kw_only=True)\nclass A:\n{fields}")


ARRAYS = re.compile(r"\b(Array|ndarray)\b")
CHECKED = re.compile(r"\w+\[(?:Array|np\.ndarray), ('[^']*'|\"[^\"]*\")\]")
"""An annotated shape, which jaxtyping checks while tests run."""
NAMED_SHAPE = re.compile(r"\[(?=[^]]*[a-z0-9])[^]]*\]|\[\]")
ANY_SHAPE = re.compile(r"\[[^]]*\]")
WITH_NAMES = ("core", "models", "objectives", "optim")
"""Folders in which dims have names."""
SHORT_CLOSURE = 5
"""Lines of a function inside a function that may leave shapes to the one around it."""


def lacking_shapes(source: str, dims_have_names: bool = True) -> list[str]:
    """Return functions of arrays without a shape in the annotation or the docstring.

    If dims have names, `...` alone is no shape. Overloads, and closures of `SHORT_CLOSURE`
    lines, need none.
    """
    shape = NAMED_SHAPE if dims_have_names else ANY_SHAPE
    lacking = []

    def visit(node: ast.AST, is_inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not (is_inside and num_lines(child) <= SHORT_CLOSURE):
                types = f"{ast.unparse(child.args)} {ast.unparse(child.returns or ast.Constant(0))}"
                unnamed = [shape for shape in CHECKED.findall(types) if shape[1:-1] == "..."]
                is_bare = ARRAYS.search(CHECKED.sub("", types)) is not None
                is_bare &= shape.search(ast.get_docstring(child) or "") is None
                decorators = " ".join(map(ast.unparse, child.decorator_list))
                if (is_bare or unnamed) and "overload" not in decorators:
                    lacking.append(f"{child.name}, line {child.lineno}")
            visit(child, is_inside or is_function)

    visit(ast.parse(source), False)
    return lacking


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def test_functions_of_arrays_have_shapes():
    results = {
        name: lacking_shapes(path.read_text(), name.startswith(WITH_NAMES))
        for name, path in MODULES.items()
    }
    assert {name: lines for name, lines in results.items() if lines} == {}


def test_missing_shapes_are_detected():
    function = 'def f(x: Array) -> int:\n    """Sum {}."""\n    return 1'
    assert lacking_shapes("def f(x: Array) -> int:\n    return 1")
    assert lacking_shapes("def f() -> tuple[np.ndarray, int]:\n    return 1")
    assert lacking_shapes(function.format("x [...]"))
    assert not lacking_shapes(function.format("x [...]"), dims_have_names=False)
    assert lacking_shapes("def f(x: Float[Array, '...']) -> int:\n    return 1")
    assert lacking_shapes("def f(x: Float[Array, 'batch seq'], y: Array) -> int:\n    return 1")
    assert not lacking_shapes(function.format("x [batch, seq]"))
    assert not lacking_shapes("def f(x: Float[Array, 'batch seq']) -> int:\n    return 1")
    closure = "def f():\n    def g(x: jax.Array):\n" + "        x = x + 1\n" * SHORT_CLOSURE
    assert lacking_shapes(closure)
    assert not lacking_shapes(closure.replace("        x = x + 1\n", "", 1))


def test_annotated_shapes_are_checked_while_tests_run():
    logits = jnp.zeros((2, 3, 4), jnp.float32)  # [batch, seq, vocab], not [batch, classes]
    with pytest.raises(jaxtyping.TypeCheckError):
        classification(logits, {}, None)


def test_flags_are_written_with_dashes():
    """Check texts for users; the parser accepts both spellings."""
    folders = [PACKAGE.parent / name for name in ("jaxdist", "docs", "configs", "examples")]
    files = [PACKAGE.parent / "README.md", *(f for folder in folders for f in folder.rglob("*.*"))]
    matches = [
        f"{file.name}: {flag}"
        for file in files
        if file.suffix in (".md", ".py", ".toml")
        for flag in re.findall(r"--[a-z][a-z.-]*_[a-z_.]*", file.read_text())
        if not flag.startswith("--xla")
    ]
    assert matches == []


SHAPES_ITS_NUMBERS = (
    "runtime.formatting",
    "data.template_sandbox",  # the program of a child process, which imports nothing of the package
)
BY_HAND = re.compile(
    r":[^{}% ]*%\}|\} ?%(?!\()|\} ?[kKMGT]i?B\b|%[-+.\d]*[dfgs] ?(%%|[kKMGT]i?B\b)"
)


def formatted_by_hand(source: str) -> list[str]:
    nodes = list(ast.walk(ast.parse(source)))
    texts = [ast.unparse(node) for node in nodes if isinstance(node, ast.JoinedStr)]
    values = (node.value for node in nodes if isinstance(node, ast.Constant))
    texts += [value for value in values if isinstance(value, str)]
    return [text for text in texts if BY_HAND.search(text)]


def test_shares_and_sizes_are_formatted_in_one_module():
    modules = [name for name in MODULES if not name.startswith(SHAPES_ITS_NUMBERS)]
    results = {name: formatted_by_hand(MODULES[name].read_text()) for name in modules}
    assert {name: texts for name, texts in results.items() if texts} == {}


@pytest.mark.parametrize(
    "text",
    ["f'{x:+.1%}'", "'{x:.0%}'", "f'{100 * x} %'", "f'{x:.1f}' ' GB/s'", "'%.1f MB'", "'%.0f %%'"],
)
def test_manually_formatted_numbers_are_detected(text: str):
    assert formatted_by_hand(text)
    assert not formatted_by_hand("f'{percent(share)} of {in_bytes(size)}, at most 5 % or 8 GB'")


def test_importing_the_package_imports_no_heavy_library():
    import subprocess
    import sys

    code = "import sys, jaxdist; print([m for m in ('jax', 'flax', 'orbax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


SIZE_LIMITS = {
    "package lines": 66_609,
    "package code lines": 47_712,
    "test lines": 47_625,
    "two-way folder pairs": 0,
    "settings of a run": 161,
}
"""They only fall: whoever deletes code lowers them, and whoever raises one gives the reason."""


def test_the_code_stays_within_its_size_limits():
    sizes = SIZE["sizes"]()
    assert {name: n for name, n in sizes.items() if n > SIZE_LIMITS[name]} == {}


def test_code_lines_and_folder_pairs_are_counted_by_their_rules():
    source = '"""Doc."""\n\nx = """a\nb"""  # why\n\n\ndef f():\n    """Doc.\n    more"""\n'
    assert SIZE["count_code"](source) == 3
    lines = "if TYPE_CHECKING:\n    from jaxdist.a import B\nimport_module('jaxdist.c.d')\n"
    assert SIZE["imported_names"](lines) == {"jaxdist.a.B", "jaxdist.c.d"}


ENGLISH_LIMITS = {"dialect names": 5, "dialect docstrings": 0}
"""They only fall."""


def test_names_and_docstrings_stay_within_the_limits_of_dialect():
    counts = ENGLISH["count"](PACKAGE)
    assert {name: n for name, n in counts.items() if n > ENGLISH_LIMITS[name]} == {}
    for folder in ("scripts", "tests"):
        counts = ENGLISH["count"](PACKAGE.parent / folder)
        assert {name: n for name, n in counts.items() if n > ENGLISH_LIMITS[name]} == {}


def test_dialect_is_counted_once_for_each_binding(tmp_path):
    source = '"""Whether."""\ndef f(given, size):\n    """Return it."""\n    known = given\n'
    (tmp_path / "places.py").write_text(source)
    counts = ENGLISH["count"](tmp_path)
    assert counts == {"dialect names": 3, "dialect docstrings": 1}
