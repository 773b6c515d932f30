"""What the tests of several folders share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def computers() -> ModuleType:
    """The module of simulated computers; pytest's importlib mode has no package to import it from."""
    file = Path(__file__).with_name("simulated_computers.py")
    spec = importlib.util.spec_from_file_location("simulated_computers", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
