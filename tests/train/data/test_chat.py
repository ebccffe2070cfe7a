"""Chats by a template: what the text is, and which of it are answers."""

import datetime
import gc
import json
import pathlib
import re

import pytest

from tests.helpers import tokens
from tests.helpers.snippets import ROOT
from train.data import chat, documents, token_files
from train.data.sources import Data
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
QUESTION = json.dumps(CHAT[:1])


def render(tmp_path, template, messages=CHAT):
    folder = tokens.folder(tmp_path, template=template)
    return chat.renderer(load_tokenizer(folder), str(folder))(json.dumps(messages))


CLOSED = PLAIN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
"""As Phi 3's, which ends each text with one more token."""


@pytest.mark.parametrize("template", [PLAIN, MARKED, CLOSED])
def test_answers_are_what_the_model_has_to_say_with_its_end(tmp_path, template):
    made = render(tmp_path, template)
    assert made.text.startswith("<s><|turn|>user\na question</s>\n<|turn|>assistant\none answer")
    answers = [made.text[first:last] for first, last in made.answers]
    assert answers == ["one answer</s>\n", "two</s>\n" + "</s>" * (template == CLOSED)]


@pytest.fixture
def brief(monkeypatch):
    """A template may take one second."""
    monkeypatch.setattr(chat, "_SECONDS", 1)


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


def test_values_of_messages_are_written_as_in_transformers(tmp_path):
    value = {"query": "it's <b>5 > 3</b> & gr\u00f6\u00dfer", "a": [1.0, None, True]}
    template = "{% for m in messages %}{{ m.call | tojson }}{{ m.call | tojson(indent=2) }}|{{ m }}"
    message = {"role": "user", "call": value}
    made = render(tmp_path, template + "{% endfor %}", [message]).text
    assert made == (
        json.dumps(value, ensure_ascii=False)
        + json.dumps(value, ensure_ascii=False, indent=2)
        + f"|{message}"
    )


def test_a_message_with_nulls_is_one_without_these_keys(tmp_path):
    template = "{% for m in messages %}{{ m }}{{ m.content is defined }}{% endfor %}"
    message = {"role": "user", "content": None, "calls": [{"id": None}]}
    made = render(tmp_path, template, [message]).text
    assert made == "{'role': 'user', 'calls': [{'id': None}]}False"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_every_name_by_which_templates_read_it(tmp_path, name):
    template = "{% for m in messages %}{{ m.reasoning_content }}, {{ m.thinking }}{% endfor %}"
    assert render(tmp_path, template, [{"role": "user", name: "so"}]).text == "so, so"


def test_time_is_one_for_all_chats(tmp_path):
    folder = tokens.folder(tmp_path, template="{{ strftime_now('%Y-%m-%d %f') }}")
    rendered = chat.renderer(load_tokenizer(folder), str(folder))
    first, second = rendered(QUESTION).text, rendered(QUESTION).text
    today = datetime.datetime.now(datetime.UTC)
    days = [today.date(), today.date() - datetime.timedelta(1)]
    assert first == second and first.split()[0] in map(str, days)


def test_no_text_of_a_chat_makes_an_answer(tmp_path):
    """Marks are drawn for each chat: a chat that holds those of another key is text."""
    old = "\ue000answer begin\ue001spoken by the user\ue000answer end\ue001"
    chat_with_marks = [{"role": "user", "content": old}, CHAT[1]]
    made = render(tmp_path, MARKED, chat_with_marks)
    assert old in made.text
    assert [made.text[first:last] for first, last in made.answers] == ["one answer</s>\n"]


def test_marks_in_macros_and_in_each_other_are_where_the_text_is(tmp_path):
    template = (
        "{% macro said(m) %}{% generation %}{{ m.role }}: {% generation %}{{ m.content }}"
        "{% endgeneration %}!{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}- {{ said(m) }}\n{% endfor %}{# {% generation %} #}"
    )
    made = render(tmp_path, template, CHAT[:2])
    assert made.text == "- user: a question!\n- assistant: one answer!\n"
    assert sorted(made.text[first:last] for first, last in made.answers) == [
        "a question", "assistant: one answer!", "one answer", "user: a question!",
    ]  # fmt: skip


def test_text_that_is_changed_after_its_marks_is_refused(tmp_path):
    body = "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}"
    assert render(tmp_path, body + "{{ x }}").answers == [(0, 12)]
    for change in ("trim", "upper", "length", "truncate(5)"):
        with pytest.raises(ValueError, match="put {% generation %} and {% endgeneration %} around"):
            render(tmp_path, body + "{{ x | " + change + " }}")


