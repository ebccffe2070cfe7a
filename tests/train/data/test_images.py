"""Images: what is read, what is held out, what a step sees, and that models learn from it."""

import dataclasses
import functools
import gzip
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from tests.helpers import pictures
from tests.helpers.tiny_runs import tiny_config
from train import examples, loop
from train.config import Images
from train.config import run as configs
from train.data import image_files, image_folder, images
from train.models.modules import PathRngs, split
from train.models.objectives import OBJECTIVES
from train.models.resnet import ResNet, ResNetConfig
from train.models.swin import Block as SwinBlock
from train.models.swin import Swin, SwinConfig, _offsets
from train.models.vit import ViT, ViTConfig

DIGITS = ResNetConfig(blocks=(1,), width=8, stem="plain", size=8, channels=1, classes=10)
CIFAR10 = ResNetConfig(blocks=(1,), width=8, size=32, classes=10)
FOLDER = ResNetConfig(blocks=(1,), width=8, size=8, classes=2)
SETS = ("digits", "cifar10", "folder")


def made(form, tmp_path, fraction=0.2):
    if form == "digits":
        path, model = pictures.digits(tmp_path / "digits.csv.gz"), DIGITS
    elif form == "cifar10":
        pictures.cifar10(tmp_path / "cifar")
        path, model = str(tmp_path / "cifar"), CIFAR10
    else:
        path, model = pictures.folder(tmp_path / "folder", count=20), FOLDER
    return pictures.read(Images(form, path, validation_fraction=fraction), model)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.fixture(params=SETS)
def some(request, tmp_path):
    return made(request.param, tmp_path)


# What is read.


def test_digits_are_read_whole_and_scaled_to_bytes(tmp_path):
    stored = image_files.digits(pictures.digits(tmp_path / "d.csv.gz"))
    np.testing.assert_array_equal(stored.labels, pictures.LABELS)
    image = stored.load(7)
    assert image.shape == (8, 8, 1) and image.dtype == np.uint8
    # Of class 7 48 pixels are bright; 16 of 16 is 255, and n of 16 is found again.
    assert np.all(image[:6] == 255) and np.all(image[6:] < 255)
    assert set(np.unique(image)) <= {round(n * 255 / 16) for n in range(17)}


def test_cifar10_is_read_in_colour_with_its_own_validation(tmp_path):
    expected = pictures.cifar10(tmp_path / "c")
    found = pictures.read(Images("cifar10", str(tmp_path / "c")), CIFAR10)
    for number in (0, 33, 59):
        np.testing.assert_array_equal(
            found.stored.load(number), expected[number].transpose(1, 2, 0)
        )
    np.testing.assert_array_equal(found.stored.labels, pictures.LABELS)
    np.testing.assert_array_equal(found.validation, np.arange(50, 60))


def test_folder_has_its_own_validation_and_classes_by_name(tmp_path):
    path = pictures.folder(tmp_path / "f", ("train", "val"), count=3)
    found = pictures.read(Images("folder", path), FOLDER)
    assert found.train.size == found.validation.size == 6
    rows = images.validation_batch(found, 0, 1, 6)
    np.testing.assert_array_equal(rows["labels"], [0, 0, 0, 1, 1, 1])
    assert rows["images"].shape == (6, 8, 8, 3)
    # The middle of 20x12, ten of its pixels wide: half of it is of the green side.
    assert rows["images"][0, 0, 0].tolist() == [200, 0, 0]
    assert rows["images"][3, 0, -1].tolist() == [0, 255, 200]


def test_copies_of_a_digit_are_held_out_together(tmp_path):
    file = pictures.digits(tmp_path / "d.csv.gz")
    content = (tmp_path / "d.csv.gz").read_bytes()
    (tmp_path / "d.csv.gz").write_bytes(content + content)  # gzip's files may be joined
    found = pictures.read(Images("digits", file), DIGITS)
    of = lambda numbers: {found.stored.load(n).tobytes() for n in numbers}
    assert not of(found.train) & of(found.validation) and of(found.validation)


def test_record_sees_contents_and_the_share_held_out(tmp_path):
    hashes = {made("digits", tmp_path, fraction).record["sha256"] for fraction in (0.2, 0.2, 0.5)}
    pictures.digits(tmp_path / "other.csv.gz", seed=1)
    other = pictures.read(Images("digits", str(tmp_path / "other.csv.gz")), DIGITS)
    assert len(hashes) == 2 and other.record["sha256"] not in hashes
    path = pictures.folder(tmp_path / "f", count=20)
    before = pictures.read(Images("folder", path), FOLDER).record["sha256"]
    file = tmp_path / "f" / "ant" / "0.png"
    size = file.stat().st_size
    Image.fromarray(np.full((12, 20, 3), 9, np.uint8)).save(file, compress_level=0)
    file.write_bytes(file.read_bytes()[:-12].ljust(size, b"\0"))  # as many bytes
    assert pictures.read(Images("folder", path), FOLDER).record["sha256"] != before


