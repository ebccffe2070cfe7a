"""What is made of a piece of text, and what the model is asked about it."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train import losses

MASK = 256
"""The token that stands for a hidden byte."""
_HIDDEN, _REPLACED = 0.8, 0.1  # of the chosen positions; the others keep their byte
_CHOSEN = 0.15  # of all positions


class Objective(NamedTuple):
    """A task that text sets by itself."""

    # (i32[rows, context + 1], key of each row) -> i32[rows, ...]: the batch
    prepare: Callable[[np.ndarray, list[list[int]]], np.ndarray]
    shape: Callable[[int], tuple[int, ...]]  # context -> shape of a row of the batch
    # (i32[rows, context] -> logits, batch) -> f32[], nats per predicted byte
    loss: Callable[[Callable[[jax.Array], jax.Array], jax.Array], jax.Array]
    causal: bool  # whether a position may look only at those before it
    vocab: int  # least number of tokens


def _next_token_loss(logits_of, tokens):
    return losses.cross_entropy(logits_of(tokens[:, :-1]), tokens[:, 1:])


def _masked(tokens: np.ndarray, keys: list[list[int]]) -> np.ndarray:
    """i32[rows, 2, context]: what the model sees, and the hidden bytes; -1 where none is asked.

    As many positions of each row, so that the mean over replicas is the mean over positions.
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


def _masked_loss(logits_of, batch):
    inputs, targets = batch[:, 0], batch[:, 1]
    asked = targets >= 0
    losses_BxT = losses.cross_entropies(logits_of(inputs), jnp.where(asked, targets, 0))
    return jnp.sum(losses_BxT, where=asked) / jnp.sum(asked)


OBJECTIVES = {
    "next_token": Objective(
        prepare=lambda tokens, keys: tokens,
        shape=lambda context: (context + 1,),
        loss=_next_token_loss,
        causal=True,
        vocab=256,
    ),
    # Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
    # Understanding", 2019, section 3.1, task 1; bytes in place of word pieces.
    "masked": Objective(
        prepare=_masked,
        shape=lambda context: (2, context),
        loss=_masked_loss,
        causal=False,
        vocab=257,
    ),
}
