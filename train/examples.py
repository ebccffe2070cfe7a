"""Training examples of any kind: rows of batches, made by number."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxcomp.launch import agree
from jaxcomp.launch.exits import say
from train.config import Config
from train.data import image_folder, images, packing, texts, token_files
from train.data.sources import Data, Images
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
    data, model, seed, batches = config.data, config.model, config.seed, config.eval_batches
    folder = Path(data.cache or Path(config.runs_dir, config.name, "data"))
    if isinstance(data, Images):
        return _images(_image_set(data, model, folder, config.name), data.batch, seed, batches)
    corpus = _corpus(data, model.vocab, folder)
    if data.packed:
        return _documents(corpus, data, model.context, seed, batches)
    prepare = OBJECTIVES[config.objective].prepare
    return _text(corpus, data, model.context, prepare, seed, batches)


def none(config: Config) -> Examples:
    """No examples, for callers that only need to know what a step sends."""

    def refuse(number, rows, seen=None):
        raise RuntimeError(f"{config.name} was made without its data: it cannot be trained.")

    return Examples({}, refuse, refuse)


def _corpus(data: Data, vocab: int, folder: Path) -> Corpus:
    """The tokens, made by process 0 for all that see its files; other hosts make their own."""
    prepare = lambda: token_files.prepare(data, folder, vocab)
    made = Path(agree.from_first(lambda: str(prepare())))
    corpus = token_files.load(made if made.is_dir() else prepare())
    token_files.require_fit(corpus.vocab, vocab, data)
    return corpus


def _text(
    corpus: Corpus, data: Data, context: int, prepare: Callable, seed: int, batches: int
) -> Examples:
    size = data.batch
    texts.require_enough(corpus, data, context)

    def keyed(tokens, rows, *key, first=0):
        return prepare(tokens, [[*key, first + row] for row in range(*rows.indices(size))])

    def train(step, rows, seen=None):
        tokens = texts.batch(corpus.train, seed, step, size, context, rows)
        return keyed(tokens, rows, seed, step)

    def validation(number, rows):
        sizes = (batches, size, context)
        tokens = texts.validation_batch(corpus.validation, number, *sizes, rows)
        # By its place among all: what is hidden of a row does not depend on the size of a batch.
        return keyed(tokens, rows, first=number * size)

    return Examples(corpus.record, train, validation)


def _documents(corpus: Corpus, data: Data, context: int, seed: int, batches: int) -> Examples:
    size = data.batch
    made = {name: packing.pack(part, context) for name, part in corpus.parts.items()}
    for name, packed in made.items():
        every, few = range(packed.starts.size), packing.evenly_spaced(packed, batches * size)
        if not every or not packing.has_targets(packed, every if name == "train" else few):
            raise ValueError(
                f"{corpus.record['source']} leaves nothing to predict for {name}, which needs a "
                "document of two tokens, or a chat with an answer; add some, or change "
                f"data.validation_fraction={data.validation_fraction}."
            )
    record = corpus.record | {"train_sequences": made["train"].starts.size}

    def train(step, rows, seen=None):
        seen = step * size if seen is None else seen
        return packing.batch(made["train"], seed, seen, size, rows)

    def validation(number, rows):
        return packing.validation_batch(made["validation"], number, batches, size, rows)

    return Examples(record, train, validation)


def _image_set(data: Images, model: Any, folder: Path, name: str) -> images.ImageSet:
    """The images; process 0 says which cannot be read."""
    if data.form == "folder":
        agree.from_first(lambda: image_folder.read(data.path, folder).sha256)
    made = images.read(data, model, folder)
    if (broken := made.stored.unreadable) and agree.is_first():
        reasons = " ".join([*broken.values()][:3])
        say(
            f"{name}: {len(broken)} of {len(broken) + made.record['images']} images cannot "
            f"be read and are left out: {reasons}"
        )
    return made


def _images(made: images.ImageSet, size: int, seed: int, batches: int) -> Examples:
    def train(step, rows, seen=None):
        return images.batch(made, seed, step * size if seen is None else seen, size, rows)

    def validation(number, rows):
        return images.validation_batch(made, number, batches, size, rows)

    return Examples(made.record, train, validation)
