"""Open the panel: widgets if a kernel can display them, otherwise the same state as text.

``state`` defines the displayed state, ``model`` runs the operations, and ``view`` renders the state as HTML and builds the
widgets. ``view`` imports ipywidgets, so it is imported only when a panel is opened.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..._events.progress import current_shell
from ..._utils.validation import check_bool
from ...models.config import OpenMedConfig
from ...models.files import read_config
from ...models.registry import download_model, find_model
from ...session import SESSION
from .state import PanelState, read_state

if TYPE_CHECKING:
    from .view import PanelView


NO_KERNEL_NOTICE = "The interactive panel requires a notebook. Here, use the commands below."
NO_WIDGETS_NOTICE = (
    "The interactive panel requires ipywidgets. Run python -m pip install ipywidgets, then restart the kernel."
)

# The open panels, each with the id of the cell and of the execution that opened it. ipywidgets keeps a panel alive until
# it is closed.
OPEN_PANELS: WeakKeyDictionary[PanelView, tuple[str | None, str | None]] = WeakKeyDictionary()


def panel(model: str | None = None, show_text: bool = True) -> PanelView | PanelState:
    """Open a panel of this session: device, memory, an example text, models and environment.

    Args:
        model: Model for "Try it": an alias, a Hub id or a folder. If ``None``, use the bundled model.
        show_text: Whether a result shows the annotated text.

    Returns:
        The panel, a widget that a notebook displays. Without a kernel, for example in a terminal, the state of the
        panel with the equivalent commands. A panel closes when its cell is run again, or when its ``close()`` is called.

    Raises:
        ModelError: If the name is not a valid alias, Hub id or folder, if the folder has no token-classification
            model, or if a model of the Hub is not in the cache and the network is disabled.

    Example:
        >>> print(panel())  # doctest: +ELLIPSIS
        Device: ...
        ...
    """
    check_bool("show_text", show_text)
    # Raise an error for a model that cannot be used, as far as this can be checked without network access.
    config = OpenMedConfig()
    reference = find_model(model, config.default_org)
    if not reference.on_hub:
        read_config(Path(reference.location), reference.name)
    else:
        from huggingface_hub import constants

        if constants.is_offline_mode():
            download_model(reference.location, config)
    shell = current_shell()
    if shell is None or not shell.has_trait("kernel"):
        return PanelState(**read_state(SESSION), notice=NO_KERNEL_NOTICE)
    if not importlib.util.find_spec("ipywidgets"):
        return PanelState(**read_state(SESSION), notice=NO_WIDGETS_NOTICE)
    from .model import MainThreadRunner, PanelModel, kernel_loop
    from .view import PanelView

    parent = shell.get_parent()
    cell_id = parent.get("metadata", {}).get("cellId")
    execution_id = parent.get("header", {}).get("msg_id")
    for previous, (previous_cell_id, previous_execution_id) in tuple(OPEN_PANELS.items()):
        # The front end removes the output of the previous execution of a cell.
        if previous_cell_id is not None and previous_cell_id == cell_id and previous_execution_id != execution_id:
            previous.close()
            del OPEN_PANELS[previous]
    panel_model = PanelModel(SESSION, model, show_text, cells=MainThreadRunner(kernel_loop(shell)), events=shell.events)
    try:
        view = PanelView(panel_model)
    except BaseException:  # Including an interrupt.
        panel_model.close()
        raise
    OPEN_PANELS[view] = (cell_id, execution_id)
    return view


def close_panels() -> None:
    """Close all open panels."""
    for view in tuple(OPEN_PANELS):
        view.close()
    OPEN_PANELS.clear()
