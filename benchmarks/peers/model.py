"""The model of `train.models.decoder` in PyTorch, with its weights."""

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.names import path_of

EPS = 1e-6  # what Flax adds to a variance; PyTorch adds ten times as much


class Block(nn.Module):
    """Causal self-attention, then a perceptron, norms first."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width, eps=EPS)
        self.norm_mlp = nn.LayerNorm(width, eps=EPS)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, time, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class GPT(nn.Module):
    """Logits of the next of 256 bytes; the embedding is the output's matrix, too."""

    def __init__(self, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, eps=EPS)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.embed.weight.T


def load(model: GPT, weights: Mapping[str, np.ndarray]) -> None:
    """Takes the weights of a `Decoder`, by their paths in it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = torch.from_numpy(weights[path_of(name)].copy())
            parameter.copy_(value.T if path_of(name).endswith("kernel") else value)


def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next byte, in nats; tokens i64[batch, context + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
