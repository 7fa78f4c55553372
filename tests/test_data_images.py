"""CIFAR-10: both formats give the same images, and a pickle cannot execute code."""

import io
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from jaxdist.data import DataConfig, open_datasets
from jaxdist.data.images import TEST_FILE, TRAIN_FILES, open_cifar
from jaxdist.settings import ConfigError

NAMES = (*TRAIN_FILES, TEST_FILE)


def real_data() -> Path:
    named = os.environ.get("JAXDIST_TEST_DATA")
    folder = Path(named) if named else Path(__file__).parent.parent.parent / "shared" / "data"
    if not (folder / "cifar-10-batches-py").is_dir():
        pytest.skip(f"no CIFAR-10 in {folder}: set JAXDIST_TEST_DATA")
    return folder


def make_batches(folder: Path, count=6, protocol=2, numpy_module=b"numpy.core.multiarray"):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, count, 3072), np.uint8)
    labels = rng.integers(0, 10, (6, count))
    (folder / "py").mkdir()
    (folder / "bin").mkdir()
    for name, x, y in zip(NAMES, pixels, labels, strict=True):
        batch = {b"data": x, b"labels": y.tolist(), b"batch_label": b"x", b"filenames": [b"a"]}
        stored = pickle.dumps(batch, protocol=protocol)
        stored = stored.replace(b"numpy._core.multiarray", numpy_module)
        (folder / "py" / name).write_bytes(stored)
        records = np.concatenate([y[:, None].astype(np.uint8), x], axis=1)
        (folder / "bin" / f"{name}.bin").write_bytes(records.tobytes())
    return pixels, labels


def test_real_images_equal_those_read_by_pickle():
    """The reference is Python's own loader, on the trusted files of the test data."""
    folder = real_data() / "cifar-10-batches-py"
    train, test = open_cifar(folder, "half")
    for images, names in ((train, TRAIN_FILES), (test, (TEST_FILE,))):
        raw = [pickle.loads((folder / n).read_bytes(), encoding="bytes") for n in names]
        pixels = np.concatenate([b[b"data"] for b in raw])
        np.testing.assert_array_equal(images.labels, np.concatenate([b[b"labels"] for b in raw]))
        # Stored as red, green and blue planes of 32 rows.
        for at in (0, 7, len(pixels) - 1):
            for colour in range(3):
                plane = pixels[at, colour * 1024 : (colour + 1) * 1024].reshape(32, 32)
                np.testing.assert_array_equal(images.pixels[at, :, :, colour], plane)


OLD_NAME, NEW_NAME = b"numpy.core.multiarray", b"numpy._core.multiarray"


# Not protocol 4 with the old name: it stores the name's length, so the name cannot be replaced.
@pytest.mark.parametrize(
    ("protocol", "module"),
    [(2, OLD_NAME), (3, OLD_NAME), (2, NEW_NAME), (3, NEW_NAME), (4, NEW_NAME)],
)
def test_pickles_of_every_python_3_protocol_are_read(tmp_path, protocol, module):
    pixels, labels = make_batches(tmp_path, protocol=protocol, numpy_module=module)
    train, test = open_cifar(tmp_path / "py", "half")
    np.testing.assert_array_equal(train.labels, labels[:5].ravel())
    expected = pixels[5].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(test.pixels, expected)
    records = open_cifar(tmp_path / "bin", "half")
    assert [train.fingerprint, test.fingerprint] == [images.fingerprint for images in records]


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "function",
    [os.system, eval, open, __import__, getattr, np.load, pickle.loads, io.open_code],
    ids=lambda f: f.__name__,
)
def test_malicious_pickle_executes_nothing(tmp_path, function):
    make_batches(tmp_path)
    target = tmp_path / "ran"
    text = {os.system: f"touch {target}", eval: f"open({str(target)!r}, 'w')"}
    evil = Evil(function, text.get(function, str(target)))
    batch = {b"data": evil, b"labels": [1]}
    (tmp_path / "py" / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=2))
    with refused("data_batch_3'", "tries to load"):
        open_cifar(tmp_path / "py", "half")
    assert not target.exists()


def test_malicious_pickle_executes_under_pickle_load(tmp_path):
    """Python's own loader does execute the code, so the test above can fail."""
    target = tmp_path / "ran"
    pickle.loads(pickle.dumps(Evil(os.system, f"touch {target}")))
    assert target.exists()


def object_array():
    return np.array([{"a": 1}, None], dtype=object)


