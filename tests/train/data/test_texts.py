"""The text: what is read, what is held out, and that batches are pure functions."""

import hashlib
import json
import os

import numpy as np
import pytest

from train.config import Data
from train.data import files, texts

CONTEXT = 8
TOKENS = np.frombuffer(bytes(range(256)) * 4, np.uint8)


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Data(path=str(folder))


def documents(count):
    return {f"part{i % 3}/{i}.txt": f"<{i}> is the text of document {i}" for i in range(count)}


def test_standard_library_is_the_default_and_has_both_parts():
    corpus = texts.read(Data(), 128)
    assert corpus.record["source"] == "python standard library"
    assert corpus.record["documents"] > 300
    share = corpus.validation.size / (corpus.train.size + corpus.validation.size)
    # A tenth of some 500 files of very different sizes: no closer than a factor of two.
    assert 0.05 < share < 0.2
    assert b"class JSONDecodeError" in b"".join(
        (corpus.train.tobytes(), corpus.validation.tobytes())
    )


def test_standard_library_is_its_own_source_alone(tmp_path, monkeypatch):
    sources = {"json/decoder.py": "a" * 50, "os.py": "b" * 50, "ast.py": "c" * 50}
    others = ("site-packages/x.py", "test/x.py", "json/tests/x.py", "x.txt", "_sysconfigdata_x.py")
    write(tmp_path, sources | dict.fromkeys(others, "other"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    corpus = texts.read(Data(), CONTEXT)
    assert corpus.record["documents"] == 3 and corpus.record["bytes"] == 150


def test_whole_files_are_held_out_and_none_is_lost_or_in_both(tmp_path):
    files = documents(200)
    corpus = texts.read(write(tmp_path, files), CONTEXT)
    train, held = (part.tobytes().decode().split("\n") for part in corpus[:2])
    assert sorted(train + held) == sorted(files.values())
    # 200 draws at 0.1: four standard deviations of 4.2 about 20.
    assert 3 <= len(held) <= 37
    assert corpus.record["train_documents"] == len(train)
    assert corpus.record["validation_documents"] == len(held)
    assert corpus.record["bytes"] == sum(len(text) for text in files.values())


def test_membership_does_not_depend_on_other_files(tmp_path):
    few = texts.read(write(tmp_path / "few", documents(100)), CONTEXT)
    many = texts.read(write(tmp_path / "many", documents(200)), CONTEXT)
    few, many = (set(part.validation.tobytes().decode().split("\n")) for part in (few, many))
    assert few == many & set(documents(100).values())


def test_documents_are_joined_in_the_order_of_their_names(tmp_path):
    files = documents(30)
    corpus = texts.read(write(tmp_path, files), CONTEXT)
    train = corpus.train.tobytes().decode().split("\n")
    assert train == [files[name] for name in sorted(files) if files[name] in train]


def test_single_file_has_its_end_held_out(tmp_path):
    (tmp_path / "book.txt").write_text("0123456789" * 10)
    corpus = texts.read(Data(path=str(tmp_path / "book.txt"), validation_fraction=0.2), CONTEXT)
    assert corpus.train.tobytes() == b"0123456789" * 8
    assert corpus.validation.tobytes() == b"0123456789" * 2


def test_two_files_always_give_one_to_each_part(tmp_path):
    for number in range(20):
        files = {f"{number}-{i}.txt": f"{i}" * 20 for i in range(2)}
        corpus = texts.read(write(tmp_path / str(number), files), CONTEXT)
        assert corpus.record["train_documents"] == corpus.record["validation_documents"] == 1


def test_hidden_files_are_not_read(tmp_path):
    visible = texts.read(write(tmp_path, documents(20)), CONTEXT)
    with_hidden = write(tmp_path, {".git/index": b"\0", ".DS_Store": b"\xff"})
    assert texts.read(with_hidden, CONTEXT).record == visible.record


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": "text " * 9, "sub/b.bin": b"bi\0nary"}, r"sub/b.bin' is binary"),
        ({}, "holds no text"),
        ({"a.txt": "", "b.txt": ""}, "holds no text"),
        ({"a.txt": "text " * 9, "b.txt": ""}, "leaves 0 .*, in 1 of 2 documents, but one"),
        ({"a.txt": "text " * 4}, "leaves 2 bytes for validation, but one sequence needs 9"),
    ],
)
def test_text_that_cannot_be_used_is_refused(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        texts.read(write(tmp_path, files), CONTEXT)


def test_missing_path_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"data.path='.*gone' does not exist"):
        texts.read(Data(path=str(tmp_path / "gone")), CONTEXT)


