"""The commands of the page on data, with data as the page says."""

import re
import shlex

import numpy as np
import pytest

from tests.helpers import page_inputs
from tests.helpers.snippets import ROOT
from train import examples
from train.config import run as configs

COMMANDS = re.findall(
    r"^    python -m train (.*)$", (ROOT / "docs" / "data.md").read_text(), re.MULTILINE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    page_inputs.every_form(folder)
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
