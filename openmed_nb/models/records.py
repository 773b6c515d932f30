"""What was measured of a model on this computer, a JSON file each: its certificates of reduced types, and its best batch.

A record is of one :class:`Identity`. With another file of the model or another torch it has expired, and on another device
it does not count. It holds counts and fingerprints of texts, and no word of them. What makes a certificate is decided where
it is measured (``runbook.checks.precision``); loading asks only whether there is one.

A reduced type without a certificate is a warning, and ``"auto"`` takes the fastest type that has one.
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

from .._render.display import OK, SIMULATED_SUFFIX, Displayable, JsonMixin, Report, Table, pluralize
from .._utils.plain import Minimum, atomic_write, from_json_data, utc_timestamp
from .._utils.text import collapse_whitespace, describe_error, describe_value
from .._utils.warning import warn
from ..devices.backend import import_torch
from ..devices.computer import DeviceManager
from ..devices.machine import is_marked_simulated
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError
from .files import hash_model_files
from .limits import read_json
from .loading import INT8, LoadSpec, model_folder, snapshot_files
from .store import ModelKey

# The folder of what is kept for the person; where it is not set, the system's own place for such things.
DATA_VARIABLE = "OPENMED_NB_DATA"

# What makes a certificate expire, in words; with another device it counts there, but not here.
CHANGE_MESSAGES = {
    "weights": "the weights changed",
    "settings": "its config.json changed",
    "tokenizer": "the tokenizer changed",
    "torch": "torch was {before.torch} and is {now.torch}",
    "transformers": "transformers was {before.transformers} and is {now.transformers}",
}
FILE_FIELDS = {"weights", "settings", "tokenizer"}
DEVICE_FIELDS = {"device", "simulated", "device_name"}

Count = Annotated[int, Minimum(0)]
Ratio = Annotated[float, Minimum(0)]


@dataclass(frozen=True)
class ModelIdentity:
    """What a record is of: it counts for exactly this."""

    model: str  # What the person calls the model; two names for the same files are the same.
    weights: str  # A fingerprint of its weights, of every byte.
    config: str  # A fingerprint of its config.json.
    tokenizer: str  # A fingerprint of its tokenizer.
    dtype: str  # The type of its numbers, such as ``"bfloat16"``.
    device: str  # ``"mps"``, ``"cuda"`` or ``"cpu"``.
    device_name: str  # What the device calls itself.
    torch: str  # The version of torch.
    transformers: str  # The version of transformers.
    simulated: bool  # Whether the device is simulated.

    @property
    def key(self) -> str:
        """A short text that all identities share which differ in the model's name alone."""
        return hashlib.blake2b(json.dumps(astuple(self)[1:]).encode(), digest_size=12).hexdigest()

    @property
    def shown_device(self) -> str:
        """The kind of device, marked where it is simulated."""
        return f"{self.device}{SIMULATED_SUFFIX}" if self.simulated else self.device

    def changes(self, before: ModelIdentity) -> set[str]:
        """Return the names of what differs from an identity: of files, versions and the device."""
        return {name for name in {*CHANGE_MESSAGES, *DEVICE_FIELDS} if getattr(before, name) != getattr(self, name)}


def identify_model(spec: LoadSpec, dtype: str, device: str, computer: DeviceManager) -> ModelIdentity:
    """Return the identity of a model in a type on a device; its files are fetched, and read once in a process."""
    import_torch()  # Its files may give another version than it gives itself: wheels for CUDA leave their build out.
    known = parse_device_argument(device)
    return ModelIdentity(
        model=spec.reference.name.encode("utf-8", "replace").decode(),  # The bytes of a path need not be text.
        **asdict(hash_model_files(model_folder(spec))),
        dtype=dtype,
        device=known.type,
        device_name=known.own_name(computer.machine, computer.torch),
        torch=str(computer.torch.version),
        transformers=importlib.metadata.version("transformers"),
        simulated=computer.machine.simulated and known.can_be_simulated,
    )


@dataclass(frozen=True)
class ValidationMetrics:
    """What was measured; of the counts of entities and of the recalls, those of the strategy that lost most."""

    texts: Count  # How many texts, each of other words.
    texts_fingerprint: str  # Differs for other texts.
    tokens: Count  # How many tokens they have.
    non_finite_tokens: Count  # How many of them became NaN or infinity.
    # How many entities of the reference, the CPU in float32, were found at the same place with the same label.
    exact: Count
    moved: Count  # How many with other borders.
    relabelled: Count  # How many with another label.
    missing: Count  # How many not at all.
    extra: Count  # How many entities were found that the reference does not have.
    distinct_entities: Count  # How many entities of the reference differ in their words or labels.
    reference_recall: Ratio | None  # The reference's recall of gold entities; ``None`` where no gold was given.
    recall: Ratio | None  # The recall in the reduced type.
    # How many times faster than float32 on the same device, measured in turn; 1 where that is not certain, ``None``
    # where the device is simulated.
    speedup: Ratio | None


