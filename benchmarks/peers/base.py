"""The interface of peers: functions that make the training steps of a module on every host."""

import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

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
