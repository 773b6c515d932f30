"""Annotate on the workers of a cluster: texts go out in parcels, answers come back in order.

The twin of ``annotation.stream.Annotator``: a stream of texts -> a stream of answers, computed by the workers of a cluster.

A bounded number of chunks is under way, so that an endless stream fills no memory; answers come back in the order of the
texts. A chunk whose worker dies is run again by Dask; after the scheduler's ``allowed-failures`` Dask gives it up
(``KilledWorker``), and with it what else was waiting on those workers. Its texts then run one at a time, with nothing else
under way, so that only a text that ends its worker alone is blamed.
"""

from __future__ import annotations

import contextlib
import os
import uuid
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..annotation.references import Reference, absolute
from ..annotation.stream import END, Answer, Chunk, Source, in_chunks, unreadable
from ..errors import ClusterUnusable, ConfigurationError, OpenMedWarning, WorkerKilled
from ..models.registry import BUNDLED
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
from .members import Members, Ready, check_alike, most_common
from .worker import Work

if TYPE_CHECKING:
    from distributed import Client, Future


# How many chunks are under way for each task that the workers can run at once: one runs, one waits next to it, and two more
# let the others work on while the first in order takes longer.
AHEAD = 4

LEAST = 32  # The fewest characters that a text counts for: some thousand short ones are enough for a task.

RETRIES = 2  # How often Dask runs a chunk again that failed, perhaps on another worker.

# After how many texts in a row, each of which ended all workers that read it alone, the workers are to blame. Some can be
# chance, such as copies of one huge note, or notes sorted by length; by the fifth, each has ended as many workers as the
# scheduler's ``allowed-failures`` and one more, with no answer from anywhere between, and each end takes the seconds in which
# a worker starts again. Those texts are recorded, so that a call that is repeated goes on after them.
MOST_KILLED = 5

UnderWay = deque[tuple[Chunk, "Future"]]


@dataclass(frozen=True)
class ClusterAnnotator:
    """The workers of a cluster as something that answers texts."""

    client: Client
    work: Work
    characters: int  # About how many go out at a time.
    split: bool = False  # Whether texts are lists of words.
    patience: float = PATIENCE  # How many seconds the cluster may be without a worker that works.

    def answers(self, texts: Iterable[Any], first: int = 0) -> Iterator[list[Answer]]:
        """Yield the answers to a stream of texts in order, chunk by chunk; errors count texts from ``first``.

        Whatever ends it early, also what the stream raises, is raised after the answers to all texts before it.
        """

        def while_connected() -> Iterator[Any]:  # Those of a slow stream would be waited for in vain.
            for number, text in enumerate(texts, first):
                yield sendable(text, number, self.split)
                if self.client.status != "running":
                    raise lost(self.client)

        return while_workers_last(self.in_order(in_chunks(while_connected(), self.characters, first, LEAST)))

    def in_order(self, chunks: Iterator[Chunk]) -> Generator[list[Answer]]:
        """Yield the answers to chunks in their order; what is under way when nobody wants more is called off."""
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
        """Send chunks out until enough are under way or an answer is there; return what the stream failed with."""
        most = AHEAD * max(1, sum(ask_scheduler(self.client, self.client.nthreads).values()))
        while len(under_way) < most:
            chunk = next(chunks, END)
            if not chunk.texts:
                return chunk.error
            under_way.append((chunk, self.submit(chunk)))
            if under_way[0][1].done():
                break
        return None

    def submit(self, chunk: Chunk) -> Future:
        """Send a chunk out; the texts go with the task, so that no worker that dies takes them along."""
        return submit(self.client, worker.answers_of, self.work, chunk, retries=RETRIES)

    def finished(self, chunk: Chunk, future: Future, others: Sequence[Future]) -> Iterator[list[Answer]]:
        """Yield the answers to a chunk when they are there; where it ends its workers, text by text, once no other runs."""
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
                yield [self.alone(Chunk(chunk.first + place, [text]))]

    def alone(self, chunk: Chunk) -> Answer:
        """Return the answer to a chunk of one text while nothing else is under way, or that it ends its worker."""
        from distributed import KilledWorker

        try:
            answers: list[Answer] = compute(self.client, self.submit(chunk), self.patience)
        except KilledWorker as error:
            times, host = error.allowed_failures + 1, host_of(error.last_worker.address)
            what = f"Text {chunk.first} ended the worker that read it {times} times, the last one on {host}."
            return WorkerKilled(what, "Read it alone; it may need more memory than a worker has.")
        return answers[0]


def sendable(text: Any, number: int, split: bool) -> Any:
    """Return a text as what can go to any worker, plain strings or a reference, or why it cannot be read.

    A text of another class could only be read where there is that class, and what is no text may not travel at all.
    """
    if isinstance(text, Reference):
        return text
    return unreadable(text, number, split) or ([*map(str.__str__, text)] if split else str.__str__(text))


def while_workers_last(answers: Generator[list[Answer]]) -> Iterator[list[Answer]]:
    """Yield answers until too many texts in a row have ended their workers; then raise ``ClusterUnusable``."""
    in_a_row = 0
    with contextlib.closing(answers):
        for some in answers:
            yield some
            for answer in some:
                in_a_row = 0 if isinstance(answer, list) else in_a_row + isinstance(answer, WorkerKilled)
            if in_a_row >= MOST_KILLED:
                raise ClusterUnusable(
                    f"{MOST_KILLED} texts in a row ended every worker that read them, each of them alone.",
                    "Check the device and the memory of the workers, and go on with the same call and its resume file.",
                )


def source_on_workers(
    client: Any, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Any, Source]:
    """Return the name of a model, the texts to send out, and what answers them on the workers of a cluster."""
    client = checked_client(client)
    if model is not None and not isinstance(model, (str, os.PathLike)):
        what = f"model must be a name or a folder where workers load it, not {type(model).__name__}."
        raise ConfigurationError(what, "Pass the name or the folder of its model, and its arguments to annotate().")
    name = "bundled" if model is None else str(model)
    check_sendable(arguments)
    # A folder that is here goes by its path from the root, which means the same in another working folder. As in the
    # registry of models, the name of a bundled one is not a folder, nor is one of somebody's home, which every worker has.
    folder = name not in BUNDLED and os.path.isdir(name)  # noqa: PTH112 - for Path, "" is the working folder
    work = Work(uuid.uuid4().hex, absolute(name) if folder else name, dict(arguments), batch_tokens)
    ready: list[Ready] = call_on_workers(client, worker.get_ready, work)
    check_alike(ready)
    for message in sorted({message for one in ready for message in one.warnings}):
        warnings.warn(message, OpenMedWarning, stacklevel=2)
    terms = most_common(one.terms for one in ready)
    settings = ready[0].settings
    annotator = ClusterAnnotator(
        client,
        replace(work, terms=terms),
        characters=min(one.characters for one in ready),
        split=settings["delimiter"] is not None,
    )
    label = Members(tuple(one.member for one in ready)).label
    return name, referred(texts, client), Source(annotator.answers, settings, label)


def members_of(client: Client, reason: str | None = None) -> Members:
    """Return who takes part in a cluster; ``reason`` says why they have their device, where that was decided here."""
    found = call_on_workers(client, worker.introduce)
    return Members(tuple(one if reason is None else replace(one, reason=reason) for one in found))
