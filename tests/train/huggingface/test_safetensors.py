"""The file format: what the package reads, and headers that do not describe their file."""

import json
import os

import jax
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


def test_others_may_read_what_they_may_read_of_plain_files(tmp_path):
    (tmp_path / "plain").touch()
    safetensors.write(tmp_path / "weights", {"a": np.zeros(2, np.float32)})
    modes = [(tmp_path / name).stat().st_mode for name in ("weights", "plain")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("most", [1, 20, 1000])
def test_several_files_have_an_index(most, tmp_path):
    safetensors.write_all(tmp_path, iter(ARRAYS.items()), most)
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (most < 1000)
    found = safetensors.read_all(tmp_path)
    assert found.keys() == ARRAYS.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, ARRAYS[name], strict=True)
    assert not list(tmp_path.glob("*.part"))


def entry(**fields):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | fields


def header(**fields):
    return json.dumps({"a": entry(**fields)}).encode()


def written(file, text, size=8):
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (header(shape=[3]), "header"),
        (header(shape=[-2]), "header"),
        (header(shape=[1] * 70, data_offsets=[0, 8], dtype="I64"), "dimension"),
        (header(shape=[2**40, 2**40]), "header"),
        (header(shape=[8], dtype="F8_E4M3"), "holds a as F8_E4M3; those read are"),
        (header(shape=[1], data_offsets=[4, 8]), "header"),
        (b"{}", "header"),
        (b'{"a": {}}', "header"),
        (b"[" * 100_000, "header"),
        (header(deep=json.loads("[" * 100 + "]" * 100)), None),
        (header()[:-1] + b"," + header()[1:], "has the key 'a' twice"),
    ],
)
def test_headers_that_lie_are_refused(text, message, tmp_path):
    file = written(tmp_path / "model.safetensors", text)
    if message is None:  # what the format does not know is nobody's harm
        assert safetensors.read(file)["a"].shape == (2,)
        return
    with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
        safetensors.read(file)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is a FIFO; needs a file"):
        safetensors.read_all(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ValueError, match="is a FIFO; needs a file"):
        safetensors.read_all(tmp_path)


@pytest.mark.parametrize("kept", [True, False])
def test_one_file_wins_over_an_older_index_as_in_transformers(tmp_path, kept):
    names = ("a", "b")
    safetensors.write_all(tmp_path, [(name, np.ones(4, np.float32)) for name in names], most=1)
    shards = list(tmp_path.glob("model-*"))
    assert len(shards) == 2
    new = {name: np.full(4, 2, np.float32) for name in names}
    safetensors.write(tmp_path / "model.safetensors", new)
    for shard in () if kept else shards:
        shard.unlink()
    found = safetensors.read_all(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, found, new)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map is nothing; needs an object of values that are text"),
        ({"weight_map": {"a": 1}}, "weight_map is .* needs an object of values that are text"),
        ({"weight_map": {"a": "one", "b": ".."}}, "names '..', which is not in its folder"),
        ({"weight_map": {"a": "one", "b": "/one"}}, "names '/one', which is not in its folder"),
        ({"weight_map": {"a": "one", "b": "../one"}}, "names '../one', which is not in its folder"),
        ({"weight_map": {"a": "one", "b": "one"}}, "has 'b' in one, where it is not"),
        ({"weight_map": {"a": "one", "b": "three"}}, "three cannot be read"),
        ({"weight_map": {"a": "one", "b": "two"}}, "a is both in one and in two"),
    ],
)
def test_an_index_says_where_each_array_is(tmp_path, index, message):
    one = {"a": np.ones(4, np.float32)}
    safetensors.write(tmp_path / "one", one)
    safetensors.write(tmp_path / "two", one | {"b": np.ones(4, np.float32)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        safetensors.read_all(tmp_path)


def test_a_file_that_is_cut_off_or_away_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes((100).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="is damaged"):
        safetensors.read_all(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        safetensors.read_all(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="has no model.safetensors"):
        safetensors.read_all(tmp_path)
