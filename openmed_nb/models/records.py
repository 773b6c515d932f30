"""Measurements of a model on this machine, one JSON file each: validation records of reduced dtypes and tuned batch sizes.

A record is valid for exactly one :class:`ModelIdentity`. It expires when a file of the model, torch or transformers
changes, and it is not valid on another device. It contains counts and fingerprints of texts, but no text content.
``runbook.checks.validation`` decides whether a dtype gets a validation record. Loading only checks whether one exists.

Loading in a reduced dtype without a validation record emits a warning. ``"auto"`` selects the first dtype of
``REDUCED_DTYPES`` that has one and is faster than float32.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from .._render.display import OK, SIMULATED_SUFFIX, Displayable, Report, Table, pluralize, to_plain_data
from .._utils.plain import Count, Minimum, Size, atomic_write, from_json_data
from .._utils.text import collapse_whitespace, describe_error, describe_value
from .._utils.warning import warn
from ..devices.backend import import_torch
from ..devices.computer import DeviceManager
from ..devices.registry import get_device
from ..errors import ConfigurationError
from .files import hash_model_files, read_json
from .loading import INT8, LoadSpec, model_folder
from .store import ModelKey

# Names the directory for the records of the user. If it is not set, the user data directory of the system is used.
DATA_VARIABLE = "OPENMED_NB_DATA"

Ratio = Annotated[float, Minimum(0)]


@dataclass(frozen=True)
class ModelIdentity:
    """The model, dtype, device and library versions for which a record is valid.

    Attributes:
        model: Name that the user gave the model. It is not part of :attr:`key`: the same files may have two names.
        weights: Fingerprint of every byte of the weights.
        config: Fingerprint of the ``config.json``.
        tokenizer: Fingerprint of the tokenizer files.
        dtype: Data type of the weights, such as ``"bfloat16"``.
        device: Device type: ``"mps"``, ``"cuda"`` or ``"cpu"``.
        device_name: Name that the device reports.
        torch: Version of torch.
        transformers: Version of transformers.
        simulated: Whether the device is simulated.
    """

    model: str
    weights: str
    config: str
    tokenizer: str
    dtype: str
    device: str
    device_name: str
    torch: str
    transformers: str
    simulated: bool

    @property
    def key(self) -> str:
        """Short hash of all fields except the name of the model."""
        return hashlib.blake2b(json.dumps(astuple(self)[1:]).encode(), digest_size=12).hexdigest()

    @property
    def shown_device(self) -> str:
        """Device type, labeled if it is simulated."""
        return f"{self.device}{SIMULATED_SUFFIX}" if self.simulated else self.device


def identify_model(spec: LoadSpec, dtype: str, device: str, computer: DeviceManager) -> ModelIdentity:
    """Return the identity of a model with a dtype on a device.

    Downloads the files of the model if necessary. Each file is read once per process.
    """
    import_torch()  # torch.__version__ has the build of a CUDA wheel, which the package metadata may lack.
    parsed_device = get_device(device)
    return ModelIdentity(
        model=spec.reference.name.encode("utf-8", "replace").decode(),  # A path may contain undecodable bytes.
        **asdict(hash_model_files(model_folder(spec))),
        dtype=dtype,
        device=parsed_device.type,
        device_name=parsed_device.hardware_name(computer.machine, computer.torch),
        torch=str(computer.torch.version),
        transformers=importlib.metadata.version("transformers"),
        simulated=computer.machine.simulated and parsed_device.can_be_simulated,
    )


@dataclass(frozen=True)
class ValidationMetrics:
    """Measurements of a reduced dtype against the reference, the CPU in float32.

    Attributes:
        texts: Number of distinct texts.
        texts_fingerprint: Fingerprint of the texts.
        tokens: Number of tokens in the texts.
        non_finite_tokens: Number of tokens with NaN or infinity.
        exact: Number of reference entities with the same offsets and label.
        moved: Number of reference entities with different boundaries.
        label_changed: Number of reference entities with a different label.
        missing: Number of reference entities that were not found.
        extra: Number of entities that the reference does not have.
        reference_recall: Recall of the reference on gold entities, or ``None`` without gold entities.
        recall: Recall of the reduced dtype on gold entities, or ``None`` without gold entities.
        speedup: Speedup over float32 on the same device, from interleaved runs. It is 1 if the difference is not
            significant, and ``None`` on a simulated device or if the computer was busy or hot.
    """

    texts: Count
    texts_fingerprint: str
    tokens: Count
    non_finite_tokens: Count
    exact: Count
    moved: Count
    label_changed: Count
    missing: Count
    extra: Count
    reference_recall: Ratio | None
    recall: Ratio | None
    speedup: Ratio | None


@dataclass(frozen=True, repr=False)
class ValidationRecord(Displayable):
    """Record that the predictions of a model in a reduced dtype meet the acceptance criteria.

    Attributes:
        identity: Model, dtype, device and versions for which the record is valid.
        evidence: Measurements.
        date: Day of the validation, such as ``2026-03-01``.
        criteria: Thresholds that the measurements met, by name.
        format: Name and version of the format. The version increases when a release tightens the criteria, so that
            older records are no longer valid.
    """

    identity: ModelIdentity
    evidence: ValidationMetrics
    date: str
    criteria: dict[str, float]
    format: Literal["openmed_nb validation record, 2"] = "openmed_nb validation record, 2"

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated."""
        return self.identity.simulated

    @property
    def summary(self) -> str:
        """Result of the validation in one sentence."""
        evidence = self.evidence
        count = evidence.exact + evidence.moved + evidence.label_changed + evidence.missing + evidence.extra
        entities = pluralize(count, "entity", "entities")
        return f"{evidence.exact:,} of {entities} in {pluralize(evidence.texts, 'text')} are the same as in float32."

    def to_report(self) -> Report:
        """Return the summary, and all fields as a collapsed table."""
        identity = self.identity
        fields = {**asdict(identity), **asdict(self.evidence), "date": self.date, **self.criteria}
        fields["device"] = identity.shown_device
        rows = tuple((name.replace("_", " "), str(value)) for name, value in fields.items() if value is not None)
        title = f"Validation record: {identity.model} in {identity.dtype} on {identity.shown_device}"
        table = Table("Validation record", ("field", "value"), rows, collapsed=True)
        return Report(title, (self.summary,), metrics=(table,), status=OK)


