"""Pictures of values: bars, lines in axes and lamps, as HTML and SVG that no label and no number can break."""

import base64
import math
import re
from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._render.display import SEVERITY
from openmed_nb._render.drawing import (
    LIMIT_COLOR,
    MUTED_COLOR,
    PALETTE,
    Axes,
    AxisMarker,
    Bar,
    Chart,
    Series,
    StatusIndicator,
    bar_chart,
    nice_ticks,
    render_charts,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ['"><script>', "</td>", "&", "\0"]
)
NUMBERS = st.floats() | st.integers(-3, 300) | st.sampled_from([1e308, -1e308, 5e-324])


def line_of(*heights, **more):
    """Return a line through heights at 1, 2, 3 and so on."""
    places = tuple(map(float, range(1, 1 + len(heights))))
    return Series("tensors", places, heights, tuple(f"epoch {place:g}" for place in places), **more)


def axes_of(**more):
    """Return axes from 0 to 10 epochs."""
    return Axes("MiB", "epoch", tuple(AxisMarker(epoch, str(epoch)) for epoch in (0, 5, 10)), **more)


def svg_in(page):
    """Return the image of a picture of lines as XML."""
    (source,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return ET.fromstring(base64.b64decode(source))  # noqa: S314 - it was made here


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colors_stand_out_from_both_themes(contrast, background):
    """Lines, bars and limits have a contrast of at least 3 to 1 with a light and with a dark page (WCAG 2.2, 1.4.11)."""
    assert min(contrast(color, background) for color in (*PALETTE, MUTED_COLOR, LIMIT_COLOR)) >= 3


@pytest.mark.parametrize("most", [0.003, 1, 2.5, 7, 99, 101, 4096, 1e9])
def test_ticks_are_round(most):
    """An axis has two to six ticks, from zero, evenly, beyond the largest value by less than one of them."""
    found = nice_ticks(most)

    assert found[0] == 0
    assert 2 <= len(found) <= 6
    assert found[-2] < most <= found[-1]
    assert {f"{one / found[1]:.3f}" for one in found} == {f"{number}.000" for number in range(len(found))}
    assert f"{found[1]:e}"[:4].rstrip("0") in {"1.", "2.", "2.5", "5."}


def lines_of(*lines, **more):
    """Return a picture of lines in axes."""
    return Chart("Memory", lines=lines, axes=axes_of(**more))


LIMITED = {"limits": (AxisMarker(150.0, "recommended"),), "marks": (AxisMarker(1.0, "warm-up"),)}
INTERVAL = Bar("mps", 30.0, "30", low=20.0, high=40.0, emphasized=True)
UNKNOWN = tuple(Bar("cpu", value, "not known") for value in (None, math.nan, math.inf, -math.inf, 0.0, -1.0))

PICTURES = {
    "bars are as long as their values": [
        Chart("Time", (Bar("data", 1.0, "1 ms"), Bar("forward", 3.0, "3 ms", start=1.0)))
    ],
    "a bar stands out and has its interval": [Chart("Speed", (Bar("cpu", 10.0, "10"), INTERVAL))],
    "bars that are alike": [bar_chart("Speed", [("cpu", 10.0), ("mps", 30.0)], "{:g}".format)],
    "bars without a length keep their words": [Chart("Speed", (*UNKNOWN, Bar("mps", 2.0, "2")))],
    "a line with a limit and a mark says in words what it shows": [lines_of(line_of(50.0, 120.0, 100.0), **LIMITED)],
    "two lines are named and dashed differently": [lines_of(line_of(1.0, 2.0), line_of(2.0, 3.0))],
    "one point is a dot": [lines_of(line_of(5.0, math.nan))],
    "a long line has no dots": [lines_of(line_of(*map(float, range(100))))],
    "axes below each other begin at the same place": [
        Chart("", lines=(line_of(9.0, 20.0),), axes=axes_of()),
        Chart("", lines=(line_of(9.0, 2000.0),), axes=replace(axes_of(), unit="rows/s")),
    ],
    "lamps have their sign and their words": [
        Chart("Gates", indicators=tuple(StatusIndicator(f"area {status}", status, "12 %") for status in SEVERITY))
    ],
}


def test_pictures_are_as_recorded(as_recorded):
    """Each picture is what the record has, its SVG in plain; the record is read by people, and by a browser's tests."""
    shown = {}
    for name, pictures in PICTURES.items():
        page = render_charts(*pictures)
        shown[name] = re.sub(
            r'data:image/svg\+xml;base64,([^"]+)', lambda match: base64.b64decode(match[1]).decode(), page
        )

    as_recorded("drawing", shown)


def test_words_that_styles_place_are_hidden_without_styles():
    """Where styles are lost, as on GitHub, the words of axes are hidden."""
    shown, hidden = render_charts(lines_of(line_of(1.0, 2.0))).split('<div hidden="hidden"')

    assert ">epoch<" in hidden
    assert ">epoch<" not in shown


@pytest.mark.parametrize("heights", [(), (math.nan,), (math.inf, -math.inf)])
def test_nothing_is_drawn_of_nothing(heights):
    """Lines without a point that can be drawn, and a picture without anything, are no picture."""
    assert (
        render_charts(Chart("Memory", lines=(line_of(*heights),), axes=axes_of()))
        == render_charts(Chart("Empty"))
        == ""
    )


@given(NAMES, NAMES, st.lists(NUMBERS, max_size=5), st.lists(NUMBERS, min_size=5, max_size=5))
def test_nothing_breaks_a_picture(read, name, unit, values, others):
    """Whatever labels and numbers are, HTML is closed, SVG is XML with finite numbers, and nothing is added to either."""
    across = tuple(others[: len(values)])
    line = Series(name, across, tuple(values), (name,) * len(values), tuple(combinations(others, 2))[: len(values)])
    marks = tuple(AxisMarker(value, name) for value in others)
    bars = tuple(Bar(name, value, unit, others[0], *others[1:3]) for value in values)
    pictures = (
        Chart(name, bars),
        Chart(name, lines=(line,), axes=Axes(unit, name, marks, marks[:2], marks[2:])),
        Chart(name, indicators=(StatusIndicator(name, "ok", unit),)),
    )
    for page in map(render_charts, pictures):
        read(page)

        assert not re.search(r"(nan|inf)(%|em|,)", "".join(re.findall(r'style="([^"]*)"', page)))
        if "<img" in page:
            assert not [one for one in svg_in(page) if re.search("nan|inf", one.get("points"))]
