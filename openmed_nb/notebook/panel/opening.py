"""Opening a panel: widgets where a kernel can show them, otherwise the same state as text."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ...errors import check_flag
from ...models.config import OpenMedConfig
from ...models.registry import find_model
from ...session import SESSION
from .state import PanelState, look

if TYPE_CHECKING:
    from .model import PanelModel
    from .view import PanelView


NO_KERNEL = "Widgets need a notebook, and this is none: type the commands below."
NO_WIDGETS = "ipywidgets is not installed: python -m pip install ipywidgets, then restart the kernel."


@dataclass(frozen=True)
class Origin:
    """Where a panel was opened: in which cell, and in which run of it."""

    cell: str | None
    run: str | None


OPEN: WeakKeyDictionary[PanelView, Origin] = WeakKeyDictionary()
"""The panels that are open, each with where it was opened; ipywidgets keeps them alive until they are closed."""


def panel(model: str | None = None, show_text: bool = True) -> PanelView | PanelState:
    """Open a panel over this session: device, environment, memory, models, and a text to try.

    Args:
        model: The model of "Try it": an alias, a hub id or a folder; ``None`` is the bundled one.
        show_text: Whether an answer shows the text that was annotated.

    Returns:
        The panel, a widget that shows itself in a notebook; where there is no kernel, as in a terminal, what it would
        show, with the commands to type. A panel is closed when its cell is run again, and by its ``close()``.

    Raises:
        UnknownModel: For a name that is no alias, hub id or folder.

    Example:
        >>> print(panel())  # doctest: +ELLIPSIS
        openmed_nb: device, environment, memory and models
        ...
    """
    check_flag("show_text", show_text)
    find_model(model, OpenMedConfig().default_org)
    missing = _missing(_shell())
    if missing:
        return replace(PanelState(**look(SESSION)), note=missing)
    origin = _origin(_shell())
    _close_former(origin)
    view = _view(_model(_shell(), model, show_text))
    OPEN[view] = origin
    return view


def close_panels() -> None:
    for view in tuple(OPEN):
        view.close()
    OPEN.clear()


def _view(model: PanelModel) -> PanelView:
    from .view import PanelView

    try:
        return PanelView(model)
    except BaseException:  # An interrupt too.
        model.close()
        raise


def _model(shell: Any, model: str | None, show_text: bool) -> PanelModel:
    """Return the panel's model, which works in the thread of this kernel."""
    from .model import CellThread, PanelModel, kernel_loop

    cells = CellThread(kernel_loop(shell))
    return PanelModel(SESSION, model, show_text, cells=cells, events=shell.events)


def _close_former(origin: Origin) -> None:
    """Close the panels that an earlier run of this cell opened; the front end has thrown them away."""
    for view, former in tuple(OPEN.items()):
        if former.cell is not None and former.cell == origin.cell and former.run != origin.run:
            view.close()
            del OPEN[view]


def _missing(shell: Any) -> str:
    if shell is None or not shell.has_trait("kernel"):
        return NO_KERNEL
    return "" if importlib.util.find_spec("ipywidgets") else NO_WIDGETS


def _origin(shell: Any) -> Origin:
    parent = shell.get_parent()
    return Origin(parent.get("metadata", {}).get("cellId"), parent.get("header", {}).get("msg_id"))


def _shell() -> Any:
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
