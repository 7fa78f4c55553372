"""Names on the Hugging Face hub, from a prepared cache and from a local hub server."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from decoders import FAMILIES
from hf_models import write_model, write_tokenizer
from hub_server import hub_in_use, local_hub
from huggingface_hub import constants
from refusals import refused

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.config import read_run, settings_of_run
from jaxdist.config.command_line import stored_run
from jaxdist.data import load_tokenizer
from jaxdist.data.tokenizer import TOKENIZER_FILES, FileTokenizer
from jaxdist.models.huggingface.directory import folder_of, open_weights
from jaxdist.run.setup import assemble
from jaxdist.run.startup import fetch_weights
from jaxdist.runtime import hub
from jaxdist.settings import write_toml
from jaxdist.tools.convert.__main__ import main as convert

OLD, NEW = "0" * 39 + "1", "0" * 39 + "2"
SMALL = "--train.seq_len=64"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, FAMILIES["llama3.1"])
    write_tokenizer(path, ["some text of a model"] * 4, 320)
    (path / "pytorch_model.bin").write_text("pickled")
    (path / "onnx").mkdir()
    (path / "onnx" / "model.safetensors").write_text("another framework's")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """Create an empty cache in offline mode: no test may contact the real hub."""
    path = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    hub._download.cache_clear()
    yield path
    hub._download.cache_clear()


def store(cache: Path, repo: str, folder: Path, commit: str, ref: str = "main") -> Path:
    """Store a commit of a model in the hub's cache layout: refs, blobs, links in snapshots."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    for directory in (root / "refs", root / "blobs", snapshot):
        directory.mkdir(parents=True, exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    for file in (file for file in folder.iterdir() if file.is_file()):
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(blob)
    return snapshot


def edit_copy(folder: Path, to: Path, **sizes: object) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **sizes}))
    return to


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("org/name", True),
        ("Qwen/Qwen3-0.6B@main", True),
        ("org/name@refs/pr/1", True),
        ("org", False),
        ("a/b/c", False),
        ("./name", False),
        ("/name", False),
        ("../name", False),
        ("~/name", False),
        ("folder/tokenizer.json", False),
        ("org/name@", False),
        ("s3://name", False),
        ("here/model", False),
    ],
)
def test_hub_name_has_one_slash_and_is_not_an_existing_path(tmp_path, monkeypatch, text, is_name):
    monkeypatch.chdir(tmp_path)
    Path("here/model").mkdir(parents=True)
    assert hub.is_hub_name(text) == is_name


def test_run_from_a_hub_name_stores_the_commit(cache, model, tmp_path):
    store(cache, "org/tiny", model, OLD)
    store(cache, "org/tiny", edit_copy(model, tmp_path / "new", rope_theta=7e4), NEW, ref="v2")
    config = read_run(["--init-from=org/tiny", SMALL], command="jaxdist.train")
    assert config.init_from == config.data.tokenizer == f"org/tiny@{OLD}"
    assert config.name == "tiny" and config.optim.peak_lr == 2e-5
    assert config.model == read_run([f"--init-from={model}", SMALL], command="x").model
    newer = read_run(["--init-from=org/tiny@v2", SMALL], command="jaxdist.train")
    assert newer.init_from == newer.data.tokenizer == f"org/tiny@{NEW}"
    assert newer.model.rope_theta == 7e4 != config.model.rope_theta


def test_same_command_resumes_with_the_first_commit(cache, model, tmp_path):
    """Also from the stored settings alone, and if the branch has moved to another commit."""
    store(cache, "org/tiny", model, OLD)
    flags = ["--init-from=org/tiny", "--run-dir=run", SMALL]
    first = read_run(flags, command="jaxdist.train")
    Path("run").mkdir()
    Path("run/config.toml").write_text(write_toml(first))
    store(cache, "org/tiny", edit_copy(model, tmp_path / "new", rope_theta=7e4), NEW)
    hub._download.cache_clear()  # another process
    assert read_run(flags, command="jaxdist.train") == first
    assert stored_run("run/config.toml") == first
    resumed = read_run(["--resume=run", "--data.tokenizer=org/tiny"], command="jaxdist.train")
    assert resumed.data.tokenizer == f"org/tiny@{OLD}"
    flags[1] = "--run-dir=other"
    assert read_run(flags, command="jaxdist.train").init_from == f"org/tiny@{NEW}"


def test_existing_path_takes_precedence_over_a_hub_name(cache, model):
    store(cache, "org/tiny", model, OLD)
    shutil.copytree(model, "org/tiny")
    config = read_run(["--init-from=org/tiny", SMALL], command="jaxdist.train")
    assert config.init_from == "org/tiny"
    assert Path(config.data.tokenizer) == Path("org/tiny/tokenizer.json").absolute()


def test_tokenizer_by_hub_name_equals_its_file(cache, model):
    store(cache, "org/tiny", model, OLD)
    flags = ["--data.tokenizer=org/tiny", "--model.vocab_size=320"]
    assert read_run(flags, command="x").data.tokenizer == f"org/tiny@{OLD}"
    ours, expected = load_tokenizer("org/tiny"), FileTokenizer(model / "tokenizer.json")
    assert ours.fingerprint == expected.fingerprint and ours.files == expected.files
    np.testing.assert_array_equal(ours.encode("a model"), expected.encode("a model"))


def test_convert_from_a_hub_name(cache, model, capsys):
    store(cache, "org/tiny", model, OLD)
    assert convert(["from-hf", "org/tiny", "out"]) == 0
    assert convert(["from-hf", str(model), "expected"]) == 0
    assert convert(["diff", "out", "expected"]) == 0
    assert stored_run("out/config.toml").name == "tiny"
    assert Path("out/tokenizer/tokenizer.json").is_file()


