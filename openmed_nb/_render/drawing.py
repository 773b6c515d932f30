"""Charts as HTML that work in every theme: bars and line charts.

A chart must remain visible in an untrusted notebook and must follow the theme. No use of SVG does both: JupyterLab's sanitizer
(https://github.com/jupyterlab/jupyterlab/blob/main/packages/apputils/src/sanitizer.ts) removes ``<svg>`` but not its text, and an
``<img>`` follows the color scheme of the system instead of the theme of the notebook. Text is therefore HTML text with the font
and color of the page, bars are elements with inline styles, and only lines are an image: an SVG without text, in colors that are
visible on white and on black. If styles are removed too, as on GitHub, bars are readable tables, and the text of
axes is hidden.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import cycle

# Colors of lines and bars, with a contrast of at least 3 to 1 to white and to #111111, and distinguishable by the color-blind.
PALETTE = ("#2f7ed8", "#c8680a", "#2b9460", "#8f6ad8")
MUTED_COLOR = "#808080"
LIMIT_COLOR = "#e0413f"

# Sign of each status and its background color, with a contrast of at least 4.5 to 1 to the white sign.
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
# The image is slightly larger than the axes, so that lines are not clipped at the edge.
IMAGE = "position:absolute;left:-2%;top:-5%;width:104%;height:110%;max-width:none"
VIEW_BOX = "-2 -5 104 110"
LEGEND = "display:inline-block;margin:0 1.5em 0 0"
DOT = "width:8px;height:8px;margin:-4px 0 0 -4px;border-radius:50%"
LABEL = "position:absolute;line-height:1;white-space:nowrap"
SMALL = "font-size:0.9em"
CELL = "padding:0.15em 0;border:none;text-align:left;vertical-align:middle;font-weight:400;overflow-wrap:break-word"
TABULAR_DIGITS = "font-variant-numeric:tabular-nums"
MAX_DRAWABLE = 1e300  # Larger values are not drawn, so that the sum of two values is finite.
MAX_NOWRAP_CHARACTERS = 24  # Maximum length of a value without line breaks.
MAX_DOTS = 60  # A line with more points is drawn without dots and tooltips.
NUM_INTERVALS = 5  # Approximate number of intervals of an axis.
MIDDLE_PERCENT = 50  # Markers to the right of the middle have their name on the left.

# x, y and tooltip of each point.
Points = list[tuple[float, float, str]]


@dataclass(frozen=True)
class Bar:
    """A bar of a chart.

    Attributes:
        label: Label.
        value: Length; ``None`` if unknown.
        display_value: Value for display.
        start: Start of the bar.
        emphasized: Whether the bar is emphasized.
    """

    label: str
    value: float | None
    display_value: str
    start: float = 0.0
    emphasized: bool = False


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        name: Name for the legend.
        x: x coordinates.
        y: y coordinates.
        tooltips: Tooltip of each point; empty for a point without a dot.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    tooltips: tuple[str, ...]


@dataclass(frozen=True)
class AxisMarker:
    """A named position on an axis."""

    position: float
    name: str


@dataclass(frozen=True)
class Axes:
    """Axes of a line chart.

    Attributes:
        y_unit: Unit of the y axis.
        x_label: Label of the x axis.
        ticks: Ticks of the x axis.
        reference_lines: Named horizontal lines.
        vertical_markers: Named vertical lines.
        height: Height of the chart in lines of text.
    """

    y_unit: str
    x_label: str
    ticks: tuple[AxisMarker, ...]
    reference_lines: tuple[AxisMarker, ...] = ()
    vertical_markers: tuple[AxisMarker, ...] = ()
    height: float = 12.0


@dataclass(frozen=True)
class Chart:
    """A chart of bars or lines.

    Attributes:
        caption: Caption with the unit.
        bars: Bars from top to bottom.
        lines: Lines.
        axes: Axes of the lines.

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


def render_charts(*charts: Chart) -> str:
    """Return charts as HTML, one below the other with aligned axes, or an empty string if there is nothing to draw."""
    left_margin = max(map(_left_margin, charts), default=0)
    return "".join(_render_chart(chart, left_margin) for chart in charts)


def _render_chart(chart: Chart, left_margin: int) -> str:
    """Return a chart as HTML."""
    lines = _drawable_lines(chart)
    if chart.bars:
        content = _bars(chart.bars)
    elif lines and chart.axes:
        content = _lines(chart.caption, lines, chart.axes, left_margin)
    else:
        return ""
    caption = f'<figcaption style="{CAPTION}">{escape(chart.caption)}</figcaption>'
    return f'<figure class="openmed-picture" style="{WIDTH}">{caption}{content}</figure>'


def status_badge(status: str) -> str:
    """Return the colored badge of a status."""
    sign, color = SIGNS[status]
    return f'<span style="{BADGE};background-color:{color}">{sign}</span>'


def _is_drawable(value: float | None) -> bool:
    """Return whether a value can be drawn: it is not ``None``, not NaN, and not too large."""
    return value is not None and abs(value) <= MAX_DRAWABLE


