"""The text of `benchmarks.scale`: sources of installed packages, in byte-pair tokens.

The packages are those of `pip install -e '.[train,huggingface]'` whose pinned version, and whose
source, is the same for all Python versions that requirements.txt knows. So every machine with these
pins has the same text: a row keeps its sha256, that of the tokenizer included.
"""

import importlib.metadata
import pathlib
from collections.abc import Iterator

from benchmarks.fine_tune_text import write_tokenizer
from train.config import Data
from train.data import token_files

PACKAGES = (
    *("matplotlib", "fonttools", "optax", "orbax-checkpoint", "tyro", "rich", "pygments"),
    *("treescope", "etils", "simplejson", "pillow"),
    *("pandas", "pyarrow", "datasets", "huggingface_hub", "fsspec"),
)


def sources() -> Iterator[tuple[str, str]]:
    """Name and text of each Python file of the packages, as installed."""
    for package in PACKAGES:
        files = importlib.metadata.distribution(package).files or ()
        for file in sorted(file for file in files if file.suffix == ".py"):
            try:
                yield file.as_posix(), file.read_text("utf-8")
            except UnicodeDecodeError:
                continue


def data(vocab: int, batch: int, folder: pathlib.Path) -> Data:
    """Writes the text, a tokenizer of `vocab` tokens, and the text's tokens, each once.

    Args:
      vocab: Tokens of the byte-pair code, which is trained on the text.
      batch: Sequences of a step.
      folder: Where text, tokenizers and tokens are kept.

    Returns:
      The `data` of a config; `train` reads it.
    """
    text, tokenizer = folder / "text", folder / f"tokenizer_{vocab}"
    if not text.is_dir():
        unfinished = folder / "text.unfinished"
        for name, content in sources():
            file = unfinished / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        unfinished.rename(text)
    if not (tokenizer / "tokenizer_config.json").is_file():
        write_tokenizer(tokenizer, (content for _, content in sources()), vocab)
    cache = folder / "tokens"
    made = Data(path=str(text), tokenizer=str(tokenizer), cache=str(cache), batch=batch)
    token_files.prepare(made, cache, vocab)
    return made
