from __future__ import annotations

from collections.abc import Iterator

import pytest

from openmed_nb.session import SESSION


@pytest.fixture(scope="module", autouse=True)
def no_models_of_other_tests() -> Iterator[None]:
    """Let the session's models go around a module: they would follow it to a device, and a logbook tells of the last one."""
    SESSION.unload()
    yield
    SESSION.unload()
