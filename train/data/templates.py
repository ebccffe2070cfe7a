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
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import jinja2
from jinja2 import ext, nodes, sandbox, visitor

_ASSISTANT = "assistant"  # role
_REASONING = "reasoning_content", "thinking", "reasoning"  # names for the same, the usual one first
_BYTES = 1 << 30  # of memory
_LONGEST = 1 << 24  # characters of a chat: a tokenizer needs a hundred times as many bytes
_LOST = "so answers are not found; put {% generation %} and {% endgeneration %} around them in it"


class _Marks(ext.Extension):
    """Writes marks into the text while `environment.key` is set, where answers may begin and end.

    Around what the tag `{% generation %}` encloses; transformers counts the characters before the
    tag instead, which is wrong inside macros. A template without the tag gets marks of its loops
    over messages, by `_Loops`.
    """

    tags = {"generation"}

    def parse(self, parser):
        self.environment.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller):
        return f"{self._mark('begin')}{caller()}{self._mark('end')}"

    def _enter(self):
        self.environment.loops.append(False)
        return ""

    def _turn(self, item):
        number = self.environment.numbers.get(id(item))
        if number is None:
            return ""
        self.environment.loops[-1] = True
        return self._mark(f"{len(self.environment.loops)} {number}")

    def _leave(self):
        depth = len(self.environment.loops)
        return self._mark(f"{depth} -1") if self.environment.loops.pop() else ""

    def _mark(self, word):
        key = self.environment.key
        return key and f"\ue000{key} {word}\ue001"


class _Loops(visitor.NodeTransformer):
    """Marks where each message's turn in a loop begins, and where the loop ends."""

    def __init__(self, marks: _Marks):
        self.marks = marks

    def visit_For(self, node):
        self.generic_visit(node)
        if not isinstance(node.target, nodes.Name):
            return node
        call = lambda *names: nodes.Output([self.marks.call_method(*names)])
        node.body.insert(0, call("_turn", [nodes.Name(node.target.name, "load")]))
        return [call("_enter"), node, call("_leave")]


def serve(asked: BinaryIO, answered: BinaryIO) -> None:
    """Answers each line with a line of `answer` until there are no more.

    The first one is {"template": ..., "names": ..., "seconds": ...}. For the others, see
    `renderer`.
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
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (_least(_BYTES, hard), hard))


def _limit_time(seconds: int) -> None:
    """Lets the kernel end this process if the next answer takes longer, whatever it is doing."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    limit = int(time.process_time()) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_least(limit, hard), hard))


def _least(limit: int, hard: int) -> int:
    return limit if hard < 0 else min(limit, hard)  # negative: unlimited


def renderer(source: str, names: dict[str, str]) -> Callable[[Any], Any]:
    """Makes the function from a chat to (text, [(first, last), ...]); may raise anything.

    A chat is its messages or, with tools, {"messages": ..., "tools": ...}.
    """
    environment = _environment()
    plain = environment.from_string(source, globals=names)

    @functools.cache  # marks make loops slow, and few templates need them
    def with_marks():
        if environment.has_marks:
            return plain
        loops = _Loops(environment.extensions[_Marks.identifier])
        tree = loops.visit(environment.parse(source))
        tree.set_environment(environment).set_lineno(1)
        return environment.from_string(tree, globals=names)

    def written(tools, messages, prompt=False, key=""):
        numbers = {id(message): number for number, message in enumerate(messages)}
        environment.key, environment.numbers, environment.loops = key, numbers, []
        template = with_marks() if key else plain
        text = template.render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=prompt
        )
        if len(text) > _LONGEST:
            raise ValueError(f"its text has {len(text)} characters, more than {_LONGEST}")
        return text.encode("utf-8", "replace").decode()  # no tokenizer takes half a character

    def render(chat):
        is_plain = not isinstance(chat, dict)
        messages, tools = (chat, None) if is_plain else (chat["messages"], chat["tools"])
        if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            raise ValueError("messages must be a list of objects")
        messages = [_normalized(message) for message in messages]
        text_of = functools.partial(written, tools)
        if environment.has_marks:
            return _marked(messages, text_of)
        return _unmarked(messages, text_of, names.get("eos_token", ""))

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
    made.has_marks = False
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
    whole, marks = _read_marks(messages, text_of)
    answers, open_ones = [], []
    for word, at in marks:
        if word == "begin":
            open_ones.append(at)
        else:
            answers.append((open_ones.pop(), at))
    return whole, answers