def test_a_comment_marks_nothing(tmp_path):
    made = render(tmp_path, "{# {% generation %} #}" + PLAIN)
    assert [made.text[first:last] for first, last in made.answers][1:] == ["two</s>\n"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 9**(9**9) > 1 }}", "is damaged: it takes more than 1 seconds"),
        ("{{ (messages | length + 5)**(9**9) > 1 }}", r"a chat \(it takes more than 1 seconds"),
        ("{% for i in range(10**5) %}" * 3 + "{% endfor %}" * 3, "it takes more than 1 seconds"),
        ("{% for i in range(10**9) %}{% endfor %}", "OverflowError: Range too big"),
        ("{{ 'a' * 10**10 }}", "needs more than 1024 MiB of memory"),
        ("{{ [0] * 10**10 }}", "needs more than 1024 MiB of memory"),
        ("{{ 'a' | center(10**10) }}", "needs more than 1024 MiB of memory"),
        ("{{ '%10000000000d' % 1 }}", "ValueError|needs more than 1024 MiB of memory|too big"),
        ("{{ '{:10000000000}'.format(1) }}", "needs more than 1024 MiB of memory"),
        ("{{ 'a' * (1 + 2**24) }}", "its text has 16777217 characters, more than 16777216"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 400 + "1" + ")" * 400 + " }}", "is damaged: RecursionError"),
        ("{% for i in [] %}" * 30 + "{% endfor %}" * 30, "is damaged: SyntaxError"),
    ],
)
def test_a_template_that_takes_too_much_is_ended(tmp_path, brief, template, message):
    with pytest.raises(ValueError, match=message) as caught:
        render(tmp_path, template)
    assert f"the chat template '{tmp_path}/tokenizer_config.json'" in str(caught.value)


def children():
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    return {child for task in tasks for child in task.read_text().split()}


def test_the_process_that_renders_is_started_again_and_ends_with_the_function(tmp_path, brief):
    gc.collect()
    before = children()
    template = "{% if messages[0].content == 'hang' %}{{ messages[0].n ** (9**9) }}{% endif %}fine"
    folder = tokens.folder(tmp_path, template=template)
    rendered = chat.renderer(load_tokenizer(folder), str(folder))
    hang = json.dumps([{"role": "user", "content": "hang", "n": 9}])
    for _ in range(2):
        with pytest.raises(ValueError, match="it takes more than 1 seconds"):
            rendered(hang)
        assert rendered(QUESTION).text == "fine"
    assert len(children() - before) == 1
    del rendered
    gc.collect()
    assert children() == before


def test_many_chats_may_take_longer_than_one(tmp_path, brief):
    template = "{% for i in range(10**5) %}{% for j in range(4) %}{% endfor %}{% endfor %}"
    folder = tokens.folder(tmp_path, template=template)
    rendered = chat.renderer(load_tokenizer(folder), str(folder))
    for _ in range(20):
        rendered(QUESTION)


GOLDEN = json.loads((ROOT / "tests" / "golden" / "chats.json").read_text())


TEMPLATES = ROOT / "tests" / "golden" / "templates"


NAMES = dict.fromkeys(case["template"] for case in GOLDEN["cases"])
UNMARKED = NAMES.keys() - {"filters", "joined"}
"""Without marks `filters` has no answers, and `joined` has others, which begin at words."""


@pytest.mark.parametrize(
    ("name", "marked"),
    [(name, True) for name in NAMES] + [(name, False) for name in sorted(UNMARKED)],
)
def test_equals_transformers(tmp_path, name, marked):
    """Tokens, and which are of answers, with and without marks; made by `make_chats.py`.

    The templates `qwen_3`, `deepseek`, `harmony` and `thinking` change earlier turns.
    """
    template = (TEMPLATES / f"{name}.jinja").read_text()
    if not marked:
        template = re.sub(r"\{%-? (end)?generation -?%\}", "", template)
    folder = str(tokens.folder(tmp_path, template=template))
    tokenizer = load_tokenizer(folder)
    encode = chat.encoder(tokenizer, folder)
    for case in [case for case in GOLDEN["cases"] if case["template"] == name]:
        messages = GOLDEN["chats"][case["chat"]]
        if tools := GOLDEN["tools"].get(case["chat"]):
            messages = {"messages": messages, "tools": tools}
        messages = json.dumps(messages)
        if case["text"] is None:
            with pytest.raises(ValueError, match="refuses a chat"):
                encode(messages)
            continue
        made, asked = encode(messages)
        assert made.tolist() == tokenizer.spans(case["text"])[0].tolist(), case["chat"]
        if "mask" in case:
            assert "".join(map(str, asked.astype(int))) == case["mask"], case["chat"]


