"""What runs on a worker of a cluster: its own session chooses the device and loads a model once.

Workers are asked for the functions of this file by name: neither code nor models travel. As in a notebook, the session
sets the MPS variables before torch is loaded.
"""

from __future__ import annotations

import asyncio
import functools
import platform
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..annotation.forward import TokenBudget
from ..annotation.loading import create_pipeline
from ..annotation.results import ResultStore
from ..annotation.resume import run_settings
from ..annotation.stream import Annotator, Chunk, chunk_characters
from ..errors import OpenMedError, OpenMedWarning
from ..models.config import OpenMedConfig
from ..session import SESSION
from .members import ReadyWorker, WorkerInfo, check_worker_matches, installed_versions

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class RunSpec:
    """A run over many texts on workers; it has no repr, because its arguments can hold a token of the hub."""

    run_id: str  # Its identifier; runs with the same one are equal.
    model: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)  # Those of create_pipeline.
    batch_tokens: int | None = field(default=None, compare=False)
    # What every worker must have, as soon as that is known; it is checked on workers that come later.
    expected: Mapping[str, Any] | None = field(default=None, compare=False)


@dataclass(repr=False)
class LoadedRun:
    """The model of a run, what its worker says of itself, and the budget of a batch, smaller once memory was short."""

    annotator: Annotator
    ready: ReadyWorker
    budget: TokenBudget


# Held while a model is loaded and while a budget is changed: a worker can run tasks in several threads.
LOAD_LOCK = threading.Lock()


async def describe_worker(dask_worker: Any = None) -> WorkerInfo:
    """Return what this worker is, and which device models will run on; a GPU is confirmed by computing on it.

    Here and below, ``client.run`` fills ``dask_worker`` in, and a task does not.
    """
    return await run_in_task_thread(dask_worker, worker_info)


async def prepare_worker(work: RunSpec, dask_worker: Any = None) -> ReadyWorker:
    """Load the model of a run on this worker, and return what is compared with other workers."""
    return await run_in_task_thread(dask_worker, lambda: get_or_load(work).ready)


def annotate_chunk(work: RunSpec, chunk: Chunk) -> ResultStore:
    """Return the answers to a chunk of texts, if this worker is like the others; every task of a run calls this."""
    with prefix_errors_with_host():
        found = get_or_load(work)
        if work.expected is not None:
            check_worker_matches(found.ready, work.expected)
        answers, learnt = found.annotator.annotate_chunk(chunk, found.budget)
        with LOAD_LOCK:  # Where memory was short, later texts run in smaller batches.
            found.budget = found.budget.capped_at(learnt.max_tokens)
        return answers


def get_or_load(work: RunSpec) -> LoadedRun:
    """Return the model of a run; of several threads that ask, one loads it and the others wait."""
    with LOAD_LOCK:
        return load(work)


@functools.lru_cache(maxsize=1)  # For the last run; the session keeps the models themselves.
def load(work: RunSpec) -> LoadedRun:
    with prefix_errors_with_host(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OpenMedWarning)
        pipe = create_pipeline(SESSION, work.model, OpenMedConfig(), **work.arguments)
        annotator = pipe.default_annotator(work.batch_tokens)
    messages = tuple(str(one.message) for one in caught if issubclass(one.category, OpenMedWarning))
    characters = chunk_characters(annotator.budget)
    labels = annotator.decoder.entity_labels
    ready = ReadyWorker(worker_info(str(pipe.device)), run_settings(pipe, annotator), characters, messages, labels)
    return LoadedRun(annotator, ready, annotator.budget)


def worker_info(device: str | None = None) -> WorkerInfo:
    """Return what this worker is, with the device that is asked for, or the best one."""
    with prefix_errors_with_host():
        choice = SESSION.device(device)
    system = f"{platform.system()} {platform.machine()}"
    return WorkerInfo(socket.gethostname(), system, choice.device, choice.reason, installed_versions())


async def run_in_task_thread(dask_worker: Any, function: Callable[[], Result]) -> Result:
    """Run a function in a thread of tasks, so that the loop of the worker stays free while a model is loaded."""
    executor = dask_worker.executors["default"] if dask_worker else None  # A task runs on the loop: any other thread.
    return await asyncio.get_running_loop().run_in_executor(executor, function)


@contextmanager
def prefix_errors_with_host() -> Iterator[None]:
    """Add the name of this computer to errors of this package."""
    host = f"On {socket.gethostname()}: "
    try:
        yield
    except OpenMedError as error:
        if error.message.startswith(host):
            raise
        raise type(error)(host + error.message, error.remedy) from None
