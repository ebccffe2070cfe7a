"""Chat templates, and the messages that they render."""

import functools
import json

import pytest
from hypothesis import strategies as st

from tests.helpers import tokens
from tests.helpers.fuzzing import fuzz, objects, refused, texts, trees
from train.data import chat, templates
from train.data.tokenizer import load_tokenizer

GROWN = (
    "{{- bos_token }}{% set ns = namespace(last='') %}{% for m in messages %}"
    "{% if m['role'] == ns.last %}{{ raise_exception('again ' + m.role) }}{% endif %}"
    "<|turn|>{{ m.role + '\n' }}{{ (m.content or '') | trim }}{{ m.calls | default([]) | tojson }}"
    "</s>\n{% set ns.last = m.role %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}{% generation %}{{ m['content'] }}{{ m.n * 3 }}"
    "{% endgeneration %}{{ m | dictsort }}{{ m | tojson(indent=1) }}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "a question", "n": 1},
    {"role": "assistant", "content": "words", "calls": [{"f": {"x": [1, None]}}], "n": 2.5},
]


def is_sane(text, answers):
    return all(0 <= first <= last <= len(text) for first, last in answers)


@fuzz(st.tuples(st.one_of(texts(GROWN), texts(MARKED)), objects({"messages": CHAT})), few=60)
def test_templates(given):
    """In this process, where they meet no limit: each is answered in JSON."""
    template, value = given
    messages = value.get("messages") if isinstance(value, dict) else value
    render = lambda: templates.renderer(template.decode(errors="replace"), {})(messages)
    found = json.loads(templates.answer(render))
    assert is_sane(*found["made"]) if "made" in found else found["error"]


@pytest.fixture(scope="module")
def encode(tmp_path_factory):
    @functools.cache
    def of(template):
        folder = tokens.folder(tmp_path_factory.mktemp("model"), template=template)
        tokenizer = load_tokenizer(folder)
        return chat.renderer(tokenizer, str(folder)), chat.encoder(tokenizer, str(folder))

    return of


@fuzz(st.tuples(st.sampled_from([GROWN, MARKED]), st.one_of(objects({"chat": CHAT}), trees())))
def test_messages(encode, given):
    template, value = given
    render, encoded = encode(template)
    messages = value.get("chat") if isinstance(value, dict) else value
    made = refused(render, json.dumps(messages))
    if made is not None:
        ids, asked = encoded(json.dumps(messages))
        assert is_sane(*made) and ids.shape == asked.shape
        assert asked.any() == any(first < last for first, last in made.answers)


def test_messages_are_nested_as_deep_as_json_reads(encode):
    for depth in (100, 5000, 200_000):
        refused(encode(GROWN)[1], '[{"role": ' + "[" * depth + "]" * depth + "}]")
