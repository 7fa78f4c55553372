"""Settings of a run: config files, meshes, the `jaxdist` program, and the list of all settings."""

import collections
import dataclasses
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import missing, refused

from jaxdist.__main__ import COMMANDS
from jaxdist.__main__ import main as jaxdist
from jaxdist.config import RunConfig, parse_run, read_run, stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.types import Model
from jaxdist.data.tokenizer import tokenizer_file
from jaxdist.models.weights import num_params as count
from jaxdist.run.run_directory import RunDirectory
from jaxdist.settings import ConfigError, write_toml
from jaxdist.settings.schema import fields_of
from jaxdist.tools.launch.__main__ import read_config as launch_config

pytestmark = pytest.mark.smoke


CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


def run_config(*argv):
    return read_run(argv, command="jaxdist.train")


def test_the_default_has_no_problem_and_reads_back_equal(tmp_path):
    config = run_config()
    assert config == RunConfig()
    (tmp_path / "config.toml").write_text(write_toml(config))
    assert stored_run(tmp_path / "config.toml") == config


def test_every_field_of_a_run_has_a_doc_and_is_in_the_help(capsys):
    with pytest.raises(SystemExit):
        run_config("--help")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    for field in fields_of(RunConfig):
        assert len(field.doc) > 3, f"{field.name} has no doc"
        assert f"\n  {field.flag} " in text
        assert " ".join(field.doc.split()) in " ".join(text.split())


def load(path, tmp_path):
    """Load a config file; replace its data, which belongs to the user, by files that exist."""
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
def test_config_file_starts_with_command_hardware_time_and_result(path):
    opening = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in opening.splitlines())
    for part in ("Command ", "Hardware ", "Time ", "Result "):
        assert f"# {part}" in opening
    assert f"--config configs/{path.name}" in opening or path.stem == "default"
    assert max(map(len, path.read_text().splitlines())) <= 100


# From the papers and model cards. The CNN's are computed by hand: two 3x3 convolutions, two dense
# layers.
PUBLISHED_NUM_PARAMS = {
    "gpt2_124m": 124_439_808,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_128k": 8_030_261_248,
    "llama3_8b_1m": 8_030_261_248,
    "llama3_8b_one_gpu": 8_030_261_248,
    "llama3_8b_full": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_70b_128k": 70_553_706_496,
    "llama3_70b_pipeline": 70_553_706_496,
    "llama3_405b_pipeline": 405_853_388_800,
    # Rank 16 in all products: 41,943,040 and 207,093,760 more, as PEFT prints.
    "llama3_8b_lora": 8_030_261_248 + 41_943_040,
    "llama3_8b_qlora": 8_030_261_248 + 41_943_040,
    "llama3_70b_lora": 70_553_706_496 + 207_093_760,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_235b_a22b": 235_093_634_560,
    "pipeline_64gpu": 13_015_864_320,
    "cifar10_cnn": (27 + 1) * 32 + (9 * 32 + 1) * 64 + (8 * 8 * 64 + 1) * 512 + 513 * 10,
    "cifar10_resnet": 269_722,
    # nanoGPT reports 0.80M for 65 characters. We add 256 byte values, a position table and
    # LayerNorm biases: 4 (12 * 128^2 + 4 * 128) + 256 * 128 + 64 * 128 + 256.
    "shakespeare_char": 4 * (12 * 128**2 + 4 * 128) + 256 * 128 + 64 * 128 + 2 * 128,
}


@pytest.mark.parametrize(("name", "num_params"), PUBLISHED_NUM_PARAMS.items())
def test_parameter_counts_equal_the_published_ones(name, num_params):
    path = next(p for p in CONFIGS if p.stem == name)
    assert count(stored_run(path).build_model()) == num_params


