"""The commands of the page on data, with data as the page says."""

import json
import re
import shlex

import numpy as np
import pytest

from tests.helpers import tokens
from tests.helpers.snippets import ROOT
from train.config import run as configs
from train.data import examples

COMMANDS = re.findall(
    r"^    python -m train (.*)$", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE
)
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import datasets
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("data")
    bodies = [f"row {number} is text, and goes on for a while " * 20 for number in range(40)]
    (folder / "text").mkdir()
    for number, body in enumerate(bodies):
        (folder / "text" / f"{number}.txt").write_text(body)
    rows = [json.dumps({"body": body}) for body in bodies]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    pyarrow.parquet.write_table(pyarrow.table({"body": bodies}), folder / "rows.parquet")
    datasets.Dataset.from_dict({"text": bodies}).save_to_disk(folder / "saved_set")
    chat = lambda n: [
        {"role": "user", "content": f"a question {n}"},
        {"role": "assistant", "content": f"words {n}"},
    ]
    chats = [json.dumps({"messages": chat(number)}) for number in range(40)]
    (folder / "chats.jsonl").write_text("\n".join(chats))
    tokens.folder(folder / "model", template=TEMPLATE)
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_reads_its_data(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    config = configs.load(*(lambda path, *args: (path, args))(*shlex.split(command)))
    made = examples.read(config)
    assert made.record["documents"] == 40
    for batch in (made.train(0, slice(0, 2)), made.validation(0, slice(0, 2))):
        if config.data.packed:
            assert batch["tokens"].shape == (2, config.model.context)
            assert batch["weights"].any() and np.isfinite(batch["weights"]).all()
        else:
            assert batch.shape == (2, config.model.context + 1)
