"""The memory curve as a figure of matplotlib, with the limits of the device in it.

Importing this file imports matplotlib; so it is imported only through ``curve.needing``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..display import UNITS
from .curve import LINES_OF_DEVICE, LINES_OF_PROCESS, NEAR, MemoryCurve, memory_exponent, places

# What tells the lines apart without colour: their style and marker.
STYLES = {"peak": (":", "^"), "reserved": ("--", "s"), "allocated": ("-", "o"), "resident": ("-", "d")}


class CurveFigure(Figure):
    """A matplotlib figure that a notebook shows by itself, without ``pyplot`` and its state."""

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.savefig(written, format="png", dpi=110)
        return written.getvalue()


def draw(curve: MemoryCurve) -> CurveFigure:
    """Return a matplotlib figure of a curve: the memory of the device above, that of the process below."""
    figure = CurveFigure(figsize=(7.0, 4.0), layout="constrained")
    device, process = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    _lines(device, curve, LINES_OF_DEVICE)
    _limits(device, curve)
    _lines(process, curve, LINES_OF_PROCESS)
    for axes in (device, process):
        _finish(axes, curve)
    process.set_xlabel("epoch")
    suspect = f" ({curve.suspect.name})" if curve.suspect else ""
    title = f"{'SIMULATED MPS, ' if curve.simulated else ''}{curve.device}: {curve.verdict}{suspect}"
    figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure


def _lines(axes: Any, curve: MemoryCurve, lines: Mapping[str, str]) -> None:
    """Draw some of the figures over the epochs; samples at their ends have markers."""
    series = {name: [getattr(sample, name) for sample in curve.samples] for name in lines}
    series = {name: sizes for name, sizes in series.items() if sizes and None not in sizes}
    exponent = memory_exponent(max(map(max, series.values()), default=0))
    boundaries = [index for index, sample in enumerate(curve.samples) if sample.boundary]
    for name, sizes in series.items():
        style, marker = STYLES[name]
        shown = [size / 1024**exponent for size in sizes]
        axes.plot(places(curve.samples), shown, style, marker=marker, markevery=boundaries, label=lines[name])
    axes.set_ylabel(UNITS[exponent])


def _limits(axes: Any, curve: MemoryCurve) -> None:
    """Draw the memory of the device and the limit in force, where they are near enough to be seen."""
    unit, near = 1024 ** UNITS.index(axes.get_ylabel()), axes.get_ylim()[1] * NEAR
    for (label, size), style in zip(curve.limits, ("--", ":"), strict=False):
        if size / unit <= near:
            axes.axhline(size / unit, linestyle=style, color="firebrick", linewidth=1, label=label)


def _finish(axes: Any, curve: MemoryCurve) -> None:
    """Begin at zero, leave room above, shade the warm-up, and name the lines at their right."""
    for first in curve.boundaries[:1]:
        axes.axvspan(first.epoch - 1, first.epoch, alpha=0.12, color="grey", label="warm-up")
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.set_ylim(0, max(axes.get_ylim()[1], axes.dataLim.ymax * 1.1))
    with_legend(axes)


def with_legend(axes: Any) -> None:
    """Draw a grid, and name the lines at their right."""
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="medium", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
