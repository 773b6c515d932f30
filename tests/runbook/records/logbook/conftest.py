from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def logbooks(helper: Callable[[Path], ModuleType]) -> ModuleType:
    """Module with the complete logbook."""
    return helper(Path(__file__).parent / "logbooks.py")
