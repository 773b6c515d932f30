"""Tests of charts: bars and lines as HTML and SVG, for any label and number."""

import base64
import math
import re
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.html import contrast, read
from openmed_nb._render.drawing import (
    LIMIT_COLOR,
    MUTED_COLOR,
    PALETTE,
    Axes,
    AxisMarker,
    Bar,
    Chart,
    Series,
    nice_ticks,
    render_charts,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ['"><script>', "</td>", "&", "\0"]
)
NUMBERS = st.floats() | st.integers(-3, 300) | st.sampled_from([1e308, -1e308, 5e-324])


def make_series(*y, **options):
    """Return a series at x = 1, 2, 3, ..."""
    x = tuple(map(float, range(1, 1 + len(y))))
    return Series("tensors", x, y, tuple(f"epoch {epoch:g}" for epoch in x), **options)


def make_axes(**options):
    """Return axes from 0 to 10 epochs."""
    return Axes("MiB", "epoch", tuple(AxisMarker(epoch, str(epoch)) for epoch in (0, 5, 10)), **options)


def parse_svg(page):
    """Return the image of a line chart as XML."""
    (source,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return ET.fromstring(base64.b64decode(source))  # noqa: S314 - it was made here


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colors_stand_out_from_both_themes(background):
    """WCAG 2.2, 1.4.11 requires a contrast of at least 3 to 1."""
    assert min(contrast(color, background) for color in (*PALETTE, MUTED_COLOR, LIMIT_COLOR)) >= 3


@pytest.mark.parametrize("largest", [0.003, 1, 2.5, 7, 99, 101, 4096, 1e9])
def test_nice_ticks_are_round_and_evenly_spaced(largest):
    ticks = nice_ticks(largest)

    assert ticks[0] == 0
    assert 2 <= len(ticks) <= 6
    assert ticks[-2] < largest <= ticks[-1]
    assert {f"{tick / ticks[1]:.3f}" for tick in ticks} == {f"{index}.000" for index in range(len(ticks))}
    assert f"{ticks[1]:e}"[:4].rstrip("0") in {"1.", "2.", "2.5", "5."}


def make_line_chart(*lines, **options):
    """Return a chart of lines."""
    return Chart("Memory", lines=lines, axes=make_axes(**options))


LIMITED = {"reference_lines": (AxisMarker(150.0, "recommended"),), "vertical_markers": (AxisMarker(1.0, "warm-up"),)}
UNKNOWN = tuple(Bar("cpu", value, "not known") for value in (None, math.nan, math.inf, -math.inf, 0.0, -1.0))

CHARTS = {
    "bars": [Chart("Time", (Bar("data", 1.0, "1 ms"), Bar("forward", 3.0, "3 ms", start=1.0)))],
    "emphasized bar": [Chart("Speed", (Bar("cpu", 10.0, "10"), Bar("mps", 30.0, "30", emphasized=True)))],
    "bars of one format": [Chart("Speed", (Bar("cpu", 10.0, "10"), Bar("mps", 30.0, "30")))],
    "bars without a finite value": [Chart("Speed", (*UNKNOWN, Bar("mps", 2.0, "2")))],
    "line with a limit and a marker": [make_line_chart(make_series(50.0, 120.0, 100.0), **LIMITED)],
    "two lines": [make_line_chart(make_series(1.0, 2.0), make_series(2.0, 3.0))],
    "line of one point": [make_line_chart(make_series(5.0, math.nan))],
    "line of many points": [make_line_chart(make_series(*map(float, range(100))))],
    "aligned axes": [
        Chart("", lines=(make_series(9.0, 20.0),), axes=make_axes()),
        Chart("", lines=(make_series(9.0, 2000.0),), axes=replace(make_axes(), y_unit="rows/s")),
    ],
}


def test_charts_are_as_recorded(as_recorded):
    """The browser tests also read the snapshot, in which the SVG is decoded."""
    rendered = {}
    for name, charts in CHARTS.items():
        page = render_charts(*charts)
        rendered[name] = re.sub(
            r'data:image/svg\+xml;base64,([^"]+)', lambda match: base64.b64decode(match[1]).decode(), page
        )

    as_recorded("drawing.json", rendered)


@pytest.mark.parametrize("heights", [(), (math.nan,), (math.inf, -math.inf)])
def test_chart_without_finite_points_is_empty(heights):
    assert (
        render_charts(Chart("Memory", lines=(make_series(*heights),), axes=make_axes()))
        == render_charts(Chart("Empty"))
        == ""
    )


@given(NAMES, NAMES, st.lists(NUMBERS, max_size=5), st.lists(NUMBERS, min_size=5, max_size=5))
def test_chart_is_valid_for_any_labels_and_numbers(name, unit, values, others):
    x = tuple(others[: len(values)])
    line = Series(name, x, tuple(values), (name,) * len(values))
    marks = tuple(AxisMarker(value, name) for value in others)
    bars = tuple(Bar(name, value, unit, others[0]) for value in values)
    charts = (
        Chart(name, bars),
        Chart(name, lines=(line,), axes=Axes(unit, name, marks, marks[:2], marks[2:])),
    )
    for page in map(render_charts, charts):
        read(page)

        assert not re.search(r"(nan|inf)(%|em|,)", "".join(re.findall(r'style="([^"]*)"', page)))
        if "<img" in page:
            assert not [shape for shape in parse_svg(page) if re.search("nan|inf", shape.get("points"))]
