"""The batches of a run, as its objective prepares them."""

import dataclasses

import numpy as np

from train.config import Data
from train.config import run as configs
from train.data import examples


def hidden(batch):
    """Where a masked text asks for a byte."""
    return batch[:, 1] >= 0


def test_every_row_of_every_step_and_validation_batch_hides_places_of_its_own(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"a" * 4000)
    config = configs.load("configs/nano_bert_dense.py")
    data = Data(path=str(tmp_path / "text.txt"), batch=4)
    made = examples.read(dataclasses.replace(config, data=data))
    for batch_of in (made.train, made.validation):
        batches = [batch_of(number, slice(None)) for number in (0, 1)]
        rows = np.concatenate(list(map(hidden, batches)))
        assert len(np.unique(rows, axis=0)) == len(rows) == 8
        # A process that holds the last rows alone sees the same.
        np.testing.assert_array_equal(batch_of(1, slice(2, 4)), batches[1][2:])
