"""Medical NLP models in notebooks, on the best device of this computer, and the reason for that device.

In a notebook::

    %load_ext openmed_nb
    %openmed_device            # which device, and why
    %openmed_device cpu        # change it
    %openmed_panel             # all of it to look at and to click

    %%openmed_ner
    Patient with type 2 diabetes mellitus and hypertension.

In Python::

    import openmed_nb as nb
    pipe = nb.load_pipeline()  # the bundled, offline disease model
    pipe("Patient with type 2 diabetes mellitus.")

Importing this package imports neither torch nor transformers nor ipywidgets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._utils.lazy import attach_stub

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; IPython calls this for ``%load_ext openmed_nb``."""
    from .notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that :func:`load_ipython_extension` added; IPython calls this for ``%unload_ext``."""
    from .notebook.extension import unload

    unload(shell)
