"""What a run learns from, whatever it is: rows of batches, made by number."""

from collections.abc import Callable
from typing import Any, NamedTuple

from train.config import Config
from train.data import images, texts
from train.data.sources import Images
from train.models.objectives import OBJECTIVES


class Examples(NamedTuple):
    """Batches as functions of their number: a row is the same whichever process makes it.

    Attributes:
      record: Where the examples come from, with the sha256 of all; plain values.
      train: (step, rows) -> those rows of the step's batch, a pytree of NumPy arrays.
      validation: (number, rows) -> those rows of one of the fixed validation batches.
    """

    record: dict[str, str | int]
    train: Callable[[int, slice], Any]
    validation: Callable[[int, slice], Any]


def read(config: Config) -> Examples:
    """Reads the text or the images that a configuration names.

    Raises:
      ValueError: If something is missing or unreadable, or does not fit the model.
    """
    return (_images if isinstance(config.data, Images) else _text)(config)


def none(config: Config) -> Examples:
    """No examples, of whoever only wants to know what a step sends."""

    def refuse(number, rows):
        raise RuntimeError(f"{config.name} was made without its data: it cannot be trained.")

    return Examples({}, refuse, refuse)


def _text(config: Config) -> Examples:
    size, context = config.data.batch, config.model.context
    corpus = texts.read(config.data, context)
    prepare = OBJECTIVES[config.objective].prepare

    def keyed(tokens, rows, *key):
        return prepare(tokens, [[*key, row] for row in range(*rows.indices(size))])

    def train(step, rows):
        tokens = texts.batch(corpus.train, config.seed, step, size, context, rows)
        return keyed(tokens, rows, config.seed, step)

    def validation(number, rows):
        sizes = (config.eval_batches, size, context)
        return keyed(texts.validation_batch(corpus.validation, number, *sizes, rows), rows, number)

    return Examples(corpus.record, train, validation)


def _images(config: Config) -> Examples:
    size = config.data.batch
    made = images.read(config.data, config.model)

    def train(step, rows):
        return images.batch(made, config.seed, step, size, rows)

    def validation(number, rows):
        return images.validation_batch(made, number, config.eval_batches, size, rows)

    return Examples(made.record, train, validation)
