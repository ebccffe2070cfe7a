"""Files of images, and the record of those that can be read."""

import functools
import io
import json

import numpy as np
import pytest
from hypothesis import strategies as st

from tests.helpers import pictures
from tests.helpers.fuzzing import fuzz, octets, refused, texts, trees
from train.data import image_files, image_folder


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    pictures.cifar10(folder / "binary")
    return folder


@fuzz(octets(bytes(3073 * 2)))
def test_batches_of_cifar10(cifar, content):
    (cifar / "binary" / "data_batch_2.bin").write_bytes(content)
    if (found := refused(image_files.cifar10, str(cifar / "binary"))) is not None:
        assert found.labels.max() < 10


LINE = ",".join(["0", "16", "3", "8"] * 16 + ["7"]) + "\n"


@fuzz(st.one_of(octets(LINE.encode() * 2), st.just(b"\x1f\x8b" + LINE.encode())))
def test_tables_of_digits(tmp_path, content):
    (tmp_path / "digits.csv").write_bytes(content)
    if (found := refused(image_files.digits, str(tmp_path / "digits.csv"))) is not None:
        assert found.load(0).shape == (8, 8, 1) and 0 <= found.labels.min() <= found.labels.max()


@functools.cache
def drawn(form):
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 3), dtype=np.uint8)
    made = io.BytesIO()
    Image.fromarray(pixels).save(made, form)
    return made.getvalue()


FORMS = st.sampled_from(image_folder._FORMATS)


@fuzz(st.deferred(lambda: FORMS.flatmap(lambda form: octets(drawn(form)))))
def test_pictures(tmp_path, content):
    (tmp_path / "a.png").write_bytes(content)
    if (found := refused(image_folder.picture, tmp_path / "a.png")) is not None:
        assert np.asarray(found.convert("RGB")).shape[2] == 3


@fuzz(
    st.one_of(
        texts('{"sha256": "a", "unreadable": {}}'), trees().map(lambda x: json.dumps(x).encode())
    )
)
def test_records_of_pictures(cifar, text):
    path, cache = cifar / "folder", cifar / "cache"
    if not path.exists():
        image_folder.read(pictures.folder(path, count=1), cache)
    (checked,) = cache.iterdir()
    (checked / "images.json").write_bytes(text)
    refused(image_folder.read, str(path), cache)
