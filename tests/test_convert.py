"""`python -m jaxdist.convert`: inspect, compare and rewrite checkpoints."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import missing, refused
from safetensors import safe_open

from jaxdist.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointError,
    manifest,
    orbax_io,
    streaming_io,
)
from jaxdist.checkpoint.blocks import block_shape, even_chunk, grid
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import read_run, stored_run
from jaxdist.run.setup import assemble
from jaxdist.runtime.storage import locate
from jaxdist.settings import ConfigError, write_toml
from jaxdist.tools.convert.__main__ import VERBS, main
from jaxdist.tools.convert.checkpoint_paths import making_run, new_run_directory

QUIET = {"log": lambda line: None}


def state(offset: float = 0.0) -> dict:
    rng = np.random.default_rng(0)
    return {
        "params": {
            "layers": {"w": jnp.asarray(rng.standard_normal((4, 6, 8)) + offset, jnp.float32)},
            "table": jnp.asarray(rng.standard_normal((10, 3)), jnp.bfloat16),
        },
        "opt_state": ({"mu": jnp.ones((4, 6, 8))},),
        "rest": {"step": jnp.int32(7), "key": jax.random.key(3)},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    writer = Checkpointer(path / "checkpoints", CheckpointConfig(), **QUIET)
    for step, offset in ((1, 0.0), (2, 0.5)):
        writer.save(step, state(offset), {"mesh": "dp=1", "config": "seed = 0", "at": step})
    writer.close()
    return path


def test_inspect_shows_step_mesh_and_every_array(run, capsys):
    assert main(["inspect", str(run), "--settings=true"]) == 0
    text = capsys.readouterr().out
    for fact in ("step        2", "mesh        dp=1", "[4, 6, 8]", "threefry2x32 key", "seed = 0"):
        assert fact in text, fact
    assert "params      2 arrays, 222 elements" in text
    assert main(["inspect", str(run), "--json=true"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["arrays"]["params/table"]["shape"] == [10, 3] and inspected["step"] == 2


@pytest.mark.parametrize("inside", [".", "checkpoints", "checkpoints/1"])
def test_any_path_into_a_run_selects_its_checkpoints(run, capsys, inside):
    assert main(["inspect", str(run / inside), "--json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["at"] == (1 if inside.endswith("1") else 2)
    assert main(["inspect", str(run / inside), "--json=true", "--step=1"]) == 0
    assert json.loads(capsys.readouterr().out)["at"] == 1


def test_run_with_numeric_name_is_not_read_as_a_checkpoint(run, tmp_path, capsys):
    numbered = tmp_path / "1"
    shutil.copytree(run, numbered)
    assert manifest.named_step(str(numbered)) == (locate(numbered / "checkpoints"), None)
    assert main(["inspect", str(numbered), "--json=true"]) == 0
    assert json.loads(capsys.readouterr().out)["at"] == 2
    numbered.rename(tmp_path / "7")
    assert main(["verify", str(tmp_path / "7")]) == 0
    step_1 = str(tmp_path / "7" / "checkpoints" / "1")
    assert manifest.named_step(step_1) == (locate(tmp_path / "7" / "checkpoints"), 1)


def copied(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run / "checkpoints", tmp_path / "copy" / "checkpoints")
    return tmp_path / "copy"


def largest_file(checkpoint: Path) -> Path:
    files = (p for p in checkpoint.rglob("*") if p.is_file())
    return max(files, key=lambda p: p.stat().st_size)


def test_verify_checks_all_and_fails_if_one_is_corrupt(run, tmp_path, capsys):
    copy = copied(run, tmp_path)
    assert main(["verify", str(copy), "--arrays=true"]) == 0
    assert capsys.readouterr().out.count(": valid, ") == 2
    victim = largest_file(copy / "checkpoints" / "2")
    victim.write_bytes(victim.read_bytes()[:-1])
    assert main(["verify", str(copy)]) == 1
    text = capsys.readouterr().out
    assert "checkpoint 1: valid" in text and "checkpoint 2: CORRUPT: " in text
    assert main(["verify", str(copy / "checkpoints" / "1")]) == 0
    with refused("checkpoint 2", "corrupt", "another step", num_problems=2):
        main(["inspect", str(copy), "--step=2"])
    assert main(["inspect", str(copy)]) == 0  # falls back to 1


def test_verify_leaves_out_what_a_training_run_deletes_meanwhile(
    run, tmp_path, capsys, monkeypatch
):
    copy, damage = copied(run, tmp_path), manifest.damage

    def after_retention(checkpoint):
        manifest.delete(locate(copy / "checkpoints" / "1"))
        return damage(checkpoint)

    monkeypatch.setattr(manifest, "damage", after_retention)
    assert main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out.startswith("checkpoint 2: valid")


def damage_array(checkpoint: Path, name: str) -> None:
    """Let an array differ from its checksum, in files that are those of the manifest."""
    metadata, folder = checkpoint / "meta" / "metadata", locate(checkpoint)
    document = json.loads(metadata.read_text())
    document["arrays"][name]["checksum"] ^= 1
    metadata.write_text(json.dumps(document))
    files = manifest.fingerprints(folder, manifest.files_of(folder))
    manifest.write(folder, int(checkpoint.name), files, {})


def test_verify_arrays_detects_damage_missed_by_file_checksums(run, tmp_path, capsys):
    copy = copied(run, tmp_path) / "checkpoints" / "2"
    damage_array(copy, "params/layers/w")
    assert main(["verify", str(copy)]) == 0
    assert main(["verify", str(copy), "--arrays=true"]) == 1
    assert "params/layers/w" in capsys.readouterr().out


def test_diff_reports_arrays_and_the_size_of_differences(run, tmp_path, capsys):
    step_1, step_2 = (str(run / "checkpoints" / name) for name in "12")
    assert main(["diff", step_1, step_1]) == 0
    assert "5 arrays identical, 0 of equal shape differ" in capsys.readouterr().out
    assert main(["diff", step_1, step_2, "--json=true"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert list(result["differing"]) == ["params/layers/w"]
    difference = result["differing"]["params/layers/w"]
    a, b = (np.asarray(state(offset)["params"]["layers"]["w"], np.float64) for offset in (0.0, 0.5))
    assert (
        difference["max_abs"] == np.abs(a - b).max()
        and difference["mean_abs"] == np.abs(a - b).mean()
    )
    assert difference["differing_share"] == 1.0
    assert difference["at"] == list(np.unravel_index(np.abs(a - b).argmax(), a.shape))


def test_diff_of_different_trees_reports_missing_and_reshaped_arrays(run, tmp_path, capsys):
    other = state()
    other["params"]["table"] = jnp.full((10, 4), jnp.nan)
    other["params"]["new"] = jnp.ones(1)
    other["params"]["layers"]["w"] = other["params"]["layers"]["w"].at[1, 2, 3].set(jnp.nan)
    del other["opt_state"]
    writer = Checkpointer(tmp_path, CheckpointConfig(), **QUIET)
    writer.save(1, other, {})
    writer.close()
    assert main(["diff", str(run / "checkpoints" / "1"), str(tmp_path)]) == 1
    text = capsys.readouterr().out

    def line_of(name):
        (line,) = (line for line in text.splitlines() if name in line)
        return line

    assert "in a: " in line_of("opt_state/0/mu") and "in b: " in line_of("params/new")
    assert missing(line_of("params/table"), "[10, 3] in a", "[10, 4] in b") == []
    facts = "inf at [1, 2, 3]", "mean inf", "1 of 192 elements (0.5 %)"
    assert missing(line_of("params/layers/w"), *facts) == []


def tensors_in(folder: Path) -> tuple[dict, dict]:
    """Return the tensors of all files, read by the safetensors library, and the metadata."""
    tensors: dict = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="flax") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata()
    return tensors, metadata


def test_consolidate_writes_the_weights_to_one_file(run, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming_io, "BLOCK_BYTES", 100)  # many blocks
    assert main(["consolidate", str(run), str(tmp_path / "out")]) == 0
    tensors, metadata = tensors_in(tmp_path / "out")
    assert sorted(tensors) == ["layers.w", "table"] and metadata["step"] == "2"
    expected = state(0.5)["params"]
    np.testing.assert_array_equal(tensors["layers.w"], expected["layers"]["w"])
    np.testing.assert_array_equal(tensors["table"], expected["table"])
    assert tensors["table"].dtype == jnp.bfloat16


def test_consolidate_shards_by_size_with_an_index_and_casts(run, tmp_path):
    words = ["--items=all", "--shard_gb=0.0000007", "--dtype=bfloat16"]
    assert main(["consolidate", str(run), str(tmp_path), *words]) == 0
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    tensors, _ = tensors_in(tmp_path)
    assert {*tensors} == {*index["weight_map"]} and len({*index["weight_map"].values()}) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    expected = state(0.5)
    w, mu = expected["params"]["layers"]["w"], expected["opt_state"][0]["mu"]
    np.testing.assert_array_equal(tensors["layers.w"], w.astype(jnp.bfloat16))
    np.testing.assert_array_equal(tensors["opt_state.0.mu"], mu)
    np.testing.assert_array_equal(tensors["rest.key"], jax.random.key_data(expected["rest"]["key"]))


SMALL = (
    *("--model.num_layers=4", "--model.d_model=32", "--train.seq_len=32", "--mesh=fsdp=2"),
    *("--train.global_batch_size=16", "--train.num_microbatches=2"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    path = tmp_path_factory.mktemp("trained")
    config = read_run(SMALL, command="test")
    parts = assemble(config, jax.devices()[:2])
    begun = parts.init_state()
    writer = Checkpointer(path / "checkpoints", CheckpointConfig(), **QUIET)
    writer.save(3, begun, {"data": {"next_sample": 48}, "mesh": "fsdp=2", "config": ""})
    writer.close()
    (path / "config.toml").write_text(write_toml(config))
    return path, jax.tree.map(host, begun)


def host(x) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


@pytest.mark.parametrize("mesh", ["dp=2,fsdp=2,tp=2", "fsdp=8"])
def test_reshard_is_bit_identical_and_matches_the_mesh(trained, tmp_path, mesh):
    source, values = trained
    out = tmp_path / "out"
    assert main(["reshard", str(source), str(out), f"--mesh={mesh}", "--chunk_mb=1"]) == 0
    settings = stored_run(out / "config.toml")
    assert settings.mesh.shape == mesh and settings.train.num_microbatches == 2
    reader = Checkpointer(out / "checkpoints", CheckpointConfig(), **QUIET)
    parts = assemble(settings, jax.devices()[:8])
    restored, meta, step = reader.restore(parts.abstract_state())
    reader.close()
    assert step == 3 and meta["data"] == {"next_sample": 48} and meta["mesh"] == mesh
    for name, one, other in zip(
        StoredArrays(out / "checkpoints" / "3").entries,
        jax.tree.leaves(values),
        jax.tree.leaves(restored),
        strict=True,
    ):
        assert one.tobytes() == host(other).tobytes(), name
    # Chunks are device shards: 8 of them for a matrix split 8 ways.
    kernel = restored.params["layers"]["mlp"]["down"]
    shard = kernel.sharding.shard_shape(kernel.shape)
    handle = orbax_io.open_array(
        locate(out / "checkpoints" / "3"), "params", ["layers", "mlp", "down"]
    )
    assert handle.chunk == shard
    assert shard != kernel.shape


def test_reshard_of_the_weights_alone_in_another_dtype(trained, tmp_path):
    source, values = trained
    out = tmp_path / "out"
    words = ["--mesh=tp=2,fsdp=4", "--items=params", "--dtype=bfloat16"]
    assert main(["reshard", str(source), str(out), *words]) == 0
    stored = StoredArrays(out / "checkpoints" / "3")
    assert all(name.startswith("params/") for name in stored.entries)
    table = stored.read("params/embed/table")
    np.testing.assert_array_equal(table, values.params["embed"]["table"].astype(table.dtype))
    assert main(["verify", str(out), "--arrays=true"]) == 0
    parts = assemble(stored_run(out / "config.toml"), jax.devices()[:8])
    reader = Checkpointer(out / "checkpoints", CheckpointConfig(), read_only=True, **QUIET)
    params = reader.restore_params(parts.abstract_state().params)
    np.testing.assert_array_equal(host(params["embed"]["table"]), table.astype(np.float32))


def test_reshard_rewrites_moments_that_training_keeps_outside_of_devices(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    text, name = (copy / "config.toml").read_text(), "offload_optimizer"
    (copy / "config.toml").write_text(text.replace(f'{name} = "none"', f'{name} = "host"'))
    assert main(["reshard", str(copy), str(tmp_path / "out"), "--mesh=fsdp=8"]) == 0
    entries = StoredArrays(tmp_path / "out" / "checkpoints" / "3").entries
    assert entries.keys() == StoredArrays(copy / "checkpoints" / "3").entries.keys()
    assert stored_run(tmp_path / "out" / "config.toml").train.offload == "host"


def test_reshard_rejects_damaged_arrays_and_leaves_nothing(trained, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained[0], copy)
    damage_array(copy / "checkpoints" / "3", "params/embed/table")
    with refused("params/embed/table", "wrong checksum", error=CheckpointError):
        main(["reshard", str(copy), str(tmp_path / "out"), "--mesh=fsdp=8"])
    assert manifest.steps_in(locate(tmp_path / "out" / "checkpoints")) == []


@pytest.mark.parametrize("shape", [(), (7,), (5, 4, 3), (1, 1, 9), (2, 100)])
@pytest.mark.parametrize("limit", [1, 20, 50, 10**6])
def test_blocks_are_row_major_cover_all_and_stay_small(shape, limit):
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    block = block_shape(shape, 4, limit)
    parts = [values[index] for index in grid(shape, block)]
    assert (
        np.concatenate([part.reshape(-1) for part in parts]).tolist() == values.reshape(-1).tolist()
    )
    assert all(part.nbytes <= max(limit, 4) for part in parts)


@pytest.mark.parametrize(
    ("shape", "limit", "chunk"),
    [
        ((12, 10), 100, (3, 5)),
        ((12, 10), 4, (1, 1)),
        ((7, 9), 10**6, (7, 9)),
        ((), 4, ()),
        ((4096, 4096), 16 << 20, (1024, 4096)),
        ((50257, 768), 16 << 20, (50257, 48)),  # a prime number of rows is not cut into single ones
    ],
)
def test_even_chunks_divide_the_shape(shape, limit, chunk):
    assert even_chunk(shape, 4, limit) == chunk


WRONG = {
    "unknown_verb": (["reshrad", "a"], "reshrad", "mean reshard"),
    "no_path": (["inspect"], "PATH"),
    "missing_path": (["inspect", "nowhere"], "nowhere", "not exist"),
    "not_a_run": (["verify", "{tmp}"], "{tmp}", "no checkpoint"),
    "unknown_step": (["inspect", "{run}", "--step=9"], "checkpoint 9", "has 1, 2"),
    "unknown_flag": (["inspect", "{run}", "--steps=1"], "steps"),
    "diff_needs_two": (["diff", "{run}"], "B is missing"),
    "bad_limit": (["diff", "{run}", "{run}", "--limit=-1"], "limit=-1", "0 or more"),
    "bad_dtype": (["consolidate", "{run}", "{tmp}/x", "--dtype=int8"], "dtype", "int8"),
    "bad_shard": (["consolidate", "{run}", "{tmp}/x", "--shard_gb=-2"], "shard_gb=-2"),
    "output_exists": (["consolidate", "{run}", "{run}"], "{run}", "not empty"),
    "bad_mesh": (["reshard", "{run}", "{tmp}/x", "--mesh=zp=2"], "axis 'zp'"),
    "misfit": (["reshard", "{run}", "{tmp}/x", "--mesh=fsdp=8"], "params/layers/w", "not match"),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_of_wrong_input_name_the_fix(run, tmp_path, case):
    words, *facts = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        main([word.format(run=run, tmp=tmp_path) for word in words])
    facts = [fact.format(run=run, tmp=tmp_path) for fact in facts]
    assert missing("\n".join(caught.value.problems), *facts) == []


def test_illegal_mesh_is_rejected_before_writing(trained, tmp_path):
    with refused("pp=8", "num_layers="):
        main(["reshard", str(trained[0]), str(tmp_path / "out"), "--mesh=pp=8"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_text(verb, capsys):
    with pytest.raises(SystemExit) as left:
        main([verb, "--help"])
    assert left.value.code == 0
    assert f"convert {verb}" in capsys.readouterr().out


def test_command_exits_with_2_on_bad_input_without_starting_a_device():
    command = [sys.executable, "-X", "importtime", "-m", "jaxdist.convert", "inspect", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere" in done.stderr.splitlines()[-1]
    imported = {
        line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.split("\n")
    }
    assert "jaxdist" in imported and not {"orbax", "flax"} & imported


@pytest.mark.parametrize("verb", ["consolidate", "to-hf"])
def test_safetensors_are_not_written_to_a_url(verb, tmp_path, monkeypatch):
    """Treated as a path, the URL would be a folder named s3: here."""
    monkeypatch.chdir(tmp_path)
    with refused("s3://bucket/out", "file systems only"):
        main([verb, "nowhere", "s3://bucket/out"])
    assert list(tmp_path.iterdir()) == []


def begun(folder: Path) -> Path:
    with pytest.raises(KeyboardInterrupt), making_run(locate(folder)):
        (folder / "checkpoints" / "0").mkdir()
        (folder / "checkpoints" / "0" / "part").write_text("half")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "chat_template.jinja").write_text("of another model")
        raise KeyboardInterrupt
    return folder


def test_an_interrupted_conversion_is_replaced(tmp_path):
    out = begun(tmp_path / "out")
    with making_run(new_run_directory(str(out))):
        assert not (out / "checkpoints" / "0").exists() and not (out / "tokenizer").exists()
    assert not (out / "unfinished.txt").exists()


def test_unknown_files_next_to_a_marker_are_kept(tmp_path):
    out = begun(tmp_path / "out")
    (out / "mine.txt").write_text("kept")
    with refused("not empty"):
        new_run_directory(str(out))
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "unfinished.txt").write_text("a list of my own")
    with refused("not empty"):
        new_run_directory(str(notes))
    assert (out / "mine.txt").exists() and (notes / "unfinished.txt").exists()


def test_concurrent_command_keeps_the_files_of_the_first(tmp_path):
    out = locate(tmp_path / "out")
    with making_run(new_run_directory(str(out))):
        (out / "checkpoints" / "0").make_directory()
        with refused(str(os.getpid())), making_run(new_run_directory(str(out))):
            pytest.fail("two commands write into one directory")
        assert (out / "checkpoints" / "0").exists()
        (out / "config.toml").write("")
    with refused("just created"), making_run(out):  # checked before the first one ended
        pytest.fail("a whole run is replaced")
    assert (out / "checkpoints" / "0").exists() and not (out / "unfinished.txt").exists()
