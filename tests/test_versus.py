"""`scripts/bench/versus.py` with minimal contenders, and `gpu_program.py --check`."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench"

STUB = """
import json, sys, time
kind, diary = sys.argv[1:3]
job = json.load(open(sys.argv[-1]))
if kind == "absent":
    import no_such_framework
print("a line of a library")
parameters = PARAMETERS * (1.02 if kind == "large" else 1)
print(json.dumps({"parameters": parameters, "versions": {"stub": "1.2"}}), flush=True)
for count, line in enumerate(sys.stdin):
    begin = time.perf_counter()
    open(diary, "a").write(f"{kind} {json.loads(line)['steps']}\\n")
    if kind == "dead" and count == 2:
        sys.exit("out of luck")
    if kind == "early":
        time.sleep(0.7)
    seconds = 1e-6 if kind == "early" else time.perf_counter() - begin
    loss = float("nan") if kind == "nan" else 5.0 if kind == "idle" else 5.0 - 0.1 * count
    print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)
"""


@pytest.fixture(scope="module")
def versus():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        return importlib.import_module("versus")


@pytest.fixture
def commands(versus, tmp_path):
    """Return kinds of stubs -> their commands; the diary records their arguments."""
    shape = versus.Shape(256, 8, 2)
    script = tmp_path / "stub.py"
    script.write_text(STUB.replace("PARAMETERS", str(shape.num_params)))
    words = lambda kind: [sys.executable, "-S", str(script), kind, str(tmp_path / "diary")]
    return lambda *kinds: {kind: words(kind) for kind in kinds}


def race(versus, commands, rounds):
    settings = versus.Settings(rounds=rounds, block_steps=4, warmup_steps=1, pause_s=0)
    return versus.Race(versus.Shape(256, 8, 2), settings).run(commands)


def test_each_round_starts_with_the_next_contender_in_turn(versus, commands, tmp_path):
    done = race(versus, commands("a", "b", "c"), rounds=4)
    words = (tmp_path / "diary").read_text().split("\n")
    assert words[:3] == ["a 1", "b 1", "c 1"]
    assert "".join(word[0] for word in words[3:-1]) == "abc" + "bca" + "cab" + "abc"
    assert {word[1:] for word in words[3:-1]} == {" 4"}
    assert {name: len(it.blocks) for name, it in done.running.items()} == dict.fromkeys("abc", 4)
    assert done.left_out == {}


def test_failed_contender_is_excluded_with_the_reason(versus, commands):
    reasons = {
        "absent": "no_such_framework",
        "large": f"{versus.Shape(256, 8, 2).num_params:,}",
        "dead": "exit code 1: out of luck",
        "early": "1e-06 s",
        "nan": "loss is nan",
        "idle": "5",
    }
    done = race(versus, commands(*reasons, "a"), rounds=3)
    assert {name: len(it.blocks) for name, it in done.running.items()} == {"a": 3}
    assert list(done.running["a"].losses) == pytest.approx([5.0, 4.9, 4.8, 4.7])
    assert set(done.left_out) == set(reasons)
    for name, fact in reasons.items():
        assert fact in done.left_out[name]
    page = versus.report({"tiny": done}, done.settings, {})
    for name, fact in reasons.items():
        assert re.search(rf"^- {name}: not measured: .*{re.escape(fact)}", page, re.M), name


def test_all_contenders_have_the_same_allocator(versus, commands, tmp_path, monkeypatch):
    """A contender of ours, PyTorch's and a rival's see the settings in their environment."""
    seen = []
    monkeypatch.setattr(
        versus, "Contender", lambda command, environment, log: seen.append(environment)
    )
    names = versus.commands_of([], [f"rival={sys.executable}:{tmp_path / 'stub.py'}"])
    assert {"ours", "bare", "pytorch", "rival"} <= set(names)
    contest = versus.Race(versus.Shape(256, 8, 2), versus.Settings())
    for name, command in names.items():
        contest._start(name, command, tmp_path / "log")
    allocators = [{k: v for k, v in one.items() if k.startswith("MALLOC_")} for one in seen]
    assert len(allocators) == len(names) and all(one == versus.ALLOCATOR for one in allocators)
    ours = (BENCH / "versus_jax.py").read_text()
    assert len(versus.ALLOCATOR) == 3 and "malloc" not in ours  # nor by a call


@pytest.mark.slow
def test_own_contenders_train(versus):
    commands = versus.commands_of([], [])
    done = race(versus, {name: commands[name] for name in ("ours", "bare")}, rounds=1)
    assert done.left_out == {} and all(it.processor[0] > 0 for it in done.running.values())


def test_table_has_medians_and_the_median_of_ratios(versus):
    blocks = {"ours": [1.0, 4.0, 5.0], "rival": [2.0, 4.0, 15.0]}
    race = versus.Race(versus.Shape(256, 10, 2), versus.Settings())
    for name, seconds in blocks.items():
        facts = {"parameters": 7_000, "versions": {"stub": "1.2"}, "threads": 3}
        race.running[name] = SimpleNamespace(
            blocks=seconds, processor=seconds[::-1], losses=[5.0, 4.5, 4.25], facts=facts
        )
    page = versus.report({"tiny": race}, race.settings, {"load average before": "0.1"})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    assert ["tiny", "5", "5 (2.00 ×)"] in rows  # not 1.00, the ratio of the medians
    losses = ["5.000, 4.500, 4.250", "4.250"]
    assert ["ours", "5", "4–20", "1.00 ×", "1.00 ×", "7,000", *losses] in rows
    assert ["rival", "5", "1–10", "2.00 ×", "2.00 ×", "7,000", *losses] in rows
    assert "- load average before: 0.1" in page
    assert "- rival: stub 1.2, 3 threads" in page


STORED_FIGURES = {
    "step": 12.0, "mfu": 0.55, "again": 1.03, "temporary": 60.0, "total": 71.0,
    "products": 8.0, "element-wise": 1.7, "exposed fsdp": 0.07,
}  # fmt: skip


@pytest.fixture(scope="module")
def program():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCH)
        yield importlib.import_module("gpu_program")
    sys.modules.pop("gpu_program", None)


@pytest.mark.parametrize(
    "key, by, moves",
    [
        ("products", 0.13, True),
        ("products", -0.13, True),
        ("products", 0.119, False),
        ("exposed tensor", 0.13, True),  # a class that was not recorded
        ("exposed fsdp", -0.07, False),  # less than one percent of the step
        ("copies", float("nan"), True),
        ("again", 0.02, True),
        ("temporary", 1.3, True),
        ("temporary", 1.1, False),
        ("mfu", 0.3, False),  # the step covers it
    ],
)
def test_class_that_changes_by_one_percent_of_the_step_is_named(program, key, by, moves):
    changed = {**STORED_FIGURES, key: STORED_FIGURES.get(key, 0.0) + by}
    lines = program.differences(changed, STORED_FIGURES)
    assert [line.partition(":")[0] for line in lines] == [key] * moves


def test_missing_class_counts_as_a_change(program):
    assert program.differences(
        {k: v for k, v in STORED_FIGURES.items() if k != "products"}, STORED_FIGURES
    ) == ["products: 8000 -> 0 ms"]


@pytest.mark.parametrize("case, status", [("8b_8192", 0), ("70b_fsdp16tp8", 1), ("8b_4096", 1)])
def test_check_exits_with_1_if_a_case_changed_or_was_not_recorded(
    program, case, status, monkeypatch, tmp_path, capsys
):
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(program, "FIGURES", figures)
    versions = {"jax": "1.2"}
    same = lambda line, flags: (line.split()[0], dict(STORED_FIGURES), versions)
    monkeypatch.setattr(program, "run_case", same)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_program.py", *arguments])
        with pytest.raises(SystemExit) as end:
            program.main()
        return end.value.code

    assert run("--record", "--only", "8b_8192", "70b_fsdp16tp8") == 0
    stored = json.loads(figures.read_text())
    assert (
        stored["8b_8192"]["figures"] == STORED_FIGURES and stored["8b_8192"]["versions"] == versions
    )
    stored["70b_fsdp16tp8"]["figures"]["products"] *= 0.9
    figures.write_text(json.dumps(stored))
    assert run("--check", "--only", case) == status
    output = capsys.readouterr().out
    assert {0: "8b_8192: as recorded", 1: case}[status] in output


def test_page_has_the_recorded_figures(program):
    """Every case is recorded too."""
    recorded = json.loads(program.FIGURES.read_text())
    assert list(recorded) == [line.split()[0] for line in program.CASES.strip().splitlines()]
    page = (program.FIGURES.with_suffix(".md")).read_text()
    table = program.table([(name, entry["figures"]) for name, entry in recorded.items()])
    assert table in page
