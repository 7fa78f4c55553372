"""Any input gives a result or one clear refusal: no traceback, no hang, no excessive memory.

A corpus of inputs that once failed, and hypothesis for new ones. `scripts/bench/fuzz.py`
runs the second part for longer.
"""

import contextlib
import functools
import gzip
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from commands import environment
from hf_models import CHATML, write_model, write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import nothing_starts, refused  # noqa: F401

from jaxdist.config import RunConfig
from jaxdist.config.monitoring import MonitoringConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.data.chat import BadRecord, checked_messages, encode_completion, load_template
from jaxdist.data.documents import read_pieces, read_records
from jaxdist.data.tokenizer import ByteTokenizer, FileTokenizer, load_tokenizer
from jaxdist.models import DecoderConfig
from jaxdist.models.huggingface.directory import open_weights, read_json
from jaxdist.models.huggingface.families import read_config
from jaxdist.models.huggingface.safetensors import open_all
from jaxdist.runtime.entry_point import run_command
from jaxdist.settings import ConfigError, read_settings

CPU_S, MEMORY_KB = 2.0, 1 << 20
EXAMPLES = int(os.environ.get("JAXDIST_FUZZ_EXAMPLES", "40"))
settings.register_profile(
    "jaxdist",
    max_examples=EXAMPLES,
    deadline=None,  # other processes add load; `bounded` counts the CPU time of this one
    database=None,
    derandomize=EXAMPLES <= 40,  # CI tries the same each time
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("jaxdist")


@contextlib.contextmanager
def bounded():
    """Fail on more than two seconds of CPU time or a GiB of memory."""
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY_KB


LONG, DIGITS = "x" * 300, "9" * 5000
TRAIN = [
    ["--seed=99999999999999999999"],
    [f"--seed={DIGITS}"],
    [f"--config={LONG}"],
    ["--config=a\0b"],
    ["--config=/dev/zero"],
    ["--config=deep.toml"],
    ["--config=deep_key.toml"],
    ["--config=digits.toml"],
    ["--config=date.toml"],
    [f"--run-dir={LONG}"],
    ["--run-dir=a\0b"],
    [f"--name={LONG}", "--steps=0"],
    [f"--data.sources={LONG}"],
    ["--data.sources=a\0b"],
    ["--data.sources=" + "[" * 100_000],
    [f"--data.tokenizer={LONG}"],
    [f"--init-from={LONG}"],
    [f"--resume={LONG}"],
    ["--resume=a\0b"],
    [f"--replay={LONG}:1"],
    ["--replay=x:\u00b2"],
    ["--mesh=dp=99999999999999999999"],
    ["--mesh=dp=9999999,tp=9999999"],
    ["--mesh=dp=999999"],
    [f"--mesh=dp={DIGITS}"],
    [f"--mesh={DIGITS}"],
    ["--simulate=1000000000"],
    ["--simulate=4096", "--mesh=dp=3"],
    ["--model.num_layers=1000000000"],
    ["--model.init_std=inf"],
    ["--model.init_std=1e300"],
    ["--model.rope_scaling=" + "[" * 100_000],
    ["--train.global_batch_size=1000000000000000"],
    ["--train.seq_len=1000000000000"],
    ["--train.num_microbatches=100000000"],
    ["--mesh=pp=2", "--simulate=2", "--pipeline.num_virtual_stages=1000000000"],
    ["--train.remat=names:" + "x" * 100_000],
    ["--data.mixture_weights=nan"],
    ["--monitoring.prometheus=x:\u00b2"],
    ["--runtime.coordinator_address=x:\u00b2"],
]
OTHERS = {
    "evaluate": [[LONG], ["a\0b"]],
    "generate": [[LONG], ["x", f"--prompt-file={LONG}"], ["x", "--prompt-file=a\0b"]],
    "convert": [["inspect", LONG], ["inspect", "a\0b"], ["from-hf", LONG, "out"]],
    "plan": [["--gpus=h100:99999999999999999999"], ["--gpus=h100:1000000000"]],
    "report": [[LONG], ["a\0b"]],
    "launch": [
        ["--nproc-per-node=1000000000"],
        ["--nproc-per-node=1:1000000000"],
        [f"--nproc-per-node={DIGITS}"],
        ["--nnodes=1:99999999999999", "--nproc-per-node=1", "--run-dir=r"],
        ["--program='x"],
        ["--program= "],
        ["--run-dir=/proc/nowhere"],
        [f"--run-dir={LONG}"],
        ["--run-dir=a\0b"],
        ["slurm", "--time=60", "--program=true", "--script=/proc/nowhere"],
        ["slurm", "--time=60", "--program=true", f"--script={LONG}"],
        ["slurm", "--time=60", "--program=true", "--nodes=99999999999999999999"],
        ["slurm", "--time=60", "--program=true", "--partition=a\n#SBATCH --x"],
        ["slurm", "--time=1", "--program=true"],
        ["slurm", f"--time={DIGITS}", "--program=true"],
    ],
    "data": [
        ["sur.jsonl", "--out=o"],
        ["deep.jsonl", "--out=o"],
        ["number.jsonl", "--out=o"],
        ["bomb.txt.gz", "--out=o"],
        ["bomb.jsonl.gz", "--out=o"],
        ["good.txt", f"--out={LONG}"],
        ["good.txt", "--out=a\0b"],
        ["good.txt", "--out=/proc/nowhere"],
    ],
}
COMMANDS = [("train", argv) for argv in TRAIN]
COMMANDS += [(name, argv) for name, cases in OTHERS.items() for argv in cases]


@functools.cache
def bombs() -> dict[str, bytes]:
    lines = b'{"text": "' + b"a" * (3 << 20) + b'"}'
    return {
        "bomb.txt.gz": gzip.compress(b"a" * (16 << 20)),
        "bomb.jsonl.gz": gzip.compress(lines),
    }


@pytest.fixture
def files(tmp_path, monkeypatch):
    # The real limits are 64 MiB for decompression and for a line. Smaller ones test the same.
    monkeypatch.setattr("jaxdist.data.documents._EXPANSION_FROM", 4 << 20)
    monkeypatch.setattr("jaxdist.data.documents.LINE_BYTES", 1 << 20)
    texts = {
        "good.txt": "some text\n" * 100,
        "sur.jsonl": '{"text": "ok"}\n{"text": "a\\ud800b"}\n',
        "deep.jsonl": '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}\n",
        "number.jsonl": '{"text": ' + DIGITS + "}\n",
        "deep.toml": "x = " + "[" * 50_000 + "]" * 50_000,
        "deep_key.toml": ".".join(["a"] * 5000) + " = 1\n",
        "digits.toml": f"seed = {DIGITS}\n",
        "date.toml": "seed = 1979-05-27\n",
    }
    for name, text in texts.items():
        Path(name).write_text(text)
    for name, content in bombs().items():
        Path(name).write_bytes(content)


MODULES = {
    "convert": "jaxdist.tools.convert.__main__",
    "plan": "jaxdist.plan.__main__",
    "launch": "jaxdist.tools.launch.__main__",
    "report": "jaxdist.tools.report.__main__",
    "data": "jaxdist.data.__main__",
}


@pytest.mark.parametrize(
    ("command", "argv"),
    COMMANDS,
    ids=[f"{name}-{number}" for number, (name, _) in enumerate(COMMANDS)],
)
def test_a_command_refuses_with_exit_code_2_and_a_short_message(
    command, argv, files, capsys, monkeypatch
):
    main = importlib.import_module(MODULES.get(command, f"jaxdist.{command}")).main
    monkeypatch.setattr("faulthandler.enable", lambda: None)
    monkeypatch.setattr("faulthandler.register", lambda *_, **__: None)
    with bounded(), pytest.raises(SystemExit) as raised:
        run_command(lambda: main(argv))
    stderr = capsys.readouterr().err
    assert raised.value.code == 2, stderr
    assert "Traceback" not in stderr and 0 < len(stderr) < 6000
    if argv[0].endswith(("jsonl", ".gz")):
        assert argv[0] in stderr
        assert (":2" in stderr) == argv[0].startswith("sur")


def test_a_closed_stdout_ends_help_quietly():
    words = [sys.executable, "-m", "jaxdist.train", "--help"]
    done = subprocess.run(
        f"'{words[0]}' -m jaxdist.train --help | head -c 1; echo ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, env=environment(),
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1][-3:] in ("141", "0", done.stdout[0] + "0")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, ["some text of a user and an assistant"] * 4)
    return folder


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