@dataclass(frozen=True)
class TunedBatchSize:
    """Fastest batch size of a model, valid for one identity.

    Attributes:
        identity: Model, dtype, device and versions for which the record is valid.
        batch_tokens: Maximum number of tokens per batch.
    """

    identity: ModelIdentity
    batch_tokens: Size


@dataclass(frozen=True)
class RejectedDtype:
    """A reduced dtype that a validation did not accept.

    Attributes:
        identity: Model, dtype, device and versions for which the record is valid.
        reason: Reason as a sentence.
        remedy: Suggested action.
    """

    identity: ModelIdentity
    reason: str
    remedy: str


Record = TypeVar("Record", ValidationRecord, TunedBatchSize, RejectedDtype)

FILE_SUFFIXES = {ValidationRecord: ".json", TunedBatchSize: ".batch_size", RejectedDtype: ".rejected"}


class RecordStore:
    """The records of a user, one file each, in a directory that need not exist. Other files there are not touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, identity: ModelIdentity, kind: type[Any] = ValidationRecord) -> Path:
        """Return the path of the record of an identity."""
        return self.folder / f"{identity.key}{FILE_SUFFIXES[kind]}"

    def store(self, record: ValidationRecord | TunedBatchSize | RejectedDtype) -> Path:
        """Write a record atomically, replacing an older record of the same identity, and return its path."""
        file = self.file(record.identity, type(record))
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(to_plain_data(record), indent=2))
        return file

    def remove(self, identity: ModelIdentity, kind: type[Any] = ValidationRecord) -> None:
        """Delete the record of an identity, if it exists."""
        with self._writing():
            self.file(identity, kind).unlink(missing_ok=True)

    def get(self, identity: ModelIdentity, kind: type[Any] = ValidationRecord) -> Any:
        """Return the record that is valid for an identity, or ``None``."""
        record = _read(self.file(identity, kind), kind)
        # The user may have renamed the file or edited the identity in it.
        return record if record and record.identity.key == identity.key else None

    def iter_batch_sizes(self) -> Iterator[TunedBatchSize]:
        """Yield all tuned batch sizes."""
        for file in sorted(self.folder.glob(f"*{FILE_SUFFIXES[TunedBatchSize]}")):
            if record := _read(file, TunedBatchSize):
                yield record

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigurationError(
                f"Measurements of a model cannot be stored in {str(self.folder)!r}: {describe_error(error)}.",
                f"Set {DATA_VARIABLE} to a writable directory.",
            ) from error


def _read(file: Path, kind: type[Record]) -> Record | None:
    """Return the record in a file, or ``None`` if the file is missing or damaged."""
    try:
        record: Record = from_json_data(kind, read_json(file))
    except (OSError, ValueError, RecursionError):
        return None
    return record


def record_store(environ: Mapping[str, str]) -> RecordStore:
    """Return the store of the user, in the directory that the environment names or the user data directory."""
    import platformdirs

    named = environ.get(DATA_VARIABLE)
    default = platformdirs.user_data_path("openmed_nb", appauthor=False)
    folder = Path(os.path.expanduser(named)) if named else default  # noqa: PTH111 - Path raises an error without a home
    return RecordStore(folder / "validation_records")


def load_batch_sizes(spec: LoadSpec, computer: DeviceManager) -> dict[str, int]:
    """Return the tuned batch sizes of a model in tokens, by device type.

    Reads the files of the model only if a tuned batch size is stored for a model of that name.
    """
    tokens = {}
    for record in record_store(computer.environ).iter_batch_sizes():
        identity = record.identity
        has_name = identity.model in spec.reference.names
        if has_name and identify_model(spec, spec.dtype, identity.device, computer).key == identity.key:
            tokens[identity.device] = record.batch_tokens
    return tokens


def save_batch_size(spec: LoadSpec, device: str, computer: DeviceManager, batch_tokens: int | None) -> None:
    """Store the tuned batch size of a model on a device, or delete it if it is ``None``; a failure is a warning."""
    identity = identify_model(spec, spec.dtype, device, computer)
    try:
        if batch_tokens is None:
            record_store(computer.environ).remove(identity, TunedBatchSize)
        else:
            record_store(computer.environ).store(TunedBatchSize(identity, batch_tokens))
    except ConfigurationError as error:
        warn(str(error))


# The dtypes that need a validation record, in the order in which "auto" selects them.
REDUCED_DTYPES = ("bfloat16", "float16", INT8)

# A reduced dtype must exceed this speedup over float32 to count as faster.
MIN_SPEEDUP = 1.05


NOT_VALIDATED = "it has not been validated on this device with these files and versions"


@dataclass(frozen=True, repr=False)
class DtypeChoice(Displayable):
    """The data type that a model is loaded in, with the reason.

    Attributes:
        dtype: Selected dtype.
        requested: Requested dtype, or ``"auto"``.
        device: Device, labeled if it is simulated.
        speedup: Validated speedup over float32, or ``None`` if it was not measured, or if the dtype was not selected by it.
    """

    dtype: str
    requested: str
    device: str
    speedup: float | None = None

    def to_report(self) -> Report:
        """Return the dtype and the reason."""
        if self.requested == self.dtype:
            reason = "Requested explicitly."
        elif self.dtype not in REDUCED_DTYPES:
            reason = (
                "Selected by 'auto': no reduced dtype is both validated here for this model and known to be faster."
            )
        else:
            speed = "; speed not measured: the device is simulated."
            if self.speedup:
                speed = f" and faster: {self.speedup:.1f} times as fast as float32."
            reason = f"Selected by 'auto': the first dtype that is validated here for this model{speed}"
        return Report(f"Data type: {self.dtype} on {self.device}", (reason,))


def select_dtype(spec: LoadSpec, device: str, computer: DeviceManager) -> tuple[LoadSpec, DtypeChoice]:
    """Return the specification with the selected dtype for a device, and the choice with its reason.

    Downloads the files of the model if necessary.
    """
    local_spec = replace(spec, folder=model_folder(spec))
    store = record_store(computer.environ)
    identity = identify_model(local_spec, spec.dtype, device, computer)
    selected = spec.dtype
    selected_speedup = None
    if spec.dtype == "auto":
        selected = "float32"
        for dtype in REDUCED_DTYPES:
            record = store.get(replace(identity, dtype=dtype))
            if record is None or computer.dtype_rejection(dtype, device):
                continue
            speedup = record.evidence.speedup
            # The speed is not measured on a simulated device.
            is_faster = identity.simulated if speedup is None else speedup > MIN_SPEEDUP
            if is_faster:
                selected = dtype
                selected_speedup = speedup
                break
    return local_spec.in_dtype(selected), DtypeChoice(selected, spec.dtype, identity.shown_device, selected_speedup)


def warn_unless_validated(key: ModelKey, device: str, computer: DeviceManager, is_reused: bool) -> None:
    """Warn if a model is placed on a device in a dtype that is not validated there, and name the remedy.

    If the model was placed there before, only a dtype that a validation did not accept is named again.
    """
    spec = key.spec
    if spec.dtype not in REDUCED_DTYPES:
        return
    identity = identify_model(spec, spec.dtype, device, computer)
    store = record_store(computer.environ)
    reason = "" if store.get(identity) else NOT_VALIDATED
    requested = "" if key.device is None else f", device={key.device!r}"
    arguments = f"{spec.reference.name!r}, texts, dtype={spec.dtype!r}{requested}"
    remedy = f"To validate it, run nb.runbook.validate_precision({arguments})"
    if rejected := store.get(identity, RejectedDtype):
        reason = f"its validation did not accept it: {rejected.reason.rstrip('.')}"
        remedy = rejected.remedy
    if rule := computer.dtype_rejection(spec.dtype, device):
        reason = rule.reason
        remedy = rule.remedy
    if reason and not (is_reused and reason == NOT_VALIDATED):
        problem = (
            f"{describe_value(spec.reference.name)} is loaded in {spec.dtype} on {identity.shown_device}, but {reason}."
        )
        warn(collapse_whitespace(f"{problem} Predictions may differ from float32. {remedy}"))
