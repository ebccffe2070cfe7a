"""The batches of a run, as its objective prepares them."""

import dataclasses
import json
import os

import numpy as np
import pytest

from tests.helpers import tokens
from tests.helpers.tiny_runs import EXACT_SGD, tiny_config
from train import examples, loop
from train.checkpoints import store
from train.config import Data, Optimizer
from train.config import run as configs
from train.models.decoder import DecoderConfig


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


def test_chats_train_alike_on_any_number_of_replicas_and_go_on_where_they_were(tmp_path, undrawn):
    folder = tokens.folder(tmp_path / "tokenizer", template=tokens.TEMPLATE)
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(20):
            question = {"role": "user", "content": "a question"}
            answer = {"role": "assistant", "content": "words " * (1 + number % 5)}
            file.write(json.dumps({"messages": [question, answer]}) + "\n")

    model = DecoderConfig(layers=1, width=8, heads=2, context=16, vocab=300)
    files = {"path": str(tmp_path / "chats.jsonl"), "cache": str(tmp_path / "cache")}
    data = Data(**files, column="messages", tokenizer=str(folder), packed=True, batch=4)
    alike = {"optimizer": Optimizer(EXACT_SGD, 0.5, schedule="constant"), "log_every": 1}
    alike |= {"model": model, "data": data}

    def rows_of(name, replicas, steps=2):
        changes = {"name": name, "replicas": replicas, "steps": steps}
        return loop.run(tiny_config(tmp_path, **alike, **changes))

    losses = lambda rows: [row["loss"] for row in rows[1:]] + [rows[-1]["val_loss"]]
    whole = rows_of("whole", replicas=4)
    assert losses(whole)[0] > losses(whole)[2]
    # Replicas hold other numbers of answers' tokens; the loss is the mean over all of them.
    rows_of("parts", replicas=4, steps=1)
    parts = rows_of("parts", replicas=2)
    np.testing.assert_allclose(losses(parts), losses(whole), rtol=1e-5)
    saved = store.choose(tmp_path / "runs" / "parts" / "checkpoints", item="metadata")
    assert saved.metadata["progress"]["examples"] == 8
    assert len([*(tmp_path / "cache").iterdir()]) == 1


@pytest.mark.parametrize(
    ("texts", "part"),
    [(["abcdefghi", "q"], "train"), (["a", "bcd"], "train"), (["abcdefghi"], "validation")],
)
def test_documents_without_a_token_to_predict_are_refused_at_the_start(tmp_path, texts, part):
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = configs.load("configs/nano_dense.py")
    data = Data(path=str(tmp_path / "rows.jsonl"), packed=True, cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=f"leaves nothing to predict for {part}, which needs a"):
        examples.read(dataclasses.replace(config, data=data))


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_while_a_run_reads_it_is_named(tmp_path, packed):
    config = tiny_config(tmp_path)
    data = dataclasses.replace(config.data, packed=packed)
    made = examples.read(dataclasses.replace(config, data=data))
    made.train(0, slice(0, 2))
    (file,) = tmp_path.glob("runs/run/data/*/train.tokens")
    os.truncate(file, file.stat().st_size - 1)  # cut to nothing, it would end the tests
    for make in (made.train, made.validation):
        with pytest.raises(ValueError, match=f"{file} was cut .*; remove {file.parent}, and start"):
            make(1, slice(0, 2))
