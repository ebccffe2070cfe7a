"""The Python of a page, run as a reader would run it."""

import contextlib
import io
import pathlib
import re
from typing import Any, NamedTuple

import jax

ROOT = pathlib.Path(__file__).parents[2]


class Snippet(NamedTuple):
    """A block of Python, and the block of text behind it: what it prints."""

    code: str
    printed: str | None


def snippets(page: str) -> list[Snippet]:
    """All Python blocks of a Markdown text, in order."""
    pattern = r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?"
    return [Snippet(m[1], m[2]) for m in re.finditer(pattern, page, re.DOTALL)]


def run(found: list[Snippet], names: dict[str, Any]) -> None:
    """Runs snippets in one namespace, and compares what they print with what the page says."""
    # A reader's JAX is not as strict as the tests'; in no thread, so no context manager.
    strict = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    try:
        for code, printed in found:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(code, names)
            if printed is not None:
                lines = [line.rstrip() for line in out.getvalue().splitlines()]
                assert lines == printed.splitlines()
    finally:
        jax.config.update("jax_numpy_rank_promotion", strict)