def test_adapters_keep_the_commit_of_their_base(cache, model, tmp_path):
    store(cache, "org/tiny", model, OLD)
    store(cache, "org/tiny", edit_copy(model, tmp_path / "new", rope_theta=7e4), NEW, ref="v2")
    flags = ["--init-from=org/tiny@v2", SMALL, "--mesh=dp=1", "--lora.rank=2"]
    config = read_run([*flags, "--lora.targets=q_proj"], command="jaxdist.train")
    parts = assemble(config, jax.devices()[:1])
    writer = Checkpointer(tmp_path / "run" / "checkpoints", CheckpointConfig(), log=print)
    state = parts.without_base(parts.init_state())
    writer.save(0, state, {"mesh": "", "config": write_toml(config)}, force=True)
    writer.close()
    for verb, source, out in (("to-peft", "run", "peft"), ("from-peft", "peft", "again")):
        assert convert([verb, str(tmp_path / source), str(tmp_path / out)]) == 0
    again = settings_of_run(tmp_path / "again")
    assert again.init_from == f"org/tiny@{NEW}" and again.model.rope_theta == 7e4


def test_names_missing_from_the_cache_are_refused_offline(cache, model, tmp_path):
    read = lambda *flags: read_run([*flags, SMALL], command="jaxdist.train")
    with refused("init_from='org/none'", cache, "HF_HUB_OFFLINE", constants.ENDPOINT):
        read("--init-from=org/none")
    with refused("data.tokenizer='org/none'", cache, "HF_HUB_OFFLINE"):
        read("--data.tokenizer=org/none")
    with refused("'org/none'", cache, "HF_HUB_OFFLINE"):
        convert(["from-hf", "org/none", "out"])
    assert not Path("out").exists()
    store(cache, "org/tiny", model, OLD)
    with refused("init_from='org/tiny@v3'", cache):
        read("--init-from=org/tiny@v3")
    bare = tmp_path / "bare"
    write_model(bare, FAMILIES["llama3.1"])
    store(cache, "org/bare", bare, OLD)
    with refused(f"data.tokenizer='org/bare@{OLD}'", "has no tokenizer.json"):
        read("--init-from=org/bare")
    with refused("config.json"):
        (cache / "models--org--bare" / "snapshots" / OLD / "config.json").unlink()
        hub._download.cache_clear()
        read("--init-from=org/bare", "--data.tokenizer=bytes")


def test_unreachable_hub_is_named_with_the_cause(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server listens there
    with refused("init_from='org/tiny'", "http://127.0.0.1:9", "Connect", cache):
        read_run(["--init-from=org/tiny"], command="jaxdist.train")


def test_only_needed_files_are_fetched_and_weights_last(cache, model, monkeypatch):
    with local_hub() as server:
        server.store("models", "org/tiny", model, NEW)
        sent, address = server.sent, server.address
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        url_path = "{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{address}/{url_path}")
        config = read_run(["--init-from=org/tiny", SMALL], command="jaxdist.train")
        assert config.init_from == f"org/tiny@{NEW}"
        small = {name for name in TOKENIZER_FILES if (model / name).exists()}
        assert sorted(sent) == sorted({"config.json", *small})
        fetch_weights(config)
        assert sent[-1] == "model.safetensors" and len(sent) == len(small) + 2
        tensors = open_weights(folder_of(config.init_from)).tensors
        assert tensors.keys() == open_weights(model).tensors.keys()
        with refused("init_from='org/tinny'", address, "no model 'org/tinny'"):
            read_run(["--init-from=org/tinny"], command="jaxdist.train")
        with refused("init_from='org/tiny@v9'", address, "no revision 'v9'"):
            read_run(["--init-from=org/tiny@v9"], command="jaxdist.train")


def test_an_export_is_pushed_to_a_private_repository(model, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert convert(["from-hf", str(model), str(run)]) == 0
    with hub_in_use(tmp_path, monkeypatch) as server:
        server.root, server.writers = tmp_path / "commits", {"hf_own": "team", "hf_other": "they"}
        words = lambda out, name: ["to-hf", str(run), str(tmp_path / out), "--push", name]
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for token, name, parts in (
            ("", "team/tuned", ["HF_TOKEN", "hf auth login"]),
            ("hf_bad", "team/tuned", ["HTTP 401", "Nothing was written"]),
            ("hf_other", "team/tuned", ["HTTP 403", "'team/tuned'"]),
            ("hf_own", "tuned", ["--push 'tuned'", "ORG/NAME"]),
        ):
            monkeypatch.setenv("HF_TOKEN", token)
            with refused(*parts):
                convert(words("no", name))
            assert not (tmp_path / "no").exists() and not server.folders
        monkeypatch.setenv("HF_TOKEN", "hf_own")
        assert convert(words("out", "team/tuned")) == 0
        assert server.private == {"team/tuned"}
        (pushed,) = server.folders.values()
        files = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
        assert {"README.md", "config.json", "tokenizer.json", "model.safetensors"} <= files.keys()
        assert {file.name: file.read_bytes() for file in pushed.iterdir()} == files
        assert convert(["from-hf", "team/tuned", str(tmp_path / "again")]) == 0

        upload = "huggingface_hub.HfApi.upload_folder"
        monkeypatch.setattr(upload, lambda *_, **__: (_ for _ in ()).throw(OSError("cut off")))
        with refused("cut off", "is complete", "hf upload team/tuned"):
            convert(words("second", "team/tuned"))
        assert (tmp_path / "second" / "config.json").exists()
