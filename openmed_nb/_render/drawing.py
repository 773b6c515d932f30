"""Draw values as HTML that looks right in every theme: bars, lines in axes, and lamps.

A picture has to survive a notebook that JupyterLab does not trust, and to follow a theme. No form of SVG does both: the sanitiser
(https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts) takes ``<svg>`` away and leaves the words in
it, and an ``<img>`` knows the scheme of the system, not the theme of the notebook. So words are words of the page, in its font and
color, bars are elements with inline styles, and only lines are an image: an SVG without words, in colors that stand out
from white and from black. Where styles are lost too, as on GitHub, bars and lamps are tables that can be read, and
the words of axes are hidden.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

# For lines and bars, each with a contrast of at least 3 to 1 with white and with #111111, and apart for the color-blind.
PALETTE = ("#2f7ed8", "#c8680a", "#2b9460", "#8f6ad8")
MUTED_COLOR, LIMIT_COLOR = "#808080", "#e0413f"
INK = "#7a7a7a"  # Of words in an image, which cannot have the color of the page: at least 4 to 1 with white and with #111111.

# The sign of each status and the background on which it stands in white, with a contrast of at least 4.5 to 1.
SIGNS = {
    "ok": ("✓", "#2b7a39"),
    "warning": ("!", "#a85800"),
    "failed": ("✕", "#c92a2a"),
    "not applicable": ("\N{EN DASH}", "#66707a"),
}
BADGE = "display:inline-block;min-width:1.3em;line-height:1.3;text-align:center;border-radius:3px;color:#ffffff;font-weight:700"

WIDTH = "max-width:48em;margin:0.6em 0 1em 0"
CAPTION = "font-weight:600;margin:0 0 0.3em 0"
FILL = "position:absolute;left:0;top:0;width:100%;height:100%"
# A little larger than the axes, so that no line is cut at their edge.
IMAGE, VIEW = "position:absolute;left:-2%;top:-5%;width:104%;height:110%;max-width:none", "-2 -5 104 110"
LEGEND = "display:inline-block;margin:0 1.5em 0 0"
DOT = "width:8px;height:8px;margin:-4px 0 0 -4px;border-radius:50%"
WORD = "position:absolute;line-height:1;white-space:nowrap"
SMALL = "font-size:0.9em"
CELL = "padding:0.15em 0;border:none;text-align:left;vertical-align:middle;font-weight:400;overflow-wrap:break-word"
DIGITS = "font-variant-numeric:tabular-nums"
INDICATOR_STYLE = (
    "display:inline-block;width:14em;padding:0 1.2em 0.6em 0;text-align:left;vertical-align:top;border:none"
)

# What tells lines apart beside their color: how they are dashed, as CSS and as SVG have it.
DASHES = (("solid", ""), ("dashed", "9 5"), ("dotted", "2 5"))
MAX_DRAWABLE = 1e300  # What is beyond is not drawn, so that no sum of two is infinite.
SHORT = 24  # How many characters a value may have that is not broken into lines.
MAX_DOTS = 60  # A longer line is drawn without the dots that say their values.
TICKS = 5  # About how many parts an axis has.
MIDDLE = 50  # Percent; what is marked to the right of it has its name to its left.

# Places across and upwards, each with what it says.
Points = list[tuple[float, float, str]]


@dataclass(frozen=True)
class Bar:
    """One bar of a picture.

    Attributes:
        label: What it is of.
        value: How long it is; null if that is not known.
        shown: The value as people read it.
        start: Where it begins.
        low: Where its interval begins; null if it has none.
        high: Where its interval ends.
        strong: Whether it stands out from the others.
    """

    label: str
    value: float | None
    display_value: str
    start: float = 0.0
    low: float | None = None
    high: float | None = None
    emphasized: bool = False


@dataclass(frozen=True)
class Series:
    """One line of a picture.

    Attributes:
        name: What it is of.
        across: Where its points stand on the axis below.
        up: How high they are.
        shown: What a point says under the mouse; empty for one without a dot.
        spread: The two ends of the interval of each point; empty if there are none.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    tooltips: tuple[str, ...]
    intervals: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class AxisMarker:
    """A place on an axis that has a name."""

    position: float
    name: str


@dataclass(frozen=True)
class Axes:
    """What lines are drawn in.

    Attributes:
        unit: What is counted upwards.
        below: What the axis below is of.
        ticks: The places on the axis below that are named.
        limits: Heights that are named.
        marks: Places on the axis below that a line and a name above mark.
        height: How high the drawing is, in lines of text.
    """

    y_unit: str
    x_label: str
    ticks: tuple[AxisMarker, ...]
    reference_lines: tuple[AxisMarker, ...] = ()
    vertical_markers: tuple[AxisMarker, ...] = ()
    height: float = 12.0


