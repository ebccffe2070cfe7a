"""Metadata and checksums of checkpoints."""

import json

import pytest
from hypothesis import strategies as st

from tests.helpers.fuzzing import fuzz, objects, refused, texts
from train.checkpoints import files, resume, store

SAVED = {
    "progress": {"step": 4, "losses": [0.5], "parts": {"all": 4}, "sent_bytes": 8.0},
    "num_replicas": 4,
    "data_sha256": "0" * 64,
    "config": {"data": {"batch": 32}},
}


@fuzz(objects(SAVED))
def test_metadata_of_checkpoints(value):
    if isinstance(value, dict) and value.keys() >= SAVED.keys():
        if (done := refused(resume._progress, "checkpoints/4", value, 4)) is not None:
            assert done.step >= 0 and done.sent_bytes >= 0


@fuzz(texts(json.dumps({"leaves": {"w": "float32[2]"}, "run": SAVED}), st.sampled_from(["run"])))
def test_files_of_metadata(tmp_path, text):
    (tmp_path / "metadata").mkdir(exist_ok=True)
    (tmp_path / "metadata" / "metadata").write_bytes(text)
    refused(store._read, tmp_path)


SUMS = {"metadata/metadata": [2, 0], "state/a": [4, 1]}


@fuzz(st.one_of(texts(json.dumps(SUMS)), objects(SUMS).map(lambda x: json.dumps(x).encode())))
def test_checksums(tmp_path, text):
    (tmp_path / "checksums.json").write_bytes(text)
    assert files._damage(tmp_path)  # none of these files is there


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"progress": {"epochs": 2}}, "counts epochs, which this version does not know"),
        ({"progress": {"step": -1}}, "progress.step=-1 must be at least 0"),
        ({"progress": {"step": True}}, "progress.step=True must be a whole number"),
        ({"num_replicas": "4"}, "metadata with num_replicas='4'"),
    ],
)
def test_what_is_wrong_in_a_checkpoint_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        resume._progress("checkpoints/4", SAVED | changed, 4)
    assert resume._progress("checkpoints/4", SAVED, 4).examples == 128


def test_checksums_of_another_shape_are_damage(tmp_path):
    for text in ("{}", "[]", '{"metadata/metadata": 3}', '{"metadata/metadata": [1, "a"]}'):
        (tmp_path / "checksums.json").write_text(text)
        assert "checksums.json" in files._damage(tmp_path)
