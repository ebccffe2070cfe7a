"""What the tests of the training program have in common."""

import pytest


@pytest.fixture
def undrawn(request, monkeypatch):
    """Leaves the picture out where a test does not look at it: it takes longer than a tiny run."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("train.output.plots.loss_figure", lambda runs, path: None)
