"""Annotate on the workers of a cluster: the twin of ``annotation.stream.Annotator``.

Chunks of texts go out, a bounded number at a time, so that an endless stream fills no memory; answers come back in the
order of the texts. If a worker dies, Dask runs its chunks again; after the scheduler's ``allowed-failures`` it gives them up
(``KilledWorker``), the harmless ones too. Their texts then run one at a time, with nothing else under way, so that only a
text that ends its worker alone is blamed.
"""

from __future__ import annotations

import contextlib
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
from ..annotation.references import TextReference, absolute_path, check_iterable
from ..annotation.results import ResultStore
from ..annotation.stream import END_OF_STREAM, AnnotationSource, Chunk, iter_chunks, text_error
from ..errors import ClusterUnavailableError, ConfigurationError, WorkerKilledError
from ..models.registry import BUNDLED, is_model_name
from . import worker
from .client import (
    WORKER_TIMEOUT,
    call_on_workers,
    call_scheduler,
    cancel,
    check_picklable,
    client_closed_error,
    fetch_result,
    parse_host,
    submit,
    translate_dask_errors,
    validate_client,
    wait_for_workers,
)
from .columns import to_references
from .members import ReadyWorker, WorkerList, check_workers_match
from .worker import RunSpec

if TYPE_CHECKING:
    from distributed import Client, Future


# How many chunks are under way for each thread of a worker: one runs, one waits there, and two more keep the other threads
# busy while the first in order takes longer.
CHUNKS_PER_THREAD = 4

MIN_TEXT_CHARACTERS = (
    32  # A shorter text counts as so many characters, so that a task gets some thousand texts at most.
)

RETRIES = 2  # How often Dask runs a chunk again that failed, perhaps on another worker.

# After so many texts in a row that each ended every worker that read it alone, the workers are to blame and the run ends.
# Fewer can be chance, such as copies of one huge note, or notes sorted by length. Those texts are recorded, so that the same
# call goes on after them, and reads them again at its end.
MAX_CONSECUTIVE_KILLS = 5

PendingChunks = deque[tuple[Chunk, "Future"]]


@dataclass(frozen=True)
class ClusterAnnotator:
    """Answers texts on the workers of a cluster."""

    client: Client
    run_spec: RunSpec
    characters: int  # About how many a chunk has.
    split: bool = False  # Whether texts are lists of words.
    timeout: float = WORKER_TIMEOUT  # After how many seconds without a working worker a run ends.

    def annotate(self, texts: Iterable[Any], first: int = 0, _tell: Any = None) -> Iterator[ResultStore]:
        """Yield the answers to a stream of texts in order, chunk by chunk; errors count texts from ``first``.

        Chunks are so small that nothing is told within one.

        What ends it early, such as an error of the stream itself, is raised after the answers to all texts before it.
        """

        def while_connected() -> Iterator[Any]:  # A slow stream may outlive the client.
            for number, text in enumerate(texts, first):
                yield to_picklable(text, number, self.split)
                if self.client.status != "running":
                    raise client_closed_error(self.client)

        threads = self.threads()

        def most() -> float:
            """Return how many texts a chunk may have, so that at the end no worker waits long for the last."""
            return length_hint(texts, sys.maxsize) / (2 * threads)

        return stop_after_repeated_kills(
            self.iter_in_order(iter_chunks(while_connected(), self.characters, first, MIN_TEXT_CHARACTERS, most))
        )

    def iter_in_order(self, chunks: Iterator[Chunk]) -> Generator[ResultStore]:
        """Yield the answers to chunks in their order; chunks under way are cancelled when nobody wants more."""
        under_way = PendingChunks()
        error: Exception | None = None
        try:
            while True:
                error = self.submit_chunks(under_way, chunks) or error
                if not under_way:
                    break
                chunk, future = under_way[0]
                yield from self.chunk_results(chunk, future, [other for _chunk, other in under_way][1:])
                with translate_dask_errors(self.client):
                    # Dask has ``Future.__del__`` for that: Python drops an interrupt that comes in a ``__del__``.
                    future.release()
                under_way.popleft()
        finally:
            cancel(self.client, [future for _chunk, future in under_way])
        if error:
            raise error

    def submit_chunks(self, under_way: PendingChunks, chunks: Iterator[Chunk]) -> Exception | None:
        """Send chunks out until enough are under way or an answer is there; return the error of the stream."""
        most = CHUNKS_PER_THREAD * self.threads()
        while len(under_way) < most:
            chunk = next(chunks, END_OF_STREAM)
            if not chunk.texts:
                return chunk.error
            under_way.append((chunk, self.submit(chunk)))
            if under_way[0][1].done():
                break
        return None

    def threads(self) -> int:
        """Return how many chunks run at once; at least one, for a worker that comes."""
        threads: int = sum(call_scheduler(self.client, self.client.nthreads).values())
        return max(1, threads)

    def submit(self, chunk: Chunk) -> Future:
        """Send a chunk out with its texts in the task, so that they survive any worker."""
        return submit(self.client, worker.annotate_chunk, self.run_spec, chunk, retries=RETRIES)

    def chunk_results(self, chunk: Chunk, future: Future, others: Sequence[Future]) -> Iterator[ResultStore]:
        """Yield the answers to a chunk; if it ends its workers, wait for the other chunks and run it text by text."""
        from distributed import KilledWorker

        async def ended() -> None:
            for other in others:
                await other.exception()

        try:
            yield wait_for_workers(self.client, future.result, self.timeout)
        except KilledWorker:
            cancel(self.client, [future])
            wait_for_workers(self.client, ended, self.timeout)
            for place, text in enumerate(chunk.texts):
                yield self.annotate_single(Chunk(chunk.first + place, [text]))

    def annotate_single(self, chunk: Chunk) -> ResultStore:
        """Return the answer to a chunk of one text, or that it ends its worker; nothing else is under way."""
        from distributed import KilledWorker

        try:
            answers: ResultStore = fetch_result(self.client, self.submit(chunk), self.timeout)
        except KilledWorker as error:
            times, host = error.allowed_failures + 1, parse_host(error.last_worker.address)
            what = f"Text {chunk.first} ended the worker that read it {times} times, the last one on {host}."
            killed = WorkerKilledError(what, "Read it alone; it may need more memory than a worker has.")
            return ResultStore.of([killed])
        return answers


