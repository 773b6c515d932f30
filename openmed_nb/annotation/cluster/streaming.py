"""The twin of ``annotation.stream.Annotator``: a stream of texts -> a stream of answers, computed by the workers of a cluster.

A bounded number of chunks is under way, so that an endless stream fills no memory; answers come back in the order of the
texts. A chunk whose worker dies is run again by Dask; after the scheduler's ``allowed-failures`` Dask gives it up
(``KilledWorker``), and with it what else was waiting on those workers. Its texts then run one at a time, with nothing else
under way, so that only a text that ends its worker alone is blamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...errors import WorkerKilled
from ..chunks import Chunk, in_chunks
from ..stream import END, Answer
from .clients import PATIENCE, host_of, result_of, wait_for
from .work import Work

if TYPE_CHECKING:
    from distributed import Client, Future

AHEAD = 4
"""How many chunks are under way for each task that the workers can run at once: one runs, one waits beside it, and two
more let the others work on while the first in order takes longer."""

LEAST = 32
"""What a text counts at least, in characters: some thousand short ones are enough for a task."""

RETRIES = 2
"""How often Dask runs a chunk again that failed, perhaps on another worker."""

UnderWay = deque[tuple[Chunk, "Future"]]


@dataclass(frozen=True)
class ClusterAnnotator:
    """The workers of a cluster as something that answers texts.

    Attributes:
        client: The client of the cluster.
        work: What the workers are told.
        answers_of: What a worker calls: a function that it can import, of the work and a chunk.
        characters: About how many characters go out at a time.
        patience: How many seconds the cluster may be without a worker that works.
    """

    client: Client
    work: Work
    answers_of: Callable[[Work, Chunk], list[Answer]]
    characters: int
    patience: float = PATIENCE

    def answers(self, texts: Iterable[Any], first: int = 0) -> Iterator[list[Answer]]:
        """Yield the answers to a stream of texts in order, chunk by chunk; errors count texts from ``first``.

        Raises:
            ClusterUnusable: Where no worker is left.
            DeviceUnavailable: Where a device fails again and again; the answers to all texts before were given then.
            Exception: What the stream itself raises, after the answers to all texts before it.
        """
        chunks, under_way = in_chunks(texts, self.characters, first, LEAST), UnderWay()
        error: Exception | None = None
        try:
            while True:
                error = self.fill(under_way, chunks) or error
                if not under_way:
                    break
                chunk, future = under_way.popleft()
                yield from self.finished(chunk, future, [other for _chunk, other in under_way])
        finally:
            self.client.cancel([future for _chunk, future in under_way])
        if error:
            raise error

    def fill(self, under_way: UnderWay, chunks: Iterator[Chunk]) -> Exception | None:
        """Send chunks out until enough are under way or an answer is there; return what the stream failed with."""
        most = AHEAD * max(1, sum(self.client.nthreads().values()))
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
        return self.client.submit(self.answers_of, self.work, chunk, pure=False, retries=RETRIES)

    def finished(self, chunk: Chunk, future: Future, others: Sequence[Future]) -> Iterator[list[Answer]]:
        """Yield the answers to a chunk when they are there; where it ends its workers, text by text."""
        from distributed import KilledWorker

        try:
            yield result_of(self.client, future, self.patience)
        except KilledWorker:
            wait_for(self.client, others, self.patience)
            for place, text in enumerate(chunk.texts):
                yield [self.alone(Chunk(chunk.first + place, [text]))]

    def alone(self, chunk: Chunk) -> Answer:
        """Return the answer to a chunk of one text while nothing else is under way, or that it ends its worker."""
        from distributed import KilledWorker

        try:
            answers: list[Answer] = result_of(self.client, self.submit(chunk), self.patience)
        except KilledWorker as error:
            times, host = error.allowed_failures + 1, host_of(error.last_worker.address)
            what = f"Text {chunk.first} ended the worker that read it {times} times, the last one on {host}."
            return WorkerKilled(what, "Read it alone; it may need more memory than a worker has.")
        return answers[0]
