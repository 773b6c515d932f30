"""Line charts as matplotlib figures.

Importing this module imports matplotlib, so it is imported only through ``curve.require_plotting``.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle

from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes as PlotAxes
from matplotlib.figure import Figure

from .._render.drawing import INK, LIMIT_COLOR, MUTED_COLOR, PALETTE, Axes, Chart, Series

# Colors that are visible on a white and on a black page, as in the charts of ``drawing``. Line styles and markers
# distinguish the lines without color.
THEME = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), MUTED_COLOR),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.prop_cycle": cycler(color=PALETTE, linestyle=("-", "--", ":", "-"), marker=("o", "s", "^", "o")),
}


class CurveFigure(Figure):
    """Matplotlib figure that a notebook displays without ``pyplot`` and its state."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, facecolor="none")
        return buffer.getvalue()


def plot_charts(title: str, charts: Sequence[Chart]) -> CurveFigure:
    """Return a matplotlib figure with line charts below one another, as in their HTML form."""
    with rc_context(THEME):
        figure = CurveFigure(figsize=(7.0, 4.0), layout="constrained")
        axes = [chart.axes for chart in charts if chart.axes]
        heights = [chart_axes.height for chart_axes in axes]
        subplots = figure.subplots(len(charts), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for subplot, chart, chart_axes in zip(subplots, charts, axes, strict=True):
            _draw_lines(subplot, chart.lines, chart_axes)
        figure.suptitle(title, fontsize="large", fontweight="bold", wrap=True)
    return figure


def _draw_lines(subplot: PlotAxes, lines: Sequence[Series], axes: Axes) -> None:
    """Draw lines, with reference lines and markers, into matplotlib axes, with a legend to their right."""
    for line in lines:
        marked = [index for index, tooltip in enumerate(line.tooltips) if tooltip]
        subplot.plot(line.x, line.y, markevery=marked, label=line.name)
        if line.intervals:
            subplot.vlines(line.x, *zip(*line.intervals, strict=True), linewidth=1)
    for limit, style in zip(axes.reference_lines, cycle(("--", ":")), strict=False):
        subplot.axhline(limit.position, linestyle=style, color=LIMIT_COLOR, linewidth=1, label=limit.name)
    names = dict.fromkeys(marker.name for marker in axes.vertical_markers)
    # Markers with the same name share one line in the legend.
    for name, style in zip(names, cycle(("--", ":")), strict=False):
        positions = [marker.position for marker in axes.vertical_markers if marker.name == name]
        subplot.vlines(positions, 0, 1, MUTED_COLOR, style, label=name, transform=subplot.get_xaxis_transform())
    subplot.set_xticks([tick.position for tick in axes.ticks], [tick.name for tick in axes.ticks])
    grid_position = subplot.get_subplotspec()
    if grid_position is not None and grid_position.is_last_row():
        subplot.set_xlabel(axes.x_label)
    subplot.set_ylabel(axes.y_unit)
    subplot.margins(x=0.02)
    if any(line.y for line in lines):
        subplot.set_ylim(0, max(subplot.get_ylim()[1], subplot.dataLim.ymax * 1.1))
    # Ticks are created when they are drawn, which may be outside the context of the theme.
    subplot.tick_params(colors=INK)
    subplot.grid(alpha=0.3)
    if subplot.get_legend_handles_labels()[0]:
        subplot.legend(fontsize="medium", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