def test_every_model_config_has_its_published_size():
    assert {p.stem for p in CONFIGS} == {
        *PUBLISHED_NUM_PARAMS,
        "default",
        "pipeline_64cpu",
        "moe_tiny",
    }


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_tokens_per_step_and_state_in_the_comments_are_right(path):
    text, config = path.read_text(), stored_run(path)
    if stated := re.search(r"([\d,]+) tokens a step", text):
        tokens = config.train.global_batch_size * config.train.seq_len
        assert int(stated[1].replace(",", "")) == tokens
    if stated := re.search(r"state \(([\d.]+) (GB|TB)\)", text):
        size = config.state_bytes(config.build_model()) / {"GB": 1e9, "TB": 1e12}[stated[2]]
        assert float(stated[1]) == pytest.approx(size, rel=0.006)  # rounded to three digits


def test_paths_of_tokenizer_and_template_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tokenizer.json", "chat.jinja"):
        (tmp_path / name).touch()
    flags = ["--data.tokenizer=tokenizer.json", "--data.chat-template=chat.jinja"]
    data = read_run(flags, command="x", check_rules=False).data
    assert data.tokenizer == str(tmp_path / "tokenizer.json")
    assert data.chat_template == str(tmp_path / "chat.jinja")


def test_a_folder_does_not_hide_a_config_of_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama3_8b").mkdir()
    assert read_run(["--config", "llama3_8b"], command="x", check_rules=False).name == "llama3_8b"


@pytest.mark.parametrize(
    "mesh",
    ["dp=8", "fsdp=8", "tp=8", "dp=2,fsdp=2,tp=2", "pp=2,dp=4", "pp=8", "dp=4,tp=4,pp=4"],
)
def test_the_default_is_legal_on_every_kind_of_mesh(mesh):
    simulate = f"--simulate={MeshSpec.parse(mesh).num_devices}"
    assert run_config(simulate, f"--mesh={mesh}").mesh.shape == mesh


def test_auto_mesh_chooses_replicas_or_the_nearest_legal_mesh_with_a_reason():
    assert RunConfig().choose_mesh(1)[0] == MeshSpec()
    assert RunConfig().choose_mesh(8)[0] == MeshSpec(data=8)
    spec, reason = run_config("--train.global_batch_size=6").choose_mesh(4)
    assert spec == MeshSpec(data=2, tensor=2)
    assert missing(reason, "dp=4", "train.global_batch_size=6", "multiple of 4") == []
    model = RunConfig().build_model()
    assert RunConfig().choose_mesh(8, model=model, memory_bytes=2**20)[0] == MeshSpec(fsdp=8)
    assert run_config("--mesh=dp=2,tp=-1").choose_mesh(8)[0] == MeshSpec(data=2, tensor=4)


def test_bad_mesh_reports_every_violated_rule_and_similar_legal_meshes():
    config = run_config("--mesh=auto", "--train.global_batch_size=24")
    with pytest.raises(ConfigError) as caught:
        config.check_mesh(MeshSpec(tensor=3, pipeline=9), num_devices=8)
    lines = caught.value.problems
    assert str(caught.value).startswith("mesh: 5 problems") and len(lines) == 5
    text = "\n".join(lines)
    for part in (
        "needs 27 devices, 8 are",
        "num_layers=8",
        "num_heads=8",
        "vocab_size=1024",
    ):
        assert part in text
    suggested = re.findall(r"--mesh (\S+?)[ .]", lines[-1].partition("Legal with 8")[2] + " ")
    assert len(suggested) == 3
    for mesh in suggested:
        run_config("--simulate=8", f"--mesh={mesh}", "--train.global_batch_size=24")


def test_error_of_mesh_resolution_is_reported(monkeypatch):
    def refuse(*args):
        raise ConfigError("no mesh without a problem")

    monkeypatch.setattr(MeshSpec, "resolve", refuse)
    with refused("no mesh without a problem"):
        run_config("--simulate=2", "--mesh=dp=2")


def test_no_legal_mesh_of_all_devices_suggests_fewer():
    with refused("Legal with 6 devices", "--mesh dp=6"):
        run_config(
            "--simulate=7",
            "--train.global_batch_size=6",
            "--model.num_layers=6",
            "--model.sliding_window=0",
        )


def test_custom_model_dims_are_checked_after_it_is_built():
    config = run_config("--model=custom", "--model.factory=my.model:build", "--mesh=tp=4")
    assert config.mesh_problems(MeshSpec(tensor=4)) == []
    model = Model(name="m", init=None, axes={}, dims={"mlp": 6}, head=None, objective=None)
    with refused("tp=4", "mlp=6"):
        config.choose_mesh(4, model=model)


