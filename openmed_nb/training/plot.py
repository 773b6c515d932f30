"""Pictures of lines in axes as a figure of matplotlib.

Importing this file imports matplotlib; so it is imported only through ``curve.needing``.
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

# What tells the lines apart without color: their style and marker.
STYLES = (("-", "o"), ("--", "s"), (":", "^"))


# What is written and drawn stands out from a white and from a black page, as in the pictures of ``drawing``.
COLORS = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), MUTED_COLOR),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.prop_cycle": cycler(color=PALETTE),
}


def themed() -> AbstractContextManager[None]:
    """Return what lets figures that are made within it have no ground of their own, and colors for any."""
    return rc_context(COLORS)


class CurveFigure(Figure):
    """A matplotlib figure that a notebook shows by itself, without ``pyplot`` and its state."""

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format="png", dpi=110, facecolor="none")
        return written.getvalue()


def draw(title: str, pictures: Sequence[Chart]) -> CurveFigure:
    """Return pictures of lines in axes, which their HTML form shows too, as one matplotlib figure, one below the other."""
    with themed():
        figure = CurveFigure(figsize=(7.0, 4.0), layout="constrained")
        heights = [picture.axes.height for picture in pictures if picture.axes]
        parts = figure.subplots(len(pictures), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for part, picture in zip(parts, pictures, strict=True):
            _draw_lines(part, picture)
        figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure


def _draw_lines(part: Any, picture: Chart) -> None:
    """Draw the lines of a picture, with its limits and marks, into axes of matplotlib."""
    axes: Any = picture.axes
    for line, (style, marker) in zip(picture.lines, cycle(STYLES), strict=False):
        dots = [index for index, said in enumerate(line.tooltips) if said]
        part.plot(line.x, line.y, style, marker=marker, markevery=dots, label=line.name)
        if line.intervals:
            part.vlines(line.x, *zip(*line.intervals, strict=True), linewidth=1)
    for limit, style in zip(axes.reference_lines, cycle(("--", ":")), strict=False):
        part.axhline(limit.position, linestyle=style, color=LIMIT_COLOR, linewidth=1, label=limit.name)
    names = dict.fromkeys(mark.name for mark in axes.vertical_markers)
    for name, style in zip(names, cycle(("--", ":")), strict=False):  # Marks of one name have one line in the legend.
        places = [mark.position for mark in axes.vertical_markers if mark.name == name]
        part.vlines(places, 0, 1, MUTED_COLOR, style, label=name, transform=part.get_xaxis_transform())
    part.set_xticks([tick.position for tick in axes.ticks], [tick.name for tick in axes.ticks])
    if part.get_subplotspec().is_last_row():
        part.set_xlabel(axes.x_label)
    part.set_ylabel(axes.y_unit)
    part.margins(x=0.02)
    if any(line.y for line in picture.lines):
        part.set_ylim(0, max(part.get_ylim()[1], part.dataLim.ymax * 1.1))
    with_legend(part)


def with_legend(axes: Any) -> None:
    """Draw a grid, and name the lines at their right."""
    axes.tick_params(colors=INK)  # Ticks are made when they are drawn, which may be outside of themed().
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="medium", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
