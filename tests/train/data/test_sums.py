"""Damage of token files, and what their record says of them: found at the start."""

import json
import os

import numpy as np
import pytest

from tests.helpers.corpora import again, write
from train.data import token_files, tokenizing


@pytest.mark.parametrize("kind", ["tokens", "ends"])
@pytest.mark.parametrize("part", tokenizing.PARTS)
def test_a_byte_that_changed_on_disk_is_found(tmp_path, part, kind):
    made = token_files.prepare(write(tmp_path / "texts", 30), tmp_path / "cache")
    content = bytearray((made / f"{part}.{kind}").read_bytes())
    content[len(content) // 2] ^= 1
    (made / f"{part}.{kind}").write_bytes(content)
    with pytest.raises(ValueError, match=rf"is damaged: {part}.{kind} differs from its checksum"):
        token_files.load(made)


def test_a_changed_place_of_any_piece_changes_the_checksums(monkeypatch):
    monkeypatch.setattr(token_files, "_PIECE", 64)
    values = np.random.default_rng(0).integers(0, 60_000, 999).astype(np.uint16)
    whole = token_files.sums(values)
    assert whole.largest == values.max() and len(whole.crc32) == -(-999 // 32)
    for place in (0, 31, 32, 500, 998):
        changed = values.copy()
        changed[place] ^= 256
        assert token_files.sums(changed).crc32 != whole.crc32
    assert token_files.sums(values[:0]) == ([], -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "object"}, "dtype is 'object'; needs one of 'uint8', 'uint16', 'uint32'"),
        ({"dtype": "uint16"}, r"tokens has \d+ bytes"),
        ({"size": 10**12}, r"train.tokens has \d+ bytes; remove it"),
        ({"size": -8}, r"tokens has \d+ bytes"),
        ({"documents": 10**12}, r"ends has \d+ bytes"),
        ({"asked": True}, "train.asked"),
        ({"crc32": {}}, "train.tokens differs from its checksum"),
        ({"crc32": {"tokens": ["a"]}}, "crc32 is"),
    ],
)
def test_what_the_record_says_of_the_files_is_checked_before_they_are_read(
    tmp_path, change, message
):
    made = token_files.prepare(write(tmp_path / "texts", 5), tmp_path / "cache")
    again(made, lambda facts: facts["parts"]["train"].update(change))
    with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
        token_files.load(made)


def test_a_record_that_is_damaged_or_of_another_version_is_refused(tmp_path):
    made = token_files.prepare(write(tmp_path / "texts", 5), tmp_path / "cache")
    record, text = made / "corpus.json", (made / "corpus.json").read_text()
    for other, message in (
        (text.replace('"bytes": ', '"bytes": 1'), "differs from its own checksum"),
        (json.dumps({k: v for k, v in json.loads(text).items() if k != "sha256"}), "sha256"),
        ("[" * 60_000, "nests too deeply"),
        ("[]", "needs a JSON object"),
    ):
        record.write_text(other)
        with pytest.raises(ValueError, match=f"is damaged: .*{message}"):
            token_files.load(made)
    record.write_text(text)
    for name in ("corpus.json", "train.tokens", "validation.ends"):
        (made / name).rename(tmp_path / "away")
        os.mkfifo(made / name)
        with pytest.raises(ValueError, match=f"{name} is a FIFO"):
            token_files.load(made)
        (tmp_path / "away").replace(made / name)
    assert token_files.load(made).record["documents"] == 5


def test_ends_out_of_order_are_refused(tmp_path):
    made = token_files.prepare(write(tmp_path / "texts", 30), tmp_path / "cache")
    for name in tokenizing.PARTS:
        ends = np.fromfile(made / f"{name}.ends", np.int64)[::-1].copy()
        ends.tofile(made / f"{name}.ends")
        crc32 = {"ends": token_files.sums(ends).crc32}
        again(made, lambda facts, n=name, x=crc32: facts["parts"][n]["crc32"].update(x))
    with pytest.raises(ValueError, match="train.ends are not in order"):
        token_files.load(made)
