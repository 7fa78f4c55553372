"""`jaxdist data prepare NAME`: the data of each shipped config, from a local hub and server."""

import dataclasses
import functools
import hashlib
import http.server
import io
import json
import tarfile
import threading
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hf_models import write_model, write_tokenizer
from hub_server import Hub, hub_in_use
from refusals import refused

from jaxdist.config import read_run
from jaxdist.config.command_line import stored_run
from jaxdist.data import load_tokenizer, open_datasets
from jaxdist.data.__main__ import main as data_command
from jaxdist.data.images import TEST_FILE, TRAIN_FILES
from jaxdist.data.prepare import SHIPPED_SETS, _download, _find
from jaxdist.settings.sources import NAMED_FILES
from jaxdist.train import main as train

slow, product = pytest.mark.slow, pytest.mark.product
COMMIT = "0" * 39 + "1"
WITH_DATA = sorted(
    path.stem for path in NAMED_FILES.glob("*.toml") if 'sources = ["data/' in path.read_text()
)
CONFIGS = {path.stem: tomllib.loads(path.read_text()) for path in NAMED_FILES.glob("*.toml")}
SIZES = {
    "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "mlp_dim": 64, "num_experts": 4, "experts_per_token": 2,
}  # fmt: skip
SMALL = [
    "--train.steps=1", "--train.global_batch_size=8", "--train.seq_len=16", "--mesh=dp=8",
    "--train.num_microbatches=1", "--eval.final_max_batches=1", "--eval.interval_steps=0",
    "--optim.warmup_steps=0", "--monitoring.tracker=", "--run-dir=run",
]  # fmt: skip


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves files, the rest of one for a Range header."""

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        content = Path(self.translate_path(self.path)).read_bytes()
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:])


def cifar_archive() -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name in (*TRAIN_FILES, TEST_FILE):
            about = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            record = bytes(3073) * 8
            about.size = len(record)
            archive.addfile(about, io.BytesIO(record))
    return data.getvalue()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Hub:
    rows = [f"text {number} of a page. " * 20 for number in range(200)]
    folder = tmp_path / "set" / "sample" / "10BT"
    folder.mkdir(parents=True)
    parquet.write_table(pa.table({"text": rows}), folder / "000_00000.parquet")
    (tmp_path / "set" / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: data/*\n- config_name: sample-10BT\n"
        "  data_files:\n  - split: train\n    path: sample/10BT/*\n---\n"
    )
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer", rows[:4], 320)
    (tmp_path / "tokenizer" / "config.json").write_text("{}")
    files = {"tinyshakespeare": b"First Citizen: speak. " * 999, "cifar10": cifar_archive()}
    served = tmp_path / "served"
    served.mkdir()
    handler = functools.partial(Files, directory=served)
    with (
        hub_in_use(tmp_path, monkeypatch) as server,
        http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web,
    ):
        threading.Thread(target=web.serve_forever, daemon=True).start()
        server.store("datasets", "HuggingFaceFW/fineweb-edu", tmp_path / "set", COMMIT)
        for name, shipped in SHIPPED_SETS.items():
            if shipped.tokenizer:
                server.store("models", shipped.tokenizer, tmp_path / "tokenizer", COMMIT)
                continue
            path = served / Path(shipped.source).name
            path.write_bytes(files[name])
            smaller = dataclasses.replace(
                shipped,
                source=f"http://127.0.0.1:{web.server_port}/{path.name}",
                sha256=hashlib.sha256(files[name]).hexdigest(),
                num_bytes=len(files[name]),
            )
            monkeypatch.setitem(SHIPPED_SETS, name, smaller)
        yield server
        web.shutdown()


@pytest.mark.parametrize("name", SHIPPED_SETS)
def test_configs_name_the_command_that_makes_their_data(hub, name, tmp_path, capsys):
    configs = [config for config in WITH_DATA if _find([config])[0] == name]
    for config in configs:
        with refused(f"jaxdist data prepare {name}"):
            read_run(["--config", config], command="jaxdist.train")
    assert data_command(["prepare", configs[-1]]) == 0
    run, *others = [read_run(["--config", config], command="jaxdist.train") for config in configs]
    assert all(other.data.tokenizer == run.data.tokenizer for other in others)
    train_rows, held_out = open_datasets(run.data, seq_len=16)
    assert train_rows.num_rows and held_out.num_rows
    if train_rows.kind == "text" and name != "tinyshakespeare":
        made_with = load_tokenizer(str(tmp_path / "tokenizer" / "tokenizer.json"))
        assert train_rows.tokenizer.fingerprint == made_with.fingerprint
        size, rest = capsys.readouterr().err.split(" to download, ", 1)
        assert "1 files, " in size and "of tokens" in rest and "cores" in rest
    sent = list(hub.sent)
    assert data_command(["prepare", name]) == 0 and hub.sent == sent


def tuned_model(hub, folder: Path, config: str) -> list[str]:
    """Store a small model of the config's kind on the hub; return the flags that tune it."""
    sizes = {**{name: size for name, size in SIZES.items() if "expert" not in name}, "head_dim": 0}
    model = stored_run(NAMED_FILES / f"{config}.toml").model
    write_model(folder, dataclasses.replace(model, vocab_size=320, **sizes))
    write_tokenizer(folder, ["a text"], 320)
    hub.store("models", "meta-llama/Meta-Llama-3-8B", folder, COMMIT)
    chats = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "an answer"}]
    line = json.dumps({"messages": chats * 3})
    Path("chats.jsonl").write_text(f"{line}\n" * 99)
    flags = ["--init-from=meta-llama/Meta-Llama-3-8B", "--data.sources=chats.jsonl"]
    return [*flags, "--data.records=chat", "--model.vocab_size=320"]


