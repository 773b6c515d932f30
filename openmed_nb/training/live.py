"""The memory curve while it grows: one widget whose value changes in place.

Importing this file imports ipywidgets; so it is imported only when a live curve is asked for. Only the widget's value
changes: outputs that are cleared or updated cannot be followed by nbval.
"""

from __future__ import annotations

from ipywidgets import HTML

from ..display import Report, StaticForm, to_html
from .curve import MemoryCurve, plotting


class LiveCurve(StaticForm, HTML):
    """A small picture of a memory curve with its verdict; call it with a curve to show that.

    Its text and HTML forms, which stay where there is no widget, do not change between runs.
    """

    def __init__(self) -> None:
        plotting()  # A missing library is an error before the training, not after its first epoch.
        super().__init__(value=waiting())

    def __call__(self, curve: MemoryCurve) -> None:
        """Show a curve; a curve without samples shows that the first epoch is under way."""
        self.value = picture(curve) if curve.samples else waiting()

    def __repr__(self) -> str:
        return "The live memory curve"

    def report(self) -> Report:
        """Return how to get the curve; a notebook is saved with what stood there before the first epoch."""
        return Report(
            repr(self), ("It is drawn while the training runs; openmed_nb.training.last_curve() returns it.",)
        )


def picture(curve: MemoryCurve) -> str:
    """Return a curve as HTML: the picture, the verdict with its reason, and what to do."""
    report = Report(curve.report().title, curve.report().sentences)
    return f'{plotting().to_svg(curve)}<div role="status">{to_html(report)}</div>'


def waiting() -> str:
    return to_html(Report("Memory", ("The first epoch is under way.",)))
