"""Reading settings: files, flags, kinds, types, and one message with every problem."""

import dataclasses
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, Literal

import pytest

from jaxdist.__main__ import find_commands
from jaxdist.__main__ import main as jaxdist
from jaxdist.config import RunConfig, read_run, stored_run
from jaxdist.config.reference import reference
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.settings import read_settings, write_toml
from jaxdist.core.settings.help import help_text
from jaxdist.core.settings.schema import fields_of
from jaxdist.core.types import ConfigError, Model, setting
from jaxdist.models.weights import num_params as count

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
    heading, *lines = caught.value.problems
    assert heading.startswith(f"paint: {len(lines)} problem")
    return lines


def one_problem(*argv, **kwargs):
    (line,) = problems_of(*argv, **kwargs)
    return line


# ---- values ----


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
        (["--paint.shares=1,0.5,2e-1"], "shares", [1.0, 0.5, 0.2]),
        (["--paint.thinner=0.25"], "thinner", 0.25),
        (["--paint.thinner=none"], "thinner", None),
    ],
)  # fmt: skip
def test_a_flag_is_read_by_its_fields_type(argv, field, value):
    got = getattr(read(*argv).paint, field)
    assert got == value and type(got) is type(value)


def test_a_toml_integer_is_a_number_and_a_flag_may_be_negative(tmp_path):
    config = read(file="[shape]\nside = 3\n", tmp_path=tmp_path)
    assert config.shape.side == 3.0 and isinstance(config.shape.side, float)
    assert one_problem("--paint.num_coats", "-1").startswith("  - paint.num_coats=-1 must be")


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


# ---- problems: one message, each with given, allowed, fix ----


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
    ("argv", "message"),
    [
        (["--paint.num_coat=1"], "Did you mean --paint.num-coats"),
        (["--num_coats=1"], "Did you mean --paint.num-coats"),
        (["--pain.colour=red"], "Did you mean --paint.colour"),
        (["--paint.zzz=1"], "--paint.zzz is not a setting. Sections: shape, paint. See --help."),
        (["--shape.radius=1"], "--shape.radius is not a setting of kind square."),
        (["--shape.kind=cirle"], "is not a choice: square or circle. Did you mean circle?"),
        (["--paint.colour=gren"], "not a choice: red, green or blue. Did you mean green?"),
        (["--paint.num_coats=2.5"], "='2.5' (flag --paint.num_coats) is not a whole number"),
        (["--paint.num_coats=many"], "The default is 2: coats, each dried"),
        (["--shape.side=wide"], "is not a number"),
        (["--paint.glossy=yes"], "is not true or false"),
        (["--paint.shares=1,x"], "has an item that is not a number"),
        (["--paint.level=3"], "is not a choice: 0, 1 or 2"),
        (["--paint.num_coats"], "has no value: a whole number is needed. Use --paint.num-coats=2"),
        (
            ["--coats=1", "--paint.num_coats=2"],
            "given twice (flag --coats, flag --paint.num_coats)",
        ),
        (["--paint=3"], "gives a value to a section. Its fields are colour, num_coats"),
        (["--name.first=x"], "is not a setting"),
        (["wall"], "argument 'wall' is one too many: the command takes flags only"),
        (["--config=none.toml"], "none.toml does not exist"),
        (["--config"], "--config has no value"),
        (["--config=a.toml", "--config=b.toml"], "given 2 times (a.toml, b.toml)"),
        (["--help", "pain"], "--help pain: there is no such section. Use one of shape, paint"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_flag_is_answered_with_the_fix(argv, message):
    if argv[0] == "--help":
        with pytest.raises(ConfigError, match="there is no such section"):
            read(*argv)
        return
    assert message in one_problem(*argv)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("nmae = 'x'", "nmae (FILE line 1) is not a setting. Did you mean name?"),
        ("name = 'x'\n[pait]\nnum_coats = 1\nglossy = true", "pait (FILE line 2) is not a s"),
        ("[pait]\nnum_coats = 1\nglossy = true", "Did you mean paint?"),
        ("\n[paint]\n# note\nnum_cots = 1", "paint.num_cots (FILE line 4) is not a setting. Did"),
        ("[paint]\nnum_cots = 1", "Did you mean paint.num_coats"),
        ("[paint]\nnum_coats = 2.0", "paint.num_coats=2.0 (FILE line 2) is not a whole number"),
        ("[paint]\nnum_coats = true", "paint.num_coats=True (FILE line 2) is not a whole number"),
        ("[paint]\nglossy = 1", "is not true or false"),
        ("[paint]\nlevel = true", "is not a choice: 0, 1 or 2"),
        ("[paint]\nlevel = '1'", "is not a choice: 0, 1 or 2"),
        ("[paint]\ntools = 'brush'", "is not a list: each item a text"),
        ("[paint]\ntools = [1]", "has an item that is not a text"),
        ("[shape]\nkind = 'circle'\nargs = 3", "is not a table of names and values"),
        ("[shape]\nkind = 3", "shape.kind=3 (FILE line 2) is not a choice: square or circle"),
        ("[shape]\nkind = 'circle'\nside = 1.0", "side (FILE line 3) is not a setting of kind"),
        ("paint = 3", "paint=3 (FILE line 1) gives a value to a section"),
        ("shape = 'circle'", "gives a value to a section. Use shape.kind"),
        ("[paint]\nnum_coats = 0", "at least 1. Use 1. [paint.num_coats: FILE line 2]"),
        ("x = 1\nname = = 2", "is not TOML: invalid value (at line 2"),
        ("name = 'a'\nname = 'b'", "is not TOML"),
    ],
)  # fmt: skip
def test_a_bad_file_is_answered_with_its_line(file, message, tmp_path):
    line = one_problem(file=file, tmp_path=tmp_path)
    assert message.replace("FILE", str(tmp_path / "job.toml")) in line


