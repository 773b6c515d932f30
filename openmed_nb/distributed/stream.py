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
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..annotation.references import Reference, absolute
from ..annotation.stream import END, Answer, Chunk, Source, in_chunks, unreadable
from ..errors import ClusterUnusable, ConfigurationError, OpenMedWarning, WorkerKilled
from ..models.registry import BUNDLED
from . import worker
from .client import (
    PATIENCE,
    ask_all,
    ask_one,
    asked,
    call_off,
    check_sendable,
    checked_client,
    computed,
    host_of,
    let_go,
    lost,
    patiently,
    submitted,
    wait_for,
)
from .columns import counted_by, referred
from .members import Members, Ready, check_alike, most_common
from .worker import Work

if TYPE_CHECKING:
    from distributed import Client, Future


AHEAD = 4
"""How many chunks are under way for each task that the workers can run at once: one runs, one waits beside it, and two
more let the others work on while the first in order takes longer."""

LEAST = 32
"""What a text counts at least, in characters: some thousand short ones are enough for a task."""

RETRIES = 2
"""How often Dask runs a chunk again that failed, perhaps on another worker."""

MOST_KILLED = 5
"""After how many texts in a row, each of which ended all workers that read it alone, the workers are to blame.

Some can be chance, such as copies of one huge note, or notes sorted by length; by the fifth, each has ended as many workers as
the scheduler's ``allowed-failures`` and one more, with no answer from anywhere between, and each end takes the seconds in
which a worker starts again.
Those texts are recorded, so that a call that is repeated goes on after them."""

UnderWay = deque[tuple[Chunk, "Future"]]


@dataclass(frozen=True)
class ClusterAnnotator:
    """The workers of a cluster as something that answers texts.

    Attributes:
        client: The client of the cluster.
        work: What the workers are told.
        answers_of: What a worker calls: a function that it can import, of the work and a chunk.
        characters: About how many characters go out at a time.
        split: Whether texts are lists of words.
        patience: How many seconds the cluster may be without a worker that works.
    """

    client: Client
    work: Work
    answers_of: Callable[[Work, Chunk], list[Answer]]
    characters: int
    split: bool = False
    patience: float = PATIENCE

    def answers(self, texts: Iterable[Any], first: int = 0) -> Iterator[list[Answer]]:
        """Yield the answers to a stream of texts in order, chunk by chunk; errors count texts from ``first``.

        Raises:
            ClusterUnusable: Where no worker is left, or all end whatever they read.
            DeviceUnavailable: Where a device fails again and again; the answers to all texts before were given then.
            Exception: What the stream itself raises, after the answers to all texts before it.
        """
        plain = (sendable(text, number, self.split) for number, text in enumerate(self.while_connected(texts), first))
        return while_workers_last(self.in_order(in_chunks(plain, self.characters, first, LEAST)))

    def while_connected(self, texts: Iterable[Any]) -> Iterator[Any]:
        """Yield texts for as long as the scheduler is there: those of a slow stream would be waited for in vain."""
        for text in texts:
            yield text
            if self.client.status != "running":
                raise lost(self.client)

    def in_order(self, chunks: Iterator[Chunk]) -> Generator[list[Answer]]:
        """Yield the answers to chunks in their order; what is under way when nobody wants more is called off."""
        under_way = UnderWay()
        error: Exception | None = None
        try:
            while True:
                error = self.fill(under_way, chunks) or error
                if not under_way:
                    break
                yield from self.finished(*under_way[0], [future for _chunk, future in under_way][1:])
                let_go(self.client, under_way[0][1])
                under_way.popleft()
        finally:
            call_off(self.client, [future for _chunk, future in under_way])
        if error:
            raise error

    def fill(self, under_way: UnderWay, chunks: Iterator[Chunk]) -> Exception | None:
        """Send chunks out until enough are under way or an answer is there; return what the stream failed with."""
        most = AHEAD * max(1, sum(asked(self.client, self.client.nthreads).values()))
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
        return submitted(self.client, self.answers_of, self.work, chunk, retries=RETRIES)

    def finished(self, chunk: Chunk, future: Future, others: Sequence[Future]) -> Iterator[list[Answer]]:
        """Yield the answers to a chunk when they are there; where it ends its workers, text by text."""
        from distributed import KilledWorker

        try:
            yield patiently(self.client, future.result, self.patience)
        except KilledWorker:
            call_off(self.client, [future])
            wait_for(self.client, others, self.patience)
            for place, text in enumerate(chunk.texts):
                yield [self.alone(Chunk(chunk.first + place, [text]))]

    def alone(self, chunk: Chunk) -> Answer:
        """Return the answer to a chunk of one text while nothing else is under way, or that it ends its worker."""
        from distributed import KilledWorker

        try:
            answers: list[Answer] = computed(self.client, self.submit(chunk), self.patience)
        except KilledWorker as error:
            times, host = error.allowed_failures + 1, host_of(error.last_worker.address)
            what = f"Text {chunk.first} ended the worker that read it {times} times, the last one on {host}."
            return WorkerKilled(what, "Read it alone; it may need more memory than a worker has.")
        return answers[0]