FIRST = {"gpt2_124m": (), "cifar10_cnn": (), "mixtral_8x7b": slow, "llama3_8b_qlora": slow}


@pytest.mark.parametrize(
    "config", [pytest.param(name, marks=FIRST.get(name, product)) for name in sorted(CONFIGS)]
)
def test_first_step_on_prepared_data(hub, config, tmp_path):
    """The sizes of the model are reduced; everything else is the config's, on eight devices."""
    Path("prepare").mkdir()  # the command, not this folder
    model, flags = CONFIGS[config]["model"], list(SMALL)
    if config in WITH_DATA:
        data_command(["prepare", config])
    elif not CONFIGS[config].get("data"):
        flags += tuned_model(hub, tmp_path / "model", config)
        if "offload_optimizer" in CONFIGS[config]["train"]:
            flags.append(f"--train.offload_optimizer=disk:{tmp_path}")
    if model["kind"] == "decoder":
        flags += [f"--model.{name}={n}" for name, n in SIZES.items() if name in model]
    assert train(["--config", config, *flags]) == 0
    assert Path("run/summary.json").exists()


def test_gated_tokenizer_names_its_license_page(hub):
    hub.gated.add("meta-llama/Meta-Llama-3-8B")
    page = f"{hub.address}/meta-llama/Meta-Llama-3-8B"
    with refused("meta-llama/Meta-Llama-3-8B", page, "HF_TOKEN"):
        data_command(["prepare", "llama3_8b"])
    assert not Path("data").exists() and not any("parquet" in name for name in hub.sent)


def test_interrupted_file_is_continued_and_a_changed_one_is_refused(hub, tmp_path, monkeypatch):
    shipped = SHIPPED_SETS["tinyshakespeare"]
    content = (tmp_path / "served" / "input.txt").read_bytes()
    part = tmp_path / "data" / ".tinyshakespeare.txt.download"
    part.parent.mkdir()
    part.write_bytes(b"x" * 9)
    _download(shipped, part)
    assert part.read_bytes() == b"x" * 9 + content[9:]
    with refused("SHA-256", shipped.sha256):
        data_command(["prepare", "tinyshakespeare"])
    assert not list(part.parent.iterdir())
    data_command(["prepare", "tinyshakespeare"])
    assert Path("data/tinyshakespeare.txt").read_bytes() == content


def test_wrong_names_are_refused():
    with refused("'none'", "fineweb_edu_gpt2"):
        _find(["none"])
    with refused("takes one name"):
        _find([])
    with refused("default", "'stdlib'"):
        _find(["default"])
    with refused("llama3_8b_lora", "data.sources"):
        _find(["llama3_8b_lora"])
