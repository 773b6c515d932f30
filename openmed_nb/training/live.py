"""The memory curve as a widget while it grows.

Importing this file imports ipywidgets; so it is imported only through ``curve.needing``. Only the widget's value changes: nbval
cannot follow outputs that are cleared or updated.
"""

from __future__ import annotations

from dataclasses import replace

from ipywidgets import HTML

from .._render.display import Report, StaticReprMixin, to_html
from .._render.drawing import render_charts
from .curve import MemoryCurve


class LiveMemoryCurve(StaticReprMixin, HTML):
    """A small picture of a memory curve with its verdict; call it with a curve to show that.

    Its text and HTML forms, which stay where there is no widget, do not change between runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self(MemoryCurve(""))

    def __call__(self, curve: MemoryCurve) -> None:
        """Show a curve; a curve without samples shows that the first epoch is under way."""
        self.value = (
            render_curve(curve) if curve.samples else to_html(Report("Memory", ("The first epoch is under way.",)))
        )

    def __repr__(self) -> str:
        return "The live memory curve"

    def report(self) -> Report:
        """Return how to get the curve; a notebook is saved with what stood there before the first epoch."""
        said = "It is drawn while the training runs; openmed_nb.training.last_curve() returns it."
        return Report(repr(self), (said,))


def render_curve(curve: MemoryCurve) -> str:
    """Return a curve as HTML: the pictures, and the verdict with its reason and what to do, which a screen reader reads out."""
    report = curve.final_report()
    said = to_html(replace(report, tables=(), charts=()))
    return f'{render_charts(*report.charts)}<div role="status">{said}</div>'
