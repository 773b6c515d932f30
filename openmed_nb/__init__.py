"""Medical NLP models in notebooks, on the best device of this computer, and the reason for that device.

In a notebook::

    %load_ext openmed_nb
    %openmed_device            # which device, and why
    %openmed_device cpu        # change it

    %%openmed_ner
    Patient with type 2 diabetes mellitus and hypertension.

In Python::

    import openmed_nb as nb
    pipe = nb.load_pipeline()  # the bundled, offline disease model
    pipe("Patient with type 2 diabetes mellitus.")

Importing this package imports neither torch nor transformers nor ipywidgets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from . import errors
    from .devices.choice import DeviceChoice
    from .devices.environment import EnvPlan
    from .errors import OpenMedError
    from .interface.api import (
        ModelLoader,
        annotate,
        apply_mps_tuning,
        device,
        load_model,
        load_pipeline,
        reset,
        resolve_torch_device,
        use,
    )
    from .models.config import OpenMedConfig

__version__ = "0.1.0"

_HOMES = {
    "DeviceChoice": "devices.choice",
    "EnvPlan": "devices.environment",
    "ModelLoader": "interface.api",
    "OpenMedConfig": "models.config",
    "OpenMedError": "errors",
    "annotate": "interface.api",
    "apply_mps_tuning": "interface.api",
    "device": "interface.api",
    "load_model": "interface.api",
    "load_pipeline": "interface.api",
    "reset": "interface.api",
    "resolve_torch_device": "interface.api",
    "use": "interface.api",
}

__all__ = [
    "DeviceChoice",
    "EnvPlan",
    "ModelLoader",
    "OpenMedConfig",
    "OpenMedError",
    "__version__",
    "annotate",
    "apply_mps_tuning",
    "device",
    "errors",
    "load_model",
    "load_pipeline",
    "reset",
    "resolve_torch_device",
    "use",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; IPython calls this for ``%load_ext openmed_nb``."""
    from .interface.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that :func:`load_ipython_extension` added; IPython calls this for ``%unload_ext``."""
    from .interface.extension import unload

    unload(shell)