# What is shown of the evidence first, in words.
METRIC_LABELS = {
    "texts": "texts, each of other words",
    "tokens": "tokens",
    "non_finite_tokens": "tokens with NaN or infinity",
    "exact": "entities that are the same",
    "moved": "entities with other borders",
    "relabelled": "entities with another label",
    "missing": "entities that were not found",
    "extra": "entities that float32 does not find",
    "distinct": "entities of other words or labels",
    "reference_recall": "recall in float32",
    "recall": "recall in this type",
    "speedup": "times as fast as float32",
}


@dataclass(frozen=True, repr=False)
class ValidationRecord(Displayable):
    """That a model kept its answers.

    Attributes:
        identity: What it is of.
        evidence: What was measured.
        date: The day, as ``2026-03-01``.
        gate: What was required.
        format: The form of the record, and what it stands for: where more is required from one release on, the number grows.
    """

    identity: ModelIdentity
    evidence: ValidationMetrics
    date: str
    criteria: dict[str, float]
    format: Literal["openmed_nb certificate, 2"] = "openmed_nb certificate, 2"

    @property
    def simulated(self) -> bool:
        """Whether it is of a simulated device."""
        return self.identity.simulated

    @property
    def summary(self) -> str:
        """What it says, in one sentence."""
        evidence = self.evidence
        reference = evidence.exact + evidence.moved + evidence.relabelled + evidence.missing
        return f"On {pluralize(evidence.texts, 'text')} it kept {evidence.exact:,} of {pluralize(reference, 'entity', 'entities')}."

    def to_report(self) -> Report:
        """Return what it is of and what it says; what it was measured with stands among the figures."""
        identity = self.identity
        facts = (
            asdict(identity)
            | {"device": identity.shown_device}
            | asdict(self.evidence)
            | {"date": self.date}
            | self.criteria
        )
        known = {name: str(value) for name, value in facts.items() if value is not None}
        measured = tuple((said, known.pop(name)) for name, said in METRIC_LABELS.items() if name in known)
        rest = tuple((name.replace("_", " "), value) for name, value in known.items())
        columns = ("what", "value")
        type_and_device = f"{identity.dtype} on {identity.shown_device}"
        return Report(
            f"Certificate: {identity.model} in {type_and_device}",
            (self.summary,),
            metrics=(
                Table("Measured", columns, measured),
                Table("What it counts for, and what was required", columns, rest, collapsed=True),
            ),
            html_sentences=(f"{identity.model} is validated in {type_and_device} since {self.date}", self.summary),
            status=OK,
        )


@dataclass(frozen=True)
class TunedBatchSize(JsonMixin):
    """How many tokens of a model run best at once, which counts for its identity as a certificate does."""

    identity: ModelIdentity
    batch_tokens: Annotated[int, Minimum(1)]
    source: str  # What measured it, such as ``nb.sweep()``.
    date: str  # The day, as ``2026-03-01``.


Record = TypeVar("Record", ValidationRecord, TunedBatchSize)

ENDINGS = {ValidationRecord: ".json", TunedBatchSize: ".learned"}  # How the names of files end.


