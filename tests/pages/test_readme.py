"""What the README tells a reader to type."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import figures, rows, slow_network_figure, tables, worker
from tests.helpers.snippets import ROOT, Snippet, run

MICRO = rows.RESULTS / "micro.json"
README = (ROOT / "README.md").read_text()


def train(code):
    """Runs a loop; the losses of the first batch before and after it, and the loop's names."""

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - batch) ** 2)

    batches = [np.random.default_rng(i).normal(size=(16, 64)).astype("float32") for i in range(9)]
    names = {"loss_fn": loss_fn, "params": {"w": jnp.zeros((64, 64))}, "batches": batches}
    before = float(loss_fn(names["params"], batches[0]))
    run([Snippet(code, None)], names)
    return before, float(loss_fn(jax.device_get(names["params"]), batches[0])), names


def test_the_loop_trains_as_it_was_and_as_the_readme_changes_it():
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    side = lambda left_out: "\n".join(x[1:] for x in diff.splitlines() if x[:1] != left_out)
    before, plain, _ = train(side("+"))
    _, changed, names = train(side("-"))
    assert changed < 0.99 * before and abs(changed - plain) < 1e-2 * before
    assert not names["metrics"]["skipped"]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 900


def test_the_headline_is_that_of_the_call_in_the_snippet():
    call = "compressed_mean(jaxcomp.quantize(4)"
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    assert f"+tx = optax.chain(jaxcomp.{call}" in diff
    assert worker.METHODS["4 bits"].update.startswith("chain(compressed_mean(quantize(4), ")
    times = slow_network_figure.by_method(rows.read(rows.RESULTS / "slow_network.json"))
    own, dense = (
        f"{slow_network_figure.seconds(times[name]['100mbit']):.1f} s"
        for name in ("4 bits", "dense float32")
    )
    assert f"at 4 bits, takes {own}; a dense float32 step takes {dense}." in README
    losses = {s.method: s for s in figures.summarize(rows.read(MICRO), "micro", 2000)}
    own, dense = (f"{figures.mean(losses[name]):.2f}" for name in ("4 bits", "dense Adam"))
    wanted = f"They end at a loss of {own} and {dense} nats per token."
    assert wanted in " ".join(README.split())


@pytest.mark.parametrize("method", tables.README)
def test_each_call_of_the_readme_is_that_of_its_row(method):
    call, _ = tables.README[method]
    (made,) = {row["update"] for row in rows.read(MICRO) if row["method"] == method}
    words = set(re.findall(r"[a-z_]{2,}", call)) - {"rate", "replica"}
    assert words and words <= set(re.findall(r"[a-z_]{2,}", made)), made


@pytest.mark.parametrize("narrow", [False, True])
def test_the_picture_of_the_readme_is_drawn_of_six_methods_at_most(narrow, tmp_path):
    assert max(map(len, (figures.OVERVIEW_TIMES, figures.OVERVIEW_LOSSES))) <= 6
    both = zip(figures.OVERVIEW_TIMES, figures.OVERVIEW_LOSSES, strict=False)  # of one colour
    assert all(loss.startswith(time.partition(",")[0]) for time, loss in both)
    figures.draw_overview(tmp_path / "a.png", narrow)
    assert (tmp_path / "a.png").stat().st_size > 10_000


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
