"""Annotation on the workers of a cluster, with the interface of ``annotation.stream.Annotator``.

A bounded number of chunks is submitted at a time, so that an endless stream does not fill the memory. The results are in the
order of the texts. If a worker crashes, Dask repeats its chunks. After the scheduler's ``allowed-failures``, Dask gives up all
chunks of the worker (``KilledWorker``), including those that did not cause the crash. Their texts then run one at a time while
no other chunk is in progress. Only a text that crashes its worker alone gets an error.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import length_hint
from typing import TYPE_CHECKING, Any

from .._utils.text import short_type_name
from .._utils.warning import warn
from ..annotation.references import TextReference, absolute_path
from ..annotation.storage import ResultStore
from ..annotation.stream import END_OF_STREAM, AnnotationSource, Chunk, iter_chunks, text_error
from ..errors import ConfigurationError, WorkerKilledError
from ..models.registry import BUNDLED, is_model_name
from . import worker
from .client import (
    ReadyWorker,
    WorkerList,
    call_on_workers,
    call_scheduler,
    cancel,
    check_connected,
    check_workers_match,
    fetch_result,
    parse_host,
    submit,
    translate_dask_errors,
    validate_client,
    wait_for_workers,
)
from .columns import to_references
from .worker import RunSpec

if TYPE_CHECKING:
    from distributed import Client, Future


# Number of pending chunks per worker thread. One chunk runs, one waits on the worker, and two more keep the other threads busy
# if the first chunk takes longer.
CHUNKS_PER_THREAD = 4

# Minimum size of a text for the size of a chunk, which limits a chunk to a few thousand texts.
MIN_TEXT_CHARACTERS = 32

RETRIES = 2  # Number of times that Dask repeats a failed chunk, possibly on another worker.

PendingChunks = deque[tuple[Chunk, "Future"]]


@dataclass(frozen=True)
class ClusterAnnotator:
    """Annotator that runs on the workers of a cluster.

    Attributes:
        client: Client of the cluster.
        run_spec: Model and arguments of the run.
        chunk_characters: Approximate number of characters per chunk.
    """

    client: Client
    run_spec: RunSpec
    chunk_characters: int

    def annotate(self, texts: Iterable[Any], _on_progress: object = None) -> Iterator[ResultStore]:
        """Yield the results of a stream of texts in order, one chunk at a time.

        An error of the stream is raised after the results of all previous texts. Chunks are so small that no progress is
        reported within a chunk.

        Args:
            texts: Texts to annotate.
        """

        def iter_picklable() -> Iterator[object]:
            # A worker may not have the class of a text, and values that are not texts may not be picklable. Yield built-in
            # strings and references, and the errors of invalid texts.
            for number, text in enumerate(texts):
                if isinstance(text, TextReference):
                    yield text
                elif error := text_error(text, number):
                    yield error
                else:
                    yield str.__str__(text)
                check_connected(self.client)  # A slow stream can take longer than the client is connected.

        num_threads = self.count_threads()

        def get_max_texts() -> float:
            """Return the maximum number of texts per chunk, which balances the load at the end of the stream."""
            return length_hint(texts, sys.maxsize) / (2 * num_threads)

        chunks = iter_chunks(iter_picklable(), self.chunk_characters, MIN_TEXT_CHARACTERS, get_max_texts)
        return self.iter_in_order(chunks)

    def iter_in_order(self, chunks: Iterator[Chunk]) -> Generator[ResultStore]:
        """Yield the results of chunks in order. Pending chunks are cancelled when the generator is closed."""
        pending = PendingChunks()
        error: Exception | None = None
        try:
            while True:
                # Submit chunks until enough are pending or the first result is available.
                max_pending = CHUNKS_PER_THREAD * self.count_threads()
                while len(pending) < max_pending:
                    chunk = next(chunks, END_OF_STREAM)
                    if not chunk.texts:
                        error = chunk.error or error
                        break
                    pending.append((chunk, self.submit(chunk)))
                    if pending[0][1].done():
                        break
                if not pending:
                    break
                chunk, future = pending[0]
                yield from self.chunk_results(chunk, future, [future for _chunk, future in pending][1:])
                with translate_dask_errors(self.client):
                    # The result is released explicitly: Python ignores an interrupt in ``Future.__del__``, which Dask uses.
                    future.release()
                pending.popleft()
        finally:
            cancel(self.client, [future for _chunk, future in pending])
        if error:
            raise error

    def count_threads(self) -> int:
        """Return the number of worker threads, or 1 if there is no worker yet."""
        num_threads: int = sum(call_scheduler(self.client, self.client.nthreads).values())
        return max(1, num_threads)

    def submit(self, chunk: Chunk) -> Future:
        """Submit a chunk. The task contains the texts, so that they do not depend on a worker."""
        return submit(self.client, worker.annotate_chunk, self.run_spec, chunk, retries=RETRIES)

    def chunk_results(self, chunk: Chunk, future: Future, other_futures: Sequence[Future]) -> Iterator[ResultStore]:
        """Yield the results of a chunk. If it crashes its workers, wait for the other chunks and run each text alone."""
        from distributed import KilledWorker

        async def wait_for_other_chunks() -> None:
            for other_future in other_futures:
                await other_future.exception()

        try:
            yield wait_for_workers(self.client, future.result)
        except KilledWorker:
            cancel(self.client, [future])
            wait_for_workers(self.client, wait_for_other_chunks)
            for number, text in enumerate(chunk.texts, chunk.first_index):
                try:  # No other chunk is in progress, so only the text itself can crash its worker.
                    yield fetch_result(self.client, self.submit(Chunk(number, [text])))
                except KilledWorker as error:  # noqa: PERF203 - each text runs in a task of its own
                    times = error.allowed_failures + 1
                    host = parse_host(error.last_worker.address)
                    message = f"Text {number} crashed its worker {times} times, most recently on {host}."
                    remedy = "Annotate the text separately. It may need more memory than a worker has."
                    yield ResultStore.from_results([WorkerKilledError(message, remedy)])


def cluster_source(
    client: object, texts: Any, model: object, arguments: Mapping[str, object], batch_tokens: int | None
) -> tuple[str, Any, AnnotationSource]:
    """Return the name of the model, the texts to send, and the annotation source on the workers of a cluster.

    Args:
        client: Dask client.
        texts: Texts to annotate.
        model: Name or directory of the model, or ``None`` for the bundled model.
        arguments: Arguments of ``create_pipeline``.
        batch_tokens: Maximum number of tokens per batch, or ``None`` for the default.

    Raises:
        ConfigurationError: If an argument is not valid.
    """
    client = validate_client(client)
    if not is_model_name(model):
        raise ConfigurationError(
            f"model must be the name or the folder of a model for workers, not {short_type_name(model)}.",
            "Pass the name or the folder of its model, and its arguments to annotate().",
        )
    name = "bundled" if model is None else str(model)
    references = to_references(texts, client)  # Checked before workers load the model.
    # A local directory is passed as an absolute path, because workers have other working directories. As in the model
    # registry, the name of a bundled model is not a directory. A path with ~ is unchanged, because each worker expands it.
    is_folder = name not in BUNDLED and os.path.isdir(name)  # noqa: PTH112 - for Path, "" is the working directory
    run_spec = RunSpec(uuid.uuid4().hex, absolute_path(name) if is_folder else name, dict(arguments), batch_tokens)
    ready: list[ReadyWorker] = call_on_workers(client, worker.prepare_worker, run_spec)
    run_spec = replace(run_spec, expected=check_workers_match(ready))
    for message in sorted({message for ready_worker in ready for message in ready_worker.warnings}):
        warn(message)
    settings = ready[0].settings
    chunk_characters = min(ready_worker.chunk_characters for ready_worker in ready)
    annotator = ClusterAnnotator(client, run_spec, chunk_characters)
    label = WorkerList(tuple(ready_worker.info for ready_worker in ready)).label
    return name, references, AnnotationSource(annotator.annotate, settings, label, known_labels=ready[0].known_labels)
