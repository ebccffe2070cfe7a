"""Batches of sequences that begin anywhere in a text."""

import pathlib
import tempfile

import numpy as np

from train.data import token_files
from train.data.sources import Data
from train.data.token_files import Corpus as Corpus


def read(data: Data, context: int) -> Corpus:
    """Tokenizes the text that a configuration names, once, and maps the tokens into memory.

    Args:
      data: What to read; see `token_files.prepare`.
      context: Tokens of one sequence, to check that there is enough text.

    Returns:
      The corpus, equal on every machine with the same names and contents. Its files have no names,
      and end with the process.

    Raises:
      ValueError: If something is missing, unreadable, not text, or too short.
    """
    with tempfile.TemporaryDirectory() as folder:
        corpus = token_files.load(token_files.prepare(data, pathlib.Path(folder)))
    require_enough(corpus, data, context)
    return corpus


def require_enough(corpus: Corpus, data: Data, context: int) -> None:
    """Raises a ValueError if a part of a corpus is shorter than one sequence."""
    unit = "bytes" if data.tokenizer is None else "tokens"
    for part in ("train", "validation"):
        if (size := getattr(corpus, part).size) <= context:
            whole, count = (corpus.record.get(name) for name in ("documents", f"{part}_documents"))
            which = f", in {count} of {whole} documents" if whole and whole > 1 else ""
            raise ValueError(
                f"{corpus.record['source']} leaves {size} {unit} for {part}{which}, but one "
                f"sequence needs {context + 1}; add text, or lower model.context or change "
                f"data.validation_fraction={data.validation_fraction}."
            )


def batch(
    tokens: np.ndarray,
    seed: int,
    step: int,
    batch_size: int,
    context: int,
    rows: slice = slice(None),
) -> np.ndarray:
    """Draws the sequences of one step: a pure function of its arguments.

    Positions are uniform over the text, with replacement. A row does not
    depend on the process that makes it, so each process makes only its own.

    Args:
      tokens: [size] of whole numbers, size > context.
      seed: Seed of the run, in [0, 2^64).
      step: Step of the optimizer, in [0, 2^64).
      batch_size: Sequences of the whole step.
      context: Tokens to predict in a sequence.
      rows: Which of the sequences to make.

    Returns:
      i32[rows, context + 1]; inputs are `[:, :-1]`, targets `[:, 1:]`.
    """
    # Raw words of Philox are stable across NumPy versions; samplers may not be. The step is the
    # counter's second word: the first one counts the words drawn.
    words = np.random.Philox(key=seed, counter=step << 64).random_raw(batch_size)
    return _windows(tokens, words[rows] % np.uint64(tokens.size - context), context)


def validation_batch(
    tokens: np.ndarray,
    index: int,
    num_batches: int,
    batch_size: int,
    context: int,
    rows: slice = slice(None),
) -> np.ndarray:
    """Makes one of the fixed validation batches: sequences evenly spaced over the text.

    They are the same for every run, seed and step. Sequences overlap only if the text is too short
    for all of them.

    Args:
      tokens: [size] of whole numbers, size > context.
      index: Index of the batch, in [0, num_batches).
      num_batches: Validation batches of one evaluation.
      batch_size: Sequences of a batch.
      context: Tokens to predict in a sequence.
      rows: Which of the batch's sequences to make.

    Returns:
      i32[rows, context + 1].
    """
    total = num_batches * batch_size
    number = np.arange(index * batch_size, (index + 1) * batch_size)[rows]
    return _windows(tokens, number * (tokens.size - context - 1) // max(1, total - 1), context)


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    positions = starts.astype(np.int64)[:, None] + np.arange(context + 1)[None, :]
    return tokens[positions].astype(np.int32)