def test_a_file_that_is_not_utf8_or_is_a_folder_is_answered(tmp_path):
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "it is not UTF-8 text" in one_problem(f"--config={binary}")
    assert "cannot be read: Is a directory" in one_problem(f"--config={tmp_path}")


def test_a_rule_about_a_value_that_could_not_be_read_is_left_out():
    lines = problems_of("--paint.num_coats=x", "--shape.side=0")
    assert len(lines) == 2 and "num_coats='x'" in lines[0] and "shape.side=0.0" in lines[1]


# ---- help and writing ----


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
        "Short spellings: --coats = --paint.num-coats",
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


def test_infinite_numbers_are_read_so_that_rules_can_refuse_them():
    assert math.isinf(read("--shape.side=inf").shape.side)


# ---- RunConfig ----

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def run_config(*argv):
    return read_run(argv, command="jaxdist.train")


def test_the_default_has_no_problem_and_reads_back_equal(tmp_path):
    config = run_config()
    assert config == RunConfig()
    (tmp_path / "config.toml").write_text(write_toml(config))
    assert stored_run(tmp_path / "config.toml") == config


def test_every_field_of_a_run_has_a_doc_and_stands_in_the_help(capsys):
    with pytest.raises(SystemExit):
        run_config("--help")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for field in fields_of(RunConfig):
        assert len(field.doc) > 3, f"{field.name} has no doc"
        assert f"\n  {field.flag} " in text
        assert " ".join(field.doc.split()) in " ".join(text.split())


def load(path, tmp_path):
    """A config file with its data, which is the user's, replaced by files that exist."""
    config = stored_run(path)
    flags = [f"--config={path}"]
    if config.model.kind == "decoder":
        (tmp_path / "tokenizer.json").write_text("{}")
        flags.append("--data.sources=stdlib")
        if config.data.tokenizer != "bytes":
            flags.append(f"--data.tokenizer={tmp_path / 'tokenizer.json'}")
    else:
        (tmp_path / "data_batch_1.bin").write_bytes(b"")
        flags.append(f"--data.sources={tmp_path}")
    return config, run_config(*flags)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_file_has_no_problem_and_reads_back_equal(path, tmp_path):
    stored, config = load(path, tmp_path)
    assert dataclasses.replace(config, data=stored.data) == stored
    (tmp_path / "config.toml").write_text(write_toml(config))
    assert run_config(f"--config={tmp_path / 'config.toml'}") == config
    assert config.name == path.stem or path.stem == "default"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_config_file_opens_with_command_hardware_time_and_result(path):
    opening = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    for part in ("Command ", "Hardware ", "Time ", "Result "):
        assert f"# {part}" in opening
    assert f"--config configs/{path.name}" in opening or path.stem == "default"
    assert max(map(len, path.read_text().splitlines())) <= 100


