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

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from . import errors
    from .annotation.corpus import annotate
    from .annotation.loading import ModelLoader, load_model, load_pipeline
    from .compat import apply_mps_tuning, resolve_torch_device
    from .devices.choice import DeviceChoice
    from .devices.environment import EnvPlan
    from .distributed.starting import cluster
    from .errors import OpenMedError, OpenMedWarning
    from .models.config import OpenMedConfig
    from .notebook.panel.opening import panel
    from .runbook.comparison import compare
    from .runbook.doctor.report import doctor
    from .runbook.handoff.bundle import handoff
    from .runbook.logbook.gathering import logbook
    from .runbook.logbook.logbook import Logbook
    from .runbook.operators.fallbacks import fallbacks
    from .runbook.operators.forecast import forecast
    from .runbook.precision.gate import validate_precision
    from .runbook.precision.measurement import parity
    from .runbook.profiling import profile
    from .runbook.signals import signals
    from .runbook.sweep import sweep
    from .runbook.verdict.reference import gates
    from .runbook.verdict.verdict import verdict
    from .session import device, reset, simulated_mps, use
    from .training.activations import checkpoint_activations
    from .training.callbacks import accelerator_arguments, lightning_callback, trainer_arguments, trainer_callback
    from .training.curve import MemoryCurve, MemorySample
    from .training.epochs import EpochHooks, epochs, memory_curve
    from .training.guards import Guards
    from .training.holders import who_holds
    from .training.loader import check_loader, loader_settings, to_device, worker_ladder
    from .training.autocast import precision
    from .training.release import limit_memory, release
    from .training.steps import GradientAccumulation, adamw, explain_fused

__version__ = "0.1.0"

_HOMES = {
    "DeviceChoice": "devices.choice",
    "EnvPlan": "devices.environment",
    "EpochHooks": "training.epochs",
    "GradientAccumulation": "training.steps",
    "Guards": "training.guards",
    "Logbook": "runbook.logbook.logbook",
    "MemoryCurve": "training.curve",
    "MemorySample": "training.curve",
    "ModelLoader": "annotation.loading",
    "OpenMedConfig": "models.config",
    "OpenMedError": "errors",
    "OpenMedWarning": "errors",
    "accelerator_arguments": "training.callbacks",
    "adamw": "training.steps",
    "annotate": "annotation.corpus",
    "apply_mps_tuning": "compat",
    "check_loader": "training.loader",
    "checkpoint_activations": "training.activations",
    "cluster": "distributed.starting",
    "compare": "runbook.comparison",
    "device": "session",
    "doctor": "runbook.doctor.report",
    "epochs": "training.epochs",
    "explain_fused": "training.steps",
    "fallbacks": "runbook.operators.fallbacks",
    "forecast": "runbook.operators.forecast",
    "gates": "runbook.verdict.reference",
    "handoff": "runbook.handoff.bundle",
    "lightning_callback": "training.callbacks",
    "limit_memory": "training.release",
    "load_model": "annotation.loading",
    "load_pipeline": "annotation.loading",
    "loader_settings": "training.loader",
    "logbook": "runbook.logbook.gathering",
    "memory_curve": "training.epochs",
    "panel": "notebook.panel.opening",
    "parity": "runbook.precision.measurement",
    "precision": "training.precision",
    "profile": "runbook.profiling",
    "release": "training.release",
    "reset": "session",
    "resolve_torch_device": "compat",
    "signals": "runbook.signals",
    "simulated_mps": "session",
    "sweep": "runbook.sweep",
    "to_device": "training.loaders",
    "trainer_arguments": "training.callbacks",
    "trainer_callback": "training.callbacks",
    "use": "session",
    "validate_precision": "runbook.precision.gate",
    "verdict": "runbook.verdict.verdict",
    "who_holds": "training.holders",
    "worker_ladder": "training.loader",
}

__all__ = [
    "DeviceChoice",
    "EnvPlan",
    "EpochHooks",
    "GradientAccumulation",
    "Guards",
    "Logbook",
    "MemoryCurve",
    "MemorySample",
    "ModelLoader",
    "OpenMedConfig",
    "OpenMedError",
    "OpenMedWarning",
    "__version__",
    "accelerator_arguments",
    "adamw",
    "annotate",
    "apply_mps_tuning",
    "check_loader",
    "checkpoint_activations",
    "cluster",
    "compare",
    "device",
    "doctor",
    "epochs",
    "errors",
    "explain_fused",
    "fallbacks",
    "forecast",
    "gates",
    "handoff",
    "lightning_callback",
    "limit_memory",
    "load_model",
    "load_pipeline",
    "loader_settings",
    "logbook",
    "memory_curve",
    "panel",
    "parity",
    "precision",
    "profile",
    "release",
    "reset",
    "resolve_torch_device",
    "signals",
    "simulated_mps",
    "sweep",
    "to_device",
    "trainer_arguments",
    "trainer_callback",
    "use",
    "validate_precision",
    "verdict",
    "who_holds",
    "worker_ladder",
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
    from .notebook.extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove everything that :func:`load_ipython_extension` added; IPython calls this for ``%unload_ext``."""
    from .notebook.extension import unload

    unload(shell)
