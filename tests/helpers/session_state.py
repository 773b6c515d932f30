"""State of the session and of the process that a failed operation must not change."""

from __future__ import annotations

import os
from typing import Any

from openmed_nb.models.store import ModelStore
from openmed_nb.session import SESSION


def make_store(on_progress: Any = id, on_placement: Any = lambda *_placement: None) -> ModelStore:
    """Return a store without models and without tuned batch sizes."""
    return ModelStore(on_progress, on_placement, lambda _spec: {})


def read_environment() -> dict[str, str]:
    """Return the environment of this process, without what pytest itself writes into it."""
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def read_state() -> tuple[Any, ...]:
    """Return the device, the environment, the override, the computer and the loaded models."""
    models = {key: (id(loaded), str(loaded.model.device)) for key, loaded in SESSION.models._models.items()}
    return SESSION.device().to_dict(), read_environment(), SESSION.override, SESSION.device_manager, models
