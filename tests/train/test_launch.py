"""What the launcher is told of a training run: how it goes on with fewer processes."""

import dataclasses

import pytest

from train.config import Config, Optimizer, facts
from train.launch import program as launch

CONFIG = Config("run", 10, Optimizer("sgd(learning_rate)", 0.1), replicas=4)


def config_of(**changes):
    batch = dataclasses.replace(CONFIG.data, batch=changes.pop("batch", 8))
    return dataclasses.replace(CONFIG, data=batch, **changes)


@pytest.mark.parametrize(
    ("changes", "count", "replicas", "accumulate"),
    [
        ({}, 2, 2, 2),
        ({}, 1, 1, 4),
        ({}, 3, None, None),  # 8 sequences for 3 replicas
        ({"batch": 12}, 3, 3, 2),  # of 4 sequences, 2 microbatches of 2: they do not grow
        ({"batch": 24, "accumulate": 2}, 3, 3, 4),
        ({"replicas": 8}, 2, 4, 2),
        ({"replicas": 8, "fast": 2}, 2, 4, 2),
        ({"replicas": 8, "fast": 8}, 2, None, None),
        ({"replicas": 0}, 2, None, None),
    ],
)
def test_replicas_and_accumulation_are_fitted_to_the_batch(changes, count, replicas, accumulate):
    config = config_of(**changes)
    found = launch.fewer(config, 4, count, 1)
    if replicas is None:
        assert found is None
        return
    assert found == ["--replicas", str(replicas), "--accumulate", str(accumulate)]
    assert launch.fewer(config, 4, count, replicas + 1) is None
    before = config.data.batch / config.replicas / config.accumulate
    assert config.data.batch / replicas / accumulate <= before


def test_facts_cover_config_sources_and_packages():
    found = facts.program_facts('{"steps": 4, "model": {"width": 8}}')
    assert found["config steps"] == "4" and found["config model.width"] == "8"
    assert len(found["file jaxcomp/launch/distributed.py"]) == 12
    assert "file jaxcomp/__init__.py" in found
    assert {"jax", "jaxlib", "optax", "flax", "python"} < found.keys()
