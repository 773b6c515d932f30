"""Memory curve as a widget that is updated during training.

Importing this module imports ipywidgets, so it is imported only if a curve is displayed. Only the value of the widget changes, because nbval does not support outputs that are cleared or updated.
"""

from __future__ import annotations

from dataclasses import replace

from ipywidgets import HTML

from .._render.display import Report, StaticReprMixin, to_html
from .._render.drawing import render_charts
from .curve import MemoryCurve


class LiveMemoryCurve(StaticReprMixin, HTML):
    """Chart of a memory curve with its verdict; call it with a curve to display that curve.

    Its text and HTML representations, which remain without a widget, do not change between runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self(MemoryCurve(""))

    def __call__(self, curve: MemoryCurve) -> None:
        """Display a curve; without samples, display that the first epoch is in progress."""
        self.value = (
            render_curve(curve) if curve.samples else to_html(Report("Memory", ("The first epoch is in progress.",)))
        )

    def __repr__(self) -> str:
        return "Live memory curve"

    def report(self) -> Report:
        """Return the instructions to get the curve, which a notebook stores instead of the widget."""
        sentence = "It is updated during training; openmed_nb.training.last_curve() returns the curve."
        return Report(repr(self), (sentence,))


def render_curve(curve: MemoryCurve) -> str:
    """Return a curve as HTML: its charts, and its verdict with reason and advice for screen readers."""
    report = curve.final_report()
    verdict = to_html(replace(report, tables=(), charts=()))
    return f'{render_charts(*report.charts)}<div role="status">{verdict}</div>'
