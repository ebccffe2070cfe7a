"""What the tests of the training program have in common."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def folder_of_programs(tmp_path_factory):
    return jax.config.jax_compilation_cache_dir or str(tmp_path_factory.mktemp("programs"))


@pytest.fixture(autouse=True, scope="module")
def programs_on_disk(folder_of_programs):
    """Runs of one process find their programs again: most of a tiny run is the compiler's."""
    names = {
        "jax_compilation_cache_dir": folder_of_programs,
        "jax_persistent_cache_min_compile_time_secs": 0.1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    _configure(names)
    yield
    _configure(before)


def _configure(values):
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def undrawn(request, monkeypatch):
    """Leaves the picture out where a test does not look at it: it takes longer than a tiny run."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("train.output.plots.loss_figure", lambda runs, path: None)