@pytest.mark.parametrize(
    ("source", "why"),
    {
        "loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                  "CPU time"),
        "repeats": ("{{ 'a' * 5000000000 }}", "memory"),
        "doubles": ("{% set n = namespace(x='a' * 1000000) %}{% for i in range(40) %}"
                    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}", "memory"),
        "prints": ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "characters"),
        "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        "powers": ("{% set n = 9 ** 9 %}{{ 9 ** n }}", "CPU time"),
        "reaches out": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    }.values(),
)  # fmt: skip
def test_a_template_has_limits(tokenizer_folder, tmp_path, monkeypatch, source, why):
    monkeypatch.setattr("jaxdist.data.template_sandbox._WAIT_S", 4.0)
    path = tmp_path / "t.jinja"
    path.write_text(CHATML + source)
    template = load_template(str(path), FileTokenizer(tokenizer_folder / "tokenizer.json"))
    with bounded(), pytest.raises(BadRecord, match=f"{why}|ended"):
        template.encode(TALK)


def test_a_template_that_is_not_text_is_refused(tokenizer_folder, tmp_path):
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"t\.jinja"):
        load_template(str(tmp_path / "t.jinja"), FileTokenizer(tokenizer_folder / "tokenizer.json"))


@pytest.mark.parametrize("settings_file", [
    b"[1]", b"\xff", b'{"chat_template": [1, {"name": "default"}]}', b"[" * 100_000,
    b'{"chat_template": "{{ broken"}', b'{"chat_template": {"a": 1}, "bos_token": [1]}',
])  # fmt: skip
def test_a_broken_tokenizer_config_is_refused_or_left_out(
    tokenizer_folder, tmp_path, settings_file
):
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_bytes(settings_file)
    with bounded(), contextlib.suppress(ConfigError):
        load_template("auto", FileTokenizer(tmp_path / "tokenizer.json"))