def test_file_that_cannot_be_opened_is_named(tmp_path):
    settings = write(tmp_path, documents(5))
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"link.txt' cannot be read \(No such file"):
        texts.read(settings, CONTEXT)


def test_linked_folders_are_read_and_pipes_refused(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "more.txt").write_text("more")
    settings = write(tmp_path / "near", documents(5))
    (tmp_path / "near" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "far" / "back").symlink_to(tmp_path / "near")  # a circle
    found = files.files_below(tmp_path / "near")
    assert [file.name for file in found if "link" in file.parts] == ["more.txt"]
    os.mkfifo(tmp_path / "far" / "pipe")
    with pytest.raises(ValueError, match=r"pipe' is no file"):
        texts.read(settings, CONTEXT)


def test_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    settings = write(tmp_path, documents(5))

    listed = os.scandir

    def refuse(folder):
        if str(folder) != str(tmp_path):
            return listed(folder)
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\)"):
        texts.read(settings, CONTEXT)


def test_enough_text_is_one_sequence_exactly(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 18)
    settings = Data(path=str(tmp_path / "a.txt"), validation_fraction=0.5)
    corpus = texts.read(settings, CONTEXT)
    assert texts.batch(corpus.train, 0, 0, 4, CONTEXT).shape == (4, CONTEXT + 1)
    assert texts.validation_batch(corpus.validation, 0, 1, 4, CONTEXT).shape == (4, CONTEXT + 1)
    with pytest.raises(ValueError, match="one sequence needs 10"):
        texts.read(settings, CONTEXT + 1)


def test_batch_holds_consecutive_bytes_of_the_text():
    rows = texts.batch(TOKENS, 0, 3, 16, CONTEXT)
    assert rows.shape == (16, CONTEXT + 1) and rows.dtype == np.int32
    np.testing.assert_array_equal((rows - rows[:, :1]) % 256, np.tile(np.arange(9), (16, 1)))


def test_batch_is_a_pure_function_fixed_for_all_time():
    rows = texts.batch(TOKENS, 7, 5, 4, CONTEXT)
    np.testing.assert_array_equal(rows, texts.batch(TOKENS, 7, 5, 4, CONTEXT))
    # Philox4x64-10 with key 7 and counter (1, 5, 0, 0), worked out once: a change of these
    # numbers changes every run.
    np.testing.assert_array_equal(rows[:, 0], [246, 74, 70, 213])


def test_batches_of_steps_and_seeds_differ():
    many = np.frombuffer(np.random.default_rng(0).bytes(2**16), np.uint8)
    starts = {
        texts.batch(many, seed, step, 16, CONTEXT).tobytes()
        for seed in range(4)
        for step in range(25)
    }
    assert len(starts) == 100
    rows = np.concatenate([texts.batch(many, 0, step, 16, CONTEXT) for step in range(25)])
    # 400 draws of 65,528 places: 1.2 coincidences expected, more than 8 has chance 1e-5.
    assert len(np.unique(rows, axis=0)) >= 392


