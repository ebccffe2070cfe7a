"""Chats as text, through a tokenizer's chat template, with the places of the answers."""

import importlib.util
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from train.data.tokenizer import Tokenizer

_OPEN, _CLOSE = "\ue000answer\ue001", "\ue000end\ue001"  # around the text that a template marks
_ANSWERS = "assistant"  # role


class Chat(NamedTuple):
    """A chat for training: its text, and the first and last character of each answer."""

    text: str
    answers: list[tuple[int, int]]


def renderer(tokenizer: Tokenizer, folder: str) -> Callable[[list[dict[str, Any]]], Chat]:
    """Makes the function from messages, `{"role": ..., "content": ...}`, to a `Chat`.

    An answer is what the template marks with `{% generation %}`. If it marks nothing, an answer is
    the text that an assistant's message adds to the messages before it and their generation prompt.
    So it includes the token that ends it.

    The template runs in jinja2's sandbox, but may still take time and memory.

    Args:
      tokenizer: Has the template, and the names of special tokens.
      folder: Its folder, for messages.

    Raises:
      ValueError: If there is no template, or it is damaged; from the function, if the template
        raises an error, or changes earlier messages as more are added.
    """
    if tokenizer.template is None:
        raise ValueError(
            f"chats need a chat template, which data.tokenizer={folder!r} lacks; name a Hugging "
            "Face folder with a chat_template.jinja."
        )
    if importlib.util.find_spec("jinja2") is None:
        raise ValueError(
            "chats need the package jinja2; run pip install -e '.[huggingface]' in the checkout."
        )
    import jinja2

    troubles = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError)
    where = f"the chat template of {folder!r}"
    try:
        template = _environment().from_string(tokenizer.template, globals=tokenizer.names)
    except jinja2.TemplateError as error:
        raise ValueError(f"{where} is damaged: {error}") from error
    marks = re.search(r"\{%-?\+?\s*generation\b", tokenizer.template) is not None

    def text_of(messages, prompt=False):
        try:
            return template.render(messages=messages, add_generation_prompt=prompt, tools=None)
        except troubles as error:
            raise ValueError(f"{where} refuses a chat ({error}): {str(messages)[:200]}") from error

    def render(messages):
        if marks:
            return _marked(text_of(messages))
        return _grown(messages, text_of, where)

    return render


def _environment():
    """Jinja2 as Hugging Face's templates expect it."""
    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Answers(ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked", [])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, caller):
            return f"{_OPEN}{caller()}{_CLOSE}"

    def refuse(message):
        raise jinja2.TemplateError(message)

    made = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Answers, ext.loopcontrols]
    )
    made.globals["raise_exception"] = refuse
    return made


def _marked(text: str) -> Chat:
    answers, plain, begin = [], "", 0
    for part in re.split(f"({_OPEN}|{_CLOSE})", text):
        if part == _OPEN:
            begin = len(plain)
        elif part == _CLOSE:
            answers.append((begin, len(plain)))
        else:
            plain += part
    return Chat(plain, answers)


def _grown(messages: list[dict[str, Any]], text_of: Callable, where: str) -> Chat:
    whole, answers = text_of(messages), []
    for number, message in enumerate(messages):
        if message.get("role") != _ANSWERS:
            continue
        before, after = text_of(messages[:number], prompt=True), text_of(messages[: number + 1])
        if not (whole.startswith(before) and whole.startswith(after)):
            raise ValueError(
                f"{where} changes earlier messages as more are added, so that answers cannot be "
                "found; put {% generation %} and {% endgeneration %} around them in it."
            )
        answers.append((len(before), len(after)))
    return Chat(whole, answers)
