"""The file format: what the package reads, and headers that do not describe their file."""

import json

import numpy as np
import pytest
from safetensors import numpy as package

from train.huggingface import safetensors

ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "b": np.arange(3, dtype=safetensors.DTYPES["BF16"]),
    "c": np.zeros((0, 2), np.int64),
}


def test_files_are_those_of_the_package(tmp_path):
    safetensors.write(tmp_path / "ours", ARRAYS)
    package.save_file({"a": np.ascontiguousarray(ARRAYS["a"])}, tmp_path / "theirs")
    np.testing.assert_array_equal(package.load_file(tmp_path / "ours")["a"], ARRAYS["a"])
    for name, array in safetensors.read(tmp_path / "ours").items():
        np.testing.assert_array_equal(array, ARRAYS[name], strict=True)
    np.testing.assert_array_equal(safetensors.read(tmp_path / "theirs")["a"], ARRAYS["a"])


@pytest.mark.parametrize("most", [1, 20, 1000])
def test_several_files_have_an_index(most, tmp_path):
    safetensors.write_all(tmp_path, iter(ARRAYS.items()), most)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (most < 1000)
    found = safetensors.read_all(tmp_path)
    assert list(found) == list(ARRAYS)
    for name, array in found.items():
        np.testing.assert_array_equal(array, ARRAYS[name], strict=True)
    assert not list(tmp_path.glob("*.part"))


def header(**entry):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry
    return json.dumps({"a": entry}).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (header(shape=[3]), "a needs 12 bytes and has those from 0 to 8"),
        (header(shape=[4], data_offsets=[0, 16]), "a needs 16 bytes and has those from 0 to 16"),
        (header(shape=[-2]), "the shape"),
        (header(data_offsets=[-8, 0]), "from -8 to 0"),
        (header(shape=[True, 2]), "the shape"),
        (header(dtype="F8_E4M3"), "as F8_E4M3; those read are"),
        (b"[]", "its header cannot be read"),
        (b"{", "its header cannot be read"),
        (b'{"a": 1}', "its header cannot be read"),
    ],
)
def test_headers_that_lie_are_refused(text, message, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(ValueError, match=message):
        safetensors.read(file)


def test_a_file_that_is_cut_off_or_away_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((100).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="its header is longer than the file"):
        safetensors.read_all(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        safetensors.read_all(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="has no model.safetensors"):
        safetensors.read_all(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(
        ValueError, match=r"names '../model.safetensors', which is not in its folder"
    ):
        safetensors.read_all(tmp_path)
