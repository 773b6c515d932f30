"""What the tests of clusters share: workers that start quickly, and texts for them."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from typing import Any

import pytest

IMPORTED_BY_WORKERS = [
    "distributed",
    "torch",
    "transformers.models.bert.modeling_bert",
    "openmed_nb.annotation.pipeline",
]


@pytest.fixture(scope="session")
def forking() -> dict[str, str]:
    """The setting of Dask that lets it fork workers from a process that has imported what they need, as its own tests do.

    A worker that imports torch itself takes ten times as long to start. On a Mac such a process cannot be forked.
    """
    if sys.platform != "linux":
        return {}
    multiprocessing.set_forkserver_preload(IMPORTED_BY_WORKERS)
    forkserver.ensure_running()
    return {"distributed.worker.multiprocessing-method": "forkserver"}


@pytest.fixture(scope="module")
def quick_workers(forking: dict[str, str]) -> Iterator[None]:
    """Workers that are quick to start, for the clusters of a module."""
    import dask
    import distributed  # noqa: F401 - its settings have to be there before one of them is changed

    with dask.config.set(forking):
        yield


@pytest.fixture(scope="module")
def pool(quick_workers: None) -> Iterator[Any]:  # noqa: ARG001 - it only has to be there
    """A cluster of two workers on this computer, with one thread each; tests leave it as it was.

    Each module has its own, so that no process of it is there in tests that look for processes.
    """
    import openmed_nb

    with openmed_nb.cluster(n=2, device="cpu", threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def numbered() -> Callable[..., list[str]]:
    """A function that returns texts in each of which the entity that the keyword model finds tells which it is.

    They have few tokens, and so many spaces that a chunk has few of them.
    """

    def numbered(count: int, spaces: int = 2000) -> list[str]:
        return [f"{' ' * number}asthma{' ' * spaces}" for number in range(count)]

    return numbered


@pytest.fixture(scope="session")
def numbers_of() -> Callable[..., list[list[int]]]:
    """A function that returns which of the numbered texts each answer is one to."""

    def numbers_of(found: Any) -> list[list[int]]:
        return [[entity["start"] for entity in entities] for entities in found]

    return numbers_of


@pytest.fixture
def interrupt_when(interruptible: None) -> Callable[..., Any]:  # noqa: ARG001 - it only has to be there
    """A function that interrupts this process during a block, as soon as something is so."""

    @contextlib.contextmanager
    def interrupt_when(condition: Callable[[], Any]) -> Iterator[None]:
        main = threading.get_ident()

        def interrupt() -> None:
            while not condition():
                time.sleep(0.001)
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt, daemon=True)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    return interrupt_when
