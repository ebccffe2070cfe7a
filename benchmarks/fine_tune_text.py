"""Makes the inputs of benchmarks.fine_tune_network: a tokenizer of one text, and another text.

    python -m benchmarks.fine_tune_text FOLDER

FOLDER/tokenizer becomes a byte-pair code of 2,048 tokens, of the source of Python's standard
library, tests included; FOLDER/man the machine's English manual pages of sections 5, 7 and 8.
"""

import argparse
import gzip
import json
import pathlib
import sysconfig
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB = 2048
END = "<|endoftext|>"
MANUALS, SECTIONS = pathlib.Path("/usr/share/man"), "578"


def python_texts() -> Iterator[str]:
    """The files of Python's standard library that are UTF-8."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        if "site-packages" in file.parts:
            continue
        try:
            yield file.read_text("utf-8")
        except UnicodeDecodeError:
            continue


def write_tokenizer(folder: pathlib.Path, texts: Iterator[str], vocab: int = VOCAB) -> None:
    """Trains a byte-pair code on texts, and writes it in the format of Hugging Face folders."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n")


def write_manuals(folder: pathlib.Path, root: pathlib.Path = MANUALS) -> int:
    """Unpacks manual pages, except references to other pages; returns their bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for file in sorted(root.glob(f"man[{SECTIONS}]/*")):
        content = file.read_bytes()
        if file.suffix == ".gz":
            content = gzip.decompress(content)
        if not content.startswith(b".so "):
            (folder / f"{file.name.removesuffix('.gz')}.txt").write_bytes(content)
            total += len(content)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    write_tokenizer(folder / "tokenizer", python_texts())
    print(f"{write_manuals(folder / 'man'):,} bytes of manual pages in {folder / 'man'}")


if __name__ == "__main__":
    main()
