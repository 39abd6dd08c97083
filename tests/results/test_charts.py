"""Are curves and pictures drawn as they are?"""

from __future__ import annotations

import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from ms_accum.app.report_page import HEIGHT, MOST_POINTS, WIDTH, data_address, line_chart, pixels, png, ticks

pytestmark = pytest.mark.host


def test_a_picture_is_what_the_network_saw_before_it_was_normalized(rng):
    for shape, mean, std in (((3, 5, 4), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), ((1, 5, 4), 0.3, 0.4)):
        expected = rng.randint(0, 256, shape).astype(np.uint8)
        scale = [np.reshape(np.array(each, np.float32), (-1, 1, 1)) for each in (mean, std)]
        found = pixels(((expected / 255 - scale[0]) / scale[1]).astype(np.float32), mean, std)
        assert np.array_equal(found, expected.transpose(1, 2, 0) if shape[0] == 3 else expected[0])
        opened = Image.open(BytesIO(png(found)))
        opened.verify()  # the checksums
        assert np.array_equal(np.array(Image.open(BytesIO(png(found)))), found)


def test_a_picture_of_no_numbers_is_black():
    assert np.array_equal(pixels(np.full((1, 2, 2), np.nan), 0.5, 1), np.zeros((2, 2)))
    assert pixels(np.array([[[-9.0, 9.0]]]), 0.5, 1).tolist() == [[0, 255]]


def test_the_address_of_a_picture_is_an_image():
    assert data_address(np.zeros((2, 2), np.uint8)).startswith("data:image/png;base64,iVBORw0KGgo")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 2.4, [0, 0.5, 1, 1.5, 2]), (-3, 7, [-2, 0, 2, 4, 6])],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_updates_have_no_fractions():
    assert ticks(1, 3) != [1, 2, 3] == ticks(1, 3, 1)


@pytest.mark.parametrize("low", [0.0, -1e30, 5e-324, 1e99, 0.1])
@pytest.mark.parametrize("width", [1e-3, 1, 12345.678, 1e30])
def test_there_are_a_few_ticks_whatever_the_numbers(low, width):
    high = low + max(width, abs(low) * 1e-5)
    found = ticks(low, high)
    assert 1 <= len(found) <= 6 and min(found) >= low - 1e-9 * (high - low) and max(found) <= high + 1e-9 * (high - low)


CURVES = {
    "falls": [(n, 2 / n) for n in range(1, 30)],
    "constant": [(n, 0.1) for n in range(1, 30)],
    "zero": [(n, 0.0) for n in range(1, 30)],
    "one point": [(7, 0.5)],
    "negative": [(n, -n) for n in range(1, 30)],
    "huge": [(1, 1e99), (2, -1e99)],
    "tiny": [(1, 5e-324), (2, 1e-320)],
    "nearly constant": [(1, 1.0), (2, 1.0 + 1e-12)],
    "same update": [(5, 1.0), (5, 2.0)],
    "long": [(n, np.sin(n)) for n in range(1, 10_000)],
}


def outside(drawn):
    """Say which places of a chart are outside of it."""
    places = [
        tuple(map(float, place.split(",")))
        for group in re.findall(r'points="([^"]*)"', drawn)
        for place in group.split()
    ]
    return [(x, y) for x, y in places if not (0 <= x <= WIDTH and 0 <= y <= HEIGHT)] if places else ["nothing"]


@pytest.mark.parametrize("name", CURVES)
def test_curves_stay_in_their_chart(name):
    drawn = line_chart("x", CURVES[name])
    assert outside(drawn) == [] and "nan" not in drawn and "inf" not in drawn
    assert len(drawn) < 40_000


@pytest.mark.parametrize("places", ["", "10,10 481,10", "10,-1"])
def test_a_curve_that_leaves_is_found(places):
    assert outside(f'<polyline points="{places}"/>')


def test_a_long_curve_shows_its_spikes():
    points = [(n, 1.0) for n in range(10_000)]
    points[5000] = (5000, 9.0)
    band, line = (group.split() for group in re.findall(r'points="([^"]*)"', line_chart("x", points)))
    assert (len(band), len(line)) == (2 * MOST_POINTS, MOST_POINTS)
    top = line_chart("x", [(0, 1.0), (9999, 9.0)]).split('points="')[1].split('"')[0].split(",")[-1]
    assert min(float(place.split(",")[1]) for place in band) == float(top)


def test_few_points_are_marked():
    assert line_chart("x", CURVES["one point"]).count("<circle") == 1
    assert "<circle" not in line_chart("x", CURVES["long"])