def sendable(text: Any, number: int, split: bool) -> Any:
    """Return a text as what can go to any worker, plain strings or a reference, or why it cannot be read.

    A text of another class could only be read where there is that class, and what is no text may not travel at all.

    Example:
        >>> sendable("asthma", 0, split=False), sendable(["no", "asthma"], 1, split=True)
        ('asthma', ['no', 'asthma'])
        >>> print(sendable(sendable, 2, split=False))
        Text 2 must be a string, not function. Pass a string, '' where there is no text.
    """
    if isinstance(text, Reference):
        return text
    return unreadable(text, number, split) or ([*map(str.__str__, text)] if split else str.__str__(text))


def while_workers_last(answers: Generator[list[Answer]]) -> Iterator[list[Answer]]:
    """Yield answers until too many texts in a row have ended their workers.

    Raises:
        ClusterUnusable: After those answers.
    """
    in_a_row = 0
    with contextlib.closing(answers):
        for some in answers:
            yield some
            for answer in some:
                in_a_row = 0 if isinstance(answer, list) else in_a_row + isinstance(answer, WorkerKilled)
            if in_a_row >= MOST_KILLED:
                what = f"{MOST_KILLED} texts in a row ended every worker that read them, each of them alone."
                remedy = (
                    "Check the device and the memory of the workers, and go on with the same call and its resume file."
                )
                raise ClusterUnusable(what, remedy)


def source_on_workers(
    client: Any, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Any, Source]:
    """Return the name of a model, the texts to send out, and what answers them on the workers of a cluster.

    Raises:
        ConfigurationError: For what is no client, a model that is not named, and an argument that cannot go to workers.
        ClusterError: Where there is no worker, one fails, or one is not like the others.
        OpenMedError: What the model cannot be loaded for on a worker; it names the computer.
    """
    client = checked_client(client)
    name = named(model)
    check_sendable(arguments)
    work = Work(uuid.uuid4().hex, everywhere(name), dict(arguments), batch_tokens)
    ready = ready_workers(client, work)
    terms = most_common(one.terms for one in ready)
    characters = min(one.characters for one in ready)
    settings = ready[0].settings
    split = settings["delimiter"] is not None
    annotator = ClusterAnnotator(client, replace(work, terms=terms), worker.answers_of, characters, split)
    label = Members(tuple(one.member for one in ready)).label
    return name, on_workers(client, texts), Source(annotator.answers, settings, label)


def ready_workers(client: Client, work: Work) -> list[Ready]:
    """Return the workers once all have loaded the model of a run; what they warned of is said once here."""
    ready: list[Ready] = ask_all(client, worker.get_ready, work)
    check_alike(ready)
    for message in sorted({message for one in ready for message in one.warnings}):
        warnings.warn(message, OpenMedWarning, stacklevel=2)
    return ready


def members_of(client: Client, reason: str | None = None) -> Members:
    """Return who takes part in a cluster.

    Args:
        client: A client of it.
        reason: Why the workers have their device, where they were told which; ``None`` leaves it to what they say.

    Raises:
        ClusterError: Where there is no worker, or one fails.
    """
    found = ask_all(client, worker.introduce)
    return Members(tuple(replace(one, reason=one.reason if reason is None else reason) for one in found))


def named(model: Any) -> str:
    """Return the name of a model, by which every worker can load it.

    Raises:
        ConfigurationError: For a pipeline, which is a model in the memory of this process.
    """
    if model is None or isinstance(model, (str, os.PathLike)):
        return "bundled" if model is None else str(model)
    what = (
        f"{type(model).__name__} is no name of a model, and what is in the memory of this process cannot go to workers."
    )
    raise ConfigurationError(what, "Pass the name or the folder of its model, and its arguments to annotate().")


def everywhere(name: str) -> str:
    """Return a name that means the same in another working folder: a folder that is here, from the root.

    What is a folder is told as the registry of models does: not the name of a bundled one, nor one of somebody's home,
    which every worker has itself; and no name is too long to be asked for.

    Example:
        >>> everywhere("bundled"), everywhere(""), everywhere("~")
        ('bundled', '', '~')
    """
    there = name not in BUNDLED and os.path.isdir(name)  # noqa: PTH112 - for Path, "" is the working folder
    return absolute(name) if there else name


def on_workers(client: Client, texts: Any) -> Any:
    """Return texts that workers read themselves where they can: files, and columns of dask.dataframe."""
    return referred(
        texts,
        lambda partitions: counted_by(client, partitions),
        lambda function, *files: ask_one(client, function, *files),
    )
