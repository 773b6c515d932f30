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

from ..annotation.forward import Budget
from ..annotation.loading import create_pipeline
from ..annotation.results import Answers
from ..annotation.resume import settings_of
from ..annotation.stream import Annotator, Chunk, chunk_characters
from ..errors import OpenMedError, OpenMedWarning
from ..models.config import OpenMedConfig
from ..session import SESSION
from .members import Member, Ready, check_terms, versions_here

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class Work:
    """A run over many texts on workers; it has no repr, because its arguments can hold a token of the hub."""

    run: str  # Its identifier; runs with the same one are equal.
    model: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)  # Those of create_pipeline.
    batch_tokens: int | None = field(default=None, compare=False)
    # What every worker must have, as soon as that is known; it is checked on workers that come later.
    terms: Mapping[str, Any] | None = field(default=None, compare=False)


@dataclass(repr=False)
class LoadedWork:
    """The model of a run, what its worker says of itself, and the budget of a batch, smaller once memory was short."""

    annotator: Annotator
    ready: Ready
    budget: Budget


# Held while a model is loaded and while a budget is changed: a worker can run tasks in several threads.
ONE_AT_A_TIME = threading.Lock()


async def introduce(dask_worker: Any = None) -> Member:
    """Return what this worker is, and which device models will run on; a GPU is confirmed by computing on it.

    Here and below, ``client.run`` fills ``dask_worker`` in, and a task does not.
    """
    return await in_thread_of_tasks(dask_worker, member)


async def get_ready(work: Work, dask_worker: Any = None) -> Ready:
    """Load the model of a run on this worker, and return what is compared with other workers."""
    return await in_thread_of_tasks(dask_worker, lambda: loaded(work).ready)


def answers_of(work: Work, chunk: Chunk) -> Answers:
    """Return the answers to a chunk of texts, if this worker is like the others; every task of a run calls this."""
    with named_host():
        found = loaded(work)
        if work.terms is not None:
            check_terms(found.ready, work.terms)
        answers, learnt = found.annotator.answers_to(chunk, found.budget)
        with ONE_AT_A_TIME:  # Where memory was short, later texts run in smaller batches.
            found.budget = found.budget.within(learnt.tokens)
        return answers


def loaded(work: Work) -> LoadedWork:
    """Return the model of a run; of several threads that ask, one loads it and the others wait."""
    with ONE_AT_A_TIME:
        return load(work)


@functools.lru_cache(maxsize=1)  # For the last run; the session keeps the models themselves.
def load(work: Work) -> LoadedWork:
    with named_host(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OpenMedWarning)
        pipe = create_pipeline(SESSION, work.model, OpenMedConfig(), **work.arguments)
        annotator = pipe.own_annotator(work.batch_tokens)
    messages = tuple(str(one.message) for one in caught if issubclass(one.category, OpenMedWarning))
    characters = chunk_characters(annotator.budget)
    labels = annotator.decoder.entity_labels
    ready = Ready(member(str(pipe.device)), settings_of(pipe, annotator), characters, messages, labels)
    return LoadedWork(annotator, ready, annotator.budget)


def member(device: str | None = None) -> Member:
    """Return what this worker is, with the device that is asked for, or the best one."""
    with named_host():
        choice = SESSION.device(device)
    system = f"{platform.system()} {platform.machine()}"
    return Member(socket.gethostname(), system, choice.device, choice.reason, versions_here())


async def in_thread_of_tasks(dask_worker: Any, function: Callable[[], Result]) -> Result:
    """Run a function in a thread of tasks, so that the loop of the worker stays free while a model is loaded."""
    executor = dask_worker.executors["default"] if dask_worker else None  # A task runs on the loop: any other thread.
    return await asyncio.get_running_loop().run_in_executor(executor, function)


@contextmanager
def named_host() -> Iterator[None]:
    """Add the name of this computer to errors of this package."""
    host = f"On {socket.gethostname()}: "
    try:
        yield
    except OpenMedError as error:
        if error.what.startswith(host):
            raise
        raise type(error)(host + error.what, error.remedy) from None