@dataclass(frozen=True)
class StatusIndicator:
    """A status with its sign.

    Attributes:
        name: Of what.
        status: As of a finding: ok, warning, failed or not applicable.
        words: Why, in a few words.
    """

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Chart:
    """Values that are drawn: bars, one below the other; lines in axes; or lamps, one beside the other.

    Attributes:
        caption: What is shown, and in which unit.
        bars: The bars, from above.
        lines: The lines.
        axes: What the lines are drawn in.
        lamps: The lamps, from the left.

    Example:
        >>> render_charts(Chart("Notes a second", (Bar("cpu", 2.0, "2.0"), Bar("mps", math.nan, "not known")))).count("<tr")
        2
        >>> render_charts(Chart("Nothing"))
        ''
    """

    caption: str
    bars: tuple[Bar, ...] = ()
    lines: tuple[Series, ...] = ()
    axes: Axes | None = None
    indicators: tuple[StatusIndicator, ...] = ()


def bar_chart(
    caption: str, values: Iterable[tuple[str, float]], shown: Callable[[float], str], strong: object = None
) -> Chart:
    """Return a picture of a bar for each label with its value; one label may stand out.

    Example:
        >>> bar_chart("Entities", [("DRUG", 2), ("DISEASE", math.inf)], str).bars
        (Bar(label='DRUG', value=2, display_value='2', start=0.0, low=None, high=None, emphasized=False),)
    """
    there = ((label, value) for label, value in values if is_drawable(value))
    return Chart(caption, tuple(Bar(label, value, shown(value), emphasized=label == strong) for label, value in there))


def render_charts(*pictures: Chart) -> str:
    """Return pictures as HTML, one below the other, empty if there is nothing to draw; all lines begin at the same place."""
    edge = max(map(_edge, pictures), default=0)
    return "".join(_drawn(picture, edge) for picture in pictures)


def _drawn(picture: Chart, edge: int) -> str:
    lines = _lines_of(picture)
    if picture.bars:
        inside = _bars(picture.bars)
    elif picture.indicators:
        inside = _lamps(picture.indicators)
    elif lines and picture.axes:
        inside = _lines(picture.caption, lines, picture.axes, edge)
    else:
        return ""
    caption = f'<figcaption style="{CAPTION}">{escape(picture.caption)}</figcaption>'
    return f'<figure class="openmed-picture" style="{WIDTH}">{caption}{inside}</figure>'


def status_badge(status: str) -> str:
    """Return the coloured sign of a status."""
    sign, color = SIGNS[status]
    return f'<span style="{BADGE};background-color:{color}">{sign}</span>'


def is_drawable(value: float | None) -> bool:
    """Tell whether a number can stand in a picture: it is there, and neither NaN nor beyond what can be added up."""
    return value is not None and abs(value) <= MAX_DRAWABLE


def nice_ticks(most: float, whole: bool = False) -> tuple[float, ...]:
    """Return round numbers from 0 up to at least a number, about five of them; whole ones on request.

    Example:
        >>> nice_ticks(170), nice_ticks(2, whole=True), nice_ticks(9, whole=True), nice_ticks(0)
        ((0, 50, 100, 150, 200), (0, 1, 2), (0, 2, 4, 6, 8, 10), (0, 1))
    """
    if not most > 0:
        return (0, 1)
    power = 10.0 ** math.floor(math.log10(most / TICKS)) if most / TICKS > 1 / MAX_DRAWABLE else most
    parts = [part * power for part in (1, 2, 2.5, 5, 10) if not whole or (part * power).is_integer()]
    step = next((one for one in parts if one * TICKS >= most), 1.0)
    step = int(step) if step.is_integer() else step
    return tuple(step * number for number in range(math.ceil(most / step) + 1))


def drawable_points(line: Series) -> Points:
    """Return the points of a line that can be drawn, each with what it says."""
    points = zip(line.x, line.y, line.tooltips, strict=True)
    return [one for one in points if is_drawable(one[0]) and is_drawable(one[1])]


def _share(value: float, least: float, most: float) -> float:
    """Return where a value stands between two others, in percent."""
    part = (value - least) / (most - least) if most > least else 0.5
    return round(100 * min(1.0, max(0.0, part)), 2)


