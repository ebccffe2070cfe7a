"""Pictures: drawn whatever the rows are, and readable: every axis has labels."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from train.output import plots


def run_of(bytes_per_step):
    rows = [{"step": step, "sent_bytes": step * bytes_per_step} for step in range(0, 50, 5)]
    return [row | {"val_loss": 5 - row["step"] / 20} for row in rows[::2]] + rows[1::2]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_is_drawn(tmp_path, suffix):
    runs = {f"method {index}": run_of(10**index) for index in range(9)}
    plots.loss_figure(runs, tmp_path / f"loss{suffix}")
    assert (tmp_path / f"loss{suffix}").stat().st_size > 10_000


def test_a_name_with_dollars_is_no_formula():
    for names in (["$^$"], ["$^$", "cost$5$_$x"]):
        plots.drawn({name: run_of(3) for name in names}).draw_without_rendering()


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


def visible_labels(axis):
    """The texts of an axis's ticks that lie within its limits."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    inside = [tick for tick in ticks if low <= tick.get_loc() <= high]
    shown = [tick.label1.get_text() for tick in inside if tick.label1.get_visible()]
    return [text for text in shown if text]


@pytest.mark.parametrize(
    "sent", [[1], [300, 420], [10, 99], [5, 5e6], [1e3, 1e15], [0.5, 0.6], [0]], ids=str
)
def test_every_axis_has_labels_whatever_its_range(sent):
    rows = [
        {"step": n, "sent_bytes": b, "val_loss": 3.0 - n, "loss": 3.5, "learning_rate": 1e-6}
        for n, b in enumerate(sent)
    ]
    figure = plots.drawn({"a": rows})
    figure.draw_without_rendering()
    assert len(figure.axes) == 3
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            assert len(set(visible_labels(axis))) >= 2, (axes.get_xlabel(), axes.get_ylabel())


@pytest.mark.parametrize(("low", "high"), [(7e5, 4e6), (7e5, 3e8), (7e5, 4.2e7), (3e5, 5e6)])
def test_labels_of_bytes_do_not_touch(low, high):
    """Training rows begin long before the first validation that has sent anything."""
    rows = [{"step": n, "sent_bytes": b} for n, b in enumerate(np.geomspace(low, high, 20))]
    rows = [row | {"loss": 3.5, "learning_rate": 1e-3} for row in rows]
    rows = [row | {"val_loss": 3.0} if row["step"] > 16 else row for row in rows]
    figure = plots.drawn({"a": rows})
    figure.canvas.draw()
    axis = next(a for a in figure.axes if "bytes" in a.get_xlabel()).xaxis
    left, right = axis.get_view_interval()
    ticks = [tick for tick in axis.get_major_ticks() if left <= tick.get_loc() <= right]
    places = [tick.label1.get_window_extent() for tick in ticks]
    assert len(places) >= 2
    assert all(a.x1 < b.x0 for a, b in zip(places, places[1:], strict=False))


def test_training_and_rate_are_drawn_of_the_rows_that_have_them():
    rows = run_of(3)
    rows = [row | {"loss": 2.0, "learning_rate": 0.1} for row in rows if row["step"] > 10]
    rows.append({"step": 60, "sent_bytes": 1, "loss": None, "learning_rate": 0.0})
    by_step, rate, by_bytes = (plots.drawn({"a": rows}).axes[index] for index in (0, 2, 1))
    assert max(by_step.get_lines()[0].get_xdata()) == 45  # a loss that is not finite has no place
    assert max(rate.get_lines()[0].get_xdata()) == 60
    assert len(by_bytes.get_lines()) == 3
