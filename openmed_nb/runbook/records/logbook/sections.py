"""The sections of a logbook, each a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from ...._render.display import SIMULATED_SUFFIX
from ...._utils.plain import Minimum, Pattern
from ....devices.request import normalize_device

Sha256 = Annotated[str, Pattern("^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Pattern("^[0-9a-f]{32}$|^[0-9a-f]{64}$")]
UtcTimestamp = Annotated[str, Pattern("^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
Count = Annotated[int, Minimum(0)]
Size = Annotated[int, Minimum(1)]

HYPOTHESES_NOTICE = "Hypotheses are kept in the words of the person: no note and no name of a patient may be in them."


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
        certificate: Of a reduced type, ``counts`` where the precision certificate does on the device, else why none does.
    """

    name: str
    source: Literal["files", "memory"]
    weights: Fingerprint
    settings: Fingerprint
    tokenizer: Fingerprint | None
    dtype: str | None
    certificate: str | None = None


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
            no one, without workers.
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
        checkpointed: The modules whose activations a training computed again.
        accumulation: How many batches went into a step of the optimizer.
        autocast: The type that the products of a training ran in.
    """

    task: str | None = None
    batch_size: Size | None = None
    length: Size | None = None
    workers: Count | None = None
    peak_memory_bytes: Count | None = None
    dtype: str | None = None
    row_shape: str | None = None
    checkpointed: str | None = None
    accumulation: Size | None = None
    autocast: str | None = None


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
class ReportMetrics:
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

    @property
    def canonical_device(self) -> str | None:
        """The device in its one spelling, without a mark."""
        return normalize_device(self.device.removesuffix(SIMULATED_SUFFIX)) if self.device else None


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return those values that are finite numbers.

    Example:
        >>> numbers({"rows": 8, "why": "a text", "gain": float("nan"), "exact": True})
        {'rows': 8}
    """
    kept = {name: one for name, one in values.items() if isinstance(one, (int, float)) and not isinstance(one, bool)}
    return {name: one for name, one in kept.items() if math.isfinite(one)}


Commit = Annotated[str, Pattern("^([0-9a-f]{40}|[0-9a-f]{64})$")]


@dataclass(frozen=True)
class Software:
    """What ran.

    Attributes:
        openmed_nb: The version of this toolkit.
        python: The version of Python.
        torch: The version of torch, with its build.
        transformers: The version of transformers.
        packages: The versions of other packages that change speed or answers.
        system: The operating system with its version, such as ``macOS 14.5``.
        architecture: What Python was built for, such as ``arm64``.
    """

    openmed_nb: str
    python: str
    torch: str | None
    transformers: str | None
    packages: dict[str, str]
    system: str
    architecture: str


@dataclass(frozen=True)
class Code:
    """The state of the person's own code, as git says; no name of a file, a branch or a remote.

    Attributes:
        commit: The commit that is checked out.
        changed: How many files differ from it.
        untracked: How many files it does not know.
    """

    commit: Commit | None = None
    changed: Count | None = None
    untracked: Count | None = None

    @property
    def dirty(self) -> bool | None:
        """Whether the code is not that of the commit."""
        return None if self.changed is None or self.untracked is None else bool(self.changed + self.untracked)


@dataclass(frozen=True)
class Hardware:
    """Where it ran.

    Attributes:
        device: The device, such as ``mps``, ``cuda:0`` or ``cpu``.
        name: What the device calls itself.
        chip: The processor.
        memory_bytes: The memory of the computer.
        threads: How many threads torch computes with on the CPU.
        memory_limit: The share of the device's memory at which torch refuses more.
        device_peak_bytes: The most that tensors used on the device in this process, where torch counts it.
        resident_peak_bytes: The most memory that this process had.
    """

    device: str
    name: str
    chip: str | None
    memory_bytes: int | None
    threads: int | None
    memory_limit: float | None
    device_peak_bytes: int | None
    resident_peak_bytes: int | None


@dataclass(frozen=True)
class Randomness:
    """Where random numbers came from, and what was asked of torch.

    Attributes:
        seeds: The seeds that the person named.
        torch_seed: What torch's generator of the CPU was seeded with last; a random number if it never was.
        deterministic_algorithms: Whether torch refuses operators whose results differ from run to run.
        warn_only: Whether it only warns of them.
        cudnn_deterministic: Whether cuDNN may only use algorithms that always give the same.
        cudnn_benchmark: Whether cuDNN tries which algorithm is fastest.
        matmul_precision: How exactly float32 matrices are multiplied: ``highest``, ``high`` or ``medium``.
    """

    seeds: dict[str, int] = field(default_factory=dict)
    torch_seed: int | None = None
    deterministic_algorithms: bool | None = None
    warn_only: bool | None = None
    cudnn_deterministic: bool | None = None
    cudnn_benchmark: bool | None = None
    matmul_precision: str | None = None


