"""Training examples of any kind: rows of batches, made by number."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
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
    data = config.data
    folder = Path(data.cache or Path(config.runs_dir, config.name, "data"))
    if isinstance(data, Images):
        made = _image_set(data, config.model, folder, config.name)
        return _in_epochs(config, images, made.record, made, made)
    corpus = _corpus(data, config.model.vocab, folder)
    made = (_documents if data.packed else _text)(config, corpus)
    train, validation = (_whole(corpus, make) for make in (made.train, made.validation))
    return made._replace(train=train, validation=validation)


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


def _whole(corpus: Corpus, make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes rows while the files of a corpus are whole."""

    def made(*args, **options):
        token_files.require_whole(corpus)
        return make(*args, **options)

    return made


def _text(config: Config, corpus: Corpus) -> Examples:
    context, size = config.model.context, config.data.batch
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
    context, most = config.model.context, config.eval_batches * config.data.batch
    made = {name: packing.pack(part, context) for name, part in corpus.parts.items()}
    for name, packed in made.items():
        every, few = range(packed.starts.size), packing.evenly_spaced(packed, most)
        if not every or not packing.has_targets(packed, every if name == "train" else few):
            raise ValueError(
                f"{corpus.record['source']} leaves nothing to predict for {name}, which needs a "
                "document of two tokens, or a chat with an answer; add some, or change "
                f"data.validation_fraction={config.data.validation_fraction}."
            )
    record = corpus.record | {"train_sequences": made["train"].starts.size}
    return _in_epochs(config, packing, record, made["train"], made["validation"])


def _in_epochs(config: Config, kind: ModuleType, record: dict, train: Any, held: Any) -> Examples:
    """Examples that every epoch has once, in batches of a module: `packing` or `images`."""
    size = config.data.batch

    def batch(step, rows, seen=None):
        seen = step * size if seen is None else seen
        return kind.batch(train, config.seed, seen, size, rows)

    def validation(number, rows):
        return kind.validation_batch(held, number, config.eval_batches, size, rows)

    return Examples(record, batch, validation)


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
