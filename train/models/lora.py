"""LoRA: only a low-rank product that is added to each matrix is trained."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxcomp.compressors.policies import path_of

TRAINED = "lora_[ab]$"
"""Pattern of the paths of LoRA's matrices, for `Config.trainable`."""


class Linear(nnx.Linear):
    """A linear layer with the kernel `kernel + scale * lora_a @ lora_b`; with rank 0 just `kernel`.

    `lora_b` is zero at first.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, equation 3.
    """

    def __init__(self, inputs: int, outputs: int, *, rank: int, scale: float, rngs: Any, **options):
        super().__init__(inputs, outputs, rngs=rngs, **options)
        self.scale = scale if rank else None
        if rank:
            draw = nnx.initializers.normal(inputs**-0.5)
            self.lora_a = nnx.Param(draw(rngs.params(), (inputs, rank), jnp.float32))
            self.lora_b = nnx.Param(jnp.zeros((rank, outputs), jnp.float32))

    def __call__(self, x):
        y = super().__call__(x)
        if self.scale is None:
            return y
        a, b = self.lora_a[...].astype(y.dtype), self.lora_b[...].astype(y.dtype)
        return y + (x.astype(y.dtype) @ a) @ b * self.scale


def only(params: Any) -> Any:
    """LoRA's matrices; None in place of other parameters."""
    return _chosen(params, True)


def without(params: Any) -> Any:
    """The other parameters; None in place of LoRA's matrices."""
    return _chosen(params, False)


def combined(without: Any, only: Any) -> Any:
    """All parameters, from the two parts."""
    empty = lambda x: x is None
    return jax.tree.map(lambda a, b: b if a is None else a, without, only, is_leaf=empty)


def merged(params: Any, scale: float) -> Any:
    """The parameters of the same model without LoRA: its products are added to the kernels."""
    if not isinstance(params, dict):
        return params
    rest = {n: merged(x, scale) for n, x in params.items() if n not in ("lora_a", "lora_b")}
    if "lora_a" in params:
        rest["kernel"] = rest["kernel"] + scale * (params["lora_a"] @ params["lora_b"])
    return rest


def _chosen(params: Any, wanted: bool) -> Any:
    thin = lambda key: path_of(key).endswith(("lora_a", "lora_b"))
    pick = lambda key, x: x if thin(key) == wanted else None
    return jax.tree_util.tree_map_with_path(pick, params)
