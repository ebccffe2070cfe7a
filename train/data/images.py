"""Images with labels: reading, the validation part, and batches."""

import functools
import hashlib
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np

from train.data import image_files, image_folder
from train.data.held_out import held_out
from train.data.image_files import Stored
from train.data.sources import Images

_EPOCHS, _CROPS = 0, 1  # last word of Philox's counter: the purpose of the draw
_MOVES = {"digits": 1, "cifar10": 4}  # most pixels by which a small image is shifted
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a crop
_CENTRE = 7 / 8  # of the shorter side, for validation images


class ImageSet(NamedTuple):
    """Two disjoint parts of stored images, and the record of where they came from.

    Attributes:
      stored: All images.
      train: i64[size], numbers of the training images.
      validation: i64[size], numbers of the held-out images.
      shape: Height, width and channels of an image for the model.
      form: Their format, from `Images`.
      record: Source, sha256, and counts of images; plain values, for the record of the run.
    """

    stored: Stored
    train: np.ndarray
    validation: np.ndarray
    shape: tuple[int, int, int]
    form: str
    record: dict[str, str | int]


class Fitting(Protocol):
    """What the images have to fit: the size and the classes of a model's configuration."""

    size: int
    channels: int
    classes: int


def read(settings: Images, model: Fitting, cache: pathlib.Path) -> ImageSet:
    """Finds the images that a configuration names and holds out a part of them.

    That is the data set's own validation part, if it has one. Otherwise it is each image whose hash
    (in a folder: the hash of its name) is below `validation_fraction`. So copies of one image stay
    together, and the choice does not depend on other images.

    Args:
      settings: What to read.
      model: Gives the size, channels and classes that the images must have; images of a folder are
        scaled.
      cache: Folder that records which images of a folder can be read, see `image_folder`.

    Returns:
      The images, equal on every machine with the same files.

    Raises:
      ValueError: If something is missing or broken, or does not fit the model.
    """
    form, path = settings.form, settings.path
    if form == "folder":
        stored = image_folder.read(path, cache)
    else:
        stored = getattr(image_files, form)(path)
    shape = (model.size, model.size, model.channels)
    found = {"size": model.size, "channels": model.channels, "classes": model.classes}
    needed = found | {"classes": stored.classes}
    if stored.shape is not None:
        needed |= {"size": stored.shape[0], "channels": stored.shape[2]}
    elif model.channels not in (1, 3):
        needed |= {"channels": 3}
    if found != needed:
        flags = " ".join(f"--model.{name} {value}" for name, value in needed.items())
        raise ValueError(f"the images of {form} do not fit {found} of the model; write {flags}.")
    held = stored.validation
    if held is None:
        held = np.array(held_out(stored.names, settings.validation_fraction))
    train, validation = np.flatnonzero(~held), np.flatnonzero(held)
    for part, numbers in (("train", train), ("validation", validation)):
        if not numbers.size:
            raise ValueError(
                f"{form} leaves none of {len(held)} images for {part}; add images, or change "
                f"data.validation_fraction={settings.validation_fraction}."
            )
    record = {
        "source": f"{form}:{path or 'scikit-learn'}",
        "sha256": hashlib.sha256(f"{stored.sha256} {held.tobytes().hex()}".encode()).hexdigest(),
        "images": len(held),
        "train_images": train.size,
        "validation_images": validation.size,
    }
    if stored.unreadable:
        record |= {"unreadable_images": len(stored.unreadable)}
    return ImageSet(stored, train, validation, shape, form, record)