@pytest.mark.parametrize(
    "batch",
    [
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [1, 2]},
        {b"data": object_array(), b"labels": [1, 2]},
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": [1, 2, 3], b"labels": [1, 2]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": ["cat", "dog"]},
        [1, 2, 3],
    ],
    ids=["floats", "objects", "no_labels", "list", "words", "no_dict"],
)
def test_other_pickles_are_rejected(tmp_path, batch):
    make_batches(tmp_path)
    (tmp_path / "py" / "data_batch_2").write_bytes(pickle.dumps(batch, protocol=2))
    with refused("data_batch_2'", "not a CIFAR-10 batch"):
        open_cifar(tmp_path / "py", "half")


def test_damaged_files_are_reported_by_name(tmp_path):
    make_batches(tmp_path)
    fresh = tmp_path / "fresh"
    shutil.copytree(tmp_path / "bin", fresh)
    cut = tmp_path / "bin" / "data_batch_4.bin"
    cut.write_bytes(cut.read_bytes()[:-1])
    with refused("data_batch_4.bin'", "18437 bytes", "of 3073"):
        open_cifar(tmp_path / "bin", "half")
    cut.write_bytes(b"")
    with pytest.raises(ConfigError, match="0 bytes"):
        open_cifar(tmp_path / "bin", "half")
    cut.write_bytes(b"\x0a" + bytes(3072))
    with refused("data_batch_4.bin'", "0..9"):
        open_cifar(tmp_path / "bin", "half")
    cut.unlink()
    with pytest.raises(ConfigError, match=r"lacks data_batch_4.bin"):
        open_cifar(tmp_path / "bin", "half")
    cut = tmp_path / "py" / "test_batch"
    cut.write_bytes(cut.read_bytes()[:5000])
    with refused("test_batch'", "not a CIFAR-10 batch"):
        open_cifar(tmp_path / "py", "half")
    short = {b"data": np.zeros((2, 100), np.uint8), b"labels": [1, 2]}
    cut.write_bytes(pickle.dumps(short, protocol=2))
    with refused("test_batch'", "(2, 100)", "2 labels"):
        open_cifar(tmp_path / "py", "half")


@pytest.mark.parametrize(
    ("scaling", "reference"),
    [
        # torchvision's ToTensor, then Normalize(0.5, 0.5) as in the PyTorch tutorial.
        ("half", lambda x: (x / 255 - 0.5) / 0.5),
        ("unit", lambda x: x / 255),
        ("channel", lambda x: (x / 255 - [0.4914, 0.4822, 0.4465]) / [0.2470, 0.2435, 0.2616]),
    ],
)
def test_pixels_are_scaled_as_configured(tmp_path, scaling, reference):
    pixels, labels = make_batches(tmp_path)
    config = DataConfig(sources=[str(tmp_path / "bin")], image_scaling=scaling)
    train, test = open_datasets(config, seq_len=0)
    batch = train.rows(np.array([29, 0]))
    raw = pixels.reshape(6, -1, 3, 32, 32).transpose(0, 1, 3, 4, 2).astype(np.float64)
    # float32 of values up to 4: a few units of 2^-22
    np.testing.assert_allclose(batch["images"][0], reference(raw[4, 5]), atol=2e-6)
    assert batch["images"].dtype == np.float32
    assert batch["labels"].tolist() == [labels[4, 5], labels[0, 0]]
    assert batch["weights"].tolist() == [1, 1]
    assert (train.kind, train.vocab_size, train.num_rows, test.num_rows) == ("images", 10, 30, 6)
    assert train.fingerprint != test.fingerprint


def test_mixing_images_and_text_is_rejected(tmp_path):
    make_batches(tmp_path)
    folder = str(tmp_path / "py")
    with refused(f"data.sources={[folder, 'stdlib']}", "CIFAR-10"):
        open_datasets(DataConfig(sources=[folder, "stdlib"]), seq_len=8)
    with refused("data.eval_sources=['stdlib']", "CIFAR-10"):
        open_datasets(DataConfig(sources=[folder], eval_sources=["stdlib"]), seq_len=8)
    assert open_datasets(DataConfig(sources=[folder], eval_fraction=0.0), seq_len=8)[1] is None
    # Both formats at once are two sources of the same kind.
    both, _ = open_datasets(DataConfig(sources=[folder, str(tmp_path / "bin")]), seq_len=8)
    assert both.num_rows == 60
