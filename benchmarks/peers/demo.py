"""DeMo's code, github.com/bloc97/DeMo."""

from torch import nn

from benchmarks.peers import base


def make(module: nn.Module, job: base.Job, **options) -> base.Step:
    """The step; `options` are those of the authors' optimizer."""
    job.reach("DeMo")
    from demo import DeMo

    return base.plain(module, DeMo(module.parameters(), lr=1e-3, **options))
