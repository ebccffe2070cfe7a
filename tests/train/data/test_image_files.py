"""Files of images that were made to harm: refused, or left out, by name."""

import gzip
import os
import pickle

import numpy as np
import pytest
from PIL import Image

from tests.helpers import pictures
from train.config import Images
from train.data import image_files, image_folder, images
from train.models.resnet import ResNetConfig

FOLDER = ResNetConfig(blocks=(1,), width=8, size=8, classes=2)


def reduced(call, *args):
    """A thing whose pickle calls a function."""
    return type("Reduced", (), {"__reduce__": lambda self: (call, args)})()


def nested_tuples():
    return b"\x80\x02}K\x00" + b"\x85" * 100_000 + b"K\x01s."


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (reduced(np.ndarray, (2,), np.dtype("O"), b"A" * 16), "array of b?'O8', and not of bytes"),
        (reduced(os.getpid), "no array"),
        (reduced(np.ndarray, (2,), np.dtype("u1"), b"A" * 16), "not callable"),
        ({b"labels": [1], b"data": np.zeros((1, 3072), np.int64)}, "of b?'i8', and not of bytes"),
        ({b"labels": [1], b"data": np.array([None])}, "array of b?'O8', and not of bytes"),
        ({b"labels": [1], b"data": np.zeros((1, 3071), np.uint8)}, "a row of 3072 bytes for each"),
        ({b"labels": [1, 2], b"data": np.zeros((1, 3072), np.uint8)}, "for each of 2 labels"),
        ({b"labels": [10], b"data": np.zeros((1, 3072), np.uint8)}, "labels need numbers from 0"),
        ({b"labels": [True], b"data": np.zeros((1, 3072), np.uint8)}, "labels need numbers from"),
        ({b"labels": b"a", b"data": np.zeros((1, 3072), np.uint8)}, "labels need numbers from"),
        ({b"labels": [[[]]], b"data": []}, "labels need numbers from"),
        ([1], "labels need numbers from"),
        (b"\x80\x02]r\xff\xff\xff\xff.", "remembers more objects than it has bytes"),
        (b"\x80\x05\x96" + b"\xff" * 7 + b"\x0f.", "but only 1 remain"),
        (nested_tuples(), "more tuples than its arrays need"),
        (b"", "exhausted"),
    ],
)
def test_a_pickle_builds_lists_and_arrays_of_bytes_alone(tmp_path, batch, message):
    pictures.cifar10(tmp_path / "c")
    content = batch if isinstance(batch, bytes) else pickle.dumps(batch, protocol=3)
    (tmp_path / "c" / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match=rf"data_batch_3' is no batch of CIFAR-10: .*{message}"):
        image_files.cifar10(str(tmp_path / "c"))


def test_a_pickle_of_python_2_is_read(tmp_path):
    expected = pictures.cifar10(tmp_path / "c")
    rows = expected[:10].reshape(10, -1)
    text = lambda content: b"T" + len(content).to_bytes(4, "little") + content
    dtype = (
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNN"
        + 2 * b"J\xff\xff\xff\xff"
        + b"K\x00tb"
    )
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR"
    state = b"(K\x01(K\x0aM\x00\x0ct" + dtype + b"\x89" + text(rows.tobytes()) + b"tb"
    labels = b"U\x06labels](" + b"".join(b"K" + bytes([n]) for n in range(10)) + b"e"
    content = b"\x80\x02}(U\x04data" + made + state + labels + b"u."
    (tmp_path / "c" / "data_batch_1").write_bytes(content)
    stored = image_files.cifar10(str(tmp_path / "c"))
    np.testing.assert_array_equal(stored.load(3), expected[3].transpose(1, 2, 0))


def test_files_that_would_fill_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "_MOST_TABLE", 1000)
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"1," * 10**5))
    with pytest.raises(ValueError, match="no table of digits: it has more than 1000 bytes"):
        image_files.digits(str(tmp_path / "d.csv.gz"))
    pictures.cifar10(tmp_path / "c", is_binary=True)
    for name in ("c/data_batch_1.bin", "d.csv.gz"):
        with (tmp_path / name).open("ab") as file:
            file.truncate(3073 * 10**9)
    with pytest.raises(ValueError, match=r"data_batch_1.bin has \d+ bytes; needs at most"):
        image_files.cifar10(str(tmp_path / "c"))
    with pytest.raises(ValueError, match=r"d.csv.gz has \d+ bytes; needs at most 1000"):
        image_files.digits(str(tmp_path / "d.csv.gz"))


def test_what_is_no_file_is_refused_at_once(tmp_path):
    pictures.cifar10(tmp_path / "c")
    pictures.folder(tmp_path / "f", count=3)
    for name in ("digits", "c/data_batch_2", "f/ant/1.png"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="digits is a FIFO"):
        image_files.digits(str(tmp_path / "digits"))
    with pytest.raises(ValueError, match="data_batch_2 is a FIFO"):
        image_files.cifar10(str(tmp_path / "c"))
    stored = images.read(Images("folder", str(tmp_path / "f")), FOLDER).stored
    assert "is a FIFO" in stored.unreadable["ant/1.png"] and len(stored.names) == 5


def test_pictures_that_fill_memory_or_start_programs_or_end_early_are_left_out(tmp_path):
    pictures.folder(tmp_path / "f", count=3)
    Image.new("1", (9000, 9000)).save(tmp_path / "f" / "ant" / "0.png")
    (tmp_path / "f" / "ant" / "1.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n showpage\n"
    )
    whole = (tmp_path / "f" / "bee" / "0.png").read_bytes()
    (tmp_path / "f" / "bee" / "0.png").write_bytes(whole[: len(whole) // 2])
    reasons = images.read(Images("folder", str(tmp_path / "f")), FOLDER).stored.unreadable
    assert reasons.keys() == {"ant/0.png", "ant/1.jpg", "bee/0.png"}
    assert "has 9000 x 9000 pixels; needs at most" in reasons["ant/0.png"]
    assert "cannot identify" in reasons["ant/1.jpg"]


def test_a_record_of_images_that_is_damaged_is_refused(tmp_path):
    path = pictures.folder(tmp_path / "f", count=3)
    checked = image_folder.check(path, tmp_path / "cache")
    for text in ("[" * 60_000, "{}", '{"sha256": "a", "unreadable": [1]}'):
        (checked / "images.json").write_text(text)
        with pytest.raises(ValueError, match="images.json"):
            image_folder.folder(path, checked)
