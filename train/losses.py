"""What is minimized."""

import jax
import optax


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Averages the cross entropy of the next tokens, in nats per token.

    Args:
      logits: f32[batch, time, vocab], unnormalized log-probabilities.
      targets: i32[batch, time], the tokens that came, in [0, vocab).

    Returns:
      f32[]; uniform predictions give `log(vocab)`.
    """
    logits = logits.astype("float32")
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
