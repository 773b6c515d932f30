"""Line charts as matplotlib figures.

Importing this module imports matplotlib, so it is imported only through ``curve.require_plotting``.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure

from .._render.drawing import INK, LIMIT_COLOR, MUTED_COLOR, PALETTE, Chart

# Line styles and markers, which distinguish the lines without color.
STYLES = (("-", "o"), ("--", "s"), (":", "^"))

# Colors that are visible on a white and on a black page, as in the charts of ``drawing``.
COLORS = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), MUTED_COLOR),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.prop_cycle": cycler(color=PALETTE),
}


def _use_theme() -> AbstractContextManager[None]:
    """Context manager for figures with a transparent background and colors for any page."""
    return rc_context(COLORS)


class CurveFigure(Figure):
    """Matplotlib figure that a notebook displays without ``pyplot`` and its state."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, facecolor="none")
        return buffer.getvalue()


def draw(title: str, charts: Sequence[Chart]) -> CurveFigure:
    """Return line charts, which their HTML form also displays, as one matplotlib figure, one below another."""
    with _use_theme():
        figure = CurveFigure(figsize=(7.0, 4.0), layout="constrained")
        heights = [chart.axes.height for chart in charts if chart.axes]
        subplots = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for subplot, chart in zip(subplots, charts, strict=True):
            _draw_lines(subplot, chart)
        figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure


def _draw_lines(subplot: Any, chart: Chart) -> None:
    """Draw the lines of a chart, with its reference lines and markers, into matplotlib axes."""
    axes: Any = chart.axes
    for line, (style, marker) in zip(chart.lines, cycle(STYLES), strict=False):
        marked = [index for index, tooltip in enumerate(line.tooltips) if tooltip]
        subplot.plot(line.x, line.y, style, marker=marker, markevery=marked, label=line.name)
        if line.intervals:
            subplot.vlines(line.x, *zip(*line.intervals, strict=True), linewidth=1)
    for limit, style in zip(axes.reference_lines, cycle(("--", ":")), strict=False):
        subplot.axhline(limit.position, linestyle=style, color=LIMIT_COLOR, linewidth=1, label=limit.name)
    names = dict.fromkeys(vertical.name for vertical in axes.vertical_markers)
    # Markers with the same name share one line in the legend.
    for name, style in zip(names, cycle(("--", ":")), strict=False):
        positions = [vertical.position for vertical in axes.vertical_markers if vertical.name == name]
        subplot.vlines(positions, 0, 1, MUTED_COLOR, style, label=name, transform=subplot.get_xaxis_transform())
    subplot.set_xticks([tick.position for tick in axes.ticks], [tick.name for tick in axes.ticks])
    if subplot.get_subplotspec().is_last_row():
        subplot.set_xlabel(axes.x_label)
    subplot.set_ylabel(axes.y_unit)
    subplot.margins(x=0.02)
    if any(line.y for line in chart.lines):
        subplot.set_ylim(0, max(subplot.get_ylim()[1], subplot.dataLim.ymax * 1.1))
    _add_legend(subplot)


def _add_legend(axes: Any) -> None:
    """Draw a grid, and a legend of the lines to their right."""
    # Ticks are created when they are drawn, which may be outside use_theme().
    axes.tick_params(colors=INK)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="medium", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
