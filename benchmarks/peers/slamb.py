"""SLAMB's code, github.com/hangxu0304/SLAMB: the optimizer of its CIFAR program."""

import ast
import math

import torch
from torch import nn

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, **options) -> base.Step:
    """The step; `options` are those of the authors' optimizer."""
    path = job.find("SLAMB") / "Cifar10" / "main.py"
    # Only the class: the program around it needs Horovod and a GPU. Its mask is on the GPU, too.
    tree = ast.parse(path.read_text().replace("device='cuda'", "device='cpu'"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "Slamb"]
    names = {"torch": torch, "math": math}
    exec(compile(tree, str(path), "exec"), names)
    return base.plain(module, names["Slamb"](module.parameters(), **options))
