"""How a widget ends, so that it leaves nothing behind.

Importing this file imports ipywidgets; so it is imported only where a widget is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from ipywidgets import Box, Widget


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