def _bars(bars: Sequence[Bar]) -> str:
    """Return bars as a table: what, how long, and the value in words; also without its styles it can be read."""
    ends = [end for bar in bars for end in (_end(bar), bar.high) if end is not None and is_drawable(end)]
    most, any_strong = max(ends, default=0.0), any(bar.emphasized for bar in bars)
    width = min(20.0, 0.62 * max(len(bar.label) for bar in bars) + 1)
    rows = []
    for bar in bars:
        color = PALETTE[0] if bar.emphasized or not any_strong else MUTED_COLOR
        begin, end = _share(bar.start, 0, most), _share(_end(bar) or 0.0, 0, most)
        filled = f"position:absolute;left:{begin}%;top:0;width:{max(0.0, round(end - begin, 2))}%;min-width:1px;height:100%;border-radius:2px"
        drawing = f'<div style="{filled};background-color:{color}"></div>{_whisker(bar, most)}'
        weight = ";font-weight:600" if bar.emphasized else ""
        line = ";white-space:nowrap" if len(bar.display_value) <= SHORT else ""
        rows.append(
            f'<tr style="border:none;background:none" title="{escape(f"{bar.label}: {bar.display_value}")}">'
            f'<th scope="row" style="{CELL};padding:0.15em 0.6em 0.15em 0;width:{width:g}em{weight}">{escape(bar.label)}</th>'
            f'<td style="{CELL};width:60%"><div style="position:relative;height:1.1em">{drawing}</div></td>'
            f'<td style="{CELL};padding:0.15em 0 0.15em 0.8em;{DIGITS}{weight}{line}">{escape(bar.display_value)}</td></tr>'
        )
    table = "width:100%;table-layout:auto;border-collapse:collapse;border:none;margin:0;font-size:1em"
    return f'<table style="{table}"><tbody>{"".join(rows)}</tbody></table>'


def _end(bar: Bar) -> float | None:
    """Return where a bar ends."""
    return bar.start + bar.value if bar.value is not None and is_drawable(bar.value) else None


def _whisker(bar: Bar, most: float) -> str:
    """Return the interval of a bar, in the color of the text, which stands out from the bar and from the page."""
    if bar.low is None or bar.high is None or not is_drawable(bar.low) or not is_drawable(bar.high):
        return ""
    low, high = _share(bar.low, 0, most), _share(bar.high, 0, most)
    ends = f"position:absolute;left:{low}%;top:25%;width:{max(0.0, round(high - low, 2))}%;height:50%"
    middle = '<div style="position:absolute;left:0;top:50%;width:100%;border-top:2px solid"></div>'
    return f'<div style="{ends};border-left:2px solid;border-right:2px solid">{middle}</div>'


def _lamps(lamps: Iterable[StatusIndicator]) -> str:
    """Return lamps as a table of one row, which goes on below where it is too narrow."""
    cells = "".join(
        f'<td style="{INDICATOR_STYLE}">{status_badge(one.status)} <strong>{escape(one.name)}</strong><br>'
        f'<span style="{SMALL}">{escape(one.detail).replace(" %", "&nbsp;%")}</span></td>'
        for one in lamps
    )
    return f'<table style="border:none;margin:0;font-size:1em"><tbody><tr style="border:none;background:none;text-align:left">{cells}</tr></tbody></table>'


def _lines_of(picture: Chart) -> list[tuple[Series, Points]]:
    """Return the lines of a picture that can be drawn, each with its points."""
    return [(line, found) for line in picture.lines if (found := drawable_points(line))]


def _heights(lines: Sequence[tuple[Series, Points]], axes: Axes) -> tuple[float, ...]:
    """Return the numbers at the axis upwards."""
    limits = [one.position for one in axes.reference_lines if is_drawable(one.position)]
    spreads = [end for line, _ in lines for ends in line.intervals for end in ends if is_drawable(end)]
    return nice_ticks(max([point[1] for _, points in lines for point in points] + limits + spreads, default=0))


def _edge(picture: Chart) -> int:
    """Return how many characters stand to the left of the axes of a picture."""
    if picture.axes is None:
        return 0
    heights = _heights(_lines_of(picture), picture.axes)
    return max(len(format_number(one)) for one in heights) + len(picture.axes.y_unit) + 1