def _read_marks(messages: list, text_of: Callable, **how: Any) -> tuple[str, list[tuple[str, int]]]:
    """The text without marks, and each mark with its place there."""
    # Nobody can write marks into a chat that are drawn for it.
    key = secrets.token_hex(16)
    marks, plain = [], ""
    parts = re.split(f"\ue000{key} (.*?)\ue001", text_of(messages, key=key, **how))
    for text, word in itertools.zip_longest(parts[::2], parts[1::2]):
        plain += text
        marks.append((word, len(plain)))
    if plain != text_of(messages, **how):
        raise ValueError(
            "it changes text after it has written it; put {% generation %} and {% endgeneration %} "
            "around the place where the template writes that text"
        )
    return plain, marks[:-1]


def _unmarked(messages: list[dict[str, Any]], text_of: Callable, end: str) -> tuple[str, list]:
    """The text, and what each answer adds to it; `end` may close every text."""
    whole, answers = text_of(messages), []
    for number, message in enumerate(messages):
        if message.get("role") != _ASSISTANT:
            continue
        before, after = text_of(messages[:number], prompt=True), text_of(messages[: number + 1])
        if not whole.startswith(after):
            after = after.removesuffix(end)
        if whole.startswith(before) and whole.startswith(after):
            answers.append((len(before), len(after)))
        else:
            answers.append(_in_loop(messages, number, text_of))
    if any(message.get("role") == "tool" for message in messages):
        _require_own_turns(messages, [whole[first:last] for first, last in answers], text_of)
    return whole, answers


def _require_own_turns(
    messages: list[dict[str, Any]], answers: list[str], text_of: Callable
) -> None:
    """Raises a ValueError if a template writes a tool's result into an answer, as Gemma 4's."""
    _, turns = _turns(messages, text_of)
    for number, message in enumerate(messages):
        first, last = turns.get(number, (0, 0))
        result = message.get("content")
        if message.get("role") == "tool" and first == last and isinstance(result, str) and result:
            if any(result in text for text in answers):
                raise ValueError(f"it writes the result of a tool into an answer's turn, {_LOST}")


def _in_loop(messages: list[dict[str, Any]], number: int, text_of: Callable) -> tuple[int, int]:
    """Where an answer is if the template changes earlier messages, as Qwen 3's drops reasoning.

    It is what the template's loop writes in the message's turn, without the beginning that is the
    generation prompt's, too.
    """
    whole, turns = _turns(messages, text_of)
    _, before = _turns(messages[:number], text_of)
    if number not in turns or not before:
        raise ValueError(
            f"it changes earlier messages as more are added, outside of loops over them, {_LOST}"
        )
    prompt = text_of(messages[:number], prompt=True)[max(last for _, last in before.values()) :]
    first, last = turns[number]
    begun = os.path.commonprefix([prompt, whole[first:last]])
    if begun != prompt:  # a special token is no part of another: `<think>` and `<tool_call>`
        begun = re.sub(r"[<\[][^>\]]*$", "", begun)
    if prompt and not begun:
        raise ValueError(f"it begins no answer as its generation prompt does, {_LOST}")
    return first + len(begun), last if number + 1 < len(messages) else len(whole)


def _turns(messages: list, text_of: Callable) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text, and by message the longest part of it that a loop writes in the message's turn."""
    whole, marks = _read_marks(messages, text_of)
    turns: dict[int, tuple[int, int]] = {}
    open_ones: list[tuple[int, int, int]] = []
    for word, at in marks:
        depth, number = map(int, word.split())
        while open_ones and open_ones[-1][0] >= depth:
            _, message, first = open_ones.pop()
            turns[message] = max(turns.get(message, (0, 0)), (first, at), key=lambda x: x[1] - x[0])
        if number >= 0:
            open_ones.append((depth, number, at))
    return whole, turns


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
