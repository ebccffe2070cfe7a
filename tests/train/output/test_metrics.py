"""What a run leaves behind: rows of metrics, its record, progress and pictures; the loss."""

import json
import math
import os
import pathlib
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.figure import Figure

from train.models import losses
from train.output import metrics, plots


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_rows_come_back_as_they_were_appended(path):
    rows = [{"step": step, "loss": 0.1 * step, "sent_bytes": 2**40 + step} for step in range(5)]
    for row in rows:
        metrics.append(path, row)
    assert metrics.read(path) == rows


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
    with pytest.raises(ValueError, match=r"line 2, is no JSON: 'hello'"):
        metrics.read(path)


def test_replacing_a_text_that_fails_leaves_the_old_one(path, monkeypatch):
    metrics.write_text(path, "old")

    def disk_full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", disk_full)
    with pytest.raises(OSError, match="No space left"):
        metrics.write_text(path, "new")
    assert path.read_text() == "old"


def test_tensorboard_gets_the_numbers_of_a_row(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with metrics.tensorboard(tmp_path, step=4) as write:
        write({"step": 5, "loss": jnp.float32(0.5), "val_loss": math.nan, "sent_bytes": 2**40})
    (file,) = tmp_path.iterdir()
    scalars = [
        (event.step, value.tag, value.simple_value)
        for event in events_of(file.read_bytes(), Event)
        for value in event.summary.value
    ]
    assert scalars == [(5, "loss", 0.5), (5, "sent_bytes", 2.0**40)]


def events_of(content, event):
    """Reads TFRecord: length u64, its checksum u32, the record, its checksum u32."""
    while content:
        size = int.from_bytes(content[:8], "little")
        yield event.FromString(content[12 : 12 + size])
        content = content[16 + size :]


def test_missing_tensorboard_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[tensorboard\]'"):
        metrics.tensorboard(tmp_path, step=0).__enter__()


def test_every_text_that_says_what_to_install_names_an_extra_of_the_checkout():
    root = pathlib.Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    folders = ("benchmarks", "configs", "notebooks", "train")
    files = [file for folder in folders for file in (root / folder).rglob("*.py")]
    files += [root / "README.md", *(root / "docs").rglob("*.md")]
    installed = []
    for file in files:
        # A string may go on in the next line.
        text = re.sub(r'"\n\s*f?"', "", file.read_text())
        for command in re.findall("pip install.*", text):
            installed += re.findall(r"'([^'\[]*)\[([\w,]+)\]'", command)
    assert len(installed) > 9
    # The package index does not have jaxcomp: a checkout does, or the clone that a notebook makes.
    assert {folder for folder, _ in installed} == {".", "{folder}"}
    extras = {extra for _, group in installed for extra in group.split(",")}
    assert extras <= project["optional-dependencies"].keys()


def test_run_record_names_what_the_run_depends_on():
    record = json.loads(metrics.run_record('{"steps": 3}', {"sha256": "ab"}, ["embed"]))
    assert record["config"] == {"steps": 3}
    assert record["data"] == {"sha256": "ab"} and record["plan"] == ["embed"]
    assert record["versions"]["jax"] == jax.__version__
    assert record["versions"].keys() == {"python", "jax", "jaxlib", "flax", "optax", "numpy"}
    assert record["hardware"] == metrics.hardware_name()


def test_hardware_name_tells_the_cores_of_a_cpu():
    name = metrics.hardware_name()
    assert name.endswith(f", {os.cpu_count()} cores") and not name.startswith(",")


def test_progress_prints_plain_lines_where_there_is_no_terminal(capsys):
    with metrics.progress("small", 50, 100) as show:
        show(60, 2.5, 0.5)
        show(100, 1.25, 0.25)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("small: step 100/100, loss 1.250, 0.250 s/step, 00:00 left")


def test_plain_progress_comes_every_ten_seconds_with_the_time_left(capsys, monkeypatch):
    clock = iter([0, 4, 11, 12, 22])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    with metrics.progress("small", 50, 150) as show:
        for step in (51, 61, 62, 72):
            show(step, 2.0, 0.5)
    assert capsys.readouterr().err.splitlines() == [
        "small: step 61/150, loss 2.000, 0.500 s/step, 01:29 left",
        "small: step 72/150, loss 2.000, 0.500 s/step, 01:18 left",
    ]


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with metrics.progress("small", 50, 100) as show:
        show(100, 1.25, 0.5)
    text = capsys.readouterr().err
    assert "50/100" in text and "small: 100%" in text
    assert text.rstrip().endswith(", loss 1.250, 0.500 s/step]") and "step/s" not in text


def run_of(bytes_per_step):
    rows = [{"step": step, "sent_bytes": step * bytes_per_step} for step in range(0, 50, 5)]
    return [row | {"val_loss": 5 - row["step"] / 20} for row in rows[::2]] + rows[1::2]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_drawn(tmp_path, suffix):
    runs = {f"method {index}": run_of(10**index) for index in range(9)}
    plots.loss_figure(runs, tmp_path / f"loss{suffix}")
    assert (tmp_path / f"loss{suffix}").stat().st_size > 10_000


def test_picture_of_one_row_or_of_a_diverged_run_is_drawn(tmp_path):
    runs = {
        "one row": [{"step": 0, "sent_bytes": 0, "val_loss": 5.5}],
        "diverged": [{"step": 5, "sent_bytes": 5, "val_loss": None}],
    }
    plots.loss_figure(runs, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_curve_holds_the_evaluated_rows_only():
    steps, sent, evaluated = plots.curve("a", run_of(3))
    np.testing.assert_array_equal(steps, [0, 10, 20, 30, 40])
    np.testing.assert_array_equal(sent, 3 * steps)
    np.testing.assert_array_equal(evaluated, 5 - steps / 20)


def test_picture_of_a_run_without_evaluation_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run 'dense' has no row with val_loss"):
        plots.loss_figure({"dense": [{"step": 1, "sent_bytes": 3}]}, tmp_path / "loss.png")


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_every_labelled_line_has_its_name_at_its_end_and_none_covers_another(scale):
    figure = Figure(figsize=(4, 3))
    axes = figure.subplots()
    if scale == "log":
        axes.set_xscale(scale)
    for name, last in {"a": 2.0, "b\nb": 2.0, "c": 1.99, "far": 9.0}.items():
        axes.plot([1, 2, 3], [0, 1, last], label=name)
    axes.plot([1, 4], [0, 5])
    axes.plot([1, 2], [np.nan, np.nan], label="diverged")
    plots.label_ends(axes)
    figure.canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert set(boxes) == {"a", "b\nb", "c", "far"}
    _, end = axes.transData.transform([3, 9])
    assert boxes["far"].y0 < end < boxes["far"].y1
    ordered = sorted(boxes.values(), key=lambda box: box.y0)
    for below, above in zip(ordered, ordered[1:], strict=False):
        assert below.y1 <= above.y0 and above.x0 > axes.transData.transform([3, 0])[0]


def test_cross_entropy_of_uniform_predictions_is_the_logarithm_of_the_vocabulary():
    loss = losses.cross_entropy(jnp.zeros((2, 3, 256)), jnp.ones((2, 3), jnp.int32))
    assert loss.dtype == jnp.float32
    # log(256) and a sum of 256 ones: two float32 roundings.
    np.testing.assert_allclose(loss, math.log(256), rtol=2**-23)


def test_cross_entropy_averages_over_all_tokens_in_float32():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(jnp.bfloat16)
    targets = np.array([[0, 1, 2], [3, 4, 0]])
    exact = logits.astype(np.float64)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], -1).mean()
    loss = losses.cross_entropy(jnp.asarray(logits), jnp.asarray(targets))
    # A dozen float32 operations a token; bfloat16 would be off by 2^-9.
    np.testing.assert_allclose(loss, expected, rtol=12 * 2**-24)
