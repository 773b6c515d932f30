"""Fixtures for tests of clusters: workers that start quickly, and texts."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

PRELOADED_MODULES = [
    "distributed",
    "torch",
    "transformers.models.bert.modeling_bert",
    "openmed_nb.annotation.pipeline",
]


@pytest.fixture(scope="session")
def fork_settings() -> dict[str, str]:
    """Setting of Dask that forks workers from a process with preloaded modules, as in the tests of Dask.

    A worker that imports torch itself takes ten times as long to start. macOS does not support the fork of such a process.
    """
    if sys.platform != "linux":
        return {}
    multiprocessing.set_forkserver_preload(PRELOADED_MODULES)
    forkserver.ensure_running()
    return {"distributed.worker.multiprocessing-method": "forkserver"}


@pytest.fixture(scope="session")
def quick_workers(fork_settings: dict[str, str]) -> Iterator[None]:
    """Workers that start quickly."""
    import dask
    import distributed  # noqa: F401 - the import loads the settings that are changed

    with dask.config.set(fork_settings):
        yield


@pytest.fixture(scope="session")
def pool(quick_workers: None) -> Iterator[Any]:  # noqa: ARG001 - only its setup is needed
    """Cluster of two workers on this machine with one thread each. Tests must not close it."""
    import openmed_nb

    with openmed_nb.cluster(n=2, device="cpu") as cluster:
        yield cluster


@pytest.fixture
def on_pool(pool: Any, keyword_model: Path) -> Callable[..., Any]:
    """Function that annotates texts on the cluster of the tests."""
    import openmed_nb

    def on_pool(texts: Any, model: Any = keyword_model, **options: Any) -> Any:
        return openmed_nb.annotate(texts, model, **{"client": pool.client, "progress": False, **options})

    return on_pool


@pytest.fixture
def interrupt_when(interruptible: None) -> Callable[..., Any]:  # noqa: ARG001 - only its setup is needed
    """Function that interrupts this process during a block when a condition is true."""

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
