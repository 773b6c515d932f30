"""The memory curve while it grows: one widget whose value changes in place.

Importing this file imports ipywidgets; so it is imported only when a live curve is asked for. Only the widget's value
changes: outputs that are cleared or updated cannot be followed by nbval.
"""

from __future__ import annotations

from ipywidgets import HTML

from ..training.curve import MemoryCurve
from ..training.pictures import plotting
from .display import Report, to_html
from .widgets import StaticForm


class LiveCurve(StaticForm, HTML):
    """A small picture of a memory curve with its verdict; call it with a curve to show that.

    Its text and HTML forms, which stay where there is no widget, do not change between runs.
    """

    def __init__(self) -> None:
        plotting()  # A missing library is told of before the training, not after its first epoch.
        super().__init__(value=waiting())

    def __call__(self, curve: MemoryCurve) -> None:
        """Show a curve; a curve without samples shows that the first epoch is under way."""
        self.value = picture(curve) if curve.samples else waiting()

    def __repr__(self) -> str:
        return "The live memory curve"

    def report(self) -> Report:
        """Return where the curve is to be had; a notebook is saved with what stood there before the first epoch."""
        return Report(repr(self), ("It is drawn while the training runs; openmed_nb.memory_curve() returns it.",))


def picture(curve: MemoryCurve) -> str:
    """Return a curve as HTML: the picture, the verdict with its reason, and what to do."""
    return f'{plotting().to_svg(curve)}<div role="status">{to_html(Report(curve.report().title, curve.report().sentences))}</div>'


def waiting() -> str:
    """Return what stands there before the first epoch is done."""
    return to_html(Report("Memory", ("The first epoch is under way.",)))
