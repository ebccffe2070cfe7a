"""Rotary position embeddings, with Llama 3's scaling."""

import jax
import jax.numpy as jnp
import numpy as np

Scaling = tuple[float, float, float, float]
"""Factor, low and high frequency factor, old context."""


def require_finite(base: float, scaling: Scaling | None) -> None:
    """Raises a ValueError if rotations of this base and scaling would be NaN."""
    if base < 1:
        raise ValueError(
            f"model.rotary_base={base} must be at least 1; write --model.rotary-base 10000."
        )
    if scaling is None:
        return
    factor, low, high, context = scaling
    if not (factor >= 1 and 0 < low < high and context >= 1):
        raise ValueError(
            f"model.rotary_scaling={scaling} must be (factor, low, high, context) with factor and "
            "context at least 1, and frequency factors 0 < low < high, as Llama 3.1's "
            "(8.0, 1.0, 4.0, 8192.0)."
        )


def rotated(x_BxTxHxK: jax.Array, turns_F: np.ndarray, pairs: bool) -> jax.Array:
    """Rotates pairs of the first 2 F features by angles that grow with the token's position.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.

    Args:
      x_BxTxHxK: Features of each token and head.
      turns_F: Radians per token, from `frequencies`.
      pairs: Whether neighbouring features are a pair; otherwise those of the two halves are.
    """
    positions = jnp.arange(x_BxTxHxK.shape[1], dtype=jnp.float32)
    angles_1xTx1xF = jnp.outer(positions, turns_F)[None, :, None]
    cos, sin = jnp.cos(angles_1xTx1xF), jnp.sin(angles_1xTx1xF)
    rest = x_BxTxHxK[..., 2 * turns_F.size :]
    x = x_BxTxHxK[..., : 2 * turns_F.size].astype(jnp.float32)
    a, b = (x[..., ::2], x[..., 1::2]) if pairs else jnp.split(x, 2, axis=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    x = jnp.stack(turned, -1).reshape(x.shape) if pairs else jnp.concatenate(turned, -1)
    return jnp.concatenate([x.astype(rest.dtype), rest], axis=-1)


def frequencies(width: int, base: float, scaling: Scaling | None) -> np.ndarray:
    """f32[width / 2], radians per token; `scaling` stretches long waves.

    Grattafiori et al., "The Llama 3 Herd of Models", 2024, as released with Llama 3.1.
    """
    exponents = np.arange(0, width, 2) / width
    turns = base**-exponents
    if scaling is not None:
        factor, low, high, context = scaling
        waves = context * turns / (2 * np.pi)  # in the old context
        kept = np.clip((waves - low) / (high - low), 0, 1)
        turns *= kept + (1 - kept) / factor
    return turns.astype(np.float32)
