"""What the pages' commands read, made small where and how the pages say."""

import dataclasses
import json
import pathlib

import jax
from flax import nnx

from tests.helpers import tokens
from tests.helpers.snippets import ROOT
from train.huggingface import folder as huggingface
from train.huggingface import settings
from train.models import modules
from train.models.decoder import Decoder

BODIES = [f"row {number} is text, and goes on for a while " * 20 for number in range(40)]


def text(folder: pathlib.Path) -> None:
    """Makes `text`, a folder of files."""
    (folder / "text").mkdir(exist_ok=True)
    for number, body in enumerate(BODIES):
        (folder / "text" / f"{number}.txt").write_text(body)


def every_form(folder: pathlib.Path) -> None:
    """Makes the data of docs/data.md, 40 documents in each form, and `model`, a tokenizer."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    text(folder)
    rows = [json.dumps({"body": body}) for body in BODIES]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    pyarrow.parquet.write_table(pyarrow.table({"body": BODIES}), folder / "rows.parquet")
    datasets.Dataset.from_dict({"text": BODIES}).save_to_disk(folder / "saved_set")
    chat = lambda n: [
        {"role": "user", "content": f"a question {n}"},
        {"role": "assistant", "content": f"words {n}"},
    ]
    chats = [json.dumps({"messages": chat(number)}) for number in range(40)]
    (folder / "chats.jsonl").write_text("\n".join(chats))
    tokens.folder(folder / "model", template=tokens.TEMPLATE)


def pythia(folder: pathlib.Path) -> None:
    """Makes `pythia-160m`: its kind, with 3,000 times fewer parameters and a short context."""
    path = folder / "pythia-160m"
    _, tiny = settings.read(ROOT / "tests" / "golden" / "huggingface" / "gpt_neox")
    config = dataclasses.replace(tiny, vocab=304, positions=256, context=256)
    _, shapes = modules.split(nnx.eval_shape(lambda: Decoder(config, rngs=modules.PathRngs(0))))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [0.02 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    huggingface.save(path, config, tree.unflatten(drawn))
    tokens.folder(path)