def batch(
    images: ImageSet, seed: int, seen: int, batch_size: int, rows: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Draws the images of one step: a pure function of its arguments.

    Every epoch has each image once, in a new order; a batch may span two epochs. A row does not
    depend on the process that makes it, so each process makes only its own.

    Digits are shifted by up to one pixel. CIFAR-10 images are shifted by up to 4 pixels, and
    mirrored half of the time. From an image in a folder, a random part is scaled to the model's
    size, 8% to 100% of the area at a ratio of 3:4 to 4:3 (cut at the edges), and mirrored half of
    the time.

    Args:
      images: From `read`. seed: Seed of the run, in [0, 2^64).
      seen: Number of images in earlier steps.
      batch_size: Images of the whole step.
      rows: Which of them to make.

    Returns:
      {"images": u8[rows, height, width, channels], "labels": i32[rows]}.
    """
    size = images.train.size
    places = [seen + row for row in range(*rows.indices(batch_size))]
    numbers = [images.train[_order(seed, place // size, size)[place % size]] for place in places]
    return _rows(images, numbers, [_draws(seed, place, _CROPS, 5) for place in places])


def validation_batch(
    images: ImageSet, index: int, num_batches: int, batch_size: int, rows: slice = slice(None)
) -> dict[str, np.ndarray]:
    """Makes one of the fixed validation batches: images evenly spaced over those held out.

    They are the same for every run, seed and step. Images repeat only if there are too few. Images
    of a folder are center crops, 7/8 of the shorter side.

    Args:
      images: From `read`. index: Index of the batch, in [0, num_batches).
      num_batches: Validation batches of one evaluation.
      batch_size: Images of a batch.
      rows: Which of the batch's images to make.

    Returns:
      As `batch`.
    """
    held, total = images.validation, num_batches * batch_size
    places = [index * batch_size + row for row in range(*rows.indices(batch_size))]
    numbers = [held[place * held.size // total] for place in places]
    return _rows(images, numbers, [None] * len(numbers))


def _draws(seed: int, number: int, purpose: int, count: int) -> np.ndarray:
    """f64[count] in [0, 1), from raw words of Philox, which are stable across NumPy versions."""
    words = np.random.Philox(key=seed, counter=purpose << 128 | number << 64).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, size: int) -> np.ndarray:
    return np.argsort(_draws(seed, epoch, _EPOCHS, size), kind="stable")


def _rows(images: ImageSet, numbers, draws) -> dict[str, np.ndarray]:
    def make(number, draw):
        image = images.stored.load(int(number))
        if images.form == "folder":
            return _scaled(image, images.shape, draw)
        return image if draw is None else _moved(image, images.form, draw)

    with ThreadPoolExecutor() as pool:
        made = list(pool.map(make, numbers, draws))
    pixels = np.stack(made) if made else np.zeros((0, *images.shape), np.uint8)
    return {"images": pixels, "labels": images.stored.labels[np.array(numbers, int)]}


def _moved(image: np.ndarray, form: str, draw: np.ndarray) -> np.ndarray:
    """Shifts an image, black beyond its edges; mirrors it unless it is a digit: He et al., 2016."""
    most = _MOVES[form]
    padded = np.pad(image, ((most, most), (most, most), (0, 0)))
    down, right = (int(x * (2 * most + 1)) for x in draw[:2])
    moved = padded[down : down + image.shape[0], right : right + image.shape[1]]
    return moved[:, ::-1] if form != "digits" and draw[2] < 0.5 else moved


def _scaled(picture, shape: tuple[int, int, int], draw: np.ndarray | None) -> np.ndarray:
    """A part of an image as u8[shape]: the center, or a random part, mirrored or not.

    Szegedy et al., "Going Deeper with Convolutions", 2015.
    """
    from PIL import Image

    if draw is None:
        width = height = _CENTRE * min(picture.size)
        left, top = 0.5, 0.5
    else:
        area = np.prod(picture.size) * (_AREA[0] + draw[0] * (_AREA[1] - _AREA[0]))
        ratio = _RATIO[0] * (_RATIO[1] / _RATIO[0]) ** draw[1]
        width = min(picture.size[0], (area * ratio) ** 0.5)
        height = min(picture.size[1], (area / ratio) ** 0.5)
        left, top = draw[2:4]
    left, top = left * (picture.size[0] - width), top * (picture.size[1] - height)
    colours = picture.convert("RGB" if shape[2] == 3 else "L")
    box = (left, top, left + width, top + height)
    scaled = colours.resize(shape[1::-1], Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(scaled, np.uint8).reshape(shape)
    return pixels[:, ::-1] if draw is not None and draw[4] < 0.5 else pixels
