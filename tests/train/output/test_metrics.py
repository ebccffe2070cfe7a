"""What a run leaves behind: rows of metrics and its record; the loss."""

import math
import os
import re
import subprocess
import sys
import tomllib

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.launching import ROOT
from train.data.once import once
from train.models import losses
from train.output import metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_rows_come_back_as_they_were_appended(path):
    rows = [{"step": step, "loss": 0.1 * step, "sent_bytes": 2**40 + step} for step in range(5)]
    for row in rows:
        metrics.append(path, row)
    assert metrics.read(path) == rows


def test_a_row_that_does_not_fit_leaves_nothing_of_itself(path):
    program = """
import pathlib, resource, sys
from train.output import metrics
path = pathlib.Path(sys.argv[1])
metrics.append(path, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
try:
    metrics.append(path, {"step": 2, "loss": 1.5})
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
metrics.append(path, {"step": 3})
"""
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("File too large\n", "")
    assert metrics.read(path) == [{"step": 1}, {"step": 3}]


def test_scalars_of_numpy_and_jax_become_numbers(path):
    row = {"step": np.int64(3), "loss": jnp.float32(0.5), "skipped": jnp.array(2), "note": "a"}
    metrics.append(path, row)
    assert path.read_text() == '{"step": 3, "loss": 0.5, "skipped": 2, "note": "a"}\n'


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_not_finite_become_null(path, value):
    metrics.append(path, {"step": 0, "loss": value, "spread": jnp.float32(value)})
    assert path.read_text() == '{"step": 0, "loss": null, "spread": null}\n'


@pytest.mark.parametrize(("step", "kept"), [(-1, 0), (0, 1), (3, 4), (4, 5), (9, 5)])
def test_rows_after_a_step_are_dropped(path, step, kept):
    for number in range(5):
        metrics.append(path, {"step": number, "loss": 1.5})
    metrics.keep_until(path, step)
    metrics.append(path, {"step": 100, "loss": 2.5})
    assert [row["step"] for row in metrics.read(path)] == [*range(kept), 100]
    assert os.listdir(path.parent) == ["metrics.jsonl"]


def test_nothing_is_dropped_where_there_is_no_file(path):
    metrics.keep_until(path, 3)
    assert not path.exists()


def test_line_cut_off_by_a_crash_is_left_out_and_mended(path):
    metrics.append(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert metrics.read(path) == [{"step": 1}]
    metrics.keep_until(path, 9)
    metrics.append(path, {"step": 2})
    assert metrics.read(path) == [{"step": 1}, {"step": 2}]


def test_unreadable_metrics_are_refused(path):
    with pytest.raises(ValueError, match=r"metrics.jsonl' does not exist"):
        metrics.read(path)
    path.write_text('{"step": 1}\nhello\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"line 2, is no row .*: 'hello'"):
        metrics.read(path)


def test_replacing_a_text_that_fails_leaves_the_old_one(path, monkeypatch):
    metrics.write_text(path, "old")

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    for write in (
        lambda: metrics.write_text(path, "new"),
        lambda: metrics.append(path, {"step": 1}),
        lambda: once(path.parent, "tokens", lambda new: disk_full(0)),
    ):
        with pytest.raises(OSError, match="No space left on device: ") as full:
            write()
        assert full.value.errno == 28 and str(path).startswith(full.value.filename)
    assert path.read_text() == "old"


def test_a_planted_link_is_not_followed(path):
    other = path.with_name("other")
    other.write_text("mine")
    path.with_name("metrics.jsonl.part").symlink_to(other)
    metrics.write_text(path, "new")
    assert (path.read_text(), other.read_text()) == ("new", "mine")


def test_every_text_that_says_what_to_install_names_an_extra_of_the_checkout():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folders = ("benchmarks", "configs", "notebooks", "train")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    installed = []
    for file in files:
        # A string may go on in the next line.
        text = re.sub(r'"\n\s*f?"', "", file.read_text())
        for command in re.findall("pip install.*", text):
            installed += re.findall(r"'([^'\[]*)\[([\w,]+)\]'", command)
        installed += [(".", extra) for extra in re.findall(r'\bextra="(\w+)"', text)]
    assert len(installed) > 9
    # The package index does not have jaxcomp: a checkout does.
    assert {folder for folder, _ in installed} == {"."}
    extras = {extra for _, group in installed for extra in group.split(",")}
    assert extras <= project["optional-dependencies"].keys()


def test_cross_entropy_averages_over_all_tokens_in_float32():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(jnp.bfloat16)
    targets = np.array([[0, 1, 2], [3, 4, 0]])
    exact = logits.astype(np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], -1).mean()
    loss = losses.cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    # A dozen float32 operations a token; bfloat16 would be off by 2^-9.
    np.testing.assert_allclose(loss, expected, rtol=12 * 2**-24)
