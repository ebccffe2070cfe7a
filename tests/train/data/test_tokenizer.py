"""Text as tokens: bytes, or what a Hugging Face folder says."""

import json
import os

import numpy as np
import pytest

from tests.helpers import tokens
from train.data.tokenizer import load_tokenizer


def test_a_token_is_a_byte_without_a_folder():
    made = load_tokenizer(None)
    text = "caf\u00e9 \U0001f642"
    (ids,) = made.encode([text])
    assert bytes(ids.tolist()) == text.encode() and made.vocab == 256
    ids, spans = made.spans(text)
    assert made.decode(ids) == text
    letters = [text[first:last] for first, last in spans]
    assert letters == list("caf\u00e9\u00e9 \U0001f642\U0001f642\U0001f642\U0001f642")
    assert made.begin == () and made.end == (10,)


def test_a_folder_says_what_tokens_are_and_what_stands_around_a_document(tmp_path):
    made = load_tokenizer(tokens.folder(tmp_path, begin="<s>"))
    first, second = made.encode(["some words of a text", "words"])
    assert made.decode(first) == "some words of a text" and len(first) < 20 and len(second) < 5
    (named,) = made.encode(["</s>"])
    assert made.end == tuple(named) and len(made.begin) == 1
    assert max(made.begin + made.end) < made.vocab
    assert made.names["eos_token"] == "</s>"
    ids, spans = made.spans("some words")
    np.testing.assert_array_equal(ids, made.encode(["some words"])[0])
    assert spans[0, 0] == 0 and spans[-1, 1] == 10 and (spans[1:, 0] == spans[:-1, 1]).all()
    assert made.spans("")[1].shape == (0, 2)


def test_settings_of_the_folder_count_as_its_files_say(tmp_path):
    folder = tokens.folder(tmp_path, template="one")
    first = load_tokenizer(folder)
    assert first.template == "one" and not first.begin
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "two"}]
    settings = {"eos_token": {"content": "</s>"}, "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    second = load_tokenizer(folder)
    assert second.template == "two" and second.end == first.end
    assert second.sha256 != first.sha256
    (folder / "chat_template.jinja").write_text("three")
    assert load_tokenizer(folder).template == "three"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json; name a Hugging Face folder"),
        ("tokenizer.json", "{}", "tokenizer.json is damaged"),
        ("tokenizer_config.json", "[1", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "[1]", "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", "[" * 60_000, "tokenizer_config.json is damaged"),
        ("tokenizer_config.json", '{"eos_token": 5}', "eos_token is 5; needs the text of a token"),
        ("special_tokens_map.json", '{"pad_token": {"content": []}}', "pad_token is {'content'"),
    ],
)
def test_a_damaged_folder_is_named(tmp_path, name, content, message):
    folder = tokens.folder(tmp_path)
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(folder)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[huggingface\]'"):
        load_tokenizer(tmp_path)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    folder = tokens.folder(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=f"{name} is a FIFO; needs a file"):
            load_tokenizer(folder)
        (folder / name).unlink()
        (folder / name).symlink_to("gone")
        with pytest.raises(ValueError, match=f"{name}' cannot be read"):
            load_tokenizer(folder)
        (folder / name).unlink()
        tokens.folder(tmp_path)


def test_errors_of_the_package_are_said_in_words(tmp_path):
    folder = tokens.folder(tmp_path)
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}
    settings = json.loads((folder / "tokenizer.json").read_text())
    alone = {"added_tokens": [], "pre_tokenizer": None, "decoder": None, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(settings | alone))
    made = load_tokenizer(folder)
    for call in (lambda: made.encode(["a", "b"]), lambda: made.spans("b")):
        with pytest.raises(ValueError, match="cannot encode a text: .*Missing"):
            call()
    slow = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    (folder / "tokenizer.json").write_text(json.dumps(settings | {"pre_tokenizer": slow}))
    with pytest.raises(ValueError, match="cannot encode a text: .*retry"):  # a panic of Rust
        load_tokenizer(folder).spans("a" * 40 + "b")
