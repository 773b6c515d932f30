"""What the tests of several folders share; pytest's importlib mode has no package to import it from."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent
NOTE = "the patient has diabetes mellitus and hypertension . no asthma ."


def load_module(file: Path) -> ModuleType:
    """Return a plain file as a module."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def helper() -> Callable[[Path], ModuleType]:
    """A function that loads a file beside a test as a module."""
    return load_module


@pytest.fixture(scope="session")
def computers() -> ModuleType:
    """The module of simulated computers."""
    return load_module(FOLDER / "simulated_computers.py")


@pytest.fixture(scope="session")
def lazy_device() -> str:
    """A second device that really computes: torch's "lazy" one, which every build has and which starts only once."""
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    return "lazy:0"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module that makes tiny models."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return load_module(FOLDER / "tiny_models.py")


@pytest.fixture(scope="session")
def keyword_model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that finds a few known words; tests read it and copy it, and do not change it."""
    return tiny.save(tmp_path_factory.mktemp("keyword"), tiny.keyword_bert())


@pytest.fixture(scope="session")
def random_model(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model whose predictions are arbitrary but fixed."""
    return tiny.save(tmp_path_factory.mktemp("random"), tiny.random_bert())


@pytest.fixture(scope="session")
def words_of() -> Callable[..., list[str]]:
    """A function that returns the pieces of a text that a pipeline takes for entities."""

    def words_of(pipe: Any, text: str = NOTE) -> list[str]:
        return [text[entity["start"] : entity["end"]] for entity in pipe(text)]

    return words_of
