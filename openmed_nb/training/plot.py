"""The memory curve as a picture, with the limits of the device in it, and as a widget while it grows.

Importing this file imports matplotlib and ipywidgets; so it is imported only through ``curve.plotting``. Only the widget's
value changes: nbval cannot follow outputs that are cleared or updated.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ipywidgets import HTML
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..devices.request import kind_of
from ..display import UNITS, Report, StaticForm, escape, to_html
from .curve import MemoryCurve, MemorySample

# Each figure with its name, line style and marker, so that the lines differ without colour too.
DEVICE_LINES = {
    "peak": ("peak in the epoch", ":", "^"),
    "reserved": ("reserved by the device", "--", "s"),
    "allocated": ("tensors", "-", "o"),
}
PROCESS_LINES = {"resident": ("process", "-", "d")}

# From so many bytes on, an axis counts in GiB.
LARGEST_IN_MEBIBYTES = 2 << 30


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
    _lines(device, curve, DEVICE_LINES)
    _limits(device, curve)
    _lines(process, curve, PROCESS_LINES)
    for axes in (device, process):
        _finish(axes, curve)
    process.set_xlabel("epoch")
    figure.suptitle(_title(curve), fontsize="large", fontweight="bold")
    return figure


def to_svg(curve: MemoryCurve) -> str:
    """Return the picture as an SVG element that describes itself."""
    return svg_of(draw(curve), f"Memory on {_title(curve)}. {curve.reason}")


def svg_of(figure: Figure, label: str) -> str:
    """Return a figure as an SVG element that describes itself to a screen reader; text is text, in any font."""
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "openmed_nb"}):
        figure.savefig(written, format="svg", metadata={"Date": None})
    svg = written.getvalue()
    return svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)


def _title(curve: MemoryCurve) -> str:
    suspect = f" ({curve.suspect.name})" if curve.suspect else ""
    return f"{'SIMULATED MPS, ' if curve.simulated else ''}{curve.device}: {curve.verdict}{suspect}"


def places(samples: Sequence[MemorySample]) -> list[float]:
    """Return where each sample stands among the epochs: a boundary at its number, others evenly before the next one.

    Example:
        >>> inner, end = MemorySample(0, 5, 1.0, boundary=False), MemorySample(1, 10, 2.0)
        >>> places([inner, end]), places([end])
        ([0.5, 1.0], [1.0])
    """
    inner = Counter(sample.epoch for sample in samples if not sample.boundary)
    parts, seen, found = max(inner.values(), default=0) + 1, Counter[int](), []
    for sample in samples:
        seen[sample.epoch] += not sample.boundary
        found.append(float(sample.epoch) if sample.boundary else sample.epoch + seen[sample.epoch] / parts)
    return found


def _lines(axes: Any, curve: MemoryCurve, lines: Mapping[str, tuple[str, str, str]]) -> None:
    """Draw some of the figures over the epochs; samples at their ends have markers."""
    series = {name: [getattr(sample, name) for sample in curve.samples] for name in lines}
    series = {name: sizes for name, sizes in series.items() if sizes and None not in sizes}
    exponent = memory_exponent(max(map(max, series.values()), default=0))
    boundaries = [index for index, sample in enumerate(curve.samples) if sample.boundary]
    for name, sizes in series.items():
        label, style, marker = lines[name]
        shown = [size / 1024**exponent for size in sizes]
        axes.plot(places(curve.samples), shown, style, marker=marker, markevery=boundaries, label=label)
    axes.set_ylabel(UNITS[exponent])


def _limits(axes: Any, curve: MemoryCurve) -> None:
    """Draw the memory of the device and the limit in force, where they are near enough to be seen."""
    recommended = next((sample.recommended for sample in curve.samples if sample.recommended), 0)
    unit, near = 1024 ** UNITS.index(axes.get_ylabel()), axes.get_ylim()[1] * 3
    on_mps = kind_of(curve.device) == "mps"
    limits = [("recommended by Metal" if on_mps else "memory of the device", "--", recommended)]
    if curve.limit:
        label = f"{'high watermark' if on_mps else 'limit'} ({curve.limit:g})"
        limits.append((label, ":", int(recommended * curve.limit)))
    for label, style, size in limits:
        if 0 < size / unit <= near:
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


def memory_exponent(most: int) -> int:
    """Return the power of 1024 in which an axis counts that reaches so many bytes: MiB, or GiB."""
    return 3 if most >= LARGEST_IN_MEBIBYTES else 2


class LiveCurve(StaticForm, HTML):
    """A small picture of a memory curve with its verdict; call it with a curve to show that.

    Its text and HTML forms, which stay where there is no widget, do not change between runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self(MemoryCurve(""))

    def __call__(self, curve: MemoryCurve) -> None:
        """Show a curve; a curve without samples shows that the first epoch is under way."""
        self.value = picture(curve) if curve.samples else to_html(Report("Memory", ("The first epoch is under way.",)))

    def __repr__(self) -> str:
        return "The live memory curve"

    def report(self) -> Report:
        """Return how to get the curve; a notebook is saved with what stood there before the first epoch."""
        return Report(
            repr(self), ("It is drawn while the training runs; openmed_nb.training.last_curve() returns it.",)
        )


def picture(curve: MemoryCurve) -> str:
    """Return a curve as HTML: the picture, the verdict with its reason, and what to do."""
    report = curve.marked()
    report = Report(report.title, report.sentences)
    return f'{to_svg(curve)}<div role="status">{to_html(report)}</div>'