def _lines(caption: str, lines: Sequence[tuple[Series, Points]], axes: Axes, edge: int) -> str:
    """Return lines in axes: an image of the lines, dots that say their values, and the words of the axes around it."""
    below, limits, marks = (
        [one for one in some if is_drawable(one.position)]
        for some in (axes.ticks, axes.reference_lines, axes.vertical_markers)
    )
    across = [point[0] for _, points in lines for point in points] + [one.position for one in (*below, *marks)]
    heights = _heights(lines, axes)
    least, most = min(across), max(across)

    def x(value: float) -> float:
        return _share(value, least, most)

    def y(value: float) -> float:
        return round(100 - _share(value, 0, heights[-1]), 2)

    paths = [_path([(0, y(one)), (100, y(one))], MUTED_COLOR, "", 1, 0.4) for one in heights]
    paths += [_path([(0, y(one.position)), (100, y(one.position))], LIMIT_COLOR, "6 4", 1.5) for one in limits]
    paths += [_path([(x(one.position), 0), (x(one.position), 100)], MUTED_COLOR, "6 4", 1.5) for one in marks]
    legend, around = [], []
    for (line, points), color, (border, dash) in zip(lines, cycle(PALETTE), cycle(DASHES), strict=False):
        paths.append(_path([(x(right), y(up)) for right, up, _ in points], color, dash, 2.5))
        swatch = f'<span style="display:inline-block;width:2em;border-top:3px {border} {color};vertical-align:middle"></span>'
        legend.append(f'<span style="{LEGEND}">{swatch} {escape(line.name)}</span>')
        for right, ends in zip(line.x, line.intervals, strict=False):
            if is_drawable(right) and all(map(is_drawable, ends)):
                paths.append(_path([(x(right), y(end)) for end in ends], color, "", 1.5))
        dots = [one for one in points if one[2]]
        for right, up, says in dots if len(dots) <= MAX_DOTS else ():
            spot = f"position:absolute;left:{x(right)}%;top:{y(up)}%;{DOT};background-color:{color}"
            around.append(f'<span style="{spot}" title="{escape(says)}"></span>')
    for height in heights:
        unit = f" {axes.y_unit}" if height == heights[-1] else ""
        around.append(_word(f"right:100%;top:{y(height)}%;margin:-0.5em 0.6em 0 0", f"{format_number(height)}{unit}"))
    centred = "top:100%;width:6em;margin:0.5em 0 0 -3em;text-align:center"
    around += [_word(f"left:{x(one.position)}%;{centred}", one.name) for one in below]
    around.append(_word("left:0;top:100%;width:100%;margin:1.8em 0 0 0;text-align:center", axes.x_label))
    around += [_word(f"right:0;top:{y(one.position)}%;margin:-1.2em 0.3em 0 0", one.name) for one in limits]
    for number, one in enumerate(marks):
        if one.name not in [other.name for other in marks[:number]]:
            side = (
                f"left:{x(one.position)}%" if x(one.position) < MIDDLE else f"right:{round(100 - x(one.position), 2)}%"
            )
            around.append(_word(f"{side};bottom:100%;margin:0 0 0.3em 0", one.name))
    drawing = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{VIEW}" preserveAspectRatio="none" fill="none">{"".join(paths)}</svg>'
    source = base64.b64encode(drawing.encode()).decode()
    image = f'<img alt="{escape(describe_chart(caption, lines, axes))}" src="data:image/svg+xml;base64,{source}" style="{IMAGE}">'
    frame = f"position:relative;height:{axes.height:g}em;margin:{1.7 if marks else 0.7}em 1.5em 3em {0.55 * edge + 0.8:.3g}em"
    names = f"<div>{''.join(legend)}</div>" if len(legend) > 1 else ""
    # Where styles are lost, what is hidden stays so.
    return f'{names}<div style="{frame}">{image}<div hidden="hidden" style="display:block;{FILL};{SMALL}">{"".join(around)}</div></div>'


def _path(points: Iterable[tuple[float, float]], color: str, dash: str, width: float, opacity: float = 1.0) -> str:
    """Return a line of the image, whose width does not change with the size of the image."""
    stroke = (
        f'stroke="{color}" stroke-width="{width:g}" stroke-opacity="{opacity:g}" stroke-dasharray="{dash or "none"}"'
    )
    places = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{places}" {stroke} stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'


def _word(place: str, text: str) -> str:
    return f'<span style="{WORD};{place}">{escape(text)}</span>'


def describe_chart(caption: str, lines: Iterable[tuple[Series, Points]], axes: Axes) -> str:
    """Return what a picture of lines shows, for who cannot see it."""
    said = [
        f"{line.name}: {format_number(points[0][1])} to {format_number(points[-1][1])} {axes.y_unit}, {len(points)} points, "
        f"at most {format_number(max(one[1] for one in points))}"
        for line, points in lines
    ]
    said += [
        f"{one.name}: {format_number(one.position)} {axes.y_unit}"
        for one in axes.reference_lines
        if is_drawable(one.position)
    ]
    return f"{caption}, by {axes.x_label}. {'; '.join((*said, *(one.name for one in axes.vertical_markers)))}."


def format_number(value: float) -> str:
    """Return a number with as many digits as are read at a glance.

    Example:
        >>> format_number(1250.0), format_number(0.123456), format_number(2_000_000), format_number(12.345)
        ('1,250', '0.123', '2,000,000', '12.3')
    """
    digits = max(3, math.floor(math.log10(abs(value))) + 1) if value else 1
    return f"{value:,.{digits}g}" if digits < 16 else f"{value:g}"  # noqa: PLR2004 - what a float holds
