"""Functions that run on a worker of a cluster, whose session selects the device and loads each model once.

Workers call these functions by name, so neither code nor models are sent. As in a notebook, the session sets the MPS
variables before torch is imported.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..annotation.forward import TokenBudget
from ..annotation.loading import create_pipeline
from ..annotation.resume import run_settings
from ..annotation.storage import ResultStore
from ..annotation.stream import Annotator, Chunk, chunk_characters
from ..errors import OpenMedWarning
from ..models.config import OpenMedConfig
from ..session import SESSION
from .client import ReadyWorker, WorkerInfo, check_worker_matches, installed_versions

if TYPE_CHECKING:
    from distributed import Worker


Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class RunSpec:
    """Run over many texts on workers. It does not have a repr, because the arguments can contain a hub token.

    Attributes:
        run_id: Unique identifier. Runs with the same identifier are equal.
        model: Name or directory of the model.
        arguments: Arguments of ``create_pipeline``.
        batch_tokens: Maximum number of tokens per batch, or ``None`` for the default.
        expected: Compatibility key of the workers, which later workers must match. ``None`` until it is known.
    """

    run_id: str
    model: str = field(compare=False)
    arguments: Mapping[str, Any] = field(compare=False)
    batch_tokens: int | None = field(default=None, compare=False)
    expected: Mapping[str, object] | None = field(default=None, compare=False)


@dataclass(repr=False)
class LoadedRun:
    """Loaded model of a run.

    Attributes:
        annotator: Annotator with the model.
        ready: Description of the worker with the model.
        budget: Budget of a batch, which is reduced when memory runs out.
    """

    annotator: Annotator
    ready: ReadyWorker
    budget: TokenBudget


# Protects the load of a model and the change of a budget, because a worker can run tasks in several threads.
LOAD_LOCK = threading.Lock()


async def describe_worker(dask_worker: Worker | None = None) -> WorkerInfo:
    """Return the description of this worker. A GPU is verified with a probe.

    ``client.run`` passes ``dask_worker``, a task does not. This also applies to :func:`prepare_worker`.
    """
    return await _run_in_task_thread(dask_worker, _worker_info)


async def prepare_worker(run_spec: RunSpec, dask_worker: Worker | None = None) -> ReadyWorker:
    """Load the model of a run on this worker, and return the values that are compared with other workers."""
    return await _run_in_task_thread(dask_worker, lambda: get_or_load(run_spec).ready)


def annotate_chunk(run_spec: RunSpec, chunk: Chunk) -> ResultStore:
    """Return the results of a chunk of texts if this worker matches the others. Each task of a run calls this function."""
    run = get_or_load(run_spec)
    if run_spec.expected is not None:
        check_worker_matches(run.ready, run_spec.expected)
    results, reduced_budget = run.annotator.annotate_chunk(chunk, run.budget)
    with LOAD_LOCK:  # If memory ran out, later texts run in smaller batches.
        run.budget = run.budget.capped_at(reduced_budget.max_tokens)
    return results


def get_or_load(run_spec: RunSpec) -> LoadedRun:
    """Return the loaded model of a run. Concurrent calls load the model once."""
    with LOAD_LOCK:
        return load(run_spec)


@functools.lru_cache(maxsize=1)  # Only the last run is cached. The session caches the models.
def load(run_spec: RunSpec) -> LoadedRun:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OpenMedWarning)
        pipe = create_pipeline(SESSION, run_spec.model, OpenMedConfig(), **run_spec.arguments)
        annotator = pipe.default_annotator(run_spec.batch_tokens)
    messages = tuple(str(warning.message) for warning in caught if issubclass(warning.category, OpenMedWarning))
    characters = chunk_characters(annotator.budget)
    labels = annotator.decoder.entity_labels
    ready = ReadyWorker(_worker_info(str(pipe.device)), run_settings(pipe, annotator), characters, messages, labels)
    return LoadedRun(annotator, ready, annotator.budget)


def _worker_info(device: str | None = None) -> WorkerInfo:
    """Return the description of this worker with the given device. If ``None``, use the best device."""
    choice = SESSION.device(device)
    return WorkerInfo(socket.gethostname(), choice.device, choice.reason, installed_versions())


async def _run_in_task_thread(dask_worker: Worker | None, function: Callable[[], Result]) -> Result:
    """Run a function in a task thread, so that it does not block the event loop of the worker."""
    # A task already runs on the event loop, so any other thread is suitable.
    executor = dask_worker.executors["default"] if dask_worker else None
    return await asyncio.get_running_loop().run_in_executor(executor, function)