def test_a_result_in_the_turn_of_an_answer_is_in_no_answer(tmp_path):
    """Gemma 4's template writes results where they were asked for: they are not the model's."""
    template = (
        "{% for m in messages %}{% if m.role != 'tool' %}[{{ m.role }}]{{ m.content }}"
        "{% if not loop.last %}{% if m.tool_calls %}<{{ messages[loop.index].content }}>{% endif %}"
        "{% else %}END{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    call = {"role": "assistant", "content": "call", "tool_calls": ["f"]}
    messages = [CHAT[0], call, {"role": "tool", "content": "result"}, CHAT[1]]
    made = render(tmp_path, template.replace("END", ""), messages)
    assert [made.text[first:last] for first, last in made.answers] == ["call", "one answer"]
    with pytest.raises(ValueError, match="the result of a tool into an answer's turn, so answers"):
        render(tmp_path, template, messages)


def written(tmp_path, template, chats):
    """What `train` writes of chats: texts of tokens, and which are targets."""
    folder = tokens.folder(tmp_path / "tokenizer", template=template)
    lines = (json.dumps({"chat": messages}) for messages in chats)
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    data = Data(
        path=str(tmp_path / "chats.jsonl"), column="chat", tokenizer=str(folder), packed=True
    )
    parts = token_files.load(token_files.prepare(data, tmp_path / "cache")).parts
    decode = load_tokenizer(folder).decode
    return [
        (decode([token]), bool(asked))
        for part in ("train", "validation")
        for token, asked in zip(parts[part].tokens, parts[part].asked, strict=True)
    ]


def test_a_row_is_named_that_a_template_refuses(tmp_path):
    template = "{% if messages[0].content == 'no' %}{{ raise_exception('why') }}{% endif %}"
    chats = [[{"role": "user", "content": text}] for text in ("yes", "no")]
    with pytest.raises(ValueError, match=r"row 2 of data.column='chat' of '.*/chats.jsonl': t"):
        written(tmp_path, template, chats)
    with pytest.raises(ValueError, match=r"row 1 of data.column='chat' of .* is damaged"):
        written(tmp_path, "{% for %}", chats)


def test_keys_of_a_row_keep_their_order_and_its_part_does_not_depend_on_it(tmp_path):
    template = "{% for m in messages %}{{ m | tojson }}{{ m.items() | list }}{% endfor %}"
    call = {"z": 1, "a": {"y": 2, "b": 3}}
    other = {"call": {"a": {"b": 3, "y": 2}, "z": 1}, "role": "user"}
    orders = [{"role": "user", "call": call}, other]
    names = []
    for number, message in enumerate(orders):
        folder = tmp_path / str(number)
        made = "".join(text for text, _ in written(folder, template, [[message]]))
        assert made == f"{json.dumps(message)}{[*message.items()]}"
        found = documents.find(Data(path=str(folder / "chats.jsonl"), column="chat"))
        names += [each.name for each in found.documents()]
    assert names[0] == names[1]


def test_a_token_that_holds_a_letter_of_an_answer_is_a_target(tmp_path):
    """The tokenizer joins `wo` and `rds` over both marks; `text ` ends in a space of its own."""
    template = (
        "{% for m in messages %}some{% if m.role == 'assistant' %} wo{% generation %}rds of a "
        "{{ m.content }} wor{% endgeneration %}ds {% endif %}{% endfor %}"
    )
    made = written(tmp_path, template, [CHAT[:2]])
    targets = "".join(text for text, asked in made if asked)
    assert "".join(text for text, _ in made) == "somesome words of a one answer words "
    assert targets.strip() == "words of a one answer words"


@pytest.mark.parametrize("trims", [True, False])
def test_spaces_at_the_ends_of_an_answer_are_targets(tmp_path, trims):
    """A byte-level tokenizer that trims says that a space of its own has no characters."""
    import tokenizers

    folder = tokens.folder(tmp_path, template="{% generation %}  a {% endgeneration %}b")
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=trims)
    made.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids, asked = chat.encoder(tokenizer, str(folder))(QUESTION)
    assert tokenizer.decode(ids[asked]) == "  a " and tokenizer.decode(ids[~asked]) == "b"
