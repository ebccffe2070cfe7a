"""Files of tokenizers, and the tokens that runs keep."""

import contextlib
import json
import os

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.helpers import corpora, tokens
from tests.helpers.fuzzing import fuzz, objects, octets, refused, texts
from train.checks import json_value
from train.data import token_files
from train.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tokens.folder(tmp_path_factory.mktemp("tokenizer"), begin="<s>")
    return folder, {file.name: json.loads(file.read_text()) for file in folder.iterdir()}


MODELS = [
    {"type": "WordLevel", "vocab": {"a": 0, "<call>": 300}, "unk_token": "a"},
    {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0], ["b", -2.0]]},
    {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "##",
     "max_input_chars_per_word": 9},
]  # fmt: skip
TOKENIZER = {
    "version": "1.0", "truncation": None, "padding": None, "normalizer": {"type": "NFC"},
    "added_tokens": [
        {"id": 300, "content": "<call>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
    ],
    "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a+"}, "behavior": "Isolated",
                      "invert": False},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [900], "tokens": ["<s>"]}},
    },
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
}  # fmt: skip
CONFIG = {"eos_token": {"content": "a"}, "bos_token": "a", "add_bos_token": True}
CONFIG |= {"chat_template": [{"name": "default", "template": "{{ messages }}"}]}


@st.composite
def tokenizers(draw):
    model = draw(st.sampled_from(MODELS))
    part = draw(st.sampled_from(["all", "model", "config"]))
    settings = TOKENIZER | {"model": draw(objects(model)) if part == "model" else model}
    if part == "all":
        settings = draw(objects(settings))
    return settings, draw(objects(CONFIG)) if part == "config" else CONFIG


@fuzz(tokenizers())
def test_tokenizers(tmp_path, given):
    for name, value in zip(("tokenizer.json", "tokenizer_config.json"), given, strict=True):
        (tmp_path / name).write_text(json.dumps(value))
    with quiet():
        if (made := refused(load_tokenizer, tmp_path)) is None:
            return
        for ids in refused(made.encode, ["ab <call>", ""]) or []:
            assert all(0 <= number < made.vocab for number in ids)
        if (found := refused(made.spans, "ab a")) is not None:
            assert len(found[0]) == len(found[1])
    assert all(0 <= number < made.vocab <= 2**31 for number in made.begin + made.end)


@contextlib.contextmanager
def quiet():
    """Without what panics of Rust print, past sys.stderr."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@fuzz(texts(json.dumps(CONFIG), st.sampled_from(sorted(CONFIG))))
def test_settings_of_tokenizers(tokenizer, text):
    folder, _ = tokenizer
    (folder / "tokenizer_config.json").write_bytes(text)
    if (made := refused(load_tokenizer, folder)) is not None:
        assert all(isinstance(name, str) for name in made.names.values())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    made = token_files.prepare(corpora.write(folder / "texts", 30), folder / "cache")
    facts = json.loads((made / "corpus.json").read_text())
    del facts["sha256"]
    return made, facts


@fuzz(st.data())
def test_records_of_tokens(corpus, data):
    made, facts = corpus
    value = data.draw(objects(facts))
    if isinstance(value, dict):  # with a checksum that fits
        value = value | {"sha256": token_files._sha256(value)}
    (made / "corpus.json").write_text(json.dumps(value))
    if (found := refused(token_files.load, made)) is not None:
        assert found.train.dtype == np.uint8 and found.train.size == facts["parts"]["train"]["size"]


@fuzz(st.data())
def test_damage_of_token_files(corpus, data):
    made, facts = corpus
    (made / "corpus.json").write_text(json.dumps(facts | {"sha256": token_files._sha256(facts)}))
    file = data.draw(st.sampled_from(sorted(made.glob("*.*"))))
    good = file.read_bytes()
    bad = data.draw(octets(good))
    file.unlink()
    file.write_bytes(bad)
    found = refused(token_files.load, made)
    file.unlink()
    file.write_bytes(good)
    same = json.loads(good) == _json(bad) if file.suffix == ".json" else good == bad
    assert (found is not None) == same


def _json(text):
    with contextlib.suppress(ValueError):  # as a key that is there twice
        return json_value(text)