class RecordStore:
    """The records of a person, a file each; any other file in the folder is left alone. The folder need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def file(self, identity: ModelIdentity, kind: type[Any] = ValidationRecord) -> Path:
        """Return where a record of an identity is stored."""
        return self.folder / f"{identity.key}{ENDINGS[kind]}"

    def store(self, record: ValidationRecord | TunedBatchSize) -> Path:
        """Write a record in one step, in the place of an older one of the same identity; return its file."""
        file = self.file(record.identity, type(record))
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(record.to_dict(), indent=2))
        return file

    def remove(self, identity: ModelIdentity, kind: type[Any] = ValidationRecord) -> None:
        """Remove the record of an identity, where there is one."""
        file = self.file(identity, kind)
        if file.is_file():
            with self._writing():
                file.unlink(missing_ok=True)

    def find(self, identity: ModelIdentity) -> ValidationRecord | None:
        """Return the certificate that counts for an identity."""
        stored = _read(self.file(identity), ValidationRecord)
        # The file may have been renamed, or its identity changed.
        return stored if isinstance(stored, ValidationRecord) and stored.identity.key == identity.key else None

    def learned(self) -> Iterator[TunedBatchSize]:
        """Yield all that was learned; a file that is damaged says nothing, as if it was not there."""
        for file in sorted(self.folder.glob(f"*{ENDINGS[TunedBatchSize]}")):
            record = _read(file, TunedBatchSize)
            if isinstance(record, TunedBatchSize):
                yield record

    def explain(self, identity: ModelIdentity) -> str:
        """Return why no certificate counts for an identity, in words; empty where one does."""
        if self.find(identity):
            return ""
        own = _read(self.file(identity), ValidationRecord)
        if isinstance(own, str):
            return f"its certificate is damaged ({own})"
        stored = [_read(file, ValidationRecord) for file in sorted(self.folder.glob("*.json"))]
        others = [
            (certificate.identity, identity.changes(certificate.identity))
            for certificate in stored
            if isinstance(certificate, ValidationRecord)
            and certificate.identity.dtype == identity.dtype
            # By its name, or where that differs by its weights.
            and (certificate.identity.model == identity.model or certificate.identity.weights == identity.weights)
            and (identity.simulated or not certificate.simulated)
        ]
        # One without changes counts under its own name: this file was renamed.
        expired = [(other, changes) for other, changes in others if changes and not changes & DEVICE_FIELDS]
        if expired:
            before, changes = min(expired, key=lambda pair: len(pair[1]))  # The nearest.
            *first, last = (
                said.format(before=before, now=identity) for name, said in CHANGE_MESSAGES.items() if name in changes
            )
            words = f"{', '.join(first)}, and {last}" if first else last
            return f"its certificate expired: {words}"
        # Two devices of one kind are told apart by their own names.
        places = {
            other.device_name if other.shown_device == identity.shown_device else other.shown_device
            for other, changes in others
            if changes and not changes & FILE_FIELDS
        }
        if places:
            return f"it was validated on {' and '.join(sorted(places))} only"
        damaged = sum(isinstance(certificate, str) for certificate in stored)
        unreadable = f", and {pluralize(damaged, 'file')} in its folder cannot be read" if damaged else ""
        return f"there is no certificate{unreadable}"

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"Certificates cannot be kept in {str(self.folder)!r}: {describe_error(error)}."
            raise ConfigurationError(what, f"Set {DATA_VARIABLE} to a folder that can be written.") from error


def _read(file: Path, kind: type[Record]) -> Record | str | None:
    """Return the record of a file, what is wrong with it, or ``None`` where there is no file."""
    try:
        record: Record = from_json_data(kind, read_json(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        return describe_error(error)
    return record


def record_store(environ: Mapping[str, str]) -> RecordStore:
    """Return the store of the person with this environment."""
    import platformdirs

    named = environ.get(DATA_VARIABLE)
    try:
        folder = Path(named).expanduser() if named else platformdirs.user_data_path("openmed_nb", appauthor=False)
    except RuntimeError as error:  # pathlib's, for a user without a home.
        what = f"{DATA_VARIABLE} is {named!r}, and that home is not known."
        raise ConfigurationError(what, f"Set {DATA_VARIABLE} to the full path of a folder.") from error
    return RecordStore(folder / "certificates")


def load_batch_sizes(spec: LoadSpec, computer: DeviceManager, environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many tokens of a model run best at once, by kind of device, as it was learned on this computer.

    Its files are read only where something was learned of a model of that name.
    """
    tokens = {}
    with contextlib.suppress(ConfigurationError):  # Without a place for it, nothing was learned; a load goes on.
        for record in record_store(environ).learned():
            identity = record.identity
            named = identity.model in spec.reference.names
            if named and identify_model(spec, spec.dtype, identity.device, computer).key == identity.key:
                tokens[identity.device] = record.batch_tokens
    return tokens


def save_batch_size(  # noqa: PLR0913, PLR0917 - each is one thing
    spec: LoadSpec, device: str, computer: DeviceManager, environ: Mapping[str, str], batch_tokens: int | None, by: str
) -> None:
    """Keep how many tokens of a model run best at once on a device, or with ``None`` forget it; what fails is a warning."""
    identity = identify_model(spec, spec.dtype, device, computer)
    try:
        if batch_tokens is None:
            record_store(environ).remove(identity, TunedBatchSize)
        else:
            record_store(environ).store(TunedBatchSize(identity, batch_tokens, by, utc_timestamp()[:10]))
    except ConfigurationError as error:
        warn(collapse_whitespace(str(error)))


# Which type a model is loaded in.

# The types that need a certificate, in the order in which equally fast ones are taken.
REDUCED_DTYPES = ("bfloat16", "float16", INT8)

# A reduced type counts as faster than float32 when it is more than this many times as fast.
MIN_SPEEDUP = 1.05


@dataclass(frozen=True)
class ReducedDtype(JsonMixin):
    """A reduced type, and its certificate that counts here, or the reason why none does."""

    dtype: str
    record: ValidationRecord | None
    reason: str

    JSON_PROPERTIES = ("faster", "summary")
    JSON_EXCLUDE = ("record", "reason")

    @property
    def faster(self) -> bool | None:
        """Whether it was measured to be worth it; ``None`` where the device is simulated, and no speed is measured."""
        if self.record is None:
            return False
        gain = self.record.evidence.speedup
        return None if gain is None else gain > MIN_SPEEDUP

    @property
    def summary(self) -> str:
        """What is known of the type, without a figure of time."""
        if self.record is None:
            return f"{self.reason[0].upper()}{self.reason[1:]}."
        return f"{self.record.summary}{' It is not clearly faster than float32.' if self.faster is False else ''}"