def test_images_that_cannot_be_read_are_left_out_and_looked_at_once(tmp_path, capsys, monkeypatch):
    path, cache = pictures.folder(tmp_path / "f", count=20), tmp_path / "cache"
    whole = images.read(Images("folder", path), FOLDER, cache)
    file = tmp_path / "f" / "bee" / "3.png"
    content = file.read_bytes()
    file.write_bytes(content[:-30])
    (tmp_path / "f" / "bee" / "gone.png").symlink_to(tmp_path / "nothing")
    data = Images("folder", path, cache=str(cache))
    config = tiny_config(tmp_path, objective="classify", model=FOLDER, data=data)
    made = examples.read(config)
    said = capsys.readouterr().err
    assert said.startswith("run: 2 of 41 images cannot be read and are left out: ")
    assert "bee/3.png' cannot be read as an image" in said and "gone.png" in said
    assert made.record["unreadable_images"] == 2 and made.record["images"] == 39
    assert made.record["sha256"] != whole.record["sha256"]
    made.train(0, slice(None))
    # What was found out is read again, not the images; that of mended ones is new.
    with monkeypatch.context() as patch:
        patch.setattr(image_folder, "_look", None)
        assert examples.read(config).record == made.record
    (tmp_path / "f" / "bee" / "gone.png").unlink()
    file.write_bytes(content)
    assert examples.read(config).record == whole.record


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"1,2,3\n", "each line needs 64 whole numbers"),
        (b"17," * 64 + b"1", "each line needs 64 whole numbers"),
        (b"1," * 64 + b"12", "a class that is not in"),
        (b"text", "is no table of digits"),
        (b"\x1f\x8bbroken", "is no table of digits"),
        (gzip.compress(b"text", mtime=0)[:10] + b"\x07" * 20, "is no table of digits"),
        (b"nan," * 64 + b"1", "each line needs 64 whole numbers"),
        (b"1," * 64 + b"1", "leaves none of 1 images for train"),
    ],
)
def test_file_that_is_no_table_of_digits_is_refused(tmp_path, content, message):
    (tmp_path / "d.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        pictures.read(Images("digits", str(tmp_path / "d.csv")), DIGITS)


@pytest.mark.parametrize(
    ("form", "model", "message"),
    [
        ("digits", CIFAR10, "--model.size 8 --model.channels 1 --model.classes 10"),
        ("cifar10", DIGITS, "--model.size 32 --model.channels 3 --model.classes 10"),
        ("folder", CIFAR10, "--model.size 32 --model.channels 3 --model.classes 2"),
    ],
)
def test_images_that_do_not_fit_the_model_are_refused(tmp_path, form, model, message):
    found = made(form, tmp_path)
    path = str(tmp_path / {"digits": "digits.csv.gz", "cifar10": "cifar"}.get(form, form))
    with pytest.raises(ValueError, match=message):
        pictures.read(Images(form, path), model)
    assert found.record["images"] > 0


@pytest.mark.parametrize("parts", [("",), ("train", "val")])
def test_a_folder_without_images_is_no_class_without_a_word(tmp_path, parts):
    path = pictures.folder(tmp_path / "f", parts, count=20)
    for name in ("cat", ".git"):
        (tmp_path / "f" / parts[0] / name).mkdir()
    (tmp_path / "f" / parts[0] / "cat" / "0.heic").touch()
    with pytest.raises(ValueError, match=r"has folders without images, \['cat'\], but each folder"):
        pictures.read(Images("folder", path), FOLDER)


def test_a_class_may_be_a_link_to_a_folder(tmp_path):
    pictures.folder(tmp_path / "f")
    (tmp_path / "f" / "bee").rename(tmp_path / "bees")
    (tmp_path / "f" / "bee").symlink_to(tmp_path / "bees")
    (tmp_path / "f" / "ant" / "again").symlink_to(tmp_path / "f")  # a circle
    stored = pictures.read(Images("folder", str(tmp_path / "f")), FOLDER).stored
    assert stored.classes == 2 and np.bincount(stored.labels).tolist() == [6, 6]


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_pictures_of_16_bits_keep_their_greys(tmp_path, suffix):
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / f"ramp.{suffix}")
    pixels = np.asarray(image_folder.picture(tmp_path / f"ramp.{suffix}"))
    np.testing.assert_array_equal(pixels, ramp >> 8)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pictures_of_32_bits_are_not_read(tmp_path, dtype):
    Image.fromarray(np.full((8, 8), 0.5 if dtype == np.float32 else 30_000, dtype)).save(
        tmp_path / "a.tif"
    )
    with pytest.raises(ValueError, match="a.tif' cannot be read as an image: its values have 32"):
        image_folder.picture(tmp_path / "a.tif")