def test_state_bytes_follow_the_optimizer():
    model = RunConfig().build_model()
    stored = count(model)  # 1024 tokens need no padding
    assert RunConfig().state_bytes(model) == 16 * stored
    assert run_config("--optim.optimizer=lion").state_bytes(model) == 12 * stored
    assert run_config("--optim.moment_dtype=bfloat16").state_bytes(model) == 14 * stored
    assert run_config("--optim.optimizer=adafactor").state_bytes(model) == 8 * stored


def test_remarks_report_a_warmup_longer_than_the_run():
    assert RunConfig().remarks() == []
    (remark,) = run_config("--steps=5").remarks()
    assert missing(remark, "optim.warmup_steps=20", "train.steps=5") == []


def test_jaxdist_lists_its_commands_and_refuses_others(capsys):
    assert jaxdist([]) == 0
    text = capsys.readouterr().out
    for name, doc in COMMANDS.items():
        assert f"  {name}" in text and doc in text and doc.endswith(".")
    assert jaxdist(["trian"]) == 2
    assert missing(capsys.readouterr().err, "jaxdist trian", "jaxdist train?") == []
    assert jaxdist(["zzz"]) == 2
    assert missing(capsys.readouterr().err, "jaxdist zzz", *COMMANDS) == []


def test_reading_a_config_imports_no_heavy_library_and_starts_no_device():
    code = (
        "import sys, jax; from jaxdist.config import read_run; read_run([], command='x')\n"
        "from jax._src import xla_bridge\n"
        "heavy = ('flax', 'orbax', 'grain', 'tensorboardX', 'pyarrow', 'tokenizers', 'jinja2')\n"
        "print([m for m in heavy if m in sys.modules], xla_bridge.backends_are_initialized())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[] False"


NUM_SETTINGS = {
    "": 10,
    "model": 42,  # seven of experts; num_labels: a score head; attention_sinks: of gpt-oss
    "lora": 8,
    "mesh": 4,
    "pipeline": 3,  # layers_per_stage: stages of unequal depth
    "train": 12,  # epochs: length in passes over the data; schedules of batch and rows
    "objective": 7,  # teacher: the model to distill; factors of the labels of kto
    "optim": 17,
    "precision": 3,
    "data": 16,  # streaming, and the files of its shuffle buffer
    "eval": 9,  # patience: early stopping; tasks, task_folder, task_limit: lm-eval
    "checkpoint": 12,  # export and its interval: formats to export, and when
    "monitoring": 6,
    "resilience": 7,  # spot_notices: which cloud to poll
    "runtime": 5,
}
"""Section -> its number of settings; "" = settings outside of sections."""


def test_number_of_settings_per_section():
    """A commit that changes a number gives the reason."""
    names = {field.name for field in fields_of(RunConfig)}
    assert collections.Counter(name.rpartition(".")[0] for name in names) == NUM_SETTINGS


def test_removed_setting_is_accepted_only_at_its_fixed_value(tmp_path):
    """Each stored config of an earlier version contains all settings with their defaults."""
    fixed = {name: removed.value for name, removed in RunConfig.REMOVED.items()}
    assert fixed and not set(fixed) & {field.name for field in fields_of(RunConfig)}
    file = tmp_path / "config.toml"
    fixed["mesh.reason"] = "any text"
    file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in fixed.items()))
    stored = stored_run(file)
    old_text_rule = dataclasses.replace(RunConfig().data, text_format=1)
    assert stored == dataclasses.replace(RunConfig(), data=old_text_rule)
    for name, removed in RunConfig.REMOVED.items():
        file.write_text(f'{name} = "another"\n')
        if removed.changes_results:
            with refused(name, "config.toml line 1", "removed", num_problems=1):
                stored_run(file)
        else:  # the run computes the same
            assert stored_run(file) == stored
        if removed.value is not None:
            with refused(name, f"flag --{name}", num_problems=1):
                read_run([f"--{name}=another"], command="test")


