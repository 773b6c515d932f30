"""Sections of a logbook as immutable values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ...._render.display import SIMULATED_SUFFIX
from ...._utils.plain import Minimum, Pattern
from ...._utils.validation import is_finite_number
from ....devices.request import normalize_device

Sha256 = Annotated[str, Pattern("^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Pattern("^[0-9a-f]{32}$|^[0-9a-f]{64}$")]
UtcTimestamp = Annotated[str, Pattern("^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
StorageKind = Literal["local", "network", "cloud", "external", "memory", "unknown"]
Count = Annotated[int, Minimum(0)]
Size = Annotated[int, Minimum(1)]

HYPOTHESES_NOTICE = "Hypotheses are stored verbatim: they must not contain text from notes or patient names."


@dataclass(frozen=True)
class Model:
    """Identity of the model.

    Attributes:
        name: Name of the model, as passed by the user.
        source: Whether the fingerprints are of files or of a model in memory. The two kinds are not comparable.
        weights: Fingerprint of the weights.
        settings: Fingerprint of the settings.
        tokenizer: Fingerprint of the tokenizer, or null for a model without a tokenizer.
        dtype: Data type of the weights in memory.
        validation: For a reduced dtype, ``valid`` if a validation record applies on the device, otherwise the reason
            why no record applies. Null for other dtypes.
    """

    name: str
    source: Literal["files", "memory"]
    weights: Fingerprint
    settings: Fingerprint
    tokenizer: Fingerprint | None
    dtype: str | None
    validation: str | None = None


@dataclass(frozen=True)
class Dataset:
    """Fingerprints of the dataset. The texts themselves are not stored.

    Attributes:
        kind: Kind of the source.
        checksum: SHA-256 of the content. For texts, each text is preceded by its length. For a folder, the content is
            the names and the checksums of its files.
        items: Number of texts or files.
        bytes: Total size in bytes.
        shards: SHA-256 of each file of a folder, sorted by name. The names are not stored.
    """

    kind: Literal["texts", "file", "folder"]
    checksum: Sha256
    items: Size
    bytes: Count
    shards: tuple[Sha256, ...] = ()


@dataclass(frozen=True)
class Loader:
    """Configuration of the data loader of a training.

    Attributes:
        workers: Number of worker processes.
        batch_size: Number of items per batch.
        pin_memory: Whether batches are copied to pinned memory.
        persistent_workers: Whether worker processes stay alive after an epoch.
        prefetch_factor: Number of batches that each worker prefetches.
        start_method: Start method of the worker processes, or null if the loader does not set one.
        seeded: Whether the loader has a separate generator for the order and the workers.
        worker_seeding: Source of the seeds of the workers: ``worker_init_fn``, ``torch`` (which does not seed other
            libraries), or ``no workers``.
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
    """Workload of a run, as specified by the user or reported by a report.

    Attributes:
        task: Task of a step, such as ``annotation``.
        batch_size: Number of rows per batch.
        length: Number of tokens per row.
        workers: Number of loader processes.
        peak_memory_bytes: Largest peak memory in a report, in bytes.
        dtype: Data type of the model.
        row_shape: Shape of a row that is not a text, such as ``3x224x224``.
        checkpointed: Names of the modules with activation checkpointing.
        accumulation: Number of batches per optimizer step.
        autocast: Autocast dtype of a training.
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
    """Hypothesis that was rejected.

    Attributes:
        hypothesis: Suspected cause.
        rejected_because: Reason for the rejection.
    """

    hypothesis: str
    rejected_because: str


@dataclass(frozen=True)
class ReportMetrics:
    """Metrics of a report. The texts of the report are not stored.

    Attributes:
        report: Kind of the report.
        subject: Name of the measured model or function.
        device: Device of the measurement.
        verdict: Verdict of the report, or null if it has none.
        simulated: Whether the device was simulated. Such metrics do not represent real hardware.
        values: Metrics by name. Each name contains the unit.
        run: Workload of the report. Metrics of different workloads are not compared.
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
        """Report, subject and device, which identify the metrics."""
        return self.report, self.subject, self.device

    @property
    def canonical_device(self) -> str | None:
        """Normalized device name, without the suffix of simulated devices."""
        return normalize_device(self.device.removesuffix(SIMULATED_SUFFIX)) if self.device else None


def finite_numbers(values: Mapping[str, object]) -> dict[str, float]:
    """Return the values that are finite numbers. A bool is not a number.

    Example:
        >>> finite_numbers({"rows": 8, "reason": "a text", "gain": float("nan"), "exact": True})
        {'rows': 8}
    """
    return {name: value for name, value in values.items() if is_finite_number(value)}


Commit = Annotated[str, Pattern("^([0-9a-f]{40}|[0-9a-f]{64})$")]


