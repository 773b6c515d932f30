"""Sections of a logbook as immutable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from ...._render.display import SIMULATED_SUFFIX
from ...._utils.plain import Pattern
from ....devices.system_status import SystemStatus
from ...verdict.metrics import Count, ReportMetrics, Run, Size

Sha256 = Annotated[str, Pattern("^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Pattern("^[0-9a-f]{32}$|^[0-9a-f]{64}$")]
UtcTimestamp = Annotated[str, Pattern("^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")]
StorageKind = Literal["local", "network", "cloud", "external", "memory", "unknown"]

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
        changed: Number of changed and untracked files.
    """

    commit: Commit | None = None
    changed: Count | None = None


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
        cudnn_benchmark: Whether cuDNN benchmarks its algorithms and selects the fastest. Null on other devices than CUDA.
        matmul_precision: Precision of float32 matrix multiplication: ``highest``, ``high`` or ``medium``.
    """

    seeds: dict[str, int] = field(default_factory=dict)
    torch_seed: int | None = None
    deterministic_algorithms: bool | None = None
    cudnn_benchmark: bool | None = None
    matmul_precision: str | None = None


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
        filesystem: Type of the file system.
        kind: Kind of storage. Files in ``cloud`` storage may have to be downloaded before they are read.
    """

    filesystem: str | None
    kind: StorageKind


@dataclass(frozen=True)
class NetworkLatency:
    """Time to connect to an artifact store over TCP. No data is sent.

    Attributes:
        host: Host, without user and password.
        port: Port.
        failures: Number of failed attempts.
        median_seconds: Median connection time of the successful attempts.
    """

    host: str
    port: int
    failures: int
    median_seconds: float | None


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
        run: Workload of the run, as specified by the user.
        randomness: Seeds and determinism settings.
        environment: Values of the environment variables on the allow list, by name.
        phase: Whether the conditions are from before or after the run.
        conditions: Power, thermal state and memory.
        background: Load of other processes.
        storage: Storage of caches and models, by contents.
        network: Time to connect to the artifact store, or null if none was requested.
        hypotheses: Reason for the rejection of each rejected hypothesis, verbatim.
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
    randomness: Randomness
    environment: dict[str, str]
    phase: Literal["before", "after"]
    conditions: SystemStatus
    background: BackgroundLoad
    storage: dict[str, StorageLocation]
    network: NetworkLatency | None = None
    hypotheses: dict[str, str] = field(default_factory=dict)
    metrics: tuple[ReportMetrics, ...] = ()

    @property
    def device(self) -> str:
        """Name of the device, labeled if it is simulated."""
        return f"{self.hardware.device}{SIMULATED_SUFFIX if self.simulated else ''}"
