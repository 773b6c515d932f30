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

from ..annotation.fingerprints import settings_of
from ..annotation.forward import Budget
from ..annotation.loading import create_pipeline
from ..annotation.stream import Annotator, Answer, Chunk, chunk_characters
from ..errors import OpenMedError, OpenMedWarning
from ..models.config import OpenMedConfig
from ..session import SESSION
from .members import Member, Ready, check_terms, versions_here


@dataclass(frozen=True, repr=False)
class Work:
    """A run over many texts on workers; it is not shown, because its arguments can hold a token of the hub.

    Attributes:
        run: What tells it from other runs; the rest follows from it.
        model: The name of the model.
        arguments: Those of ``create_pipeline``.
        batch_tokens: How many tokens run at once; ``None`` takes what suits the device of each worker.
        terms: What workers must have, where that is known; one that comes later is held to it.
    """

    run: str
    model: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)
    batch_tokens: int | None = field(default=None, compare=False)
    terms: Mapping[str, Any] | None = field(default=None, compare=False)


Result = TypeVar("Result")


ONE_AT_A_TIME = threading.Lock()
"""Held while a model is loaded and while what was learnt is kept: a worker can have several threads that do tasks."""


@dataclass(repr=False)
class Prepared:
    """A model that is loaded for a run.

    Attributes:
        annotator: The model, ready to answer.
        ready: What the worker says of it.
        budget: How much runs at once, as far as is known by now.
    """

    annotator: Annotator
    ready: Ready
    budget: Budget

    def answers(self, chunk: Chunk) -> list[Answer]:
        """Return the answers to a chunk of texts; where memory was short for them, later ones run in smaller batches."""
        answers, learnt = self.annotator.answers_to(chunk, self.budget)
        with ONE_AT_A_TIME:
            self.budget = self.budget.within(learnt.tokens)
        return answers


async def introduce(dask_worker: Any = None) -> Member:
    """Return what this worker is, and which device models will run on; a GPU is confirmed by computing on it.

    Args:
        dask_worker: The worker; Dask fills it in, but for a task.
    """
    return await in_its_thread(dask_worker, member)


async def get_ready(work: Work, dask_worker: Any = None) -> Ready:
    """Load the model of a run on this worker, and return what tells whether its answers are those of others.

    Args:
        work: The run.
        dask_worker: The worker; Dask fills it in, but for a task.
    """
    return await in_its_thread(dask_worker, lambda: prepared(work).ready)


def answers_of(work: Work, chunk: Chunk) -> list[Answer]:
    """Return the answers to a chunk of texts; this is what a task of a run is.

    Raises:
        WorkersDiffer: Where this worker came later and is not like the others.
        DeviceUnavailable: Where its device fails.
    """
    with named_host():
        found = prepared(work)
        if work.terms is not None:
            check_terms(found.ready, work.terms)
        return found.answers(chunk)


def prepared(work: Work) -> Prepared:
    """Return the model of a run, ready to answer; threads that ask at once wait for the first and get the same."""
    with ONE_AT_A_TIME:
        return load(work)


@functools.lru_cache(maxsize=1)
def load(work: Work) -> Prepared:
    """Load the model of a run; that of the last run is kept, others are the session's."""
    with named_host(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OpenMedWarning)
        pipe = create_pipeline(SESSION, work.model, OpenMedConfig(), **work.arguments)
        annotator = pipe.own_annotator(work.batch_tokens)
    said = tuple(str(one.message) for one in caught if issubclass(one.category, OpenMedWarning))
    who = member(str(pipe.device))
    ready = Ready(who, settings_of(pipe, annotator), chunk_characters(annotator.budget), said)
    return Prepared(annotator, ready, annotator.budget)


def member(device: str | None = None) -> Member:
    """Return what this worker is.

    Args:
        device: The device that was asked for; the best one where nobody asks.

    Raises:
        DeviceError: Where the device cannot be used.
    """
    with named_host():
        choice = SESSION.device(device)
    system = f"{platform.system()} {platform.machine()}"
    return Member(socket.gethostname(), system, choice.device, choice.reason, versions_here())


async def in_its_thread(dask_worker: Any, function: Callable[[], Result]) -> Result:
    """Run a function where tasks run, so that the worker can be talked to while a model is loaded.

    As a task itself it stands beside those threads already, and takes another one.
    """
    executor = dask_worker.executors["default"] if dask_worker else None
    return await asyncio.get_running_loop().run_in_executor(executor, function)


@contextmanager
def named_host() -> Iterator[None]:
    """Let errors of ours say on which computer they happened."""
    host = f"On {socket.gethostname()}: "
    try:
        yield
    except OpenMedError as error:
        if error.what.startswith(host):
            raise
        raise type(error)(host + error.what, error.remedy) from None