@dataclass(frozen=True)
class Software:
    """Versions of the software.

    Attributes:
        openmed_nb: Version of this package.
        python: Version of Python.
        torch: Version of torch, including the build.
        transformers: Version of transformers.
        packages: Versions of other packages that affect speed or results.
        system: Operating system and version, such as ``macOS 14.5``.
        architecture: Architecture of the Python build, such as ``arm64``.
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
    """State of the user's code according to git, without names of files, branches and remotes.

    Attributes:
        commit: Commit that is checked out.
        changed: Number of files that differ from the commit.
        untracked: Number of untracked files.
    """

    commit: Commit | None = None
    changed: Count | None = None
    untracked: Count | None = None

    @property
    def dirty(self) -> bool | None:
        """Whether the code differs from the commit, or ``None`` if that is unknown."""
        return None if self.changed is None or self.untracked is None else bool(self.changed + self.untracked)


@dataclass(frozen=True)
class Hardware:
    """Hardware of the machine and memory use of this process.

    Attributes:
        device: Device, such as ``mps``, ``cuda:0`` or ``cpu``.
        name: Name of the device according to its driver.
        chip: Name of the processor.
        memory_bytes: Memory of the machine in bytes.
        threads: Number of CPU threads of torch.
        memory_limit: Fraction of the device memory that torch may allocate.
        device_peak_bytes: Peak memory of tensors on the device in this process, if torch reports it.
        resident_peak_bytes: Peak memory of this process in bytes.
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
    """Seeds, and settings of torch for determinism.

    Attributes:
        seeds: Seeds, as passed by the user.
        torch_seed: Last seed of the CPU generator of torch. It is random if the generator was never seeded.
        deterministic_algorithms: Whether torch raises an error for nondeterministic operators.
        warn_only: Whether torch only warns about nondeterministic operators.
        cudnn_deterministic: Whether cuDNN is limited to deterministic algorithms.
        cudnn_benchmark: Whether cuDNN benchmarks its algorithms and selects the fastest.
        matmul_precision: Precision of float32 matrix multiplication: ``highest``, ``high`` or ``medium``.
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
    """State of an MPS environment variable of torch.

    Attributes:
        name: Name of the variable.
        value: Value of the variable, or null if it is not set.
        set_by: Source of the value.
        effect: Effect of the variable on torch.
    """

    name: str
    value: str | None
    set_by: str
    effect: str


@dataclass(frozen=True)
class SystemConditions:
    """Snapshot of the power, thermal state and memory of the machine.

    Attributes:
        phase: Whether the snapshot is from before or after the run.
        power_source: ``adapter``, ``battery`` or ``UPS``.
        power_mode: ``automatic``, ``low`` (Low Power Mode) or ``high``.
        thermal_state: ``limited``, ``moderate``, ``nominal`` or ``nothing reported``.
        memory_pressure: ``normal``, ``warning`` or ``critical``.
        cpu_speed_limit: Limit of the processor speed in percent.
        battery: Charge of the battery in percent.
        memory_available: Memory that was available to processes, in bytes.
        swap_used: Used swap space in bytes.
    """

    phase: Literal["before", "after"]
    power_source: str | None = None
    power_mode: str | None = None
    thermal_state: str | None = None
    memory_pressure: str | None = None
    cpu_speed_limit: int | None = None
    battery: int | None = None
    memory_available: int | None = None
    swap_used: int | None = None


@dataclass(frozen=True)
class BackgroundLoad:
    """Load of other processes at the time of the snapshot.

    Attributes:
        busy_processes: Number of other processes that used at least a tenth of a processor.
        cpu_fraction: Fraction of all processors used by other processes, in [0, 1].
        names: Names of the busiest processes in descending order of load, or null if names were not requested.
    """

    busy_processes: int | None = None
    cpu_fraction: float | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class StorageLocation:
    """Storage of a cache or a model.

    Attributes:
        contents: Contents of the directory.
        path: Path, with ``~`` for the home directory.
        filesystem: Type of the file system.
        kind: Kind of storage. Files in ``cloud`` storage may have to be downloaded before they are read.
    """

    contents: str
    path: str
    filesystem: str | None
    kind: StorageKind


@dataclass(frozen=True)
class NetworkLatency:
    """Time to connect to an artifact store over TCP. No data is sent.

    Attributes:
        host: Host, without user and password.
        port: Port.
        samples: Number of connection attempts.
        failures: Number of failed attempts.
        median_seconds: Median connection time of the successful attempts.
        max_seconds: Longest connection time of the successful attempts.
    """

    host: str
    port: int
    samples: int
    failures: int
    median_seconds: float | None
    max_seconds: float | None


SCHEMA: Literal["openmed_nb/logbook/1"] = "openmed_nb/logbook/1"


@dataclass(frozen=True, repr=False)
class LogbookData:
    """Contents of a logbook, without text from notes, secrets and file names.

    Attributes:
        schema: Name and version of the schema.
        created_at: Time of creation in UTC.
        simulated: Whether the device was simulated. Such metrics do not represent real hardware.
        software: Versions of the software.
        code: State of the user's code.
        hardware: Hardware of the machine.
        model: Identity of the model, or null if it is unknown.
        dataset: Fingerprints of the dataset, or null if it is unknown.
        run: Workload of the run.
        loader: Configuration of the data loader, or null if it is unknown.
        randomness: Seeds and determinism settings.
        environment: Values of the environment variables on the allow list, by name.
        mps_variables: State of the MPS environment variables. Empty on other devices.
        conditions: Power, thermal state and memory.
        background: Load of other processes.
        storage: Storage of caches and models.
        network: Time to connect to the artifact store, or null if none was requested.
        hypotheses: Rejected hypotheses, verbatim.
        metrics: Metrics of reports.
    """

    schema: Literal["openmed_nb/logbook/1"]
    created_at: UtcTimestamp
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
        """Name of the device, labeled if it is simulated."""
        return f"{self.hardware.device}{SIMULATED_SUFFIX if self.simulated else ''}"
