from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def logbooks(helper: Callable[[Path], ModuleType]) -> ModuleType:
    """The module of logbooks as values."""
    return helper(Path(__file__).parent / "logbooks.py")
