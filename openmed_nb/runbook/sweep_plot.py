"""A sweep as a picture: throughput above, memory below, over the batch sizes.

Importing this file imports matplotlib; so it is imported only when a picture is asked for, through ``SweepReport.plot``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ..display import NOTE, UNITS, counted
from ..errors import shorten
from ..training.plot import LARGEST_IN_MEBIBYTES, CurveFigure, svg_of
from .sweep_search import fitting

if TYPE_CHECKING:
    from .sweep import SweepReport


# The limit is drawn if it is at most so many times the highest memory; otherwise the curve would lie on the axis.
NEAR = 3


def draw(report: SweepReport, width: float = 7.0, height: float = 4.5) -> CurveFigure:
    """Return a matplotlib figure of a sweep; width and height are in inches."""
    figure = CurveFigure(figsize=(width, height), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    _throughput(above, report)
    _memory_axes(below, report)
    for axes in (above, below):
        _finish(axes, report, named=axes is above)
    largest = max(point.rows for point in report.points)
    below.set_xlim(0.8, largest * 1.25)
    below.xaxis.set_major_locator(FixedLocator([1 << power for power in range(largest.bit_length() + 1)]))
    below.xaxis.set_minor_locator(NullLocator())
    below.xaxis.set_major_formatter(FuncFormatter(lambda rows, _place: f"{rows:,.0f}"))
    below.set_xlabel("rows in a batch")
    figure.suptitle(_title(report), fontsize="large", fontweight="bold")
    return figure


def to_svg(report: SweepReport) -> str:
    """Return the picture as an SVG element that describes itself."""
    return svg_of(draw(report), f"{_title(report)}. {report.why} {report.end}{f' {NOTE}' if report.simulated else ''}")


def _title(report: SweepReport) -> str:
    return f"{shorten(report.name, 30)}, {report.task} {report.heading}"


def _throughput(axes: Any, report: SweepReport) -> None:
    """Draw the medians, and bars between the quartiles."""
    points = fitting(report.points)
    rows, speeds = [point.rows for point in points], [point.speed for point in points]
    spread = [point.spread or (point.speed, point.speed) for point in points]
    errors = [
        [max(0.0, speed - low) for speed, (low, _) in zip(speeds, spread, strict=True)],
        [max(0.0, high - speed) for speed, (_, high) in zip(speeds, spread, strict=True)],
    ]
    if points:
        axes.errorbar(rows, speeds, yerr=errors, fmt="-o", capsize=3, label="median and quartiles")
    axes.set_ylabel("rows/s")


def _memory_axes(axes: Any, report: SweepReport) -> None:
    """Draw the memory of a step, and the limit where it is near."""
    sizes = [(point.rows, point.memory) for point in fitting(report.points) if point.memory is not None]
    most = max((memory for _, memory in sizes), default=0)
    exponent = 3 if most >= LARGEST_IN_MEBIBYTES else 2
    unit = 1024**exponent
    if sizes:
        axes.plot([rows for rows, _ in sizes], [memory / unit for _, memory in sizes], "--s", label="memory of a step")
    if report.limit is not None and report.limit <= NEAR * most:
        axes.axhline(report.limit / unit, linestyle=":", color="firebrick", linewidth=1.5, label="limit")
    axes.set_ylabel(UNITS[exponent])


def _finish(axes: Any, report: SweepReport, named: bool) -> None:
    """Mark the knee, and the sizes that ran out of memory, both named beside one of the two curves; begin at zero."""
    knee, failed = report.knee, [point.rows for point in report.points if not point.fits]
    if knee:
        label = f"knee: {counted(knee, 'row')}" if named else None
        axes.axvline(knee, color="seagreen", linewidth=6, alpha=0.25, label=label)
    if failed:
        label, place = "out of memory" if named else None, axes.get_xaxis_transform()
        heights = [0.03] * len(failed)  # A share of the height, near the axis.
        axes.plot(failed, heights, "x", color="firebrick", transform=place, label=label, clip_on=False)
    axes.set_xscale("log", base=2)
    highest = axes.dataLim.ymax if axes.lines else 0.0
    axes.set_ylim(0, highest * 1.15 if 0 < highest < math.inf else 1)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="medium", loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
