"""The programs that people copy: each runs, and its loss falls."""

import os
import re
import runpy
import shutil
import subprocess
import sys

import jax
import pytest

from tests.helpers.snippets import ROOT

EXAMPLES = ROOT / "examples"
ALONE = "with_optax with_nnx with_linen with_equinox with_fsdp own_compressor own_method".split()
BELOW = {"two_hosts", "islands", "fine_tune"}


@pytest.fixture(autouse=True)
def readers_jax():
    """A reader's JAX is not as strict as the tests'."""
    strict = jax.config.jax_numpy_rank_promotion
    jax.config.update("jax_numpy_rank_promotion", "allow")
    yield
    jax.config.update("jax_numpy_rank_promotion", strict)


def test_each_example_is_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*ALONE, *BELOW}


@pytest.mark.parametrize("name", ALONE)
def test_the_loss_of_an_example_falls(name, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    losses = runpy.run_path(str(EXAMPLES / f"{name}.py"))["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_shards_of_one_device_are_one_replica(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    losses = runpy.run_path(str(EXAMPLES / "with_fsdp.py"))["losses"]
    assert losses[-1] < 0.5 * losses[0]


def test_two_hosts_train_one_model(tmp_path):
    command = [sys.executable, "-m", "jaxcomp.launch", "--local", "2", "--logs", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(
        [*command, "--", sys.executable, str(EXAMPLES / "two_hosts.py")],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    first, last = map(float, re.search(r"loss (\S+), after 60 steps (\S+)", done.stdout).groups())
    assert last < 0.5 * first


def test_islands_share_a_folder(tmp_path):
    command = [sys.executable, str(EXAMPLES / "islands.py"), f"file://{tmp_path}/shared"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    islands = [
        subprocess.Popen([*command, name], env=environment, stdout=subprocess.PIPE, text=True)
        for name in ("garage-1", "garage-2")
    ]
    for island in islands:
        said, _ = island.communicate(timeout=200)
        assert island.returncode == 0
        first, last = map(float, re.search(r"loss (\S+), after 60 steps (\S+),", said).groups())
        assert last < 0.5 * first


def test_a_folder_is_fine_tuned_and_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(ROOT / "tests" / "golden" / "huggingface" / "gpt2", "gpt2")
    (tmp_path / "text.txt").write_text("the same words again and again. " * 400)
    monkeypatch.setattr(sys, "argv", ["fine_tune.py", str(folder), "text.txt", "tuned", "8"])
    losses = runpy.run_path(str(EXAMPLES / "fine_tune.py"))["losses"]
    assert losses[-1] < losses[0]
    assert (tmp_path / "tuned" / "model.safetensors").exists()
