"""Objectives: how text or images become batches, and the loss of a model on them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.data.sources import Data, Images
from train.models import losses
from train.models.decoder import Decoder, DecoderConfig
from train.models.resnet import ResNet, ResNetConfig
from train.models.swin import Swin, SwinConfig
from train.models.vit import ViT, ViTConfig

MASK = 256
"""The mask token."""
_HIDDEN, _REPLACED = 0.8, 0.1  # of the chosen positions; the others keep their byte
_CHOSEN = 0.15  # of all positions

Measures = dict[str, jax.Array]
Shapes = Any  # a pytree of jax.ShapeDtypeStruct


class Objective(NamedTuple):
    """A training task on text, or on images with labels."""

    data: type  # that it needs, from `train.data.sources`
    # type of configuration -> constructor (configuration, rngs=) -> model
    models: dict[type, Callable[..., nnx.Module]]
    row: Callable[[Any, Any], Shapes]  # configurations of model and data -> a row of the batch
    # (model: inputs -> logits, batch) -> measures of each target, and f32 weights of their shape: 0
    # where nothing is asked, else such that the mean over all rows is the mean over targets.
    # "loss", in nats per `unit`, is minimized
    terms: Callable[[Callable[..., jax.Array], Any], tuple[Measures, jax.Array]]
    unit: str
    # (i32[rows, context + 1], key of each row) -> i32[rows, ...], the batch; only for text
    prepare: Callable[[np.ndarray, list[list[int]]], np.ndarray] | None = None
    vocab: int = 0  # least number of tokens

    def measure(self, logits_of: Callable[..., jax.Array], batch: Any) -> Measures:
        """Means over the targets of a batch, each f32[], also if replicas share its rows."""
        values, weights = self.terms(logits_of, batch)
        return jax.tree.map(lambda x: jnp.mean(x * weights), values)

    def totals(self, logits_of: Callable[..., jax.Array], batch: Any) -> tuple[Measures, jax.Array]:
        """Sums over the targets of a batch, and their number, f32[]: batches may be added."""
        values, weights = self.terms(logits_of, batch)
        sums = jax.tree.map(lambda x: jnp.sum(x, dtype="float32", where=weights > 0), values)
        return sums, jnp.sum(weights > 0, dtype="float32")


def _next_token(logits_of, batch):
    if not isinstance(batch, dict):
        logits, targets = logits_of(batch[:, :-1]), batch[:, 1:]
        return {"loss": losses.cross_entropies(logits, targets)}, jnp.ones(targets.shape)
    logits = logits_of(batch["tokens"], batch["documents"], batch["positions"])
    return {"loss": losses.cross_entropies(logits, batch["targets"])}, batch["weights"]


def _sequence(model, data):
    """A sequence of tokens, or packed documents from `train.data.packing.batch`."""
    if not data.packed:
        return jax.ShapeDtypeStruct((model.context + 1,), "int32")
    names = ("tokens", "targets", "documents", "positions")
    row = {name: jax.ShapeDtypeStruct((model.context,), "int32") for name in names}
    return row | {"weights": jax.ShapeDtypeStruct((model.context,), "float32")}


def _masked(tokens: np.ndarray, keys: list[list[int]]) -> np.ndarray:
    """i32[rows, 2, context]: the masked input, and the targets; -1 where there is no target.

    Each row has equally many targets, so that the mean over replicas is the mean over targets.
    """
    tokens = tokens[:, :-1]
    rows, context = tokens.shape
    inputs, targets = tokens.copy(), np.full_like(tokens, -1)
    for row, key in enumerate(keys):
        rng = np.random.default_rng(key)
        chosen = rng.permutation(context)[: max(1, round(_CHOSEN * context))]
        targets[row, chosen] = tokens[row, chosen]
        fate = rng.random(chosen.size)
        inputs[row, chosen[fate < _HIDDEN]] = MASK
        others = chosen[(fate >= _HIDDEN) & (fate < _HIDDEN + _REPLACED)]
        inputs[row, others] = rng.integers(0, 256, others.size)
    return np.stack([inputs, targets], axis=1)


def _masked_tokens(logits_of, batch):
    inputs, targets = batch[:, 0], batch[:, 1]
    asked = targets >= 0
    losses_BxT = losses.cross_entropies(logits_of(inputs), jnp.where(asked, targets, 0))
    return {"loss": losses_BxT}, asked / jnp.mean(asked)


def _classes(logits_of, batch):
    logits = logits_of(batch["images"].astype("float32") / 127.5 - 1)
    right = jnp.argmax(logits, axis=-1) == batch["labels"]
    values = {"loss": losses.cross_entropies(logits, batch["labels"]), "accuracy": right}
    return values, jnp.ones(right.shape)


def _image(model, data):
    pixels = jax.ShapeDtypeStruct((model.size, model.size, model.channels), "uint8")
    return {"images": pixels, "labels": jax.ShapeDtypeStruct((), "int32")}


OBJECTIVES = {
    "next_token": Objective(
        data=Data,
        models={DecoderConfig: Decoder},
        row=_sequence,
        terms=_next_token,
        unit="byte",
        prepare=lambda tokens, keys: tokens,
        vocab=256,
    ),
    # Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
    # Understanding", 2019, section 3.1, task 1; bytes in place of word pieces.
    "masked": Objective(
        data=Data,
        models={DecoderConfig: functools.partial(Decoder, causal=False)},
        row=lambda model, data: jax.ShapeDtypeStruct((2, model.context), "int32"),
        terms=_masked_tokens,
        unit="byte",
        prepare=_masked,
        vocab=257,
    ),
    "classify": Objective(
        data=Images,
        models={ResNetConfig: ResNet, ViTConfig: ViT, SwinConfig: Swin},
        row=_image,
        terms=_classes,
        unit="image",
    ),
}


def check(name: str, model: Any, data: Any) -> None:
    """Raises a ValueError for a model or data that do not fit the objective of this name."""
    task = OBJECTIVES[name]
    for field, value, kinds in (("model", model, task.models), ("data", data, [task.data])):
        if type(value) not in kinds:
            known = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
            raise ValueError(
                f"objective={name!r} cannot use {field}={type(value).__name__}(...); write "
                f"{field}={known} in the config file."
            )
    if name == "masked" and (data.packed or data.tokenizer is not None):
        raise ValueError(
            "objective='masked' hides bytes anywhere in a text; write --data.no-packed "
            "--data.tokenizer None."
        )
    reads_bytes = getattr(data, "tokenizer", None) is None
    if reads_bytes and task.vocab and model.vocab < task.vocab:
        raise ValueError(
            f"model.vocab={model.vocab} must be at least {task.vocab}; write --model.vocab "
            f"{task.vocab}."
        )