def test_pictures_in_lab_are_not_read(tmp_path):
    Image.new("LAB", (8, 8)).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match="a.tif' cannot be read as an image: its colours are LAB"):
        image_folder.picture(tmp_path / "a.tif")


def test_missing_packages_and_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"gone' cannot be read \(No such file"):
        pictures.read(Images("digits", str(tmp_path / "gone")), DIGITS)
    with pytest.raises(ValueError, match=r"data_batch_1.bin' cannot be read"):
        pictures.read(Images("cifar10", str(tmp_path)), CIFAR10)
    with pytest.raises(ValueError, match="has no images in folders"):
        pictures.read(Images("folder", str(tmp_path)), FOLDER)
    (tmp_path / "f" / "ant").mkdir(parents=True)
    (tmp_path / "f" / "ant" / "1.jpg").write_text("no picture")
    with pytest.raises(ValueError, match=r"no image of .*f' can be read; 'ant/1.jpg': .* as an im"):
        pictures.read(Images("folder", str(tmp_path / "f")), FOLDER)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for settings in (Images(), Images("folder", str(tmp_path))):
        with pytest.raises(ValueError, match=r"pip install -e '.\[images\]'"):
            pictures.read(settings, DIGITS)
    with pytest.raises(ValueError, match="needs data.path"):
        Images("cifar10")


# What a step sees.


def test_rows_are_the_same_whichever_process_makes_them(some):
    for draw in (
        lambda **rows: images.batch(some, 1, 7, 12, **rows),
        lambda **rows: images.validation_batch(some, 1, 2, 12, **rows),
    ):
        whole = draw()
        assert whole["images"].dtype == np.uint8 and whole["labels"].dtype == np.int32
        parts = [draw(rows=slice(a, b)) for a, b in ((0, 1), (1, 7), (7, 12))]
        same(whole, jax.tree.map(lambda *x: np.concatenate(x), *parts))
        same(draw(rows=slice(3, 3))["images"].shape, (0, *some.shape))


def test_batches_are_fixed_for_all_time(tmp_path):
    digest = hashlib.sha256()
    for form in ("digits", "cifar10"):
        rows = images.batch(made(form, tmp_path), 7, 5 * 8, 8)
        digest.update(rows["images"].tobytes() + rows["labels"].tobytes())
    # Worked out once: a change changes every run.
    assert digest.hexdigest()[:16] == "de816ad014dc5e66"


def test_an_epoch_shows_each_image_to_train_on_once_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_moved", lambda image, *how: image)
    some = made("digits", tmp_path)
    steps = 3 * some.train.size // 6 + 1
    batches = [images.batch(some, 0, 6 * step, 6)["images"] for step in range(steps)]
    shown = [image.tobytes() for image in np.concatenate(batches)]
    size = some.train.size
    expected = sorted(some.stored.load(number).tobytes() for number in some.train)
    assert sorted(shown[:size]) == sorted(shown[size : 2 * size]) == expected
    assert shown[:size] != shown[size : 2 * size]
    other_seed = [image.tobytes() for image in images.batch(some, 1, 0, 6)["images"]]
    assert other_seed != shown[:6]


def test_a_share_is_held_out_and_each_of_it_shown_once(some):
    both = np.concatenate([some.train, some.validation])
    assert sorted(both) == list(range(some.stored.labels.size))
    # 60 or 40 draws at 0.2, or ten of CIFAR-10's 60: four standard deviations of 3.1 and 2.5.
    size = some.validation.size
    assert 0 < size < 25 and some.record["validation_images"] == size
    rows = [images.validation_batch(some, number, size, 1) for number in range(size)]
    labels = np.concatenate([row["labels"] for row in rows])
    np.testing.assert_array_equal(labels, some.stored.labels[some.validation])


