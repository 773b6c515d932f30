"""Open panels that are closed at the end of a test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from helpers import simulated_computers as computers
from helpers.panels import OpenPanel
from openmed_nb.models.config import OpenMedConfig


@pytest.fixture
def open_panel() -> Iterator[Callable[..., Any]]:
    """Give a function that opens a panel over a session; all are closed at the end."""
    from openmed_nb.notebook.panel.model import PanelModel
    from openmed_nb.session import SESSION

    opened = []

    def open_panel(session: Any = SESSION, model: str | None = None) -> Any:
        opened.append(OpenPanel(PanelModel(session, model)))
        return opened[-1]

    yield open_panel
    for panel in opened:
        panel.close()
        assert panel.comm is None


@pytest.fixture
def here() -> Any:
    """A computer without a GPU."""
    return computers.plain()


@pytest.fixture
def panel(here: Any, watch: Callable[..., Any]) -> Any:
    """A panel without widgets over its session, opened where there is no event loop."""
    return watch(here.session, "bundled_small")


class Load:
    """A thread that loads a model and blocks until the test releases it."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None

    @property
    def inside(self) -> bool:
        """Whether the thread is loading."""
        return self.thread is not None and self.thread.is_alive()

    def start(self, session: Any) -> None:
        """Start the thread, and wait until it loads the model."""
        self.remove = session.subscribe(self.stay)
        self.thread = threading.Thread(target=session.load_model, args=("bundled_small", OpenMedConfig(device="cpu")))
        self.thread.start()
        assert self.reached.wait(60)
        assert not session.is_idle()

    def stay(self, activity: object) -> None:
        """Block the load until the test releases it."""
        if activity is not None and threading.current_thread() is self.thread:
            self.reached.set()
            self.released.wait(60)

    def stop(self) -> None:
        """Release the thread, and wait for its end."""
        if self.thread is not None:
            self.released.set()
            self.thread.join(60)
            self.remove()
            assert not self.inside


@pytest.fixture
def loads() -> Iterator[Load]:
    """Return a thread that can block in a load."""
    load = Load()
    yield load
    load.stop()
