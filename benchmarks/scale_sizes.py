"""The sizes of `benchmarks.scale`: models, their text, and the recipe that all methods share."""

import dataclasses
import pathlib
import re
from typing import NamedTuple

from benchmarks import methods, scale_text
from configs import nano_dense
from train.config import Config, Data
from train.models.decoder import DecoderConfig

TEXT = pathlib.Path("runs/scale")


class Size(NamedTuple):
    """A task of one size.

    Attributes:
      model: The model.
      steps: Optimizer steps.
      batch: Sequences of a step, over all replicas.
      eval_batches: Batches of one evaluation.
      centres: The middle of trials of rates, by dense baseline; none: rates are not tuned so.
      recipe: What the methods' inner optimizers become, see `by_recipe`.
    """

    model: DecoderConfig
    steps: int
    batch: int
    eval_batches: int
    centres: dict[str, float] = {}
    recipe: dict[str, str] = {}


def _centres(adam: float, muon: float) -> dict[str, float]:
    return {"dense Adam": adam, "dense Muon": muon, "dense LAMB": 4 * adam, "dense SGD": 100 * adam}


# As large models are trained: a short memory of squares, decay, and clipping of what the optimizer
# sees: the mean gradient, or with local moments the replica's own.
CLIP, DECAY = "clip_by_global_norm(1.0)", "weight_decay=0.1"
RECIPE = {
    r"\b(adam|lamb)\(learning_rate\)": rf"chain({CLIP}, \1w(learning_rate, b2=0.95, {DECAY}))",
    "lambw": "lamb",  # which decays already
    r"\boptax\.contrib\.muon\(learning_rate\)": f"chain({CLIP}, muon(learning_rate, {DECAY}))",
    r"\bsgd\(learning_rate, momentum=0.9\)": rf"chain({CLIP}, \g<0>)",
    # Methods with moments of their own.
    r"^((?:zero_one_adam|one_bit_adam|slamb)\(learning_rate, axis_name)": rf"\1, b2=0.95, {DECAY}",
    r"^((?:dion|demo|muloco)\(learning_rate, axis_name)": rf"\1, {DECAY}",
    r"^(?:zero_one_adam|one_bit_adam|slamb|dion|demo|muloco)\(.*$": rf"chain({CLIP}, \g<0>)",
    "freeze_step=1200": "freeze_step=warmup_steps",
}
LARGE = {"heads": 12, "context": 512, "dtype": "bfloat16"}

SIZES = {
    # Nano's bytes and steps, with a smaller model and many more steps.
    "pico": Size(DecoderConfig(layers=2, width=64, heads=2, context=64), 8000, 32, 64),
    "micro": Size(
        DecoderConfig(layers=2, width=96, heads=3, context=32, vocab=8192),
        *(2000, 16, 64),
        _centres(adam=2e-3, muon=8e-3),
        RECIPE,
    ),
    "34m": Size(
        DecoderConfig(layers=8, width=512, vocab=16384, **(LARGE | {"heads": 8})),
        *(2240, 32, 8),
        _centres(adam=2e-3, muon=4e-3),
        RECIPE,
    ),
    # GPT-2's smallest.
    "124m": Size(
        DecoderConfig(layers=12, width=768, vocab=50257, **LARGE),
        *(2240, 32, 8),
        _centres(adam=1e-3, muon=2e-3),
        RECIPE,
    ),
}


def data_of(size: Size) -> Data:
    """Nano's text in bytes, or sources of packages in the model's number of tokens."""
    if size.model.vocab == 256:
        return dataclasses.replace(nano_dense.get_config().data, batch=size.batch)
    return scale_text.data(size.model.vocab, size.batch, TEXT)


def by_recipe(method: methods.Method, name: str) -> methods.Method:
    """A method with the inner optimizers of the size's recipe in place of plain ones."""
    update = method.update
    for plain, full in SIZES[name].recipe.items():
        update = re.sub(plain, full, update)
    return method._replace(update=update)


def config_of(
    name: str, method: methods.Method, seed: int, steps: int, rate: float | None = None
) -> Config:
    """The run of one row; at the method's own rate unless there is another."""
    size, nano = SIZES[name], nano_dense.get_config()
    return dataclasses.replace(
        nano,
        name=name,
        steps=steps,
        seed=seed,
        qsdp=method.qsdp,
        model=size.model,
        data=data_of(size),
        optimizer=dataclasses.replace(
            nano.optimizer,
            update=method.update,
            learning_rate=rate or method.rates[0],
            warmup_steps=steps // 10,
            final_fraction=0.0,
        ),
        eval_batches=size.eval_batches,
    )