def test_the_default_file_is_the_built_in_default():
    path = next(p for p in CONFIGS if p.stem == "default")
    assert stored_run(path) == RunConfig()


# From the papers and model cards; the CNN's by hand: two 3x3 convolutions, two dense layers.
PUBLISHED_NUM_PARAMS = {
    "gpt2_124m": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_128k": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "pipeline_64gpu": 13_015_864_320,
    "cifar10_cnn": (27 + 1) * 32 + (9 * 32 + 1) * 64 + (8 * 8 * 64 + 1) * 512 + 513 * 10,
    # nanoGPT prints 0.80M for 65 characters; 256 byte values, a position table and LayerNorm
    # biases come on top: 4 (12 * 128^2 + 4 * 128) + 256 * 128 + 64 * 128 + 256.
    "shakespeare_char": 4 * (12 * 128**2 + 4 * 128) + 256 * 128 + 64 * 128 + 2 * 128,
}


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED_NUM_PARAMS.items())
def test_shapes_equal_the_published_ones(name, num_params):
    path = next(p for p in CONFIGS if p.stem == name)
    assert count(stored_run(path).build_model()) == num_params


def test_every_model_config_has_its_published_size():
    assert {p.stem for p in CONFIGS} == {*PUBLISHED_NUM_PARAMS, "default", "pipeline_64cpu"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_tokens_per_step_and_state_in_the_comments_are_right(path):
    text, config = path.read_text(), stored_run(path)
    if stated := re.search(r"([\d,]+) tokens a step", text):
        tokens = config.train.global_batch_size * config.train.seq_len
        assert int(stated[1].replace(",", "")) == tokens
    if stated := re.search(r"state \(([\d.]+) (GB|TB)\)", text):
        size = config.state_bytes(config.build_model()) / {"GB": 1e9, "TB": 1e12}[stated[2]]
        assert float(stated[1]) == pytest.approx(size, rel=0.006)  # three digits, rounded


@pytest.mark.parametrize(
    "mesh",
    ["dp=8", "fsdp=8", "tp=8", "dp=2,fsdp=2,tp=2", "dp=4,tp=2", "pp=2,dp=4", "pp=8", "pp=2,tp=4"],
)
def test_the_default_is_legal_on_every_kind_of_mesh_of_8_devices(mesh):
    assert run_config("--simulate=8", f"--mesh={mesh}").mesh.shape == mesh


def test_the_default_is_legal_on_4_4_4():
    assert run_config("--simulate=64", "--mesh=dp=4,tp=4,pp=4").mesh.shape == "dp=4,tp=4,pp=4"


# ---- the mesh ----


def test_auto_takes_replicas_or_the_nearest_legal_mesh_and_says_why():
    assert RunConfig().choose_mesh(1) == (MeshSpec(), "one device: nothing to split")
    assert RunConfig().choose_mesh(8)[0] == MeshSpec(data=8)
    spec, reason = run_config("--train.global_batch_size=6").choose_mesh(4)
    assert spec == MeshSpec(data=2, tensor=2)
    assert "dp=4 is refused (train.global_batch_size=6 is not a multiple of 4" in reason
    model = RunConfig().build_model()
    assert RunConfig().choose_mesh(8, model=model, memory_bytes=2**20)[0] == MeshSpec(fsdp=8)
    config = run_config("--mesh=dp=2,tp=-1", "--mesh.reason=because")
    assert config.choose_mesh(8) == (MeshSpec(data=2, tensor=4), "because")


def test_a_bad_mesh_names_every_rule_and_legal_meshes_nearby():
    config = run_config("--mesh=auto", "--train.global_batch_size=24")
    with pytest.raises(ConfigError) as caught:
        config.check_mesh(MeshSpec(tensor=3, pipeline=3), num_devices=8)
    heading, *lines = caught.value.problems
    assert heading == "mesh: 6 problems in what was asked for; nothing was started."
    text = "\n".join(lines)
    for part in (
        "needs 9 devices, 8 are",
        "num_layers=8",
        "num_heads=8",
        "vocab_size=256",
        "seq_len=",
    ):
        assert part in text
    suggested = re.findall(r"--mesh (\S+?)[ .]", lines[-1].partition("Legal with 8")[2] + " ")
    assert len(suggested) == 3
    for mesh in suggested:
        run_config("--simulate=8", f"--mesh={mesh}", "--train.global_batch_size=24")


def test_no_legal_mesh_of_all_devices_suggests_fewer():
    with pytest.raises(ConfigError, match=r"Legal with 6 devices, nearest first: --mesh dp=6"):
        run_config("--simulate=7", "--train.global_batch_size=6", "--model.sliding_window=0")


def test_a_custom_models_dims_are_judged_once_it_is_built():
    config = run_config("--model=custom", "--model.factory=my.model:build", "--mesh=tp=4")
    assert config.mesh_problems(MeshSpec(tensor=4)) == []
    model = Model(name="m", init=None, axes={}, dims={"mlp": 6}, head_loss=None)
    with pytest.raises(ConfigError, match="tp=4 does not divide model dim mlp=6"):
        config.choose_mesh(4, model=model)


def test_state_bytes_follow_the_optimizer():
    model = RunConfig().build_model()
    stored = count(model)  # 256 tokens need no padding
    assert RunConfig().state_bytes(model) == 16 * stored
    assert run_config("--optim.optimizer=lion").state_bytes(model) == 12 * stored
    assert run_config("--optim.moment_dtype=bfloat16").state_bytes(model) == 14 * stored
    assert run_config("--optim.optimizer=adafactor").state_bytes(model) == 8 * stored


def test_remarks_name_a_warmup_longer_than_the_run():
    assert RunConfig().remarks() == []
    (remark,) = run_config("--steps=5").remarks()
    assert "never reaches its peak" in remark


# ---- the jaxdist program ----


def test_jaxdist_lists_its_commands_and_refuses_others(capsys):
    assert jaxdist([]) == 0
    text = capsys.readouterr().out
    for name, doc in find_commands().items():
        assert f"  {name}" in text and doc in text and doc.endswith(".")
    assert {"train", "generate", "data"} <= set(find_commands())
    assert jaxdist(["trian"]) == 2
    assert "no such command. Did you mean jaxdist train?" in capsys.readouterr().err
    assert jaxdist(["zzz"]) == 2
    assert "Use one of train, " in capsys.readouterr().err


def test_jaxdist_train_is_python_m_jaxdist_train():
    for program in (["jaxdist", "train"], ["jaxdist.train"]):
        out = subprocess.run(
            [sys.executable, "-m", *program, "--help", "optim"], capture_output=True, text=True
        )
        assert out.returncode == 0 and "--optim.peak-lr NUMBER" in out.stdout


def test_reading_a_config_imports_no_heavy_library_and_starts_no_device():
    code = (
        "import sys, jax; from jaxdist.config import read_run; read_run([], command='x')\n"
        "from jax._src import xla_bridge\n"
        "heavy = ('flax', 'orbax', 'grain', 'tensorboardX', 'pyarrow', 'tokenizers', 'torch')\n"
        "print([m for m in heavy if m in sys.modules], xla_bridge.backends_are_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] False"


# ---- the settings of a run, as a whole ----

MAX_SETTINGS = 120
ADDED_LATER = {
    "mesh.context_attention": "context parallelism",
    "mesh.fsdp_over_context": "context parallelism",
}
"""Settings that came with a feature after the limit was set, and do not count against it."""


def test_settings_are_added_and_removed_knowingly():
    """tests/settings.txt is the list of all; whoever changes it says why in the commit."""
    listed = (Path(__file__).parent / "settings.txt").read_text().split()
    assert sorted({field.name for field in fields_of(RunConfig)}) == listed
    assert set(ADDED_LATER) <= set(listed)
    assert len(listed) - len(ADDED_LATER) <= MAX_SETTINGS


def test_the_settings_reference_is_up_to_date():
    path = Path(__file__).parent.parent / "docs" / "settings.md"
    assert path.read_text() == reference(), "run python -m jaxdist.config.reference"