@pytest.fixture
def model(tmp_path):
    sizes = dict(vocab_size=8, d_model=8, num_layers=1, num_heads=2, mlp_dim=8, max_seq_len=8)
    write_model(tmp_path / "model", DecoderConfig(**sizes))
    return tmp_path / "model"


@pytest.mark.parametrize("text", [
    b"[]", b"{", b"\xff", b"[" * 100_000, b'{"model_type": "llama"}', b"NaN", b'"x"', b"9" * 5000,
])  # fmt: skip
def test_a_config_json_of_any_kind_is_refused(model, text):
    (model / "config.json").write_bytes(text)
    with bounded(), pytest.raises(ConfigError, match=r"config\.json"):
        open_weights(model)


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("text", [
    b"[]", b"{}", b"{", b"\xff", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b"[" * 100_000,
    b'{"weight_map": {"a": "../../etc/passwd"}}', b'{"weight_map": {"a": "none.safetensors"}}',
])  # fmt: skip
def test_an_index_of_any_kind_is_refused(model, text):
    (model / "model.safetensors").rename(model / "part.safetensors")  # it is read without an index
    (model / INDEX).write_bytes(text)
    with bounded(), refused("none.safetensors" if b"none" in text else INDEX):
        open_all(model)


HEADERS = [
    b"", b"\0" * 8, b"\xff" * 8, (1 << 62).to_bytes(8, "little") + b"{}",
    *((len(h).to_bytes(8, "little") + h + b"\0" * 64) for h in (
        b"[]", b"{", b"[" * 90_000, b'{"a": 3}', b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [20], "data_offsets": [0, 80]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
        b' "b": {"dtype": "F32", "shape": [14], "data_offsets": [8, 64]}}',
        b'{"a": {"dtype": "F32", "shape": [4611686018427387904], "data_offsets": [0, 8]}}',
    )),
]  # fmt: skip


@pytest.mark.parametrize("content", HEADERS, ids=range(len(HEADERS)))
def test_a_safetensors_header_of_any_kind_is_refused(model, content):
    (model / "model.safetensors").write_bytes(content)
    with bounded(), pytest.raises(ConfigError, match=r"model\.safetensors"):
        open_all(model)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
NAMES = [
    *("steps", "train.steps", "mesh", "mesh.shape", "model", "optim.peak_lr", "data.sources"),
    *("seed", "zero", "model.rope_scaling", "monitoring.profile", "train.remat", "optim.freeze"),
    *("replay", "runtime.coordinator_address", "monitoring.prometheus", "precision.compute_dtype"),
]
VALUES = st.text(max_size=20) | st.integers().map(str) | st.floats().map(str) | JSON.map(json.dumps)