def test_every_place_of_the_text_is_drawn():
    tokens = np.arange(20, dtype=np.uint8)
    first = texts.batch(tokens, 0, 0, 1000, CONTEXT)[:, 0]
    np.testing.assert_array_equal(np.unique(first), np.arange(12))


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_rows_are_the_same_whichever_process_makes_them(num_processes):
    bounds = np.linspace(0, 24, num_processes + 1).astype(int)
    slices = [slice(a, b) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    whole = texts.batch(TOKENS, 1, 2, 24, CONTEXT)
    parts = [texts.batch(TOKENS, 1, 2, 24, CONTEXT, rows=rows) for rows in slices]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    whole = texts.validation_batch(TOKENS, 1, 2, 24, CONTEXT)
    parts = [texts.validation_batch(TOKENS, 1, 2, 24, CONTEXT, rows=rows) for rows in slices]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_validation_batches_span_the_text_without_overlap():
    tokens = np.arange(250, dtype=np.uint8)
    rows = np.concatenate([texts.validation_batch(tokens, i, 4, 6, CONTEXT) for i in range(4)])
    assert rows.shape == (24, CONTEXT + 1) and rows.dtype == np.int32
    assert rows[0, 0] == 0 and rows[-1, -1] == 249
    assert len(np.unique(rows)) == rows.size


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Keeps Hugging Face's libraries off the network, and their cache in a folder of the test."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return datasets


def rows_of(corpus):
    return sorted(b"\n".join((corpus.train.tobytes(), corpus.validation.tobytes())).split(b"\n"))


TEXTS = [f"row {i} of a small data set" for i in range(40)]


def test_huggingface_data_set_saved_to_disk_is_read(tmp_path, offline):
    saved = offline.Dataset.from_dict({"text": TEXTS, "id": list(range(40))})
    saved.save_to_disk(tmp_path / "one")
    offline.DatasetDict({"train": saved.select(range(20)), "rest": saved}).save_to_disk(
        tmp_path / "two"
    )
    one = texts.read(Data(huggingface=str(tmp_path / "one")), CONTEXT)
    two = texts.read(Data(huggingface=str(tmp_path / "two"), huggingface_split="rest"), CONTEXT)
    assert rows_of(one) == rows_of(two) == sorted(text.encode() for text in TEXTS)
    assert one.record["sha256"] == two.record["sha256"]
    assert one.record["documents"] == 40


def test_huggingface_folder_of_json_is_read_and_equal_rows_stay_together(tmp_path, offline):
    (tmp_path / "set").mkdir()
    lines = [json.dumps({"content": text}) for text in TEXTS + TEXTS]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(lines))
    settings = Data(huggingface=str(tmp_path / "set"), column="content")
    corpus = texts.read(settings, CONTEXT)
    assert rows_of(corpus) == sorted(text.encode() for text in TEXTS + TEXTS)
    train, held = (set(part.tobytes().split(b"\n")) for part in corpus[:2])
    assert held and not train & held


def test_huggingface_mistakes_are_refused(tmp_path, offline):
    numbers = offline.Dataset.from_dict({"text": [1, 2, 3]})
    numbers.save_to_disk(tmp_path / "numbers")
    offline.DatasetDict({"train": numbers}).save_to_disk(tmp_path / "splits")
    where = str(tmp_path / "numbers")
    with pytest.raises(ValueError, match=r"column='txt' is not one column of .*'text'"):
        texts.read(Data(huggingface=where, column="txt"), CONTEXT)
    with pytest.raises(ValueError, match=r"'text' of .* holds 1; choose one of strings"):
        texts.read(Data(huggingface=where), CONTEXT)
    with pytest.raises(ValueError, match=r"split 'test', cannot be loaded"):
        texts.read(Data(huggingface=str(tmp_path / "splits"), huggingface_split="test"), CONTEXT)
    with pytest.raises(ValueError, match=r"gone', split 'train', cannot be loaded"):
        texts.read(Data(huggingface=str(tmp_path / "gone")), CONTEXT)


def test_missing_extra_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '.\[huggingface\]'"):
        texts.read(Data(huggingface="name"), CONTEXT)


def test_hash_is_of_names_and_contents(tmp_path):
    corpus = texts.read(write(tmp_path, {"a.txt": "x" * 20, "b/c.txt": "y" * 30}), CONTEXT)
    text = b"5 a.txt 20 " + b"x" * 20 + b"7 b/c.txt 30 " + b"y" * 30
    assert corpus.record["sha256"] == hashlib.sha256(text).hexdigest()