@pytest.mark.parametrize(
    "lines, flags, trackers",
    [
        ("tensorboard = true\ntracker = []", [], ["tensorboard"]),
        ("tensorboard = false", [], []),
        ('tracker = ["a:b", "tensorboard"]', ["--monitoring.tensorboard=false"], ["a:b"]),
        ("tensorboard = true", ["--monitoring.tracker=a:b"], ["tensorboard", "a:b"]),
    ],
)
def test_the_old_switch_of_tensorboard_is_an_item_of_the_trackers(tmp_path, lines, flags, trackers):
    file = tmp_path / "config.toml"
    file.write_text(f"[monitoring]\n{lines}\n")
    config = read_run([f"--config={file}", *flags], command="test")
    assert config.monitoring.tracker == trackers
    again = read_run(["--monitoring.tensorboard=false"], command="test", base=config)
    assert again.monitoring.tracker == [name for name in trackers if name != "tensorboard"]


@pytest.mark.parametrize(
    "line, flags, value",
    [
        ("true", [], "host"),
        ("false", [], "none"),
        ("true", ["--train.offload-optimizer=false"], "none"),
        ("false", ["--train.offload-optimizer", "host"], "host"),
    ],
)
def test_the_old_switch_of_offloading_names_the_host(tmp_path, line, flags, value):
    file = tmp_path / "config.toml"
    file.write_text(f"[train]\noffload_optimizer = {line}\n")
    config = read_run([f"--config={file}", *flags], command="test")
    assert config.train.offload_optimizer == value
    if not flags:
        assert stored_run(file).train.offload_optimizer == value
        assert parse_run(write_toml(config), "a run") == config


def test_the_settings_reference_is_up_to_date():
    path = Path(__file__).parent.parent / "docs" / "settings.md"
    script = path.parent.parent / "scripts" / "bench" / "settings_reference.py"
    assert path.read_text() == runpy.run_path(str(script))["reference"](), f"run {script}"


def test_relative_tokenizer_path_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    named = lambda name: (
        read_run(
            [f"--data.tokenizer={name}"], command="jaxdist.train", check_rules=False
        ).data.tokenizer
    )
    assert named("tokenizer.json") == str(tmp_path / "tokenizer.json")
    assert [named(name) for name in ("auto", "code", "bytes", "not/here.json")] == [
        *("auto", "code", "bytes", "not/here.json")
    ]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert named("~/tokenizer.json") == str(tmp_path / "tokenizer.json")
    assert str(tokenizer_file("~/tokenizer.json")) == f"{tmp_path}/tokenizer.json"


def test_a_resumed_run_keeps_the_commit_of_its_teacher(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.toml").write_text('[objective]\nteacher = "org/name@abc"\n')
    flags = ["--run-dir=run", "--objective.kind=distill", "--objective.teacher=org/name"]
    run = read_run(flags, command="jaxdist.train", check_rules=False)
    assert run.objective.teacher == "org/name@abc"


def test_run_in_the_home_directory_is_resumed_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("seed = 7")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    resumed = read_run(["--resume=~/run"], command="jaxdist.train", check_rules=False)
    assert resumed.seed == 7
    assert str(RunDirectory.existing("~/run").path) == str(tmp_path / "run")
    plan = launch_config(["--nproc-per-node=1", "--run-dir=~/run"])
    assert str(plan.run_directory) == str(tmp_path / "run")


@pytest.mark.parametrize(
    ("flag", "number"),
    [
        ("--optim.eps=1e-60", "1e-60"),
        ("--optim.peak-lr=1e39", "1e+39"),
        ("--model.rope-theta=1e300", "1e+300"),
        ("--model.rope-scaling={type='linear', factor=nan}", "nan"),
        ("--model.rope-scaling={type='linear', factor=1e-45}", "1e-45"),
        ("--model.rope-scaling={type='linear', factor=inf}", "inf"),
    ],
)
def test_numbers_outside_float32_are_rejected_at_any_depth(flag, number):
    name = flag[2:].partition("=")[0].replace("-", "_")
    with refused(name, number, "float32"):
        run_config(flag)