def to_picklable(text: Any, number: int, split: bool) -> Any:
    """Return a text as plain strings or a reference, which any worker can read, or why it cannot be read.

    A worker may not have the class of a text, and anything but a text may not travel at all.
    """
    if isinstance(text, TextReference):
        return text
    return text_error(text, number, split) or ([*map(str.__str__, text)] if split else str.__str__(text))


def stop_after_repeated_kills(answers: Generator[ResultStore]) -> Iterator[ResultStore]:
    """Yield answers until too many texts in a row have ended their workers; then raise ``ClusterUnavailableError``."""
    in_a_row = 0
    with contextlib.closing(answers):
        for some in answers:
            yield some
            for place in range(len(some)):
                failure = some.errors.get(place)
                in_a_row = in_a_row + isinstance(failure, WorkerKilledError) if failure else 0
            if in_a_row >= MAX_CONSECUTIVE_KILLS:
                what = f"{MAX_CONSECUTIVE_KILLS} texts in a row ended every worker that read them, each of them alone."
                remedy = (
                    "Check the device and the memory of the workers, and go on with the same call and its resume file."
                )
                raise ClusterUnavailableError(what, remedy)


def cluster_source(
    client: Any, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Any, AnnotationSource]:
    """Return the name of a model, the texts to send out, and what answers them on the workers of a cluster."""
    client = validate_client(client)
    if not is_model_name(model):
        what = f"model must be a name or a folder where workers load it, not {short_type_name(model)}."
        raise ConfigurationError(what, "Pass the name or the folder of its model, and its arguments to annotate().")
    name = "bundled" if model is None else str(model)
    check_picklable(arguments)
    found = to_references(texts, client)
    check_iterable(found)  # Before workers load the model.
    # A local folder is named by its absolute path, because workers have other working folders. As in the registry of models,
    # the name of a bundled model is not a folder; a path with ~ stays, because every worker has its own home.
    folder = name not in BUNDLED and os.path.isdir(name)  # noqa: PTH112 - for Path, "" is the working folder
    work = RunSpec(uuid.uuid4().hex, absolute_path(name) if folder else name, dict(arguments), batch_tokens)
    ready: list[ReadyWorker] = call_on_workers(client, worker.prepare_worker, work)
    terms = check_workers_match(ready)
    for message in sorted({message for one in ready for message in one.warnings}):
        warn(message)
    settings, characters = ready[0].settings, min(one.characters for one in ready)
    annotator = ClusterAnnotator(client, replace(work, expected=terms), characters, settings["delimiter"] is not None)
    label = WorkerList(tuple(one.member for one in ready)).label
    return name, found, AnnotationSource(annotator.annotate, settings, label, known_labels=ready[0].known_labels)


def get_workers(client: Client, reason: str | None = None) -> WorkerList:
    """Return the workers of a cluster; ``reason`` says why they have their device, if that was decided here."""
    found = call_on_workers(client, worker.describe_worker)
    return WorkerList(tuple(one if reason is None else replace(one, reason=reason) for one in found))
