"""Small corpora, and records of their tokens that were changed on purpose."""

import json

from train.config import Data
from train.data import token_files


def write(folder, count):
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"words of text {number}")
    return Data(path=str(folder))


def again(made, change):
    """Changes corpus.json, with a checksum that fits."""
    facts = json.loads((made / "corpus.json").read_text())
    del facts["sha256"]
    change(facts)
    (made / "corpus.json").write_text(json.dumps(facts | {"sha256": token_files._sha256(facts)}))
