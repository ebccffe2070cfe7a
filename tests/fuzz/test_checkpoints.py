"""Metadata and checksums of checkpoints."""

import dataclasses
import json

import pytest
from hypothesis import strategies as st

from tests.helpers.fuzzing import fuzz, objects, refused, texts
from train import checks, export, resume
from train.checkpoints import files, store

DONE = dataclasses.asdict(resume.Progress(step=4, losses=[0.5], parts={"all": 4}, sent_bytes=8.0))
SAVED = {
    "progress": DONE,
    "num_replicas": 4,
    "data_sha256": "0" * 64,
    "config": {"data": {"batch": 32}},
}


@fuzz(objects(SAVED))
def test_metadata_of_checkpoints(value):
    if isinstance(value, dict) and value.keys() >= SAVED.keys():
        if (done := refused(resume._progress, "checkpoints/4", value)) is not None:
            assert done.step >= 0 and done.sent_bytes >= 0


@fuzz(texts(json.dumps({"leaves": {"w": "float32[2]"}, "run": SAVED}), st.sampled_from(["run"])))
def test_files_of_metadata(tmp_path, text):
    (tmp_path / "metadata").mkdir(exist_ok=True)
    (tmp_path / "metadata" / "metadata").write_bytes(text)
    refused(store._read, tmp_path)


MODEL = {"layers": 1, "width": 8, "heads": 2, "rotary_scaling": None, "type": "DecoderConfig"}
RECORDED = {"objective": "next_token", "model": MODEL, "data": {"tokenizer": None}}
RECORDED = {"config": RECORDED | {"start_from": None}}


@fuzz(objects(RECORDED))
def test_what_an_export_reads(tmp_path, value):
    saved = store.Saved(tmp_path, {}, value if isinstance(value, dict) else {"config": value})
    if (config := refused(export.recorded, saved)) is not None:
        export.tokenizer_of(config)
        if config["start_from"] is None or "\0" not in config["start_from"]:
            export.origin(config["start_from"])
        if (model := refused(export.model_of, config, tmp_path)) is not None:
            checks.require_types(model)


SUMS = {"metadata/metadata": [2, 0], "state/a": [4, 1]}


@fuzz(st.one_of(texts(json.dumps(SUMS)), objects(SUMS).map(lambda x: json.dumps(x).encode())))
def test_checksums(tmp_path, text):
    (tmp_path / "state").mkdir(exist_ok=True)
    (tmp_path / "state" / "a").write_bytes(b"")
    (tmp_path / "checksums.json").write_bytes(text)
    assert files._damage(tmp_path)  # metadata/metadata is not there
    refused(files.require_kept, tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"progress": DONE | {"epochs": 2}}, "do not both count epochs; go on with the version"),
        ({"progress": {"step": 4}}, "do not both count dense_bytes, examples, .*, skipped; go on"),
        ({"progress": DONE | {"step": -1}}, "progress.step=-1 must be at least 0"),
        ({"progress": DONE | {"step": True}}, "progress.step=True must be a whole number"),
        ({"num_replicas": "4"}, "checkpoints/4, metadata: num_replicas is '4'; needs a whole num"),
    ],
)
def test_what_is_wrong_in_a_checkpoint_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        resume._progress("checkpoints/4", SAVED | changed)
    assert resume._progress("checkpoints/4", SAVED).step == 4


def test_checksums_of_another_shape_are_damage(tmp_path):
    for text in ("{}", "[]", '{"metadata/metadata": 3}', '{"metadata/metadata": [1, "a"]}'):
        (tmp_path / "checksums.json").write_text(text)
        assert "checksums.json" in files._damage(tmp_path)
