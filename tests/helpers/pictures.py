"""Small files of images in the forms that the program reads."""

import gzip
import pathlib
import tempfile

import numpy as np
from PIL import Image

from train.config import Images
from train.data import images

LABELS = np.arange(60) % 10


def read(data: Images, model) -> images.ImageSet:
    """The images that fit a model; nothing is recorded of them."""
    with tempfile.TemporaryDirectory() as cache:
        return images.read(data, model, pathlib.Path(cache))


def digits(path: pathlib.Path, seed: int = 0) -> str:
    """Writes 60 noisy digits as scikit-learn keeps them: each class has more bright pixels."""
    pixels = np.random.default_rng(seed).integers(0, 4, (60, 64))
    pixels[np.arange(64)[None] < 6 * (1 + LABELS)[:, None]] = 16
    lines = [",".join(map(str, [*row, label])) for row, label in zip(pixels, LABELS, strict=True)]
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    return str(path)


def cifar10(path: pathlib.Path) -> np.ndarray:
    """Writes six batches of ten images; returns all of them, u8[60, 3, 32, 32]."""
    path.mkdir(exist_ok=True)
    pixels = np.random.default_rng(1).integers(0, 256, (60, 3, 32, 32), dtype=np.uint8)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, rows in zip(names, pixels.reshape(6, 10, -1), strict=True):
        labels = np.arange(10, dtype=np.uint8)[:, None]
        (path / f"{name}.bin").write_bytes(np.concatenate([labels, rows], axis=1).tobytes())
    return pixels


def folder(path: pathlib.Path, parts: tuple[str, ...] = ("",), count: int = 6) -> str:
    """Writes pictures of 20x12 in two classes, in each part: red ones and blue ones."""
    for part in parts:
        for place, name in ((0, "ant"), (2, "bee")):
            where = path / part / name
            where.mkdir(parents=True)
            for number in range(count):
                pixels = np.zeros((12, 20, 3), np.uint8)
                pixels[..., place] = 200 + number
                pixels[:, 10:, 1] = 255  # the right half, to see what is mirrored
                Image.fromarray(pixels).save(where / f"{number}.png")
    return str(path)
