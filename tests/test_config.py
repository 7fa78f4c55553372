"""Reading settings: files, flags, kinds, types, and one message with every problem."""

import dataclasses
import errno
import os
import textwrap
from typing import Any, Literal

import pytest
from refusals import missing, refused

from jaxdist.settings import (
    ConfigError,
    read_settings,
    setting,
    value_of,
    without_flags,
    write_toml,
)
from jaxdist.settings.schema import help_text

pytestmark = pytest.mark.smoke


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square:
    """A square."""

    kind: Literal["square"] = setting("square", "square = four equal sides")
    side: float = setting(1.0, "length of a side, metres")

    def problems(self):
        return [] if self.side > 0 else [f"shape.side={self.side} must be above 0 m. Use 1."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Circle:
    """A circle."""

    kind: Literal["circle"] = setting("circle", "circle = all points at one distance")
    radius: float = setting(2.0, "radius, metres")
    args: dict[str, Any] = setting({}, "anything else")

    def problems(self):
        return []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paint:
    """Colour and coats."""

    colour: Literal["red", "green", "blue"] = setting("red", "colour of the paint")
    num_coats: int = setting(2, "coats, each dried before the next")
    glossy: bool = setting(False, "whether it shines")
    tools: list[str] = setting(["brush"], "what to paint with")
    shares: list[float] = setting([], "share of each tool")
    level: Literal[0, 1, 2] = setting(0, "thoroughness")
    thinner: float | None = setting(None, "share of thinner; none = undiluted")
    notes: tuple[str, ...] = setting((), "what to write on the tin")

    def problems(self):
        return [
            f"paint.{name}={value} must be at least {low}. Use {low}."
            for name, value, low in (("num_coats", self.num_coats, 1), ("level", self.level, 0))
            if value < low
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A thing to paint."""

    name: str = setting("job", "what to call it")
    run_dir: str = setting("", "where to put it")
    shape: Square | Circle = dataclasses.field(default_factory=Square)
    paint: Paint = dataclasses.field(default_factory=Paint)


ALIASES = {"coats": "paint.num_coats", "shape": "shape.kind"}


def read(*argv, file=None, tmp_path=None, **kwargs):
    if file is not None:
        path = tmp_path / "job.toml"
        path.write_text(textwrap.dedent(file))
        argv = (f"--config={path}", *argv)
    return read_settings(Job, argv, command="paint", aliases=ALIASES, **kwargs)


def problems_of(*argv, **kwargs):
    with pytest.raises(ConfigError) as caught:
        read(*argv, **kwargs)
    lines = caught.value.problems
    assert str(caught.value).startswith(f"paint: {len(lines)} problem")
    return lines


def one_problem(*argv, **kwargs):
    (line,) = problems_of(*argv, **kwargs)
    return line


def test_no_arguments_give_the_defaults():
    assert read() == Job()


def test_flags_win_over_the_file_and_the_file_over_the_defaults(tmp_path):
    file = """
    name = "wall"
    [paint]
    num_coats = 3
    glossy = true
    """
    config = read("--paint.num_coats", "4", file=file, tmp_path=tmp_path)
    assert (config.name, config.paint.num_coats, config.paint.glossy) == ("wall", 4, True)
    assert config.paint.tools == ["brush"]


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--paint.num_coats=7"], "num_coats", 7),
        (["--paint.num_coats", "7"], "num_coats", 7),
        (["--paint.num-coats", "7"], "num_coats", 7),
        (["--coats", "7"], "num_coats", 7),
        (["--paint.num_coats=1_000"], "num_coats", 1000),
        (["--paint.glossy"], "glossy", True),
        (["--paint.glossy", "--name=x"], "glossy", True),
        (["--paint.glossy", "false"], "glossy", False),
        (["--paint.glossy=true"], "glossy", True),
        (["--paint.colour=blue"], "colour", "blue"),
        (["--paint.level=2"], "level", 2),
        (["--paint.tools=roll, spray"], "tools", ["roll", "spray"]),
        (["--paint.tools="], "tools", []),
        (["--paint.tools=['a,b', 'c']"], "tools", ["a,b", "c"]),
        (["--paint.tools=a,b", "--paint.tools=c"], "tools", ["a", "b", "c"]),
        (["--paint.notes=wet, mind it", "--paint.notes=thin"], "notes", ("wet, mind it", "thin")),
        (["--paint.notes=[wet]", '--paint.notes=["a"]'], "notes", ("[wet]", "a")),
        (["--paint.shares=1,0.5,2e-1"], "shares", [1.0, 0.5, 0.2]),
        (["--paint.thinner=0.25"], "thinner", 0.25),
        (["--paint.thinner=none"], "thinner", None),
    ],
)  # fmt: skip
def test_a_flag_is_read_by_its_fields_type(argv, field, value):
    got = getattr(read(*argv).paint, field)
    assert got == value and type(got) is type(value)


def test_a_toml_integer_is_a_number_and_a_flag_may_be_negative(tmp_path):
    config = read(file="\ufeff[shape]\nside = 3\n", tmp_path=tmp_path)  # a byte order mark
    assert config.shape.side == 3.0 and isinstance(config.shape.side, float)
    assert one_problem("--paint.num_coats", "-1").startswith("paint.num_coats=-1 must be")


def test_kind_selects_the_dataclass_from_file_flag_or_short_spelling(tmp_path):
    assert read("--shape.kind=circle", "--shape.radius=3").shape == Circle(radius=3.0)
    assert read("--shape", "circle").shape == Circle()
    file = '[shape]\nkind = "circle"\nradius = 4.5\n'
    assert read(file=file, tmp_path=tmp_path).shape == Circle(radius=4.5)


def test_a_table_field_takes_a_section_an_inline_table_and_dotted_flags(tmp_path):
    file = """
    [shape]
    kind = "circle"
    [shape.args]
    width = 8
    deep = { a = 1 }
    """
    config = read("--shape.args.note=hi", "--shape.args.deep.b=[1,2]", file=file, tmp_path=tmp_path)
    assert config.shape.args == {"width": 8, "deep": {"a": 1, "b": [1, 2]}, "note": "hi"}
    assert read("--shape=circle", "--shape.args={a = 1.5}").shape.args == {"a": 1.5}
    assert Circle().args == {}  # the default was not written to


def test_a_base_replaces_the_defaults():
    base = Job(name="old", shape=Circle(radius=9.0, args={"x": 1}))
    config = read("--paint.num_coats=5", base=base)
    assert config.shape == base.shape and config.name == "old" and config.paint.num_coats == 5
    assert read("--shape.kind=square", base=base).shape == Square()


def test_positional_arguments_fill_named_fields():
    assert read("wall", positional=("name",)).name == "wall"
    assert "takes NAME" in one_problem("wall", "door", positional=("name",))


def test_every_problem_is_in_one_message(tmp_path):
    file = """
    nam = "wall"
    [paint]
    num_coats = "two"
    colour = "pink"
    [shape]
    side = -1
    """
    lines = problems_of("--paint.level=-3", "--glossy", "x", "y", file=file, tmp_path=tmp_path)
    text = "\n".join(lines)
    for part in ("nam (", "num_coats='two'", "'pink'", "shape.side=-1.0", "level='-3'", "--glossy"):
        assert part in text
    assert "argument 'y'" in text and len(lines) == 7


@pytest.mark.parametrize(
    ("argv", "facts"),
    [
        (["--paint.num_coat=1"], ["--paint.num-coat ", "--paint.num-coats"]),
        (["--pain.colour=red"], ["--pain.colour", "--paint.colour"]),
        (["--paint.zzz=1"], ["--paint.zzz", "shape, paint", "--help"]),
        (["--shape.radius=1"], ["--shape.radius", "kind square"]),
        (["--shape.kind=cirle"], ["'cirle'", "square or circle", "mean circle"]),
        (["--paint.colour=gren"], ["'gren'", "red, green or blue", "mean green"]),
        (["--paint.num_coats=2.5"], ["='2.5' (flag --paint.num_coats)", "whole number"]),
        (["--paint.glossy=yes"], ["paint.glossy='yes'", "true or false"]),
        (["--paint.shares=1,x"], ["paint.shares=", "'1,x'", "number"]),
        (["--paint.level=3"], ["paint.level='3'", "0, 1 or 2"]),
        (["--paint.num_coats"], ["no value", "whole number", "--paint.num-coats=INT"]),
        (["--coats=1", "--paint.num_coats=2"], ["(flag --coats, flag --paint.num_coats)"]),
        (["--paint=3"], ["paint='3'", "colour, num_coats"]),
        (["wall"], ["argument 'wall'"]),
        (["--config=none.toml"], ["none.toml", "not exist"]),
        (["--config"], ["--config", "no value"]),
        (["--config=a.toml", "--config=b.toml"], ["2 times", "(a.toml, b.toml)"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_an_invalid_flag_is_rejected_with_the_fix(argv, facts):
    assert missing(one_problem(*argv), *facts) == []


def test_help_of_an_unknown_section_lists_the_existing_ones():
    with refused("--help pain", "shape, paint"):
        read("--help", "pain")


@pytest.mark.parametrize(
    ("file", "facts"),
    [
        ("nmae = 'x'", ["nmae (FILE line 1)", "mean name"]),
        ("name = 'x'\n[pait]\nnum_coats = 1\nglossy = true", ["pait (FILE line 2)", "paint"]),
        ("\n[paint]\n# note\nnum_cots = 1", ["paint.num_cots (FILE line 4)"]),
        ("[paint]\nnum_cots = 1", ["paint.num_cots (FILE line 2)", "mean paint.num_coats"]),
        ("[paint]\nnum_coats = 2.0", ["paint.num_coats=2.0 (FILE line 2)", "whole number"]),
        ("[paint]\nglossy = 1", ["paint.glossy=1 (FILE line 2)", "true or false"]),
        ("[paint]\nlevel = '1'", ["paint.level='1' (FILE line 2)", "0, 1 or 2"]),
        ("[paint]\ntools = 'brush'", ["paint.tools='brush' (FILE line 2)", "a list"]),
        ("[paint]\ntools = [1]", ["paint.tools=[1] (FILE line 2)", "a text"]),
        ("[shape]\nkind = 'circle'\nargs = 3", ["shape.args=3 (FILE line 3)", "a table"]),
        ("[shape]\nkind = 3", ["shape.kind=3 (FILE line 2)", "square or circle"]),
        ("[shape]\nkind = 'circle'\nside = 1.0", ["side (FILE line 3)", "kind circle"]),
        ("paint = 3", ["paint=3 (FILE line 1)", "a section"]),
        ("shape = 'circle'", ["shape='circle' (FILE line 1)", "shape.kind"]),
        ("[paint]\nnum_coats = 0", ["num_coats=0", "at least 1", "[paint.num_coats: FILE line 2]"]),
        ("x = 1\nname = = 2", ["FILE", "TOML", "line 2"]),
    ],
)
def test_an_invalid_file_is_rejected_with_its_line(file, facts, tmp_path):
    line = one_problem(file=file, tmp_path=tmp_path)
    path = str(tmp_path / "job.toml")
    assert missing(line, *(fact.replace("FILE", path) for fact in facts)) == []


def test_a_file_that_is_not_utf8_or_is_a_directory_is_rejected(tmp_path):
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert missing(one_problem(f"--config={binary}"), binary, "UTF-8") == []
    about_folder = one_problem(f"--config={tmp_path}")
    assert missing(about_folder, tmp_path, os.strerror(errno.EISDIR)) == []


def test_rules_about_an_unreadable_value_are_skipped():
    lines = problems_of("--paint.num_coats=x", "--shape.side=0")
    assert len(lines) == 2 and "num_coats='x'" in lines[0] and "shape.side=0.0" in lines[1]


def full_help():
    return help_text(Job, "paint", "Paints things.", ALIASES)


def test_help_names_every_field_with_type_default_and_doc_in_100_columns():
    text = full_help()
    assert max(map(len, text.splitlines())) <= 100
    for line in (
        "--name TEXT = job",
        "--run-dir TEXT = (empty)",
        "--shape.side NUMBER = 1.0",
        "--shape.radius NUMBER = 2.0",
        "--paint.colour {red,green,blue} = red",
        "--paint.num-coats INT = 2",
        "--paint.glossy true|false = false",
        "--paint.tools TEXT,... = brush",
        "--paint.thinner NUMBER|none = none",
        "shape (kind = circle): A circle.",
        "Short flags: --coats = --paint.num-coats",
    ):
        assert line in text
    for doc in ("coats, each dried before the next", "length of a side, metres", "anything else"):
        assert doc in text


def test_help_exits_0_and_help_section_prints_one_section(capsys):
    for argv, expected in (
        (["--help"], full_help()),
        (["-h", "paint"], full_help().partition("\n\npaint: ")[2]),
    ):
        with pytest.raises(SystemExit) as leaving:
            read(*argv, summary="Paints things.")
        assert leaving.value.code == 0
        assert capsys.readouterr().out.strip().endswith(expected.strip())


def test_written_settings_read_back_equal(tmp_path):
    config = Job(
        name='a "quoted"\nname',
        shape=Circle(radius=1e-30, args={"a": {"b": [1, 2.5, "x"]}, "c": True}),
        paint=Paint(
            tools=["x,y"], notes=("a",), shares=[0.1, 1 / 3], colour="green", thinner=0.5, level=1
        ),
    )
    assert read(file=write_toml(config), tmp_path=tmp_path) == config
    assert read(file=write_toml(Job()), tmp_path=tmp_path) == Job()


@pytest.mark.parametrize(
    ("line", "value", "rest"),
    [
        ("--run-dir a --steps 3", "a", "--steps 3"),
        ("--run_dir a", "a", ""),
        ("--steps=3 --run-dir=a=b", "a=b", "--steps=3"),
        ("--run_dir=a", "a", ""),
        ("--run-dir= a", "", "a"),
        ("--run-dir -1", "-1", ""),
        ("--run-dir --steps 3", "", "--steps 3"),
        ("--steps 3 --run-dir", "", "--steps 3"),
        ("--run-dir a --run_dir=b", "b", ""),
        ("--steps --run-dir a", "a", "--steps"),
        ("--run-dirs a", None, "--run-dirs a"),
        ("--x.run-dir a", None, "--x.run-dir a"),
        ("run-dir a", None, "run-dir a"),
        ("--steps 3 -- --run-dir a", None, "--steps 3 -- --run-dir a"),
    ],
)
def test_a_flag_is_recognized_in_every_spelling(line, value, rest):
    assert value_of(line.split(), "run_dir") == value
    assert value_of(line.split(), "other", "run_dir") == value
    assert without_flags(line.split(), "run_dir") == rest.split()
