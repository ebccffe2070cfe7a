"""Files of images that were made to harm: refused, or left out, by name."""

import gzip
import os

import pytest
from PIL import Image

from tests.helpers import pictures
from train.config import Images
from train.data import image_files, image_folder
from train.models.resnet import ResNetConfig

FOLDER = ResNetConfig(blocks=(1,), width=8, size=8, classes=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3072), r"data_batch_3.bin' is no batch of CIFAR-10: rows have 3073 bytes"),
        (b"", r"data_batch_3.bin' is no batch of CIFAR-10: rows have 3073 bytes"),
        (b"\x0a" + bytes(3072), r"has a class that is not in \[0, 10\)"),
    ],
)
def test_a_broken_batch_is_refused(tmp_path, content, message):
    pictures.cifar10(tmp_path / "c")
    (tmp_path / "c" / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        image_files.cifar10(str(tmp_path / "c"))


def test_pickles_are_not_read(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds pickles.*folder of cifar-10-binary.tar.gz\."):
        image_files.cifar10(str(tmp_path))


def test_files_that_would_fill_memory_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "_MOST_TABLE", 1000)
    (tmp_path / "d.csv.gz").write_bytes(gzip.compress(b"1," * 10**5))
    with pytest.raises(ValueError, match="no table of digits: it has more than 1000 bytes"):
        image_files.digits(str(tmp_path / "d.csv.gz"))
    pictures.cifar10(tmp_path / "c")
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
    for name in ("digits", "c/data_batch_2.bin", "f/ant/1.png"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match="digits is a FIFO"):
        image_files.digits(str(tmp_path / "digits"))
    with pytest.raises(ValueError, match="data_batch_2.bin is a FIFO"):
        image_files.cifar10(str(tmp_path / "c"))
    stored = pictures.read(Images("folder", str(tmp_path / "f")), FOLDER).stored
    assert "is a FIFO" in stored.unreadable["ant/1.png"] and len(stored.names) == 5


def test_pictures_that_fill_memory_or_start_programs_or_end_early_are_left_out(tmp_path):
    pictures.folder(tmp_path / "f", count=3)
    Image.new("1", (9000, 9000)).save(tmp_path / "f" / "ant" / "0.png")
    (tmp_path / "f" / "ant" / "1.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n showpage\n"
    )
    whole = (tmp_path / "f" / "bee" / "0.png").read_bytes()
    (tmp_path / "f" / "bee" / "0.png").write_bytes(whole[: len(whole) // 2])
    reasons = pictures.read(Images("folder", str(tmp_path / "f")), FOLDER).stored.unreadable
    assert reasons.keys() == {"ant/0.png", "ant/1.jpg", "bee/0.png"}
    assert "has 9000 x 9000 pixels; needs at most" in reasons["ant/0.png"]
    assert "cannot identify" in reasons["ant/1.jpg"]


def test_a_record_of_images_that_is_damaged_is_refused(tmp_path):
    path = pictures.folder(tmp_path / "f", count=3)
    image_folder.read(path, tmp_path / "cache")
    (checked,) = (tmp_path / "cache").iterdir()
    for text in ("[" * 60_000, "{}", '{"sha256": "a", "unreadable": [1]}'):
        (checked / "images.json").write_text(text)
        with pytest.raises(ValueError, match="images.json"):
            image_folder.read(path, tmp_path / "cache")