def nice_ticks(maximum: float) -> tuple[float, ...]:
    """Return about five round numbers from 0 to at least a maximum.

    Example:
        >>> nice_ticks(170), nice_ticks(0)
        ((0, 50, 100, 150, 200), (0, 1))
    """
    if not maximum > 0:
        return (0, 1)
    interval = maximum / NUM_INTERVALS
    power = 10.0 ** math.floor(math.log10(interval)) if interval > 1 / MAX_DRAWABLE else maximum
    steps = (factor * power for factor in (1, 2, 2.5, 5, 10))
    step = next((step for step in steps if step * NUM_INTERVALS >= maximum), 1.0)
    step = int(step) if step.is_integer() else step
    return tuple(step * index for index in range(math.ceil(maximum / step) + 1))


def _percent(value: float, minimum: float, maximum: float) -> float:
    """Return the position of a value between a minimum and a maximum in percent."""
    fraction = (value - minimum) / (maximum - minimum) if maximum > minimum else 0.5
    return round(100 * min(1.0, max(0.0, fraction)), 2)


def _bars(bars: Sequence[Bar]) -> str:
    """Return bars as a table of labels, bars and values, which is readable without styles."""
    maximum = max(map(_bar_end, bars), default=0.0)
    any_emphasized = any(bar.emphasized for bar in bars)
    width = min(20.0, 0.62 * max(len(bar.label) for bar in bars) + 1)
    rows = []
    for bar in bars:
        color = PALETTE[0] if bar.emphasized or not any_emphasized else MUTED_COLOR
        start = _percent(bar.start, 0, maximum)
        end = _percent(_bar_end(bar), 0, maximum)
        bar_style = (
            f"position:absolute;left:{start}%;top:0;width:{max(0.0, round(end - start, 2))}%;"
            "min-width:1px;height:100%;border-radius:2px"
        )
        drawing = f'<div style="{bar_style};background-color:{color}"></div>'
        weight = ";font-weight:600" if bar.emphasized else ""
        nowrap = ";white-space:nowrap" if len(bar.display_value) <= MAX_NOWRAP_CHARACTERS else ""
        label_style = f"{CELL};padding:0.15em 0.6em 0.15em 0;width:{width:g}em{weight}"
        value_style = f"{CELL};padding:0.15em 0 0.15em 0.8em;{TABULAR_DIGITS}{weight}{nowrap}"
        rows.append(
            f'<tr style="border:none;background:none" title="{escape(f"{bar.label}: {bar.display_value}")}">'
            f'<th scope="row" style="{label_style}">{escape(bar.label)}</th>'
            f'<td style="{CELL};width:60%"><div style="position:relative;height:1.1em">{drawing}</div></td>'
            f'<td style="{value_style}">{escape(bar.display_value)}</td></tr>'
        )
    table = "width:100%;table-layout:auto;border-collapse:collapse;border:none;margin:0;font-size:1em"
    return f'<table style="{table}"><tbody>{"".join(rows)}</tbody></table>'


def _bar_end(bar: Bar) -> float:
    """Return the end of a bar, or 0 if it cannot be drawn."""
    end = 0.0 if bar.value is None else bar.start + bar.value
    return end if _is_drawable(end) else 0.0


def _drawable_lines(chart: Chart) -> list[tuple[Series, Points]]:
    """Return the lines of a chart that can be drawn, each with its points that can be drawn."""
    drawable = []
    for line in chart.lines:
        points = zip(line.x, line.y, line.tooltips, strict=True)
        if kept := [point for point in points if _is_drawable(point[0]) and _is_drawable(point[1])]:
            drawable.append((line, kept))
    return drawable


def _y_ticks(lines: Sequence[tuple[Series, Points]], axes: Axes) -> tuple[float, ...]:
    """Return the ticks of the y axis."""
    values = [y for _, points in lines for _, y, _ in points]
    values += [marker.position for marker in _drawable_markers(axes.reference_lines)]
    return nice_ticks(max(values, default=0))


def _left_margin(chart: Chart) -> int:
    """Return the number of characters to the left of the axes of a chart."""
    if chart.axes is None:
        return 0
    ticks = _y_ticks(_drawable_lines(chart), chart.axes)
    return max(len(_format_number(tick)) for tick in ticks) + len(chart.axes.y_unit) + 1


def _drawable_markers(markers: Iterable[AxisMarker]) -> list[AxisMarker]:
    """Return the markers that can be drawn."""
    return [marker for marker in markers if _is_drawable(marker.position)]


