"""Pictures of values: bars, lines in axes and lamps, as HTML and SVG that no label and no number can break."""

import base64
import math
import re
from dataclasses import replace
from html import unescape
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._render.display import SEVERITY
from openmed_nb._render.drawing import (
    LIMIT,
    PALETTE,
    QUIET,
    Axes,
    Bar,
    Lamp,
    Line,
    Mark,
    Picture,
    bars_of,
    drawn,
    ticks,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ['"><script>', "</td>", "&", "\0"]
)
NUMBERS = st.floats() | st.integers(-3, 300) | st.sampled_from([1e308, -1e308, 5e-324])


def line_of(*heights, **more):
    """Return a line through heights at 1, 2, 3 and so on."""
    places = tuple(map(float, range(1, 1 + len(heights))))
    return Line("tensors", places, heights, tuple(f"epoch {place:g}" for place in places), **more)


def axes_of(**more):
    """Return axes from 0 to 10 epochs."""
    return Axes("MiB", "epoch", tuple(Mark(epoch, str(epoch)) for epoch in (0, 5, 10)), **more)


def svg_in(page):
    """Return the image of a picture of lines as XML."""
    (source,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    return ET.fromstring(base64.b64decode(source))  # noqa: S314 - it was made here


def lefts(page):
    """Return where bars begin and how long they are, in percent."""
    found = re.findall(r"left:([\d.]+)%;top:0;width:([\d.]+)%", page)
    return [(float(left), float(width)) for left, width in found]


def test_axes_below_each_other_begin_at_the_same_place():
    """Lines that stand below each other have one left edge, that of the longest words, so that their axes can be compared."""
    memory, speed = (
        Picture("", lines=(line_of(9.0, most),), axes=replace(axes_of(), unit=unit))
        for most, unit in ((20.0, "MiB"), (2000.0, "rows/s"))
    )
    edges = [re.findall(r"em 1.5em 3em ([\d.]+)em", drawn(*some)) for some in ((memory,), (speed,), (memory, speed))]

    assert edges[0] < edges[1]
    assert edges[2] == edges[1] * 2


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_colours_stand_out_from_both_themes(contrast, background):
    """Lines, bars and limits have a contrast of at least 3 to 1 with a light and with a dark page (WCAG 2.2, 1.4.11)."""
    assert min(contrast(colour, background) for colour in (*PALETTE, QUIET, LIMIT)) >= 3


def test_bars_are_as_long_as_their_values():
    """The longest bar fills its place, the others as much as their share; one may begin where another ends."""
    page = drawn(Picture("Time", (Bar("data", 1.0, "1 ms"), Bar("forward", 3.0, "3 ms", start=1.0))))

    assert lefts(page) == [(0.0, 25.0), (25.0, 75.0)]
    assert [">1 ms<" in page, ">3 ms<" in page, ">Time<" in page] == [True, True, True]


def test_a_bar_stands_out_and_has_its_interval():
    """One bar has the colour, the others are grey; an interval is drawn to its ends, and makes room for itself."""
    page = drawn(Picture("Speed", (Bar("cpu", 10.0, "10"), Bar("mps", 30.0, "30", low=20.0, high=40.0, strong=True))))
    alike = drawn(bars_of("Speed", [("cpu", 10.0), ("mps", 30.0)], "{:g}".format))

    assert (page.count(PALETTE[0]), page.count(QUIET)) == (1, 1)
    assert "left:50.0%;top:25%;width:50.0%" in page
    assert (alike.count(PALETTE[0]), alike.count(QUIET)) == (2, 0)


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_a_bar_without_a_length_keeps_its_words(value):
    """A value that cannot be drawn, or is none, is a bar without a length, with its label and its words."""
    page = drawn(Picture("Speed", (Bar("cpu", value, "not known"), Bar("mps", 2.0, "2"))))

    assert lefts(page) == [(0.0, 0.0), (0.0, 100.0)]
    assert ">not known<" in page


@pytest.mark.parametrize("most", [0.003, 1, 2.5, 7, 99, 101, 4096, 1e9])
def test_ticks_are_round(most):
    """An axis has two to six ticks, from zero, evenly, beyond the largest value by less than one of them."""
    found = ticks(most)

    assert found[0] == 0
    assert 2 <= len(found) <= 6
    assert found[-2] < most <= found[-1]
    assert {f"{one / found[1]:.3f}" for one in found} == {f"{number}.000" for number in range(len(found))}
    assert f"{found[1]:e}"[:4].rstrip("0") in {"1.", "2.", "2.5", "5."}


def test_lines_stand_where_their_values_are():
    """A line runs from left to right over what is planned, from zero to a round number above the largest value."""
    page = drawn(Picture("Memory", lines=(line_of(50.0, 100.0),), axes=axes_of(limits=(Mark(150.0, "limit"),))))
    root, dots = svg_in(page), re.findall(r"left:([\d.]+)%;top:([\d.]+)%;width:8px", page)
    names = {element.tag.rpartition("}")[2] for element in root.iter()}

    assert names == {"svg", "polyline"}
    assert "10,66.67 20,33.33" in [one.get("points") for one in root]
    assert dots == [("10.0", "66.67"), ("20.0", "33.33")]
    assert ">150 MiB<" in page
    assert 'title="epoch 2"' in page


def test_a_picture_of_lines_says_in_words_what_it_shows():
    """Who cannot see it is told what is drawn, from where to where, how high at most, with limits and marks."""
    axes = axes_of(limits=(Mark(150.0, "recommended"),), marks=(Mark(1.0, "warm-up"),))
    page = drawn(Picture("Memory", lines=(line_of(50.0, 120.0, 100.0),), axes=axes))
    alternative = unescape(re.search(r'alt="([^"]*)"', page)[1])

    assert alternative == (
        "Memory, by epoch. tensors: 50 to 100 MiB, 3 points, at most 120; recommended: 150 MiB; warm-up."
    )


def test_lines_differ_without_colour():
    """Two lines are named above them and dashed differently; a line alone is named by the caption."""
    two = drawn(Picture("Memory", lines=(line_of(1.0, 2.0), line_of(2.0, 3.0)), axes=axes_of()))
    one = drawn(Picture("Memory", lines=(line_of(1.0, 2.0),), axes=axes_of()))
    dashes = [element.get("stroke-dasharray") for element in svg_in(two) if element.get("stroke") in PALETTE]

    assert len(set(dashes)) == 2
    assert (two.count(">tensors<"), two.count("> tensors<"), one.count("> tensors<")) == (0, 2, 0)


@pytest.mark.parametrize("heights", [(), (math.nan,), (math.inf, -math.inf)])
def test_nothing_is_drawn_of_nothing(heights):
    """Lines without a point that can be drawn, and a picture without anything, are no picture."""
    assert drawn(Picture("Memory", lines=(line_of(*heights),), axes=axes_of())) == drawn(Picture("Empty")) == ""


def test_one_point_is_a_dot():
    """A line of one point is a dot in its axes."""
    page = drawn(Picture("Memory", lines=(line_of(5.0, math.nan),), axes=axes_of()))

    assert page.count("width:8px") == 1
    assert svg_in(page) is not None


def test_long_lines_have_no_dots():
    """A line of a hundred points is drawn without dots."""
    assert "width:8px" not in drawn(Picture("Memory", lines=(line_of(*map(float, range(100))),), axes=axes_of()))


def test_lamps_have_their_sign_and_their_words():
    """Each lamp has the sign of its status, a name and why: never the colour alone."""
    page = drawn(Picture("Gates", lamps=tuple(Lamp(f"area {status}", status, "12 %") for status in SEVERITY)))

    assert all(f"area {status}" in page for status in SEVERITY)
    assert all(sign in page for sign in "✓✕!\N{EN DASH}")


def test_words_that_styles_place_are_hidden_without_styles():
    """Where styles are lost, as on GitHub, the words of axes are hidden, and bars and lamps are tables."""
    lines = drawn(Picture("Memory", lines=(line_of(1.0, 2.0),), axes=axes_of()))
    bare = re.sub(r' style="[^"]*"', "", lines)
    _, hidden = bare.split('<div hidden="hidden">')

    assert ">epoch<" in hidden
    assert ">epoch<" not in bare.replace(hidden, "")
    assert drawn(bars_of("Speed", [("cpu", 1.0)], str)).count("<td") == 2


@given(NAMES, NAMES, st.lists(NUMBERS, max_size=5), st.lists(NUMBERS, min_size=5, max_size=5))
def test_nothing_breaks_a_picture(read, name, unit, values, others):
    """Whatever labels and numbers are, HTML is closed, SVG is XML with finite numbers, and nothing is added to either."""
    across = tuple(others[: len(values)])
    line = Line(name, across, tuple(values), (name,) * len(values), tuple(combinations(others, 2))[: len(values)])
    marks = tuple(Mark(value, name) for value in others)
    bars = tuple(Bar(name, value, unit, others[0], *others[1:3]) for value in values)
    pictures = (
        Picture(name, bars),
        Picture(name, lines=(line,), axes=Axes(unit, name, marks, marks[:2], marks[2:])),
        Picture(name, lamps=(Lamp(name, "ok", unit),)),
    )
    for page in map(drawn, pictures):
        read(page)

        assert not re.search(r"(nan|inf)(%|em|,)", "".join(re.findall(r'style="([^"]*)"', page)))
        if "<img" in page:
            assert not [one for one in svg_in(page) if re.search("nan|inf", one.get("points"))]
