"""The sections of a logbook about what ran, each a value: what was found, ``None`` where it is not known, never a guess."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from .plain_values import Least, Pattern

Sha256 = Annotated[str, Pattern("^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Pattern("^[0-9a-f]{32}$|^[0-9a-f]{64}$")]
Day = Annotated[str, Pattern("^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
Count = Annotated[int, Least(0)]
Size = Annotated[int, Least(1)]


@dataclass(frozen=True)
class Model:
    """Which model.

    Attributes:
        name: What the person calls it.
        source: Whether the fingerprints are of files or of a model in memory; the two cannot be compared.
        weights: A fingerprint of the weights.
        settings: A fingerprint of the settings.
        tokenizer: A fingerprint of the tokenizer; null for a model without one.
        dtype: The type of the weights in memory.
    """

    name: str
    source: Literal["files", "memory"]
    weights: Fingerprint
    settings: Fingerprint
    tokenizer: Fingerprint | None
    dtype: str | None


@dataclass(frozen=True)
class Dataset:
    """Which texts, by fingerprints alone.

    Attributes:
        kind: What was read.
        checksum: SHA-256 of the content; of texts, each with its length in front of it; of a folder, the names and the
            checksums of its files.
        items: How many texts, or files.
        bytes: How large they are.
        shards: SHA-256 of each file of a folder, in the order of their names, which are not kept.
    """

    kind: Literal["texts", "file", "folder"]
    checksum: Sha256
    items: Size
    bytes: Count
    shards: tuple[Sha256, ...] = ()


@dataclass(frozen=True)
class Loader:
    """How batches were loaded in training.

    Attributes:
        workers: How many processes read ahead.
        batch_size: How many items a batch has.
        pin_memory: Whether batches lie in pinned memory.
        persistent_workers: Whether the processes live on after an epoch.
        prefetch_factor: How many batches each process reads ahead.
        start_method: How the processes are started, where that was said.
        seeded: Whether the order and the workers have a generator of their own.
        worker_seeding: Who seeds the workers: ``worker_init_fn``, torch alone (which leaves other libraries as they are), or
            nobody, without workers.
    """

    workers: Count
    batch_size: Size | None
    pin_memory: bool
    persistent_workers: bool
    prefetch_factor: Size | None
    start_method: str | None
    seeded: bool
    worker_seeding: Literal["worker_init_fn", "torch", "no workers"]


@dataclass(frozen=True)
class Run:
    """What was done, as the person or a report said it.

    Attributes:
        task: What a step did, such as ``annotation``.
        batch_size: How many rows a batch had.
        length: How many tokens a row had.
        workers: How many processes read ahead.
        peak_memory_bytes: The most memory that a report tells of.
        dtype: The type of the model's numbers.
        row_shape: The shape of a row, its resolution, where rows are no texts, such as ``3x224x224``.
    """

    task: str | None = None
    batch_size: Size | None = None
    length: Size | None = None
    workers: Count | None = None
    peak_memory_bytes: Count | None = None
    dtype: str | None = None
    row_shape: str | None = None


@dataclass(frozen=True)
class Hypothesis:
    """What was suspected and is ruled out.

    Attributes:
        hypothesis: What was suspected.
        rejected_because: What rules it out.
    """

    hypothesis: str
    rejected_because: str


@dataclass(frozen=True)
class Figures:
    """What a report found, in numbers alone.

    Attributes:
        report: Which report.
        subject: What was measured.
        device: Where.
        verdict: What it says in a word; null where it says nothing.
        simulated: Whether the device was a simulated one, whose figures are none of a real one.
        values: The figures by their names, which name their units.
        run: What the report says of what was done; figures of other runs are never set beside each other.
    """

    report: str
    subject: str
    device: str | None
    verdict: str | None
    simulated: bool
    values: dict[str, float]
    run: Run = field(default_factory=Run)

    @property
    def key(self) -> tuple[str, str, str | None]:
        """What it is of: the report, what was measured, and the device."""
        return self.report, self.subject, self.device