def _lines(caption: str, lines: Sequence[tuple[Series, Points]], axes: Axes, left_margin: int) -> str:
    """Return a line chart: an image of the lines, points with tooltips, and the text of the axes."""
    ticks = _drawable_markers(axes.ticks)
    reference_lines = _drawable_markers(axes.reference_lines)
    vertical_markers = _drawable_markers(axes.vertical_markers)
    x_values = [x for _, points in lines for x, _, _ in points]
    x_values += [marker.position for marker in (*ticks, *vertical_markers)]
    x_min = min(x_values)
    x_max = max(x_values)
    y_ticks = _y_ticks(lines, axes)

    def x_percent(value: float) -> float:
        return _percent(value, x_min, x_max)

    def y_percent(value: float) -> float:
        return round(100 - _percent(value, 0, y_ticks[-1]), 2)

    paths = [_path([(0, y_percent(tick)), (100, y_percent(tick))], MUTED_COLOR, "", 1, 0.4) for tick in y_ticks]
    for marker in reference_lines:
        y = y_percent(marker.position)
        paths.append(_path([(0, y), (100, y)], LIMIT_COLOR, "6 4", 1.5))
    for marker in vertical_markers:
        x = x_percent(marker.position)
        paths.append(_path([(x, 0), (x, 100)], MUTED_COLOR, "6 4", 1.5))
    legend = []
    labels = []
    for (line, points), color in zip(lines, cycle(PALETTE), strict=False):
        paths.append(_path([(x_percent(x), y_percent(y)) for x, y, _ in points], color, "", 2.5))
        swatch_style = f"display:inline-block;width:2em;border-top:3px solid {color};vertical-align:middle"
        legend.append(f'<span style="{LEGEND}"><span style="{swatch_style}"></span> {escape(line.name)}</span>')
        dots = [point for point in points if point[2]]
        for x, y, tooltip in dots if len(dots) <= MAX_DOTS else ():
            dot_style = f"position:absolute;left:{x_percent(x)}%;top:{y_percent(y)}%;{DOT};background-color:{color}"
            labels.append(f'<span style="{dot_style}" title="{escape(tooltip)}"></span>')
    for tick in y_ticks:
        unit = f" {axes.y_unit}" if tick == y_ticks[-1] else ""
        style = f"right:100%;top:{y_percent(tick)}%;margin:-0.5em 0.6em 0 0"
        labels.append(_label(style, f"{_format_number(tick)}{unit}"))
    # A label of the last tick does not exceed the right margin of the axes.
    centered = "top:100%;width:3.3em;margin:0.5em 0 0 -1.65em;text-align:center"
    labels += [_label(f"left:{x_percent(marker.position)}%;{centered}", marker.name) for marker in ticks]
    labels.append(_label("left:0;top:100%;width:100%;margin:1.8em 0 0 0;text-align:center", axes.x_label))
    labels += [
        _label(f"right:0;top:{y_percent(marker.position)}%;margin:-1.2em 0.3em 0 0", marker.name)
        for marker in reference_lines
    ]
    marker_names: set[str] = set()
    for marker in vertical_markers:
        if marker.name not in marker_names:  # A name that occurs several times is displayed once.
            marker_names.add(marker.name)
            x = x_percent(marker.position)
            side = f"left:{x}%" if x < MIDDLE_PERCENT else f"right:{round(100 - x, 2)}%"
            labels.append(_label(f"{side};bottom:100%;margin:0 0 0.3em 0", marker.name))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{VIEW_BOX}" preserveAspectRatio="none" fill="none">'
        f"{''.join(paths)}</svg>"
    )
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    description = f"{caption}, by {axes.x_label}: {', '.join(line.name for line, _ in lines)}"
    image = f'<img alt="{escape(description)}" src="{source}" style="{IMAGE}">'
    top = 1.7 if vertical_markers else 0.7
    frame = f"position:relative;height:{axes.height:g}em;margin:{top}em 1.5em 3em {0.55 * left_margin + 0.8:.3g}em"
    names = f"<div>{''.join(legend)}</div>" if len(legend) > 1 else ""
    # The text is hidden if styles are removed.
    text = f'<div hidden="hidden" style="display:block;{FILL};{SMALL}">{"".join(labels)}</div>'
    return f'{names}<div style="{frame}">{image}{text}</div>'


def _path(points: Iterable[tuple[float, float]], color: str, dash: str, width: float, opacity: float = 1.0) -> str:
    """Return a polyline of the SVG image. Its width does not depend on the size of the image."""
    stroke = (
        f'stroke="{color}" stroke-width="{width:g}" stroke-opacity="{opacity:g}" stroke-dasharray="{dash or "none"}"'
    )
    coordinates = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline points="{coordinates}" {stroke} stroke-linejoin="round" vector-effect="non-scaling-stroke"/>'


def _label(position_style: str, text: str) -> str:
    """Return text at a position of the chart."""
    return f'<span style="{LABEL};{position_style}">{escape(text)}</span>'


def _format_number(value: float) -> str:
    """Return a number for display with about three significant digits.

    Example:
        >>> _format_number(1250.0), _format_number(0.123456), _format_number(2_000_000), _format_number(12.345)
        ('1,250', '0.123', '2,000,000', '12.3')
    """
    digits = max(3, math.floor(math.log10(abs(value))) + 1) if value else 1
    return f"{value:,.{digits}g}" if digits < 16 else f"{value:g}"  # noqa: PLR2004 - significant digits of a float