@pytest.mark.parametrize(("form", "most"), [("digits", 1), ("cifar10", 4)])
def test_small_images_are_moved_and_half_of_them_mirrored_if_no_digits(tmp_path, form, most):
    some = made(form, tmp_path)
    image = some.stored.load(0)
    size, found = len(image), set()
    for number in range(400):
        draw = images._draws(3, number, 1, 5)
        moved = images._moved(image, form, draw)
        is_mirrored = form == "cifar10" and draw[2] < 0.5
        straight = moved[:, ::-1] if is_mirrored else moved
        down, right = (int(x * (2 * most + 1)) - most for x in draw[:2])
        inside = [slice(max(0, -move), size - max(0, move)) for move in (down, right)]
        source = [slice(max(0, move), size + min(0, move)) for move in (down, right)]
        np.testing.assert_array_equal(straight[tuple(inside)], image[tuple(source)])
        found.add((down, right, is_mirrored))
    # All 9 ways of digits; of the 162 others 400 draws are expected to find 148, four standard
    # deviations of 3.
    assert len(found) == 9 if form == "digits" else 136 < len(found)


def test_pictures_are_cut_at_random_and_half_of_them_mirrored():
    pixels = np.zeros((60, 100, 3), np.uint8)
    pixels[..., 0] = np.arange(100, dtype=np.uint8)[None]
    pixels[..., 1] = np.arange(60, dtype=np.uint8)[:, None]
    picture = Image.fromarray(pixels)
    mirrored, width, corner = [], [], []
    for number in range(300):
        part = images._scaled(picture, (16, 16, 3), images._draws(0, number, 1, 5))
        slope = int(part[0, -1, 0]) - int(part[0, 0, 0])
        mirrored.append(slope < 0)
        width.append(abs(slope))
        corner.append((int(part[0, :, 0].min()), int(part[0, 0, 1])))
    assert part.shape == (16, 16, 3)
    # 300 draws at 1/2: four standard deviations of 8.7. Of 6,000 pixels 8% at 3:4 are 19 wide.
    assert 115 < sum(mirrored) < 185
    assert 12 <= min(width) < 35 and 70 < max(width) < 100
    left, top = zip(*corner, strict=True)
    assert min(left) < 5 and max(left) > 50 and min(top) < 5 and max(top) > 25


# What learns from them.


def made_of(model, config):
    return model(config, rngs=PathRngs(0))


def parameters(model, config):
    shapes = jax.eval_shape(lambda: split(made_of(model, config))[1])
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_sizes_are_those_of_the_papers():
    # As torchvision's resnet18 and resnet34 count, whose normalization has as many parameters.
    assert parameters(ResNet, ResNetConfig()) == 11_689_512
    larger = ResNetConfig(blocks=(3, 4, 6, 3))
    assert parameters(ResNet, larger) == 21_797_672
    # ViT-B/16 without its class token and that one's position, of 768 numbers each.
    base = ViTConfig(12, 768, 12, 16, 224, 3, 1000)
    assert parameters(ViT, base) == 86_567_656 - 2 * 768
    # As torchvision's swin_b counts; "87.8 M".
    assert parameters(Swin, SwinConfig()) == 87_768_224


WINDOWS = SwinConfig((2, 2), 8, 2, window=2, patch=1, size=8, channels=1, classes=10)


def test_scanned_pairs_are_those_of_the_loop_with_their_parameters_stacked():
    config = dataclasses.replace(WINDOWS, blocks=(4, 2))
    batch = jax.random.normal(jax.random.key(1), (3, 8, 8, 1))
    by_loop, looped = split(made_of(Swin, config))
    scanned = {name: leaf for name, leaf in looped.items() if not name.startswith("stage")}
    for stage, count in enumerate(config.blocks):
        pairs = [
            {f"block_{i}": looped[f"stage_{stage}_block_{first + i}"] for i in range(2)}
            for first in range(0, count, 2)
        ]
        scanned[f"stage_{stage}"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *pairs)
    scan = dataclasses.replace(config, scan=True)
    by_scan, like = split(nnx.eval_shape(lambda: made_of(Swin, scan)))
    assert jax.tree.map(jnp.shape, scanned) == jax.tree.map(jnp.shape, like)
    expected, found = jax.jit(by_loop)(looped, batch), jax.jit(by_scan)(scanned, batch)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    with pytest.raises(ValueError, match="even number of blocks"):
        dataclasses.replace(config, blocks=(3, 2), scan=True)


