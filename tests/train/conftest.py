"""What the tests of the training program have in common."""

import jax
import pytest

from tests.helpers.compiling import programs_in


@pytest.fixture(scope="session")
def folder_of_programs(tmp_path_factory):
    return jax.config.jax_compilation_cache_dir or str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True, scope="module")
def programs_on_disk(folder_of_programs):
    """Runs of one process find their programs again: most of a tiny run is the compiler's."""
    with programs_in(folder_of_programs, 0.1):
        yield


@pytest.fixture
def undrawn(request, monkeypatch):
    """Leaves the picture out where a test does not look at it: it takes longer than a tiny run."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("train.output.plots.loss_figure", lambda runs, path: None)