@dataclass(frozen=True, repr=False)
class DtypeChoice(Displayable):
    """The type that a model is loaded in, and why.

    Attributes:
        dtype: The type that was taken.
        requested: What was asked for: a type, or ``"auto"``.
        device: The device, marked where it is simulated.
        candidates: What is known of each reduced type that was considered.
    """

    dtype: str
    requested: str
    device: str
    candidates: tuple[ReducedDtype, ...]

    def to_report(self) -> Report:
        """Return the type, who asked, and what is known of the reduced types."""
        if self.requested == self.dtype:
            reason = "It was asked for."
        elif self.dtype not in REDUCED_DTYPES:
            reason = "'auto' took it: no reduced type is validated here for this model and faster."
        elif is_marked_simulated(self.device):
            reason = (
                "'auto' took it: it is the first that is validated here; under the simulation no speed is measured."
            )
        else:
            reason = "'auto' took it: it is validated here for this model, and the fastest of those that are."
        rows = tuple((candidate.dtype, candidate.summary) for candidate in self.candidates)
        return Report(f"Type: {self.dtype} on {self.device}", (reason,), (Table("", ("type", "certificate"), rows),))


def select_dtype(
    spec: LoadSpec, device: str, computer: DeviceManager, environ: Mapping[str, str]
) -> tuple[LoadSpec, DtypeChoice]:
    """Return a model in the type that it is loaded in on a device, and why that one; its files are fetched."""
    here = replace(spec, folder=model_folder(spec))
    store = record_store(environ)
    identity = identify_model(here, spec.dtype, device, computer)
    candidates = []
    fastest = 0.0
    taken = "float32" if spec.dtype == "auto" else spec.dtype
    for dtype in REDUCED_DTYPES if spec.dtype == "auto" else (spec.dtype,):
        if dtype == INT8 and not parse_device_argument(device).has_int8:
            continue
        own = replace(identity, dtype=dtype)
        candidate = ReducedDtype(dtype, store.find(own), store.explain(own))
        candidates.append(candidate)
        if spec.dtype == "auto" and candidate.record and candidate.faster is not False:
            speed = candidate.record.evidence.speedup or 1.0
            if speed > fastest:
                taken = dtype
                fastest = speed
    return here.in_dtype(taken), DtypeChoice(taken, spec.dtype, identity.shown_device, tuple(candidates))


@dataclass(frozen=True)
class DtypeValidation:
    """What is known of a model that is loaded in a reduced type."""

    dtype: str
    device: str  # Marked where it is simulated.
    reason: str  # Why it is not validated there; empty where it is.
    command: str  # The command that validates it.


def get_dtype_validation(
    key: ModelKey, device: str, computer: DeviceManager, environ: Mapping[str, str]
) -> DtypeValidation | None:
    """Return what is known on a device of a model that was loaded in a reduced type; ``None`` in float32."""
    spec = key.spec
    if spec.dtype not in REDUCED_DTYPES:
        return None
    identity = identify_model(spec, spec.dtype, device, computer)
    reason = record_store(environ).explain(identity)
    folder = spec.reference.location
    if spec.files and (not Path(folder).is_dir() or snapshot_files(folder) != spec.files):
        reason = "its files changed since it was loaded"  # What is in memory is then not known.
    return DtypeValidation(identity.dtype, identity.shown_device, reason, validation_command(spec, key.device))


def warn_unless_validated(key: ModelKey, device: str, computer: DeviceManager, environ: Mapping[str, str]) -> None:
    """Warn of a model that comes to a device in a reduced type that was not validated there, with the command that does."""
    known = get_dtype_validation(key, device, computer, environ)
    if known and known.reason:
        name = describe_value(key.spec.reference.name)
        what = f"{name} is used in {known.dtype} on {known.device}, and {known.reason}."
        warn(
            collapse_whitespace(f"{what} Its answers may differ from those in float32. To validate it: {known.command}")
        )


def validation_command(spec: LoadSpec, device: str | None) -> str:
    """Return the command that validates a model in its type; ``device`` is ``None`` where it was not loaded for one."""
    config = spec.config
    options = {
        "dtype": spec.dtype,
        "device": device,
        "revision": config.revision,
        "cache_dir": None if config.cache_dir is None else os.fspath(config.cache_dir),
        "allow_pickle": config.allow_pickle or None,
    }
    words = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
    return f"nb.runbook.validate_precision({spec.reference.name!r}, texts, {words})"