def refusal_or(function, *refused):
    """Run the function within bounds; clear refusals are accepted."""
    with bounded(), contextlib.suppress(ConfigError, *refused):
        return function()


@given(st.lists(st.tuples(st.sampled_from(NAMES), VALUES), max_size=3))
def test_flags(flags):
    argv = [f"--{name}={value}" for name, value in flags]
    refusal_or(lambda: read_settings(RunConfig, argv, command="train"), SystemExit)


@given(st.text(max_size=60) | st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3).map(
    lambda table: "\n".join(f"{name} = {value}" for name, value in table.items())
))  # fmt: skip
def test_toml(text):
    Path("x.toml").write_bytes(text.encode(errors="surrogatepass"))
    refusal_or(lambda: read_settings(RunConfig, ["--config=x.toml"], command="train"))


@given(st.text(max_size=30) | st.lists(st.tuples(
    st.sampled_from(["dp", "tp", "pp", "fsdp"]), st.integers(-2, 10**8)), max_size=4
).map(lambda parts: ",".join(f"{name}={size}" for name, size in parts)))  # fmt: skip
def test_meshes(text):
    refusal_or(lambda: MeshSpec.parse(text, 8))
    refusal_or(lambda: read_settings(RunConfig, [f"--mesh={text}"], command="train"))
    MonitoringConfig(profile=text, prometheus=text).problems()


@given(st.binary(max_size=80) | JSON.map(lambda value: json.dumps(value).encode()), st.booleans())
def test_lines_of_records(line, twice):
    path = Path("rows.jsonl")
    path.write_bytes(b'{"text": "x"}\n' * twice + line + b"\n")
    refusal_or(lambda: [ByteTokenizer().encode(p.text) for p in read_pieces(path, "text")])
    for check in (checked_messages, lambda r: encode_completion(r, ByteTokenizer())):
        refusal_or(lambda c=check: [c(r.value) for r in read_records(path, [])], BadRecord)


@given(
    st.sampled_from(["a.txt", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.json"]),
    st.binary(max_size=200),
)
def test_files_of_text(name, content):
    Path(name).write_bytes(content)
    refusal_or(lambda: list(read_pieces(Path(name), "text")))


@given(JSON | st.dictionaries(st.sampled_from([
    "hidden_size", "num_attention_heads", "num_key_value_heads", "rope_scaling", "rope_parameters",
    "layer_types", "sliding_window", "head_dim", "vocab_size", "model_type", "rope_theta", "other",
]), JSON).map(lambda more: {
    "model_type": "mistral", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8,
    "num_hidden_layers": 1, "intermediate_size": 8, "max_position_embeddings": 8,
    "rms_norm_eps": 1e-5, **more,
}))  # fmt: skip
def test_configs_of_models(config):
    refusal_or(lambda: read_config(config))


@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_damaged_safetensors(offset, content):
    folder = Path("weights")
    if not folder.exists():
        sizes = dict(vocab_size=8, d_model=8, num_layers=1, num_heads=2, mlp_dim=8, max_seq_len=8)
        write_model(folder, DecoderConfig(**sizes))
        Path("whole").write_bytes((folder / "model.safetensors").read_bytes())
    damaged = bytearray(Path("whole").read_bytes())
    damaged[offset : offset + len(content)] = content
    (folder / "model.safetensors").write_bytes(damaged)

    def read():
        for tensor in open_weights(folder).tensors.values():
            assert tensor.read().nbytes == np.prod(tensor.shape) * tensor.dtype.itemsize

    refusal_or(read)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_tokenizers(content):
    Path("tokenizer.json").write_bytes(content)
    refusal_or(lambda: load_tokenizer("tokenizer.json"))
    model = {"type": "BPE", "vocab": {"a": 0} if content else {}, "merges": []}
    Path("tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    Path("generation_config.json").write_bytes(content)
    Path("tokenizer_config.json").write_bytes(content)
    refusal_or(lambda: load_tokenizer("tokenizer.json"))
    Path("config.json").write_bytes(content)
    refusal_or(lambda: read_config(read_json(Path())))