@dataclass(frozen=True)
class MpsVariable:
    """What became of one of torch's variables for MPS.

    Attributes:
        name: The variable.
        value: Its value; null where it is not set.
        set_by: Who set it.
        effect: Whether torch has read it.
    """

    name: str
    value: str | None
    set_by: str
    effect: str


@dataclass(frozen=True)
class SystemConditions:
    """Power, heat and memory of the computer at one moment.

    Attributes:
        moment: Whether they were read before the run, or after it, when its reports were there already.
        power_source: ``adapter``, ``battery`` or ``UPS``.
        power_mode: ``automatic``, ``low`` (Low Power Mode) or ``high``.
        heat: ``limited``, ``moderate``, ``nominal`` or ``nothing reported``.
        memory_pressure: ``normal``, ``warning`` or ``critical``.
        speed_limit: How fast the processor may run, in percent.
        battery: The charge of the battery, in percent.
        memory_available: The memory that programs could still have, in bytes.
        swap_used: What is in the swap, in bytes.
    """

    moment: Literal["before", "after"]
    power_source: str | None = None
    power_mode: str | None = None
    thermal_state: str | None = None
    memory_pressure: str | None = None
    speed_limit: int | None = None
    battery: int | None = None
    memory_available: int | None = None
    swap_used: int | None = None


@dataclass(frozen=True)
class BackgroundLoad:
    """What other programs did at the same moment.

    Attributes:
        busy: How many of them took a tenth of a processor or more.
        share: The share of all processors that was not idle and not ours, 0 to 1.
        names: The busiest of them, the first the busiest; null if no names were asked for.
    """

    busy: int | None = None
    cpu_fraction: float | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StorageLocation:
    """Where something lies that is read again and again.

    Attributes:
        what: What lies there.
        path: Where, the person's home shortened.
        filesystem: The type of the file system.
        kind: What sort of storage that is; in a ``cloud``, files may have to be fetched before they can be read.
    """

    contents: str
    path: str
    filesystem: str | None
    kind: Literal["local", "network", "cloud", "external", "memory", "not known"]


@dataclass(frozen=True)
class NetworkLatency:
    """How long it takes to reach an artifact store: connections over TCP, with nothing sent.

    Attributes:
        host: The host, without user and password.
        port: The port.
        samples: How many connections were made.
        failures: How many failed.
        median_seconds: The middle one of those that did not.
        largest_seconds: The longest one.
    """

    host: str
    port: int
    samples: int
    failures: int
    median_seconds: float | None
    largest_seconds: float | None


SCHEMA: Literal["openmed_nb/logbook/1"] = "openmed_nb/logbook/1"


@dataclass(frozen=True, repr=False)
class LogbookData:
    """What a logbook holds. No text of a note, no secret and no name of a file is in it.

    Attributes:
        schema: The name and the number of this form.
        written: When it was written, in UTC.
        simulated: Whether the device was a simulated one, whose figures are none of a real one.
        software: What ran.
        code: The state of the person's own code.
        hardware: Where it ran.
        model: Which model; null if that is not known.
        dataset: Which texts; null if that is not known.
        run: What was done.
        loader: How batches were loaded; null if that is not known.
        randomness: Where random numbers came from.
        environment: The variables of an allow list that were set, by their names.
        mps_variables: What became of the variables of MPS; empty on other devices.
        conditions: Power, heat and memory.
        background: What other programs did.
        storage: Where caches and models lie.
        network: The way to an artifact store; null if it was not asked for.
        hypotheses: What is ruled out, in the person's words.
        figures: What reports found, in numbers.
    """

    schema: Literal["openmed_nb/logbook/1"]
    written: UtcTimestamp
    simulated: bool
    software: Software
    code: Code
    hardware: Hardware
    model: Model | None
    dataset: Dataset | None
    run: Run
    loader: Loader | None
    randomness: Randomness
    environment: dict[str, str]
    mps_variables: tuple[MpsVariable, ...]
    conditions: SystemConditions
    background: BackgroundLoad
    storage: tuple[StorageLocation, ...]
    network: NetworkLatency | None = None
    hypotheses: tuple[Hypothesis, ...] = ()
    metrics: tuple[ReportMetrics, ...] = field(default=())

    @property
    def device(self) -> str:
        """Where it ran, marked where that is simulated."""
        return f"{self.hardware.device}{SIMULATED_SUFFIX if self.simulated else ''}"
