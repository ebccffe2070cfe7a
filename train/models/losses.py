"""Loss functions."""

import jax
import optax


def cross_entropies(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross entropy of each token.

    Args:
      logits: f32[batch, time, vocab], unnormalized log-probabilities.
      targets: i32[batch, time], the target tokens, in [0, vocab).

    Returns:
      f32[batch, time], nats; uniform predictions give `log(vocab)`.
    """
    logits = logits.astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Averages the cross entropy over tokens: f32[], nats per token; see `cross_entropies`."""
    return cross_entropies(logits, targets).mean()
