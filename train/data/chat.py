"""Chats as text, through a tokenizer's chat template, and as tokens with those of the answers."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from train import checks
from train.data.tokenizer import Tokenizer

_PROGRAM = pathlib.Path(__file__).with_name("templates.py")
_SECONDS = 10  # of a processor that a template may take for a chat


class Chat(NamedTuple):
    """A chat for training: its text, and the first and last character of each answer."""

    text: str
    answers: list[tuple[int, int]]


def renderer(tokenizer: Tokenizer, folder: str) -> Callable[[str], Chat]:
    """Makes the function from messages, `[{"role": ..., "content": ...}, ...]`, to a `Chat`.

    If there are tools, the messages stand in `{"messages": ..., "tools": ...}`, beside the JSON
    schemas that the template gets as `tools`. Either is one line of JSON.

    The text is the one of transformers' `apply_chat_template`. An answer is what the template marks
    with `{% generation %}`. If it marks nothing, an answer is the text that an assistant's message
    adds to the messages before it and their generation prompt. Where the template changes earlier
    messages, as Qwen 3's drops their reasoning, it is what the template's loop writes for the
    message after the generation prompt. So it includes the token that ends it.

    The template is code. It runs in jinja2's sandbox, in a process of its own, which may take 10
    seconds of a processor and 1 GiB of memory for a chat, and ends with the function.

    Args:
      tokenizer: Has the template, and the names of special tokens.
      folder: Its folder, for messages.

    Raises:
      ValueError: If there is no template, or it is damaged; from the function, if the template
        raises an error, takes too much, or writes no answer in a loop over messages.
    """
    if tokenizer.template is None:
        raise ValueError(
            f"chats need a chat template, which data.tokenizer={folder!r} lacks; name a Hugging "
            "Face folder with a chat_template.jinja."
        )
    checks.require_package("a chat", "jinja2", extra="huggingface")
    where = f"the chat template {os.path.join(folder, tokenizer.template_file)!r}"
    facts = {"template": tokenizer.template, "names": tokenizer.names, "seconds": _SECONDS}
    first = json.dumps(facts)

    def started():
        ask = _start()
        if (error := ask(first).get("error")) is not None:
            raise ValueError(f"{where} is damaged: {error}")
        return ask

    ask = started()

    def render(messages):
        nonlocal ask
        answer = ask(messages)
        if "made" in answer:
            text, answers = answer["made"]
            return Chat(text, [tuple(each) for each in answers])
        if answer.get("ended"):
            ask = started()
        raise ValueError(f"{where} refuses a chat ({answer['error']}): {messages[:200]}")

    return render


def encoder(tokenizer: Tokenizer, folder: str) -> Callable[[str], tuple[np.ndarray, np.ndarray]]:
    """Makes the function from messages to tokens i64[count] and targets bool[count].

    A token is a target if an answer has any of its characters, as in transformers'
    `return_assistant_tokens_mask`: a tokenizer may join the end of a prompt and the first letter of
    an answer, and the model has to say the token all the same.

    Args:
      tokenizer: See `renderer`.
      folder: See `renderer`.

    Raises:
      ValueError: See `renderer`.
    """
    render = renderer(tokenizer, folder)

    def encode(messages):
        made = render(messages)
        tokens, spans = tokenizer.spans(made.text)
        asked = np.zeros(tokens.size, bool)
        for first, last in made.answers:
            asked |= (spans[:, 0] < last) & (spans[:, 1] > first)
        return tokens, asked

    return encode


def _start() -> Callable[[str], dict[str, Any]]:
    """Starts the process that renders; returns the function from a line to its answer.

    A process that is forked would have only one of this one's threads, and JAX's locks.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", str(_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for the run, which ends this process
    )

    def ask(line):
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if answer.endswith(b"\n"):
            return json.loads(answer)
        return {"error": _reason(process.wait()), "ended": True}

    weakref.finalize(ask, _end, process)
    return ask


def _reason(status: int) -> str:
    if -status == signal.SIGXCPU:
        return f"it takes more than {_SECONDS} seconds"
    how = signal.Signals(-status).name if status < 0 else f"status {status}"
    return f"the process that renders chats ended with {how}"


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            pipe.close()
