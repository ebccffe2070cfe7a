"""Ids of tokens: they may have holes, and all of them fit the files and the model."""

import dataclasses
import json

import numpy as np
import pytest

from tests.helpers.corpora import again, write
from tests.train.huggingface.test_folder import GOLDEN
from train import examples, generate
from train.config import Config, Data, Optimizer
from train.data import documents, token_files, tokenizing
from train.data.tokenizer import load_tokenizer
from train.models.decoder import DecoderConfig


def holes(folder, ids, special=()):
    """A tokenizer of letters whose ids are given, and special tokens with theirs."""
    like = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": number, "content": name, "special": True} | like for name, number in special]
    pattern = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": ids | dict(special), "unk_token": "a"}
    settings = {"version": "1.0", "added_tokens": added, "pre_tokenizer": pattern, "model": model}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(settings))  # the package writes all holes
    return folder


def letters(tmp_path, text="ab"):
    lines = [json.dumps({"text": f"{text} {number}"}) for number in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return Data(path=str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer"), batch=4)


@pytest.mark.parametrize(
    ("ids", "special", "dtype"),
    [
        ({"a": 0, "b": 1}, [("<call>", 300)], np.uint16),
        ({"a": 0, "b": 300}, [], np.uint16),
        ({"a": 70_000, "b": 1}, [], np.uint32),
        ({"a": 0, "b": 255}, [], np.uint8),
        ({"a": 256, "b": 255}, [], np.uint16),
        ({"a": 0, "b": 1}, [("<call>", 2**31 - 1)], np.uint32),
    ],
)
def test_ids_with_holes_are_stored_as_they_are(tmp_path, ids, special, dtype):
    folder = holes(tmp_path / "tokenizer", ids, special)
    data = letters(tmp_path, "ab" + "".join(name for name, _ in special))
    corpus = token_files.load(token_files.prepare(data, tmp_path / "cache"))
    every = {*ids.values(), *(number for _, number in special)}
    assert load_tokenizer(folder).vocab == corpus.vocab == max(every) + 1
    assert corpus.train.dtype == dtype and set(corpus.train.tolist()) == every


def test_what_a_tokenizer_puts_around_a_text_counts_too(tmp_path):
    holes(tmp_path / "tokenizer", {"a": 0, "b": 1}, [("<s>", 2)])
    file = tmp_path / "tokenizer" / "tokenizer.json"
    settings = json.loads(file.read_text())
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [900], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(settings))
    corpus = token_files.load(token_files.prepare(letters(tmp_path), tmp_path / "cache"))
    assert corpus.vocab == 901 and 900 in corpus.train


def test_tokens_that_no_batch_can_hold_are_refused(tmp_path):
    holes(tmp_path / "tokenizer", {"a": 0, "b": 2**31})
    with pytest.raises(ValueError, match=f"tokens up to {2**31}; needs some, all below {2**31}"):
        load_tokenizer(tmp_path / "tokenizer")


def config_of(tmp_path, data, vocab):
    model = DecoderConfig(layers=1, width=8, heads=2, context=4, vocab=vocab)
    optimizer = Optimizer("sgd(learning_rate)", 0.1)
    data = dataclasses.replace(data, cache=str(tmp_path / "cache"))
    return Config("run", 1, optimizer, model=model, data=data)


def test_a_model_needs_the_largest_token_and_may_have_more(tmp_path):
    holes(tmp_path / "tokenizer", {"a": 0, "b": 1}, [("<call>", 300)])
    data = letters(tmp_path)
    with pytest.raises(ValueError, match=r"has the token 300, but model.vocab is 300.*vocab 301"):
        examples.read(config_of(tmp_path, data, 300))
    assert not (tmp_path / "cache").exists()  # before all of the text is read
    for vocab in (301, 512):
        assert examples.read(config_of(tmp_path, data, vocab)).record["vocab"] == 301


def test_tokens_of_a_cache_are_compared_with_the_model_whatever_its_record_says(tmp_path):
    holes(tmp_path / "tokenizer", {"a": 0, "b": 300})
    data = letters(tmp_path)
    made = token_files.prepare(data, tmp_path / "cache")
    again(made, lambda facts: facts["record"].update(vocab=2))
    assert token_files.load(made).vocab == 301
    monkeyed = config_of(tmp_path, data, 256)
    with pytest.raises(ValueError, match=r"has the token 300, but model.vocab is 256"):
        examples.read(monkeyed)


def test_a_token_that_the_tokenizer_itself_does_not_have_is_not_written(tmp_path):
    source = documents.find(write(tmp_path / "texts", 5))
    few = load_tokenizer(None)._replace(vocab=110)
    with pytest.raises(ValueError, match="has the token 120, but the tokenizer's largest is 109"):
        tokenizing.write(tmp_path, source, few, Data())


def test_a_prompt_is_made_of_tokens_that_the_model_has(tmp_path):
    holes(tmp_path / "model", {"a": 0, "b": 300})
    config = json.loads((GOLDEN / "gpt2" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(ValueError, match="has the token 300, but vocab_size of its config.json is"):
        generate.generated(tmp_path / "model", ["ab"], 1)
