"""Training examples of any kind: rows of batches, made by number."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxcomp.launch import agree
from train.config import Config
from train.data import image_folder, images, packing, texts, token_files
from train.data.sources import Images
from train.data.token_files import Corpus
from train.models.objectives import OBJECTIVES


class Examples(NamedTuple):
    """Batches as functions of their number; a row does not depend on the process that makes it.

    Attributes:
      record: Source of the examples, with the sha256 of all; plain values.
      train: (step, rows, seen=None) -> those rows of the step's batch, a pytree of NumPy arrays.
        `seen` is the number of examples in earlier steps; by default they had as many as this one.
      validation: (number, rows) -> those rows of a fixed validation batch.
    """

    record: dict[str, str | int]
    train: Callable[..., Any]
    validation: Callable[[int, slice], Any]


def read(config: Config) -> Examples:
    """Reads the text or the images that a configuration names.

    Raises:
      ValueError: If something is missing or unreadable, or does not fit the model.
    """
    if isinstance(config.data, Images):
        return _images(config)
    corpus = _corpus(config)
    return (_documents if config.data.packed else _text)(config, corpus)


def none(config: Config) -> Examples:
    """No examples, for callers that only need to know what a step sends."""

    def refuse(number, rows, seen=None):
        raise RuntimeError(f"{config.name} was made without its data: it cannot be trained.")

    return Examples({}, refuse, refuse)


def _folder(config: Config) -> Path:
    """The folder for processed data: the run's own, unless the config names a cache."""
    return Path(config.data.cache or Path(config.runs_dir, config.name, "data"))


def _corpus(config: Config) -> Corpus:
    """The tokens, made by process 0 for all that see its files; other hosts make their own."""
    data, vocab = config.data, config.model.vocab
    prepare = lambda: token_files.prepare(data, _folder(config), vocab)
    made = Path(agree.from_first(lambda: str(prepare())))
    corpus = token_files.load(made if made.is_dir() else prepare())
    token_files.require_fit(corpus.vocab, vocab, data)
    return corpus


def _text(config: Config, corpus: Corpus) -> Examples:
    size, context = config.data.batch, config.model.context
    prepare = OBJECTIVES[config.objective].prepare
    texts.require_enough(corpus, config.data, context)

    def keyed(tokens, rows, *key, first=0):
        return prepare(tokens, [[*key, first + row] for row in range(*rows.indices(size))])

    def train(step, rows, seen=None):
        tokens = texts.batch(corpus.train, config.seed, step, size, context, rows)
        return keyed(tokens, rows, config.seed, step)

    def validation(number, rows):
        sizes = (config.eval_batches, size, context)
        tokens = texts.validation_batch(corpus.validation, number, *sizes, rows)
        # By its place among all: what is hidden of a row does not depend on the size of a batch.
        return keyed(tokens, rows, first=number * size)

    return Examples(corpus.record, train, validation)


def _documents(config: Config, corpus: Corpus) -> Examples:
    size, context = config.data.batch, config.model.context
    made = {name: packing.pack(part, context) for name, part in corpus.parts.items()}
    for name, packed in made.items():
        if not packed.starts.size:
            raise ValueError(
                f"{corpus.record['source']} leaves no document for {name}; add some, or change "
                f"data.validation_fraction={config.data.validation_fraction}."
            )
    record = corpus.record | {"train_sequences": made["train"].starts.size}

    def train(step, rows, seen=None):
        seen = step * size if seen is None else seen
        return packing.batch(made["train"], config.seed, seen, size, rows)

    def validation(number, rows):
        return packing.validation_batch(made["validation"], number, config.eval_batches, size, rows)

    return Examples(record, train, validation)


def _images(config: Config) -> Examples:
    size = config.data.batch
    settings = config.data
    if settings.form == "folder":
        agree.from_first(lambda: str(image_folder.check(settings.path, _folder(config))))
    made = images.read(settings, config.model, _folder(config))
    if (broken := made.stored.unreadable) and agree.is_first():
        reasons = " ".join([*broken.values()][:3])
        print(
            f"{config.name}: {len(broken)} of {len(broken) + made.record['images']} images cannot "
            f"be read and are left out: {reasons}",
            file=sys.stderr,
        )

    def train(step, rows, seen=None):
        return images.batch(made, config.seed, step * size if seen is None else seen, size, rows)

    def validation(number, rows):
        return images.validation_batch(made, number, config.eval_batches, size, rows)

    return Examples(made.record, train, validation)