@pytest.mark.parametrize(
    ("model", "config"),
    [(ResNet, DIGITS), (ViT, ViTConfig(layers=1, width=16, heads=2)), (Swin, WINDOWS)],
)
def test_an_image_is_judged_by_itself(model, config):
    batch = jax.random.normal(jax.random.key(1), (3, 8, 8, 1))
    made = nnx.jit(made_of(model, config))
    whole = made(batch)
    alone = jnp.concatenate([made(batch[i : i + 1]) for i in range(3)])
    assert whole.shape == (3, 10) and np.std(whole) > 1e-3
    # Other batches are multiplied in another order.
    np.testing.assert_allclose(whole, alone, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(whole))) * 8)


def test_a_patch_keeps_the_pixels_of_its_place():
    config = ViTConfig(layers=1, width=4, heads=1, patch=2, size=4)
    image = np.zeros((1, 4, 4, 1), np.float32)
    model, patches = made_of(ViT, config), []
    image[0, 2:, :2] = 1  # the lower left patch, the third
    embed = model.embed
    model.embed = lambda pixels: patches.append(embed(pixels)) or patches[0]
    model(image)
    blank = np.asarray(embed.bias[...])
    assert [bool(np.any(row != blank)) for row in np.asarray(patches[0])] == [0, 0, 1, 0]


def reached(shifts):
    """Which patches of an image of 8x8 see its patch (1, 3), in windows of 4x4."""
    make = functools.partial(
        SwinBlock, width=4, heads=1, window=4, dtype="float32", rngs=PathRngs(0)
    )
    blocks = nnx.Sequential(*(make(shift=shift) for shift in shifts))
    image = jax.random.normal(jax.random.key(1), (1, 8, 8, 4))
    # By a derivative, since what two blocks pass on at first is less than float32 rounds off.
    change = jnp.zeros_like(image).at[0, 1, 3].set(jnp.arange(4.0))
    seen = jax.jit(lambda x, change: jax.jvp(blocks, (x,), (change,))[1])(image, change)
    return np.any(np.asarray(seen[0]) != 0, -1)


def test_windows_see_themselves_and_when_shifted_their_neighbours_but_not_around_the_edge():
    alone, shifted, both = reached([0]), reached([2]), reached([0, 2])
    rows, columns = np.indices((8, 8))
    np.testing.assert_array_equal(alone, (rows < 4) & (columns < 4))
    # Shifted windows end at 2 and at 6; the first two rows are with the last ones, unseen.
    np.testing.assert_array_equal(shifted, (rows < 2) & (columns >= 2) & (columns < 6))
    np.testing.assert_array_equal(both, (rows < 6) & (columns < 6))


def test_a_way_within_a_window_has_one_number():
    offsets = _offsets(3)
    assert offsets[0, 0] == offsets[8, 8] == 12 and offsets[0, 1] == offsets[7, 8] == 11
    assert sorted(set(offsets.ravel())) == list(range(25))


def test_measures_are_loss_and_the_share_of_right_answers():
    batch = {"images": jnp.zeros((4, 8, 8, 1), "uint8"), "labels": jnp.array([0, 1, 2, 3])}
    seen = []

    def model(inputs):
        seen.append(inputs)
        return 40.0 * jax.nn.one_hot(jnp.array([0, 1, 2, 9]), 10)

    measures = OBJECTIVES["classify"].measure(model, batch)
    assert float(measures["accuracy"]) == 0.75 and float(measures["loss"]) == pytest.approx(10)
    np.testing.assert_array_equal(seen[0], jnp.full((4, 8, 8, 1), -1.0))


def test_a_run_learns_digits(tmp_path, undrawn):
    config = tiny_config(
        tmp_path,
        "chain(compressed_mean(quantize(8), axis_name), adam(learning_rate))",
        steps=100,
        objective="classify",
        eval_batches=2,
        model=dataclasses.replace(DIGITS, blocks=(1, 1), width=16),
        data=Images("digits", batch=64),
    )
    first, last = (row for row in loop.run(config) if "val_loss" in row)
    assert last["val_loss"] < 0.6 * first["val_loss"]
    assert first["val_accuracy"] < 0.4 < 0.7 < last["val_accuracy"]


def test_report_needs_no_images():
    config = configs.load("configs/shapes/resnet18_imagenet_zero_one_adam.py")
    assert config.data.path == "imagenet"
    nothing = examples.none(config)
    assert nothing.record == {}
    with pytest.raises(RuntimeError, match="cannot be trained"):
        nothing.train(0, slice(None))
    with pytest.raises(ValueError, match="cannot be read|has no images|does not exist"):
        examples.read(config)
