"""What peers share: a model, and functions that make the training steps of a module on every host.

The model is that of `train.models.decoder` in PyTorch, with its weights.
"""

import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.peers import path_of

Loss = Callable[[nn.Module], torch.Tensor]
"""The loss of a module on this host's next rows."""

Step = Callable[[Loss, float], torch.Tensor]
"""One training step on all hosts: `(loss, learning rate) -> the loss before it`.

Afterwards the module holds this host's parameters.
"""


class Job(NamedTuple):
    """What a peer needs apart from the module."""

    dense_steps: int  # before compression starts, for methods that need them
    code: str | None  # folder of the authors' code

    def find(self, name: str) -> pathlib.Path:
        """The folder of a clone.

        Raises:
          ValueError: If it is not there.
        """
        folder = pathlib.Path(self.code or "", name)
        if self.code is None or not folder.is_dir():
            raise ValueError(
                f"no {name} in the folder {self.code}; clone it as in benchmarks.peers."
            )
        return folder

    def reach(self, name: str) -> None:
        """Makes the modules of a clone importable."""
        sys.path.insert(0, str(self.find(name)))


def plain(module: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """A plain step: gradients, then the optimizer's step."""

    def step(loss, rate):
        set_rate(optimizer, rate)
        optimizer.zero_grad()
        value = loss(module)
        value.backward()
        optimizer.step()
        return value

    return step


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def flattened(module: nn.Module) -> nn.Parameter:
    """Moves all parameters and gradients of a module into one vector, as views."""
    parameters = list(module.parameters())
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in parameters]))
    flat.grad = torch.zeros_like(flat)
    sizes = [p.numel() for p in parameters]
    parts = zip(parameters, flat.detach().split(sizes), flat.grad.split(sizes), strict=True)
    for parameter, values, gradient in parts:
        parameter.data = values.view_as(parameter)
        parameter.grad = gradient.view_as(parameter)
    return flat


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


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next byte, in nats; tokens i64[batch, context + 1]."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
