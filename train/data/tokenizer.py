"""Tokenizers: bytes, or the tokenizer.json of a Hugging Face folder."""

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from train import checks
from train.data import files as on_disk

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE = "chat_template.jinja"
_SAMPLE = "a"
_MOST = 2**31  # tokens: batches are int32


class Tokenizer(NamedTuple):
    """Converts text to tokens, and tokens to text.

    Attributes:
      encode: Texts -> tokens i64[count] of each; special tokens only where the text names them.
      spans: A text -> its tokens i64[count], and the first and last of each one's characters,
        i64[count, 2]: those of one character that several tokens make are alike.
      decode: Tokens -> the text, without special tokens.
      vocab: Tokens are in [0, vocab): one more than the largest, as ids may have holes.
      begin: Tokens before a document, as the tokenizer itself adds them.
      end: Tokens after a document that another one follows.
      names: Text of special tokens, such as {"eos_token": "</s>"}; for chat templates.
      template: Jinja2 template of a chat; None if there is none.
      sha256: Sha256 of all relevant files.
      template_file: Name of the file that has the template.
    """

    encode: Callable[[Sequence[str]], list[np.ndarray]]
    spans: Callable[[str], tuple[np.ndarray, np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    vocab: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    names: dict[str, str]
    template: str | None
    sha256: str
    template_file: str = _TEMPLATE


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
    checks.require_package("a tokenizer.json", "tokenizers", extra="huggingface")
    import tokenizers

    contents, where = _contents(pathlib.Path(folder)), f"{folder}/tokenizer.json"
    with _in_words(f"{where} is damaged"):
        made = tokenizers.Tokenizer.from_buffer(contents["tokenizer.json"])
        made.no_truncation()
        made.no_padding()
        begin, end = _around(made)
        made.post_processor = None  # adds these tokens, and may take spaces out of the spans
    names, template, file = _settings(folder, contents)
    vocab = 1 + max((*made.get_vocab().values(), *begin, *end), default=-1)
    if not 0 < vocab <= _MOST:
        raise ValueError(f"{where} has tokens up to {vocab - 1}; needs some, all below {_MOST}.")
    eos = made.token_to_id(names.get("eos_token", ""))
    return Tokenizer(
        encode=lambda texts: _ids(made, texts, where),
        spans=lambda text: _spans(made, text, where),
        decode=lambda tokens: made.decode(list(map(int, tokens))),
        vocab=vocab,
        begin=begin,
        end=end or (() if eos is None else (eos,)),
        names=names,
        template=template,
        sha256=hashlib.sha256(repr(sorted(contents.items())).encode()).hexdigest(),
        template_file=file,
    )


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Raises a ValueError for any error of the package: plain exceptions, and panics of Rust."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{what}: {error}; download it, or take another.") from error


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    if not os.path.lexists(folder / "tokenizer.json"):
        raise ValueError(
            f"{str(folder)!r} has no tokenizer.json; name a Hugging Face folder with one, or copy "
            "it there."
        )
    files = [folder / name for name in (*_FILES, _TEMPLATE)]
    return {file.name: on_disk.content_of(file) for file in files if os.path.lexists(file)}


def _settings(folder, contents: dict[str, bytes]) -> tuple[dict[str, str], str | None, str]:
    """Names of special tokens, the chat template, and the name of its file."""
    found: dict = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            part = checks.json_value(contents.get(name, b"{}"))
            if not isinstance(part, dict):
                raise ValueError(f"it holds {part!r:.80}; needs an object")
        except ValueError as error:
            raise ValueError(f"{folder}/{name} is damaged: {error}; download it.") from error
        found |= part
    return _names(folder, found), *_template(folder, contents, found.get("chat_template"))


def _names(folder, found: dict) -> dict[str, str]:
    """The texts of special tokens: strings, or objects that have one."""
    names = {}
    for key, value in found.items():
        text = value.get("content") if isinstance(value, dict) else value
        if not key.endswith("_token") or key.startswith("add_") or text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(f"{folder}: {key} is {value!r:.80}; needs the text of a token.")
        names[key] = text
    return names


def _template(folder, contents: dict[str, bytes], setting) -> tuple[str | None, str]:
    """The chat template and its file; `setting` is the one of tokenizer_config.json."""
    if _TEMPLATE in contents:
        try:
            return contents[_TEMPLATE].decode(), _TEMPLATE
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder}/{_TEMPLATE} is damaged: {error}; download it.") from error
    if isinstance(setting, list):  # several, by name
        named = (each for each in setting if isinstance(each, dict))
        setting = next(
            (each.get("template") for each in named if each.get("name") == "default"), None
        )
    if setting is not None and not isinstance(setting, str):
        raise ValueError(
            f"{folder}/tokenizer_config.json: chat_template is {setting!r:.80}; needs a text, or a "
            "list of {'name': ..., 'template': ...}."
        )
    return setting, "tokenizer_config.json"


def _around(made) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that the tokenizer itself adds before and after a text."""
    bare, whole = (made.encode(_SAMPLE, add_special_tokens=s).ids for s in (False, True))
    for at in range(len(whole) - len(bare) + 1):
        if whole[at : at + len(bare)] == bare:
            return tuple(whole[:at]), tuple(whole[at + len(bare) :])
    return (), ()


def _ids(made, texts: Sequence[str], where: str) -> list[np.ndarray]:
    with _in_words(f"{where} cannot encode a text"):
        found = made.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(each.ids, np.int64) for each in found]


def _spans(made, text: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    with _in_words(f"{where} cannot encode a text"):
        found = made.encode(text, add_special_tokens=False)
    return np.array(found.ids, np.int64), np.array(found.offsets, np.int64).reshape(-1, 2)


def _bytes() -> Tokenizer:
    def encode(texts):
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]

    def spans(text):
        first = np.repeat(np.arange(len(text)), [len(letter.encode()) for letter in text])
        return encode([text])[0], np.stack([first, first + 1], axis=1)

    return Tokenizer(
        encode=encode,
        spans=spans,
        decode=lambda tokens: bytes(int(t) for t in tokens if t < 256).decode("utf-8", "replace"),
        vocab=256,
        begin=(),
        end=tuple(b"\n"),
        names={},
        template=None,
        sha256="bytes",
    )
