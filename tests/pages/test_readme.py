"""What the README tells a reader to type."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.snippets import ROOT, run, snippets

README = (ROOT / "README.md").read_text()


def test_the_python_of_the_readme_trains():
    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - batch) ** 2)

    batches = [np.random.default_rng(i).normal(size=(16, 64)).astype("float32") for i in range(9)]
    names = {"loss_fn": loss_fn, "params": {"w": jnp.zeros((64, 64))}, "batches": batches}
    before = float(loss_fn(names["params"], batches[0]))
    found = snippets(README)
    assert len(found) == 4
    run(found, names)
    after = float(loss_fn(jax.device_get(names["params"]), batches[0]))
    assert after < 0.99 * before
    assert not names["metrics"]["skipped"]


def test_the_readme_names_only_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`?make (\w+)", README))
    assert named
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_the_readme_and_its_pages_name_only_files_that_exist():
    pages = [README, *(page.read_text() for page in (ROOT / "docs").rglob("*.md"))]
    folders = r"(?:jaxcomp|train|configs|benchmarks|docs|notebooks|tests)"
    paths = [path for page in pages for path in re.findall(rf"{folders}/[\w./]+\w", page)]
    assert len(paths) > 9
    # What a command of the page writes is not there yet.
    assert [path for path in paths if not (ROOT / path).exists()] == ["configs/mine.py"] * 2
