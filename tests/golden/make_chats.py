"""Makes tests/golden/chats.json: chats as transformers renders them, by templates of known kinds.

    pip install transformers jinja2    # in an environment of its own; made with 5.24 and 3.1.6
    PYTHONPATH=. python tests/golden/make_chats.py tests/golden/chats.json

The templates are written here, in `templates`, in the style of public models: none is a copy. Each
is tried with each chat that it takes; six write the tools of the one that has some. All but
`filters` mark answers; `mask` is transformers' `assistant_masks`, by the tokenizer of
`tests/helpers/tokens.py`, whose merges reach over the marks of `joined`.
"""

import json
import pathlib
import sys
import tempfile

import jinja2
import transformers

from tests.helpers import tokens

ARGUMENTS = {"query": "it's <b>5 > 3</b> & gr\u00f6\u00dfer \U0001f642", "a": [1, 2.5, None, True]}
CALL = {"type": "function", "id": "abc123def", "function": {"name": "f", "arguments": ARGUMENTS}}
CHATS = {
    "plain": [
        {"role": "user", "content": " a question\u00e9 "},
        {"role": "assistant", "content": " words of a \U0001f642 text \n"},
        {"role": "user", "content": "some <|im_end|></s> words"},
        {"role": "assistant", "content": "two"},
    ],
    "system": [
        {"content": "be <kind> & brief", "role": "system"},
        {"content": "a question", "role": "user"},
        {"content": "<think>\nso\n</think>\n\nsome words", "role": "assistant"},
    ],
    "tools": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "abc123def", "content": '{"b": 1}'},
        {"role": "assistant", "content": "done", "reasoning": "it is", "tool_calls": None},
    ],
    "reasons": [  # which templates show of the last turn alone
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "<table> of words", "reasoning_content": "first this"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "some", "reasoning_content": "so", "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "abc123def", "content": "a text"},
        {"role": "assistant", "content": "<b>two</b>", "reasoning_content": "now I know"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "three", "reasoning_content": "at last"},
    ],
    "functions": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "tool_call_id": "abc123def", "content": "a text"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "some words"},
    ],
    "repeats": [  # no part of it is found by its text
        *(3 * [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}]),
    ],
}
TOOLS = {  # of the chats that have some
    "functions": [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Finds gr\u00f6\u00dfer <b>words</b>.",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string"}, "a": {"type": "array"}},
                    "required": ["query"],
                },
            },
        }
        for name in "fg"
    ]
}


def main(file: pathlib.Path) -> None:
    """Writes what transformers makes of each chat by each template, or that it refuses it."""
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        made = transformers.PreTrainedTokenizerFast.from_pretrained(
            tokens.folder(pathlib.Path(folder))
        )
        for source in sorted(pathlib.Path(__file__).with_name("templates").glob("*.jinja")):
            name, template = source.stem, source.read_text()
            for chat, messages in CHATS.items():
                case = {"template": name, "chat": chat, "text": None}
                options = {"chat_template": template, "tools": TOOLS.get(chat)}
                try:
                    case["text"] = made.apply_chat_template(messages, tokenize=False, **options)
                except (jinja2.TemplateError, TypeError) as error:
                    print(f"{name}, {chat}: {error}")
                else:
                    if "generation %}" in template:
                        masks = made.apply_chat_template(
                            messages, return_dict=True, return_assistant_tokens_mask=True, **options
                        )["assistant_masks"]
                        case["mask"] = "".join(map(str, masks))
                cases.append(case)
    contents = {"chats": CHATS, "tools": TOOLS, "cases": cases}
    file.write_text(json.dumps(contents, indent=1) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
