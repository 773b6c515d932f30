"""The memory curve as a figure of matplotlib, with the limits of the device in it.

Importing this file imports matplotlib; so it is imported only through ``curve.needing``.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .._render.drawing import INK, LIMIT, PALETTE, QUIET
from .curve import MemoryCurve

# What tells the lines apart without colour: their style and marker.
STYLES = (("-", "o"), ("--", "s"), (":", "^"))


# What is written and drawn stands out from a white and from a black page, as in the pictures of ``drawing``.
COLOURS = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), QUIET),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    "axes.prop_cycle": cycler(color=PALETTE),
}


def themed() -> AbstractContextManager[None]:
    """Return what lets figures that are made within it have no ground of their own, and colours for any."""
    return rc_context(COLOURS)


class CurveFigure(Figure):
    """A matplotlib figure that a notebook shows by itself, without ``pyplot`` and its state."""

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format="png", dpi=110, facecolor="none")
        return written.getvalue()


def draw(curve: MemoryCurve) -> CurveFigure:
    """Return a matplotlib figure of a curve: the memory of the device above, that of the process below."""
    with themed():
        return _drawn(curve)


def _drawn(curve: MemoryCurve) -> CurveFigure:
    figure = CurveFigure(figsize=(7.0, 4.0), layout="constrained")
    parts = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for part, picture in zip(parts, curve.pictures, strict=True):
        axes: Any = picture.axes
        for line, (style, marker) in zip(picture.lines, STYLES, strict=False):
            ends = [index for index, said in enumerate(line.shown) if said]
            part.plot(line.across, line.up, style, marker=marker, markevery=ends, label=line.name)
        for limit, style in zip(axes.limits, ("--", ":"), strict=False):
            part.axhline(limit.at, linestyle=style, color=LIMIT, linewidth=1, label=limit.name)
        for first in curve.boundaries[:1]:
            part.axvspan(first.epoch - 1, first.epoch, alpha=0.12, color="grey", label="warm-up")
        part.set_ylabel(axes.unit)
        part.margins(x=0.02)
        part.xaxis.set_major_locator(MaxNLocator(integer=True))
        if part.lines:
            part.set_ylim(0, max(part.get_ylim()[1], part.dataLim.ymax * 1.1))
        with_legend(part)
    parts[-1].set_xlabel("epoch")
    suspect = f" ({curve.suspect.name})" if curve.suspect else ""
    title = f"{'SIMULATED MPS, ' if curve.simulated else ''}{curve.device}: {curve.verdict}{suspect}"
    figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure


def with_legend(axes: Any) -> None:
    """Draw a grid, and name the lines at their right."""
    axes.tick_params(colors=INK)  # Ticks are made when they are drawn, which may be outside of themed().
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="medium", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
