"""Tokenizers: bytes, or the tokenizer.json of a Hugging Face folder."""

import hashlib
import importlib.util
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE = "chat_template.jinja"
_SAMPLE = "a"


class Tokenizer(NamedTuple):
    """Converts text to tokens, and tokens to text.

    Attributes:
      encode: Texts -> tokens i64[count] of each; special tokens only where the text names them.
      ends: A text -> its tokens i64[count], and the end of each in characters, i64[count].
      decode: Tokens -> the text, without special tokens.
      vocab: Tokens are in [0, vocab).
      begin: Tokens before a document, as the tokenizer itself adds them.
      end: Tokens after a document that another one follows.
      names: Text of special tokens, such as {"eos_token": "</s>"}; for chat templates.
      template: Jinja2 template of a chat; None if there is none.
      sha256: Sha256 of all relevant files.
    """

    encode: Callable[[Sequence[str]], list[np.ndarray]]
    ends: Callable[[str], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    vocab: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    names: dict[str, str]
    template: str | None
    sha256: str


def load_tokenizer(folder: str | pathlib.Path | None) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder; no code of the folder runs.

    Args:
      folder: Has tokenizer.json and, for special tokens or chats, tokenizer_config.json and
        chat_template.jinja. None: a token is a byte of UTF-8.

    Returns:
      The tokenizer.

    Raises:
      ValueError: If the package or a file is missing, or a file is damaged.
    """
    if folder is None:
        return _bytes()
    if importlib.util.find_spec("tokenizers") is None:
        raise ValueError(
            "a tokenizer.json needs the package tokenizers; run pip install -e '.[huggingface]' "
            "in the checkout."
        )
    import tokenizers

    contents = _contents(pathlib.Path(folder))
    try:
        made = tokenizers.Tokenizer.from_buffer(contents["tokenizer.json"])
    except ValueError as error:
        raise ValueError(f"{folder}/tokenizer.json is damaged: {error}; download it.") from error
    made.no_truncation()
    made.no_padding()
    names, template = _settings(folder, contents)
    begin, end = _around(made)
    eos = made.token_to_id(names.get("eos_token", ""))
    return Tokenizer(
        encode=lambda texts: _ids(made, texts),
        ends=lambda text: _ends(made, text),
        decode=lambda tokens: made.decode(list(map(int, tokens))),
        vocab=made.get_vocab_size(),
        begin=begin,
        end=end or (() if eos is None else (eos,)),
        names=names,
        template=template,
        sha256=hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest(),
    )


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(
            f"{str(folder)!r} has no tokenizer.json; name a Hugging Face folder with one, or write "
            "None for bytes."
        )
    try:
        files = [folder / name for name in (*_FILES, _TEMPLATE)]
        return {file.name: file.read_bytes() for file in files if file.is_file()}
    except OSError as error:
        raise ValueError(f"{error.filename!r} cannot be read ({error.strerror}).") from error


def _settings(folder, contents: dict[str, bytes]) -> tuple[dict[str, str], str | None]:
    """Names of special tokens and the chat template."""
    found: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            part = json.loads(contents.get(name, b"{}"))
            found |= part
        except (ValueError, TypeError) as error:
            raise ValueError(f"{folder}/{name} is damaged: {error}; download it.") from error
    tokens = {key: value for key, value in found.items() if key.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    template = found.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    if _TEMPLATE in contents:
        template = contents[_TEMPLATE].decode("utf-8", "replace")
    names = {key: text for key, text in texts.items() if isinstance(text, str)}
    return names, template if isinstance(template, str) else None


def _around(made) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the tokenizer itself adds before and after a text."""
    bare, whole = (made.encode(_SAMPLE, add_special_tokens=s).ids for s in (False, True))
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return tuple(whole[:at]), tuple(whole[at + len(bare) :])
    return (), ()


def _ids(made, texts: Sequence[str]) -> list[np.ndarray]:
    found = made.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(each.ids, np.int64) for each in found]


def _ends(made, text: str) -> tuple[np.ndarray, np.ndarray]:
    found = made.encode(text, add_special_tokens=False)
    ends = [end for _, end in found.offsets]
    return np.array(found.ids, np.int64), np.array(ends, np.int64)


def _bytes() -> Tokenizer:
    def encode(texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def ends(text):
        sizes = [len(letter.encode()) for letter in text]
        return encode([text])[0], np.repeat(np.arange(1, len(sizes) + 1), sizes)

    return Tokenizer(
        encode=encode,
        ends=ends,
        decode=lambda tokens: bytes(map(int, tokens)).decode("utf-8", "replace"),
        vocab=256,
        begin=(),
        end=tuple(b"\n"),
        names={},
        template=None,
        sha256="bytes",
    )
