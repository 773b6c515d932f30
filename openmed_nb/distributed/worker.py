"""What runs on a worker of a cluster: it has a session of its own, which chooses the device and loads a model once.

Only the functions here are called there, by their names: no code travels, and no model. The session of a worker sets the
variables of MPS before it loads torch, as that of a notebook does.
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

from ..annotation.forward import Budget
from ..annotation.loading import create_pipeline
from ..annotation.resume import settings_of
from ..annotation.stream import Annotator, Answer, Chunk, chunk_characters
from ..errors import OpenMedError, OpenMedWarning
from ..models.config import OpenMedConfig
from ..session import SESSION
from .members import Member, Ready, check_terms, versions_here

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class Work:
    """A run over many texts on workers; it is not shown, because its arguments can hold a token of the hub."""

    run: str  # Tells it from other runs; the rest follows from it.
    model: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)  # Those of create_pipeline.
    batch_tokens: int | None = field(default=None, compare=False)
    # What every worker must have, once that is known; one that comes later has to have it too.
    terms: Mapping[str, Any] | None = field(default=None, compare=False)


@dataclass(repr=False)
class LoadedWork:
    """The model of a run, ready to answer, what its worker says of itself, and how much runs at once as far as is known."""

    annotator: Annotator
    ready: Ready
    budget: Budget


ONE_AT_A_TIME = threading.Lock()
# Held while a model is loaded and while a budget is kept: a worker can have several threads that do tasks.


async def introduce(dask_worker: Any = None) -> Member:
    """Return what this worker is, and which device models will run on; a GPU is confirmed by computing on it.

    ``dask_worker`` is filled in by Dask, but for a task; so also below.
    """
    return await in_thread_of_tasks(dask_worker, member)


async def get_ready(work: Work, dask_worker: Any = None) -> Ready:
    """Load the model of a run on this worker, and return what tells whether its answers are those of others."""
    return await in_thread_of_tasks(dask_worker, lambda: loaded(work).ready)


def answers_of(work: Work, chunk: Chunk) -> list[Answer]:
    """Return the answers to a chunk of texts, on a worker like the others; this is what a task of a run is."""
    with named_host():
        found = loaded(work)
        if work.terms is not None:
            check_terms(found.ready, work.terms)
        answers, learnt = found.annotator.answers_to(chunk, found.budget)
        with ONE_AT_A_TIME:  # Where memory was short, later texts run in smaller batches.
            found.budget = found.budget.within(learnt.tokens)
        return answers


def loaded(work: Work) -> LoadedWork:
    """Return the model of a run; threads that ask at once wait for the first and get the same."""
    with ONE_AT_A_TIME:
        return load(work)


@functools.lru_cache(maxsize=1)  # That of the last run is kept, others are the session's.
def load(work: Work) -> LoadedWork:
    with named_host(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OpenMedWarning)
        pipe = create_pipeline(SESSION, work.model, OpenMedConfig(), **work.arguments)
        annotator = pipe.own_annotator(work.batch_tokens)
    messages = tuple(str(one.message) for one in caught if issubclass(one.category, OpenMedWarning))
    characters = chunk_characters(annotator.budget)
    ready = Ready(member(str(pipe.device)), settings_of(pipe, annotator), characters, messages)
    return LoadedWork(annotator, ready, annotator.budget)


def member(device: str | None = None) -> Member:
    """Return what this worker is, with the device that is asked for, or the best one."""
    with named_host():
        choice = SESSION.device(device)
    system = f"{platform.system()} {platform.machine()}"
    return Member(socket.gethostname(), system, choice.device, choice.reason, versions_here())


async def in_thread_of_tasks(dask_worker: Any, function: Callable[[], Result]) -> Result:
    """Run a function where tasks run, so that the worker can be talked to while a model is loaded.

    A coroutine that is itself a task runs on the worker's loop, and takes another thread.
    """
    executor = dask_worker.executors["default"] if dask_worker else None
    return await asyncio.get_running_loop().run_in_executor(executor, function)


@contextmanager
def named_host() -> Iterator[None]:
    """Let errors of this package say on which computer they happened."""
    host = f"On {socket.gethostname()}: "
    try:
        yield
    except OpenMedError as error:
        if error.what.startswith(host):
            raise
        raise type(error)(host + error.what, error.remedy) from None
