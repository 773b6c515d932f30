"""Models whose predictions are sensitive to rounding, and sessions with a separate data folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import close_models
from helpers import tiny_models as tiny


@pytest.fixture(scope="session")
def close_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that finds asthma in float32 but not in 16 bits. Tests do not modify it."""
    return tiny.save(
        tmp_path_factory.mktemp("close"), close_models.set_margin(tiny.keyword_bert(), close_models.NOTE, "asthma", 1)
    )


@pytest.fixture(scope="session")
def border_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that ends a disease elsewhere in 16 bits. Tests do not modify it."""
    return tiny.save(tmp_path_factory.mktemp("border"), close_models.close_border())


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder, also of the session of this process."""
    monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def new_session(data: Path) -> Callable[..., Any]:
    """A function that returns a session on the CPU that stores validation records in ``data``."""
    from openmed_nb.session import Session

    def new_session(**options: Any) -> Any:
        return Session({"OPENMED_NB_DATA": str(data), "OPENMED_DEVICE": "cpu"}, **options)

    return new_session


@pytest.fixture
def session(new_session: Callable[..., Any]) -> Any:
    """A session on the CPU of this machine."""
    return new_session()


@pytest.fixture
def load(session: Any) -> Callable[..., Any]:
    """A function that loads a pipeline in the session."""
    from openmed_nb.annotation.loading import create_pipeline
    from openmed_nb.models.config import OpenMedConfig

    def load(folder: Path, **arguments: Any) -> Any:
        return create_pipeline(session, str(folder), OpenMedConfig(), **arguments)

    return load
