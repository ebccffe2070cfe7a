"""One transformer for language, in Flax nnx: GPT-2, OPT, GPT-J, GPT-NeoX, Llama, Mistral, Qwen."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from train import checks
from train.models import lora, modules, rotary
from train.models.activations import ACTIVATIONS
from train.models.modules import PathRngs

STACKED = r"^blocks(_\d+)?/"
"""Pattern of the paths of parameters that a scan over the blocks stacks."""
INIT = nnx.initializers.normal(0.02)
"""Initializers of weights and positions."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Architecture and size of the model, by default like GPT-2; parameters are float32."""

    layers: int = 4
    """Number of transformer blocks."""
    width: int = 128
    """Features of the residual stream; divisible by heads."""
    heads: int = 4
    """Attention heads of a block."""
    context: int = 128
    """Tokens that a prediction can attend to."""
    vocab: int = 256
    """Number of different tokens: 256 for bytes, 257 with a mask token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of activations and matrix products: float32 or bfloat16."""
    scan: bool = False
    """Whether to scan over the blocks, which compiles as fast as one block. Parameters then have
    other names and a leading axis of layers; methods still see one layer at a time."""
    stacks: int = 1
    """Scans over the blocks, each with parameters of its own, which are named by its first layer. A
    gradient of one scan is complete last; of several, those of the last layers are sent first."""
    remat: bool = False
    """Whether to recompute each block in the backward pass and keep only the inputs of blocks."""
    mlp: int = 0
    """Hidden features of the MLP; 0: four times width."""
    activation: Literal["gelu", "gelu_exact", "relu", "silu"] = "gelu"
    """Activation of the MLP; `gelu` is the tanh approximation."""
    gated: bool = False
    """Whether a second projection multiplies the activation; with silu this is SwiGLU."""
    norm: Literal["layer", "rms"] = "layer"
    """Normalization before attention and MLP, and at the end."""
    norm_eps: float = 1e-6
    """Epsilon that a normalization adds to the variance."""
    residual: Literal["sequential", "parallel", "shared"] = "sequential"
    """Whether the MLP comes after attention, or is parallel to it with its own normalization
    (GPT-NeoX) or the same one (GPT-J)."""
    rotary: Literal["none", "halves", "pairs"] = "none"
    """Position encoding: a learned table, or rotary embeddings of the two halves of a head's
    features (GPT-NeoX, Llama) or of neighbouring pairs (GPT-J)."""
    rotary_width: int = 0
    """Features of a head that are rotated, an even number; 0: all."""
    rotary_base: float = 10_000.0
    """Base of the rotations' wavelengths, often called theta."""
    rotary_scaling: tuple[float, float, float, float] | None = None
    """Llama 3's scaling of wavelengths: factor, low and high frequency factor, old context."""
    positions: int = 0
    """Maximum number of tokens, and rows of the learned table; 0: context."""
    first_position: int = 0
    """Row of the learned table for the first token; OPT has 2 rows before it."""
    kv_heads: int = 0
    """Heads of keys and values (grouped-query attention); 0: as many as heads."""
    head_width: int = 0
    """Features of a head; 0: width / heads."""
    window: int = 0
    """Sliding window of attention in tokens, the token itself included; 0: all."""
    qk_norm: bool = False
    """Whether RMSNorm normalizes each head's queries and keys before the rotation."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    out_bias: bool = True
    """Whether attention's output projection has a bias."""
    mlp_bias: bool = True
    """Whether the MLP's projections have a bias."""
    tied: bool = True
    """Whether the output matrix is the token embedding."""
    head_bias: bool = False
    """Whether an untied output matrix has a bias."""
    lora: int = 0
    """Rank of LoRA for each matrix of the blocks; 0: no LoRA."""
    lora_alpha: float = 16.0
    """LoRA's alpha: its product is scaled by alpha / rank."""

    def __post_init__(self):
        checks.require_types(self, "model.")
        sizes = "layers", "stacks", "width", "heads", "context", "vocab"
        checks.at_least(1, self, *sizes, prefix="model.")
        least_0 = "mlp rotary_width positions first_position kv_heads head_width window lora"
        checks.at_least(0, self, *least_0.split(), prefix="model.")
        checks.divisible(self, "layers", "stacks")
        if self.stacks > 1 and not self.scan:
            raise ValueError(f"model.stacks={self.stacks} needs scans; write --model.scan.")
        if not self.head_width:
            checks.divisible(self, "width", "heads")
        if self.kv_heads:
            checks.divisible(self, "heads", "kv_heads")
        if self.positions and self.positions < self.context:
            raise ValueError(
                f"model.context={self.context} is more than the model.positions={self.positions} "
                f"that the model is made for; write --model.context {self.positions}."
            )
        if self.rotary != "none" and (self.rotated % 2 or self.rotated > self.head_size):
            raise ValueError(
                f"model.rotary_width={self.rotated} must be even and at most the "
                f"{self.head_size} features of a head; write --model.rotary-width "
                f"{self.head_size // 2 * 2}."
            )
        if not 1e-37 <= self.norm_eps <= 1e37:  # in float32
            raise ValueError(
                f"model.norm_eps={self.norm_eps} must be positive, so that no norm is 0 or NaN; "
                "write --model.norm-eps 1e-6."
            )
        rotary.require_finite(self.rotary_base, self.rotary_scaling)
        if self.head_bias and self.tied:
            raise ValueError("model.head_bias needs --model.no-tied: a tied output has no bias.")

    @property
    def stacked(self) -> str | None:
        """Pattern of the paths whose first axis counts layers, see `jaxcomp.per_layer`; or None."""
        return STACKED if self.scan else None

    @property
    def stack_names(self) -> tuple[str, ...]:
        """Names of the stacks of a scanned model."""
        firsts = range(0, self.layers, self.layers // self.stacks)
        return ("blocks",) if self.stacks == 1 else tuple(f"blocks_{first}" for first in firsts)

    @property
    def lora_scale(self) -> float:
        """The factor of LoRA's product."""
        return self.lora_alpha / max(1, self.lora)

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_width or self.width // self.heads

    @property
    def rotated(self) -> int:
        """Features of a head that are rotated, if any."""
        return self.rotary_width or self.head_size


class Block(nnx.Module):
    """Pre-norm transformer block: self-attention, and an MLP after it or parallel to it.

    Features of all tokens are one matrix, N = batch * time rows: XLA:CPU multiplies matrices
    twice as fast as batches of them.
    """

    def __init__(self, config: DecoderConfig, causal: bool, *, rngs: PathRngs):
        c = self.config = config
        self.causal, self.kv_heads = causal, c.kv_heads or c.heads
        linear = functools.partial(lora.Linear, rank=c.lora, scale=c.lora_scale)
        linear = functools.partial(linear, dtype=c.dtype, kernel_init=INIT)
        inner, mlp = c.heads * c.head_size, c.mlp or 4 * c.width
        out_init = nnx.initializers.normal(0.02 / (2 * c.layers) ** 0.5)

        def add(name, make, *args, **options):
            setattr(self, name, make(*args, **options, rngs=rngs.at(name)))

        add("norm_attention", norm_of(c), c.width)
        add("qkv", linear, c.width, inner + 2 * self.kv_heads * c.head_size, use_bias=c.qkv_bias)
        if c.qk_norm:
            head_norm = functools.partial(nnx.RMSNorm, epsilon=c.norm_eps, dtype=c.dtype)
            add("norm_q", head_norm, c.head_size)
            add("norm_k", head_norm, c.head_size)
        add("out", linear, inner, c.width, kernel_init=out_init, use_bias=c.out_bias)
        if c.residual != "shared":
            add("norm_mlp", norm_of(c), c.width)
        if c.gated:
            add("gate", linear, c.width, mlp, use_bias=c.mlp_bias)
        add("up", linear, c.width, mlp, use_bias=c.mlp_bias)
        add("down", linear, mlp, c.width, kernel_init=out_init, use_bias=c.mlp_bias)

    def __call__(self, x_NxD, time: int, documents_BxT=None):
        residual = self.config.residual
        h_NxD = self.norm_attention(x_NxD)
        attended_NxD = self.attention(h_NxD, time, documents_BxT)
        if residual == "sequential":
            x_NxD += attended_NxD
            return x_NxD + self.perceptron(self.norm_mlp(x_NxD))
        beside_NxD = self.norm_mlp(x_NxD) if residual == "parallel" else h_NxD
        return x_NxD + attended_NxD + self.perceptron(beside_NxD)

    def attention(self, h_NxD, time: int, documents_BxT=None):
        """Self-attention: `[N, width] -> [N, width]`."""
        c = self.config
        keys = c.heads + self.kv_heads  # where the values begin
        parts = jnp.split(self.qkv(h_NxD), (c.heads * c.head_size, keys * c.head_size), axis=-1)
        q, k, v = (x.reshape(-1, time, x.shape[-1] // c.head_size, c.head_size) for x in parts)
        if c.qk_norm:
            q, k = self.norm_q(q), self.norm_k(k)
        if c.rotary != "none":
            turns = rotary.frequencies(c.rotated, c.rotary_base, c.rotary_scaling)
            q, k = (rotary.rotated(x, turns, c.rotary == "pairs") for x in (q, k))
        window = (c.window - 1, 0 if self.causal else c.window - 1) if c.window else None
        d = documents_BxT
        mask_Bx1xTxT = None if d is None else d[:, None, :, None] == d[:, None, None, :]
        options = {"is_causal": self.causal, "local_window_size": window, "mask": mask_Bx1xTxT}
        h_BxTxHxK = jax.nn.dot_product_attention(q, k, v, **options)
        return self.out(h_BxTxHxK.reshape(h_NxD.shape[0], -1))

    def perceptron(self, h_NxD):
        """The MLP of each token: `[N, width] -> [N, width]`."""
        activation = ACTIVATIONS[self.config.activation]
        if self.config.gated:
            return self.down(activation(self.gate(h_NxD)) * self.up(h_NxD))
        return self.down(activation(self.up(h_NxD)))


class Decoder(nnx.Module):
    """A transformer that returns logits for the next or the same token.

    With `causal=False` every position sees all others, as in BERT. Call with tokens i32[batch,
    time], time at most `config.context`; returns logits f32[batch, time, vocab]. With `documents`,
    i32[batch, time], a token attends only to tokens of its own document. `positions`, i32[batch,
    time], then choose rows of the learned table; rotary embeddings depend only on distances and
    need none. With `layers`, for example `jaxcomp.QSDP.layers`, the parameters of the blocks may be
    shards.
    """

    def __init__(self, config: DecoderConfig, *, causal: bool = True, rngs: PathRngs):
        c = self.config = config
        self.embed = nnx.Embed(c.vocab, c.width, embedding_init=INIT, rngs=rngs.at("embed"))
        if c.rotary == "none":
            rows = c.first_position + (c.positions or c.context)
            self.position = nnx.Param(INIT(rngs.params(), (rows, c.width), jnp.float32))
        block = functools.partial(Block, c, causal)
        self.names = tuple(f"block_{index}" for index in range(c.layers))
        if c.scan:
            size = c.layers // c.stacks
            for number, name in enumerate(c.stack_names):
                names = self.names[number * size : (number + 1) * size]
                setattr(self, name, modules.stacked(block, names, rngs))
        else:
            for name in self.names:
                setattr(self, name, block(rngs=rngs.at(name)))
        self.norm = norm_of(c)(c.width, rngs=rngs.at("norm"))
        if not c.tied:
            options = {"use_bias": c.head_bias, "dtype": c.dtype, "kernel_init": INIT}
            self.head = nnx.Linear(c.width, c.vocab, **options, rngs=rngs.at("head"))

    def __call__(
        self, tokens_BxT, documents=None, positions=None, *, layers: Callable = modules.in_turn
    ):
        c = self.config
        batch, time = tokens_BxT.shape
        x_BxTxD = self.embed(tokens_BxT)
        if c.rotary == "none" and positions is None:
            x_BxTxD += self.position[None, c.first_position : c.first_position + time]
        elif c.rotary == "none":
            x_BxTxD += self.position[...][c.first_position + positions]
        x_NxD = x_BxTxD.reshape(-1, c.width).astype(c.dtype)
        blocks = [getattr(self, name) for name in (c.stack_names if c.scan else self.names)]
        if c.remat:
            # XLA does not merge recomputation across a scan, so no guard is needed.
            recomputed = functools.partial(jax.checkpoint, prevent_cse=not c.scan)
            layers = lambda function, layers=layers: layers(recomputed(function))
        for part in blocks if c.scan else [blocks]:
            x_NxD = modules.run(part, x_NxD, time, documents, layers=layers)
        x_NxD = self.norm(x_NxD)
        if c.tied:
            logits_NxV = x_NxD @ self.embed.embedding[...].astype(x_NxD.dtype).T
        else:
            logits_NxV = self.head(x_NxD)
        return logits_NxV.reshape(batch, time, c.vocab).astype(jnp.float32)


def norm_of(config: DecoderConfig) -> Callable[..., nnx.Module]:
    """The constructor of normalizations: `(features, rngs=) -> module`."""
    kind = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}[config.norm]
    return functools.partial(kind, epsilon=config.norm_eps, dtype=config.dtype)
