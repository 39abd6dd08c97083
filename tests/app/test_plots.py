"""The figure shows the values in the metrics of the runs."""

from __future__ import annotations

import io
import itertools
import json
import math
from xml.etree import ElementTree

import numpy as np
import pytest

from ms_accum.app import plots
from ms_accum.app.plots import (
    COLOURS,
    curves_of,
    draw,
    figure_of,
    half_window,
    panels_of,
    run_names,
    running_average,
    style,
)
from ms_accum.app.series import read

pytestmark = pytest.mark.host
matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib")
LABELS = ["loss", "learning rate", "gradient norm", "test accuracy", "skipped windows", "rows/s"]
NAN = float("nan")


def window(update, **fields):
    line = {"epoch": 1, "update": update, "loss": 2 / max(update, 1), "lr": 0.1, "grad_norm": 1.0, "samples": 64}
    return {**line, "seconds": 0.5, "skipped": False, **fields}


def evaluation(updates, accuracy):
    return {"epoch": 1, "updates": updates, "accuracy": accuracy, "correct": 1, "total": 2}


def text_evaluation(updates, loss, **fields):
    return {"epoch": 1, "updates": updates, "eval_loss": loss, "bits_per_character": 2 * loss, "tokens": 9, **fields}


def run_of(folder, *lines):
    """Write the metrics of a run, and read them again."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return read(folder)


@pytest.fixture
def panels():
    """Return a function from runs to the axes of their figure, by label."""

    def axes_of(*runs):
        with style():
            figure = figure_of(runs)
        shown = [axes for axes in figure.axes if axes.get_visible()]
        assert [axes.get_ylabel() for axes in shown] == [panel.label for panel in panels_of(runs)]
        return {axes.get_ylabel(): axes for axes in shown}

    return axes_of


def curves(axes):
    """Return the updates and the values of each line that is drawn."""
    return [tuple(np.asarray(part, float).tolist() for part in line.get_data()) for line in axes.get_lines()]


# Short runs


def short_run(folder):
    lines = [window(1), window(2), evaluation(2, 0.25), window(2, loss=None, grad_norm=None, skipped=True)]
    return run_of(folder, *lines, window(3, lr=0.05, seconds=0.25), window(4, samples=32), evaluation(4, 0.5))


def check_short_run(axes):
    assert list(axes) == LABELS
    by_update = {label: curves(panel_axes) for label, panel_axes in axes.items()}
    updates = [1, 2, 2, 3, 4]
    np.testing.assert_equal(by_update["loss"], [(updates, [2, 1, NAN, 2 / 3, 0.5])])
    np.testing.assert_equal(by_update["learning rate"], [(updates, [0.1, 0.1, 0.1, 0.05, 0.1])])
    np.testing.assert_equal(by_update["gradient norm"], [(updates, [1, 1, NAN, 1, 1])])
    assert by_update["test accuracy"] == [([2, 4], [0.25, 0.5])]
    assert by_update["skipped windows"] == [(updates, [0, 0, 1, 1, 1])]
    assert by_update["rows/s"] == [(updates, [128, 128, 128, 256, 64])]


def test_each_panel_shows_its_values(tmp_path, panels):
    check_short_run(panels(short_run(tmp_path / "a")))


@pytest.mark.parametrize(
    ("label", "points"),
    [
        ("test accuracy", lambda run: (np.arange(2.0), np.array([0.25, 0.5]))),
        ("skipped windows", lambda run: (run.numbers("update"), run.numbers("skipped"))),
        ("rows/s", lambda run: (run.numbers("update"), run.numbers("seconds"))),
    ],
)
def test_wrong_panel_values_are_detected(tmp_path, panels, monkeypatch, label, points):
    run = short_run(tmp_path / "a")
    changed = [panel._replace(points=points) if panel.label == label else panel for panel in panels_of([run])]
    monkeypatch.setattr(plots, "panels_of", lambda runs: tuple(changed))
    with pytest.raises(AssertionError):
        check_short_run(panels(run))


def test_short_curves_have_dots(tmp_path, panels):
    few = panels(run_of(tmp_path / "few", window(1)))
    many = panels(run_of(tmp_path / "many", *(window(update) for update in range(1, 40)), evaluation(39, 0.5)))
    assert few["loss"].get_lines()[0].get_marker() == "o" == many["test accuracy"].get_lines()[0].get_marker()
    assert many["loss"].get_lines()[0].get_marker() == "None"


def test_panel_without_values_has_a_note(tmp_path, panels):
    axes = panels(run_of(tmp_path / "a", *(window(update, lr=None) for update in (1, 2))))
    notes = {label: [text.get_text() for text in panel_axes.texts] for label, panel_axes in axes.items()}
    assert notes == {label: ["no values"] if label in ("learning rate", "test accuracy") else [] for label in LABELS}


def test_evaluations_without_accuracy_are_left_out(tmp_path, panels):
    lines = [evaluation(1, None), evaluation(10**400, 0.5), {"epoch": 1, "updates": 1}, evaluation(2, 10**400)]
    axes = panels(run_of(tmp_path / "a", window(1), *lines, evaluation(3, 0.25)))
    assert curves(axes["test accuracy"]) == [([3], [0.25])]


def test_wide_range_has_logarithmic_axis(tmp_path, panels):
    scales = {}
    for name, losses in {"falls": [2.0, 0.001], "is even": [2.0, 1.0], "reaches 0": [2.0, 0.0]}.items():
        run = run_of(tmp_path / name, *(window(update, loss=loss) for update, loss in enumerate(losses, 1)))
        scales[name] = panels(run)["loss"].get_yscale()
    assert scales == {"falls": "log", "is even": "linear", "reaches 0": "linear"}


# Evaluations


def text_run(folder, *evaluations):
    return run_of(folder, *(window(update) for update in range(1, 5)), *evaluations)


def test_text_has_validation_loss_and_bits(tmp_path, panels):
    run = text_run(tmp_path / "a", text_evaluation(2, 1.5), text_evaluation(4, 1.25))
    axes = panels(run)
    assert list(axes) == ["bits per character" if label == "test accuracy" else label for label in LABELS]
    assert curves(axes["loss"]) == [([1, 2, 3, 4], [2, 1, 2 / 3, 0.5]), ([2, 4], [1.5, 1.25])]
    assert curves(axes["bits per character"]) == [([2, 4], [3, 2.5])]
    assert [text.get_text() for text in axes["loss"].get_legend().get_texts()] == ["training", "validation"]
    assert axes["rows/s"].get_legend() is None and axes["loss"].get_ylim()[1] > 2
    assert [(label, *map(list, points)) for label, *points in curves_of(run)][:2] == [
        ("loss", [1, 2, 3, 4], [2, 1, 2 / 3, 0.5]),
        ("validation loss", [2, 4], [1.5, 1.25]),
    ]


def test_validation_loss_is_within_the_axis(tmp_path, panels):
    low, high = panels(text_run(tmp_path / "a", text_evaluation(4, 9.0)))["loss"].get_ylim()
    assert low < 0.5 and high > 9


def test_validation_loss_alone_has_a_panel(tmp_path, panels):
    axes = panels(text_run(tmp_path / "a", {"epoch": 1, "updates": 4, "loss": 1.25}))
    assert curves(axes["validation loss"]) == [([4], [1.25])] and len(curves(axes["loss"])) == 1


def test_images_and_text_in_one_figure_have_both_panels(tmp_path, panels):
    axes = panels(short_run(tmp_path / "a"), text_run(tmp_path / "b", text_evaluation(4, 1.25)))
    assert len(axes) == 7
    assert curves(axes["test accuracy"]) == [([2, 4], [0.25, 0.5]), ([], [])]
    assert curves(axes["bits per character"]) == [([], []), ([4], [2.5])]


@pytest.mark.parametrize("accuracies", [[1.0], [0.0], [0.5], [0.0, 1.0], [0.25, 1.0], [0.96, 0.97]])
def test_axis_of_accuracy_stays_within_0_and_100_percent(tmp_path, panels, accuracies):
    lines = [window(1), *(evaluation(update, value) for update, value in enumerate(accuracies, 1))]
    axes = panels(run_of(tmp_path / "a", *lines))["test accuracy"]
    low, high = axes.get_ylim()
    assert 0 <= low <= min(accuracies) <= max(accuracies) <= high <= 1 and high > low
    (line,) = axes.get_lines()
    assert not line.get_clip_on()  # a dot at the end of the axis is complete


def test_single_evaluation_has_its_value_as_text(tmp_path, panels):
    one = panels(run_of(tmp_path / "a", window(1), evaluation(1, 0.975)))
    two = panels(run_of(tmp_path / "b", window(1), evaluation(1, 0.975), evaluation(2, 0.975)))
    texts = [[text.get_text() for text in axes["test accuracy"].texts] for axes in (one, two)]
    assert texts == [["97.5 %"], []]


def test_many_evaluations_have_no_dots(tmp_path, panels):
    def marks(count):
        lines = [text_evaluation(update, 1.0) for update in range(1, count + 1)]
        axes = panels(run_of(tmp_path / str(count), window(1), *lines))
        line, rings = axes["bits per character"].get_lines()[0], axes["loss"].get_lines()[1]
        return line.get_marker(), rings.get_marker(), rings.get_markevery()

    assert marks(40) == ("o", "o", 1) and marks(100) == ("None", "o", 10)


# The axis of updates


@pytest.mark.parametrize(
    ("updates", "evaluated", "expected"),
    [
        ([1, 300], [300], (-6, 306)),
        ([1, 300], [400], (-8, 408)),
        ([100, 300], [], (-6, 306)),
        ([200, 300], [], (198, 302)),
        ([1], [], (-0.02, 1.02)),
        ([0], [], (-1, 1)),
    ],
)
def test_all_panels_have_one_range_of_updates(tmp_path, panels, updates, evaluated, expected):
    lines = [window(update, loss=1.0) for update in updates] + [evaluation(update, 0.5) for update in evaluated]
    axes = panels(run_of(tmp_path / "a", *lines))
    (ends,) = {tuple(panel_axes.get_xlim()) for panel_axes in axes.values()}
    assert ends == pytest.approx(expected)


def test_lowest_panel_of_each_column_names_the_updates(tmp_path, panels):
    axes = panels(short_run(tmp_path / "a"), text_run(tmp_path / "b", text_evaluation(4, 1.25)))
    named = [label for label, panel_axes in axes.items() if panel_axes.get_xlabel() == "updates"]
    assert named == ["test accuracy", "bits per character", "skipped windows", "rows/s"]


# Long runs


def long_run(folder, updates=400, **fields):
    noise = np.random.RandomState(1).uniform(0.5, 1.5, updates)
    lines = [window(update, loss=loss, seconds=0.5 * loss, **fields) for update, loss in enumerate(noise, 1)]
    return run_of(folder, *lines), noise


def test_noisy_values_are_faint_below_running_mean(tmp_path, panels):
    run, noise = long_run(tmp_path / "a")
    axes = panels(run)
    half = half_window(400)
    assert half == 10
    means = [noise[max(0, index - half) : index + half + 1].mean() for index in range(400)]
    raw, mean = axes["loss"].get_lines()
    assert raw.get_alpha() == 0.25 and mean.get_alpha() is None and raw.get_color() == mean.get_color()
    np.testing.assert_allclose(raw.get_ydata(), noise)
    np.testing.assert_allclose(mean.get_ydata(), means)
    medians = [np.median(128 / noise[max(0, index - half) : index + half + 1]) for index in range(400)]
    np.testing.assert_allclose(axes["rows/s"].get_lines()[1].get_ydata(), np.array(medians))
    assert len(axes["learning rate"].get_lines()) == len(axes["skipped windows"].get_lines()) == 1


def test_files_of_long_run_are_small(tmp_path):
    run, _ = long_run(tmp_path / "a", 100_000)
    contents = draw([run], ["png", "svg"])
    assert len(contents["png"]) < 300_000 and len(contents["svg"]) < 1_500_000


def test_running_mean_of_long_run_has_few_points(tmp_path, panels):
    raw, mean = panels(long_run(tmp_path / "a", 20_000)[0])["loss"].get_lines()
    assert len(mean.get_ydata()) == 1200 and raw.get_ydata().max() > 1.4999


def test_few_values_among_gaps_are_drawn(tmp_path, panels):
    lines = [window(update, loss=3.0 if update == 1237 else None) for update in range(1, 5001)]
    raw, mean = panels(run_of(tmp_path / "a", *lines))["loss"].get_lines()
    assert np.nanmax(raw.get_ydata()) == 3 and np.isnan(mean.get_ydata()).all()


def check_outlier(axes):
    for label in ("loss", "rows/s"):
        low, high = axes[label].get_ylim()
        assert -20 < low < high < 500, label


def test_one_outlier_does_not_set_the_axis(tmp_path, panels, monkeypatch):
    lines = list(long_run(tmp_path / "a")[0].windows)
    lines[200] = {**lines[200], "loss": 1e3, "seconds": 1e-6}
    run = run_of(tmp_path / "b", *lines)
    check_outlier(panels(run))
    monkeypatch.setattr(plots, "_OUTLIERS", (0, 100))
    with pytest.raises(AssertionError):
        check_outlier(panels(run))


# Running means


def by_definition(values, half, places, average=np.mean):
    average_without_nan = {np.mean: np.nanmean, np.median: np.nanmedian}[average]
    windows = [values[max(0, place - half) : place + half + 1] for place in places]
    return [
        math.nan if math.isnan(values[place]) else average_without_nan(neighbours)
        for place, neighbours in zip(places, windows)
    ]


def by_differences(values, half, places, average=np.mean):
    sums = np.concatenate([[0.0], np.nancumsum(values)])
    starts, ends = (np.clip(np.arange(len(values)) + by, 0, len(values)) for by in (-half, half + 1))
    known = np.concatenate([[0], np.cumsum(np.isfinite(values))])
    means = (sums[ends] - sums[starts]) / np.maximum(known[ends] - known[starts], 1)
    return np.where(np.isfinite(values), means, math.nan)[places]


def gaps_as_zeros(values, half, places, average=np.mean):
    return np.where(
        np.isfinite(values[places]), running_average(np.nan_to_num(values), half, places, average), math.nan
    )


def with_wider_window(values, half, places, average=np.mean):
    return running_average(values, half + 1, places, average)


def always_the_mean(values, half, places, average=np.mean):
    return running_average(values, half, places)


def check_running(function, rng):
    for length, half, average in itertools.product((1, 2, 40, 101), (1, 3, 9), (np.mean, np.median)):
        values = rng.randn(length)
        values[5:7] = values[-2:] = NAN
        values[20:21] = 1e20
        for places in (np.arange(length), np.arange(length)[::7]):
            expected = by_definition(values, half, places, average)
            np.testing.assert_allclose(function(values, half, places, average), expected, rtol=1e-9, atol=1e-12)


def test_running_mean_averages_neighbours(rng):
    check_running(running_average, rng)


@pytest.mark.parametrize("function", [by_differences, gaps_as_zeros, with_wider_window, always_the_mean])
def test_wrong_means_are_detected(function, rng):
    with pytest.raises(AssertionError):
        check_running(function, rng)


# Several runs


def test_runs_have_different_styles(tmp_path, panels):
    runs = [run_of(tmp_path / f"_run{number}", window(1), window(2)) for number in range(28)]
    axes = panels(*runs)
    looks = {(line.get_color(), str(line._unscaled_dash_pattern)) for line in axes["loss"].get_lines()}
    assert len(looks) == 28
    (legend,) = axes["loss"].figure.legends
    assert [text.get_text().strip() for text in legend.get_texts()] == [f"_run{number}" for number in range(28)]


def luminance(colour):
    return sum(
        part * (channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)
        for part, channel in zip((0.2126, 0.7152, 0.0722), matplotlib.colors.to_rgb(colour))
    )


def test_colours_have_contrast_on_white():
    import matplotlib.colors  # noqa: F401

    assert min(1.05 / (luminance(colour) + 0.05) for colour in COLOURS) > 2
    assert 1.05 / (luminance("#F0E442") + 0.05) < 2  # the yellow, which is left out


def test_folders_with_same_name_show_their_paths(tmp_path):
    runs = [run_of(tmp_path / name, window(1)) for name in ("a/out", "b/out", "c")]
    assert run_names(runs) == [str(tmp_path / "a" / "out"), str(tmp_path / "b" / "out"), "c"]


# Files


STRANGE = "$x_1$ <&> 我的 \\frac"


def test_png_is_light_and_svg_has_text(tmp_path):
    from matplotlib.image import imread

    runs = [short_run(tmp_path / STRANGE), run_of(tmp_path / "b", window(1))]
    with matplotlib.rc_context({"figure.facecolor": "black", "axes.facecolor": "black", "svg.fonttype": "path"}):
        contents = draw(runs, ["png", "svg"])
        assert matplotlib.rcParams["figure.facecolor"] == "black"
    picture = imread(io.BytesIO(contents["png"]))
    assert picture.shape[0] >= 900 and (picture[:5, :5] == 1).all() and np.median(picture[..., :3]) == 1
    texts = [
        element.text for element in ElementTree.fromstring(contents["svg"]).iter() if element.tag.endswith("}text")
    ]
    assert {*LABELS, "updates"} <= set(texts) and [text.strip() for text in texts].count(STRANGE) == 1


def test_same_metrics_give_same_files(tmp_path):
    run = short_run(tmp_path / "a")
    assert draw([run], ["png", "svg"]) == draw([run], ["png", "svg"])


def test_mark_is_a_line_in_each_panel(tmp_path):
    with style():
        figure = figure_of([short_run(tmp_path / "a")], mark=3)
    assert [axes.get_lines()[-1].get_xdata() for axes in figure.axes] == [[3, 3]] * 6


def test_single_run_is_the_title(tmp_path):
    run = short_run(tmp_path / "mine")
    with style():
        figure = figure_of([run])
    assert "mine" in [text.get_text() for text in figure.texts] and not figure.legends
    assert math.isclose(figure.get_figwidth(), 12)
