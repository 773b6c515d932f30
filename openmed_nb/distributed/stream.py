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
from ..annotation.references import Reference, absolute, check_series
from ..annotation.results import Answers
from ..annotation.stream import END, Chunk, Source, in_chunks, unreadable
from ..errors import ClusterUnusable, ConfigurationError, WorkerKilled
from ..models.registry import BUNDLED, is_named
from . import worker
from .client import (
    PATIENCE,
    ask_scheduler,
    ask_workers,
    call_on_workers,
    cancel,
    check_sendable,
    checked_client,
    compute,
    host_of,
    lost,
    lost_as_unusable,
    submit,
)
from .columns import referred
from .members import Members, Ready, check_alike
from .worker import Work

if TYPE_CHECKING:
    from distributed import Client, Future


# How many chunks are under way for each thread of a worker: one runs, one waits there, and two more keep the other threads
# busy while the first in order takes longer.
AHEAD = 4

LEAST = 32  # A shorter text counts as so many characters, so that a task gets some thousand texts at most.

RETRIES = 2  # How often Dask runs a chunk again that failed, perhaps on another worker.

# After so many texts in a row that each ended every worker that read it alone, the workers are to blame and the run ends.
# Fewer can be chance, such as copies of one huge note, or notes sorted by length. Those texts are recorded, so that the same
# call goes on after them, and reads them again at its end.
MOST_KILLED = 5

UnderWay = deque[tuple[Chunk, "Future"]]


@dataclass(frozen=True)
class ClusterAnnotator:
    """Answers texts on the workers of a cluster."""

    client: Client
    work: Work
    characters: int  # About how many a chunk has.
    split: bool = False  # Whether texts are lists of words.
    patience: float = PATIENCE  # After how many seconds without a working worker a run ends.

    def answers(self, texts: Iterable[Any], first: int = 0, _tell: Any = None) -> Iterator[Answers]:
        """Yield the answers to a stream of texts in order, chunk by chunk; errors count texts from ``first``.

        Chunks are so small that nothing is told within one.

        What ends it early, such as an error of the stream itself, is raised after the answers to all texts before it.
        """

        def while_connected() -> Iterator[Any]:  # A slow stream may outlive the client.
            for number, text in enumerate(texts, first):
                yield sendable(text, number, self.split)
                if self.client.status != "running":
                    raise lost(self.client)

        threads = self.threads()

        def most() -> float:
            """Return how many texts a chunk may have, so that at the end no worker waits long for the last."""
            return length_hint(texts, sys.maxsize) / (2 * threads)

        return while_workers_last(self.in_order(in_chunks(while_connected(), self.characters, first, LEAST, most)))

    def in_order(self, chunks: Iterator[Chunk]) -> Generator[Answers]:
        """Yield the answers to chunks in their order; chunks under way are cancelled when nobody wants more."""
        under_way = UnderWay()
        error: Exception | None = None
        try:
            while True:
                error = self.fill(under_way, chunks) or error
                if not under_way:
                    break
                chunk, future = under_way[0]
                yield from self.finished(chunk, future, [other for _chunk, other in under_way][1:])
                with lost_as_unusable(self.client):
                    # Dask has ``Future.__del__`` for that: Python drops an interrupt that comes in a ``__del__``.
                    future.release()
                under_way.popleft()
        finally:
            cancel(self.client, [future for _chunk, future in under_way])
        if error:
            raise error

    def fill(self, under_way: UnderWay, chunks: Iterator[Chunk]) -> Exception | None:
        """Send chunks out until enough are under way or an answer is there; return the error of the stream."""
        most = AHEAD * self.threads()
        while len(under_way) < most:
            chunk = next(chunks, END)
            if not chunk.texts:
                return chunk.error
            under_way.append((chunk, self.submit(chunk)))
            if under_way[0][1].done():
                break
        return None

    def threads(self) -> int:
        """Return how many chunks run at once; at least one, for a worker that comes."""
        threads: int = sum(ask_scheduler(self.client, self.client.nthreads).values())
        return max(1, threads)

    def submit(self, chunk: Chunk) -> Future:
        """Send a chunk out with its texts in the task, so that they survive any worker."""
        return submit(self.client, worker.answers_of, self.work, chunk, retries=RETRIES)

    def finished(self, chunk: Chunk, future: Future, others: Sequence[Future]) -> Iterator[Answers]:
        """Yield the answers to a chunk; if it ends its workers, wait for the other chunks and run it text by text."""
        from distributed import KilledWorker

        async def ended() -> None:
            for other in others:
                await other.exception()

        try:
            yield ask_workers(self.client, future.result, self.patience)
        except KilledWorker:
            cancel(self.client, [future])
            ask_workers(self.client, ended, self.patience)
            for place, text in enumerate(chunk.texts):
                yield self.alone(Chunk(chunk.first + place, [text]))

    def alone(self, chunk: Chunk) -> Answers:
        """Return the answer to a chunk of one text, or that it ends its worker; nothing else is under way."""
        from distributed import KilledWorker

        try:
            answers: Answers = compute(self.client, self.submit(chunk), self.patience)
        except KilledWorker as error:
            times, host = error.allowed_failures + 1, host_of(error.last_worker.address)
            what = f"Text {chunk.first} ended the worker that read it {times} times, the last one on {host}."
            killed = WorkerKilled(what, "Read it alone; it may need more memory than a worker has.")
            return Answers.of([killed])
        return answers


