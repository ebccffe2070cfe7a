"""The process that renders chats: a template is code, so its time and memory are bounded.

`chat.py` runs this file by its path, so nothing of `train` is imported. A line of JSON comes in and
one goes out: first the template, then chats. The process ends with its standard input.
"""

import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import jinja2
from jinja2 import ext, nodes, sandbox

_ASSISTANT = "assistant"  # role
_REASONING = "reasoning_content", "thinking", "reasoning"  # names for the same, the usual one first
_BYTES = 1 << 30  # of memory
_LONGEST = 1 << 24  # characters of a chat: a tokenizer needs a hundred times as many bytes


class _Marks(ext.Extension):
    """The tag `{% generation %}`: writes `environment.marks` around what it encloses.

    transformers counts the characters before the tag instead, which is wrong inside macros.
    """

    tags = {"generation"}

    def parse(self, parser):
        self.environment.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller):
        begin, end = self.environment.marks
        return f"{begin}{caller()}{end}"


def serve(asked: BinaryIO, answered: BinaryIO) -> None:
    """Answers each line with a line of `answer` until there are no more.

    The first one is {"template": ..., "names": ..., "seconds": ...}. The others are lists of
    messages, for which (text, [(first, last), ...]) is made.
    """
    first = json.loads(asked.readline())
    _limit_memory()
    render: Callable[[Any], Any] = lambda messages: None

    def start():
        nonlocal render
        render = renderer(first["template"], first["names"])

    rest = (functools.partial(lambda line: render(json.loads(line)), line) for line in asked)
    for call in itertools.chain([start], rest):
        _limit_time(first["seconds"])
        answered.write(answer(call).encode() + b"\n")
        answered.flush()


def answer(call: Callable[[], Any]) -> str:
    """What a call returns, as {"made": ...}, or why it fails, as {"error": text}, in JSON."""
    try:
        return json.dumps({"made": call()})
    except MemoryError:
        error = f"it needs more than {_BYTES >> 20} MiB of memory"
    except Exception as caught:  # whatever a template does is its own fault
        is_meant = isinstance(caught, jinja2.TemplateError | ValueError)
        text = " ".join(str(caught).split())[:400]
        error = text if is_meant and text else f"{type(caught).__name__}: {text}"
    return json.dumps({"error": error.encode("utf-8", "backslashreplace").decode()})


def _limit_memory() -> None:
    if os.name != "posix":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_least(_BYTES, hard), hard))


def _limit_time(seconds: int) -> None:
    """Lets the kernel end this process if the next answer takes longer, whatever it is doing."""
    if os.name != "posix":
        return
    import resource

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_least(limit, hard), hard))


def _least(limit: int, hard: int) -> int:
    return limit if hard < 0 else min(limit, hard)  # negative: unlimited


def renderer(source: str, names: dict[str, str]) -> Callable[[list[dict[str, Any]]], Any]:
    """Makes the function from messages to (text, [(first, last), ...]); may raise anything."""
    environment = _environment()
    template = environment.from_string(source, globals=names)

    def text_of(messages, prompt=False, marks=("", "")):
        environment.marks = marks
        text = template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=prompt
        )
        if len(text) > _LONGEST:
            raise ValueError(f"its text has {len(text)} characters, more than {_LONGEST}")
        return text.encode("utf-8", "replace").decode()  # no tokenizer takes half a character

    def render(messages):
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise ValueError("messages must be a list of objects")
        messages = [_normalized(message) for message in messages]
        if environment.has_marks:
            return _marked(messages, text_of)
        return _grown(messages, text_of, names.get("eos_token", ""))

    return render


def _environment() -> Any:
    """Jinja2 as transformers sets it up for templates of chats."""

    def refuse(message):
        raise jinja2.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    made: Any = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marks, ext.loopcontrols]
    )
    made.has_marks, made.marks = False, ("", "")
    made.filters["tojson"] = tojson
    # One time for all chats, in UTC: hosts in different zones must make the same tokens.
    now = datetime.datetime.now(datetime.UTC)
    made.globals |= {"raise_exception": refuse, "strftime_now": now.strftime}
    return made


def _normalized(message: dict[str, Any]) -> dict[str, Any]:
    """A message as transformers 5 hands it to a template: no nulls, reasoning by each name."""
    known = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING:
        if name in known:
            return {"thinking": known[name], **known, "reasoning_content": known[name]}
    return known


def _marked(messages: list[dict[str, Any]], text_of: Callable) -> tuple[str, list]:
    """The text, and what the template marks as answers."""
    # Nobody can write marks into a chat that are drawn for it.
    begin, end = (f"\ue000{secrets.token_hex(16)}\ue001" for _ in range(2))
    whole, answers, open_ones, plain = text_of(messages), [], [], ""
    for part in re.split(f"({begin}|{end})", text_of(messages, marks=(begin, end))):
        if part == begin:
            open_ones.append(len(plain))
        elif part == end and open_ones:
            answers.append((open_ones.pop(), len(plain)))
        else:
            plain += part
    if plain != whole or open_ones:
        raise ValueError(
            "it changes text after {% generation %} has marked it; put {% generation %} and "
            "{% endgeneration %} around the place where the template writes that text"
        )
    return whole, answers


def _grown(messages: list[dict[str, Any]], text_of: Callable, end: str) -> tuple[str, list]:
    """The text, and what each answer adds to the messages before it; `end` may close every text."""
    whole, answers = text_of(messages), []
    for number, message in enumerate(messages):
        if message.get("role") != _ASSISTANT:
            continue
        before, after = text_of(messages[:number], prompt=True), text_of(messages[: number + 1])
        if not whole.startswith(after):
            after = after.removesuffix(end)
        if not (whole.startswith(before) and whole.startswith(after)):
            raise ValueError(
                "it changes earlier messages as more are added, so that answers cannot be found; "
                "put {% generation %} and {% endgeneration %} around them in it"
            )
        answers.append((len(before), len(after)))
    return whole, answers


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
