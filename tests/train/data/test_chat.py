"""Chats by a template: what the text is, and which of it are answers."""

import pytest

from tests.helpers import tokens
from train.data import chat
from train.data.tokenizer import load_tokenizer

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>\n{% endgeneration %}"
    "{% else %}{{ m.content }}</s>\n{% endif %}{% endfor %}"
)
CHAT = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "one answer"},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "two"},
]


def render(tmp_path, template, messages=CHAT):
    folder = tokens.folder(tmp_path, template=template)
    return chat.renderer(load_tokenizer(folder), str(folder))(messages)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_answers_are_what_the_model_has_to_say_with_its_end(tmp_path, template):
    made = render(tmp_path, template)
    assert made.text.startswith("<s><|turn|>user\na question</s>\n<|turn|>assistant\none answer")
    answers = [made.text[first:last] for first, last in made.answers]
    assert answers == ["one answer</s>\n", "two</s>\n"]


def test_templates_have_what_hugging_faces_have(tmp_path):
    template = (
        "{%- for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}\n"
        "    {% set x = m | tojson %}\n{{ m.content | trim }}|{{ tools is none }}{%- endfor %}"
    )
    assert render(tmp_path, template, CHAT[::2]).text == "a question|True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "lacks; name a Hugging Face folder with a chat_template.jinja"),
        ("{% for %}", "is damaged"),
        ("{{ raise_exception('roles must alternate') }}", r"refuses a chat \(roles must alternate"),
        ("{{ messages[9].content }}", "refuses a chat"),
        ("{{ messages + 1 }}", "refuses a chat"),
        ("{{ messages.append(1) }}", "refuses a chat"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses a chat"),
        ("{{ messages | length }}", "changes earlier messages as more are added"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path, template, message):
    with pytest.raises(ValueError, match=message):
        render(tmp_path, template)
