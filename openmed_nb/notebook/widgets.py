"""What widgets share: the static form, the live curve.

What our widgets have in common: a form that stays where there is no widget, and an end that leaves nothing behind.

Importing this file imports ipywidgets; so it is imported only where a widget is asked for.

The memory curve while it grows: one widget whose value changes in place.

Importing this file imports ipywidgets; so it is imported only when a live curve is asked for. Only the widget's value
changes: outputs that are cleared or updated cannot be followed by nbval.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ipywidgets import HTML, Box, Widget

from ..display import Report, to_html
from ..training.curve import MemoryCurve, plotting

VIEW = "application/vnd.jupyter.widget-view+json"


class StaticForm:
    """Gives a widget an HTML and a text form beside the live one; they are what a saved notebook keeps.

    Its text is its ``repr``, which does not change between runs; its HTML is the report of the moment in which it is shown.
    """

    comm: Any
    model_id: str

    _ipython_display_ = None  # ipywidgets 7 shows itself with it, in text only; IPython passes over None.

    def report(self) -> Report:
        raise NotImplementedError

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        static = {"text/html": to_html(self.report()), "text/plain": repr(self)}
        if self.comm is None:  # It is closed.
            return static
        return {VIEW: {"version_major": 2, "version_minor": 0, "model_id": self.model_id}, **static}


def tree(widget: Widget) -> Iterator[Widget]:
    if isinstance(widget, Box):
        for child in widget.children:
            yield from tree(child)
    yield from (getattr(widget, name) for name in ("layout", "style") if hasattr(widget, name))
    yield widget


def close_tree(widget: Widget) -> None:
    """Close a widget and all that is in it; ipywidgets itself closes neither children nor layouts nor styles."""
    for one in tuple(tree(widget)):
        Widget.close(one)
        vars(one).pop("_repr_mimebundle_", None)  # ipywidgets 8 puts None there, and the static form would be gone.


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
    return f'{plotting().to_svg(curve)}<div role="status">{to_html(Report(curve.report().title, curve.report().sentences))}</div>'


def waiting() -> str:
    return to_html(Report("Memory", ("The first epoch is under way.",)))