def sendable(text: Any, number: int, split: bool) -> Any:
    """Return a text as plain strings or a reference, which any worker can read, or why it cannot be read.

    A worker may not have the class of a text, and anything but a text may not travel at all.
    """
    if isinstance(text, Reference):
        return text
    return unreadable(text, number, split) or ([*map(str.__str__, text)] if split else str.__str__(text))


def while_workers_last(answers: Generator[Answers]) -> Iterator[Answers]:
    """Yield answers until too many texts in a row have ended their workers; then raise ``ClusterUnusable``."""
    in_a_row = 0
    with contextlib.closing(answers):
        for some in answers:
            yield some
            for place in range(len(some)):
                failure = some.errors.get(place)
                in_a_row = in_a_row + isinstance(failure, WorkerKilled) if failure else 0
            if in_a_row >= MOST_KILLED:
                what = f"{MOST_KILLED} texts in a row ended every worker that read them, each of them alone."
                remedy = (
                    "Check the device and the memory of the workers, and go on with the same call and its resume file."
                )
                raise ClusterUnusable(what, remedy)


def source_on_workers(
    client: Any, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Any, Source]:
    """Return the name of a model, the texts to send out, and what answers them on the workers of a cluster."""
    client = checked_client(client)
    if not is_named(model):
        what = f"model must be a name or a folder where workers load it, not {short_type_name(model)}."
        raise ConfigurationError(what, "Pass the name or the folder of its model, and its arguments to annotate().")
    name = "bundled" if model is None else str(model)
    check_sendable(arguments)
    found = referred(texts, client)
    check_series(found)  # Before workers load the model.
    # A local folder is named by its absolute path, because workers have other working folders. As in the registry of models,
    # the name of a bundled model is not a folder; a path with ~ stays, because every worker has its own home.
    folder = name not in BUNDLED and os.path.isdir(name)  # noqa: PTH112 - for Path, "" is the working folder
    work = Work(uuid.uuid4().hex, absolute(name) if folder else name, dict(arguments), batch_tokens)
    ready: list[Ready] = call_on_workers(client, worker.get_ready, work)
    terms = check_alike(ready)
    for message in sorted({message for one in ready for message in one.warnings}):
        warn(message)
    settings, characters = ready[0].settings, min(one.characters for one in ready)
    annotator = ClusterAnnotator(client, replace(work, terms=terms), characters, settings["delimiter"] is not None)
    label = Members(tuple(one.member for one in ready)).label
    return name, found, Source(annotator.answers, settings, label, known_labels=ready[0].known_labels)


def members_of(client: Client, reason: str | None = None) -> Members:
    """Return the workers of a cluster; ``reason`` says why they have their device, if that was decided here."""
    found = call_on_workers(client, worker.introduce)
    return Members(tuple(one if reason is None else replace(one, reason=reason) for one in found))
