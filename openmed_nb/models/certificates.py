"""What was found about a model on this computer: certificates of reduced types, the type it is loaded in, and its best batch.

A certificate is of one :class:`Identity`. With another file of the model or another torch it has expired,
and on another device it does not count. It holds counts and fingerprints of the texts, and no word of them.

A reduced type without a certificate is a warning, and ``"auto"`` takes the fastest type that has one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from .._render.display import MARK, OK, Plain, Report, Shown, Table, counted
from .._utils.plain import Least, from_plain, utc, write_whole
from .._utils.text import cause, describe_value, one_line
from .._utils.warning import warn
from ..devices.backend import import_torch
from ..devices.computer import Computer
from ..devices.machine import shows_simulated
from ..devices.registry import device_of
from ..errors import ConfigurationError
from .files import content_of
from .limits import read_json
from .loading import INT8, LoadSpec, files_in, model_folder
from .store import ModelKey

FORMAT = "openmed_nb certificate, 2"
CERTIFICATE, LEARNED = ".json", ".learned"  # How the names of files end.

# The folder of what is kept for the person; where it is not set, the system's own place for such things.
DATA_VARIABLE = "OPENMED_NB_DATA"

SPAN_AGREEMENT = 0.99  # The share of entities that must be the same.
RECALL_LOSS = 0.01  # How much of the reference's recall of gold entities may be lost.
ROUNDING = 1e-9

FLOAT32_INSTEAD = "Use float32."
# What to do about NaN and infinity in a type whose range is short.
OTHER_NUMBERS = {"float16": "Use bfloat16, which has the range of float32."}

# What makes a certificate expire, in words; with another device it counts there, but not here.
CHANGES = {
    "weights": "the weights changed",
    "settings": "its config.json changed",
    "tokenizer": "the tokenizer changed",
    "torch": "torch was {before.torch} and is {now.torch}",
    "transformers": "transformers was {before.transformers} and is {now.transformers}",
}
OF_THE_FILES = {"weights", "settings", "tokenizer"}
OF_THE_DEVICE = {"device", "simulated", "device_name"}

Count = Annotated[int, Least(0)]
Ratio = Annotated[float, Least(0)]


@dataclass(frozen=True)
class Identity:
    """What a certificate is of: it counts for exactly this."""

    model: str  # What the person calls the model; two names for the same files are the same.
    weights: str  # A fingerprint of its weights, of every byte.
    settings: str  # A fingerprint of its config.json.
    tokenizer: str  # A fingerprint of its tokenizer.
    dtype: str  # ``"float16"``, ``"bfloat16"`` or ``"int8"``.
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
        return f"{self.device}{MARK}" if self.simulated else self.device


class EntityCounts:
    """Sums and shares for a class with these fields: what became of the entities of a reference."""

    exact: int
    moved: int
    relabelled: int
    missing: int
    extra: int

    @property
    def reference(self) -> int:
        """How many entities the reference found."""
        return self.exact + self.moved + self.relabelled + self.missing

    @property
    def all(self) -> int:
        """How many entities either found, those that both found counted once."""
        return self.reference + self.extra

    @property
    def agreement(self) -> float:
        """The share of all entities that are exact; 1 where there is none."""
        return self.exact / self.all if self.all else 1.0


@dataclass(frozen=True)
class CertificateEvidence(EntityCounts):
    """What was measured; of the counts of entities and of the recalls, those of the strategy that lost most."""

    texts: Count  # How many texts, each of other words.
    texts_fingerprint: str  # Differs for other texts.
    tokens: Count  # How many tokens they have.
    not_numbers: Count  # How many of them became NaN or infinity.
    # How many entities of the reference, the CPU in float32, were found at the same place with the same label.
    exact: Count
    moved: Count  # How many with other borders.
    relabelled: Count  # How many with another label.
    missing: Count  # How many not at all.
    extra: Count  # How many entities were found that the reference does not have.
    distinct: Count  # How many entities of the reference differ in their words or labels.
    recall_reference: Ratio | None  # The reference's recall of gold entities; ``None`` where no gold was given.
    recall: Ratio | None  # The recall in the reduced type.
    # How many times faster than float32 on the same device, measured in turn; 1 where that is not certain, ``None``
    # where the device is simulated.
    speed_up: Ratio | None

    @property
    def recall_loss(self) -> float:
        """How much of the reference's recall was lost; 0 where no gold was given."""
        return 0.0 if self.recall_reference is None or self.recall is None else self.recall_reference - self.recall


# What is shown of the evidence first, in words.
MEASURED = {
    "texts": "texts, each of other words",
    "tokens": "tokens",
    "not_numbers": "tokens with NaN or infinity",
    "exact": "entities that are the same",
    "moved": "entities with other borders",
    "relabelled": "entities with another label",
    "missing": "entities that were not found",
    "extra": "entities that float32 does not find",
    "distinct": "entities of other words or labels",
    "recall_reference": "recall in float32",
    "recall": "recall in this type",
    "speed_up": "times as fast as float32",
}


@dataclass(frozen=True, repr=False)
class Certificate(Shown):
    """That a model kept its answers.

    Attributes:
        identity: What it is of.
        evidence: What was measured.
        date: The day, as ``2026-03-01``.
        gate: What was required then, by the names of :class:`Gate`; what is required now counts.
    """

    identity: Identity
    evidence: CertificateEvidence
    date: str
    gate: dict[str, float]

    @property
    def simulated(self) -> bool:
        """Whether it is of a simulated device."""
        return self.identity.simulated

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain mappings, strings and numbers, ready for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, stored: Any) -> Certificate:
        """Return the certificate that a mapping holds; for anything else a ValueError says what is wrong."""
        if not isinstance(stored, Mapping) or stored.get("format") != FORMAT:
            raise ValueError(f"it does not say {FORMAT}")
        found: Certificate = from_plain(cls, {name: value for name, value in stored.items() if name != "format"})
        return found

    @property
    def summary(self) -> str:
        """What it says, in one sentence."""
        evidence = self.evidence
        kept = f"kept {evidence.exact:,} of {counted(evidence.reference, 'entity', 'entities')}"
        return f"On {counted(evidence.texts, 'text')} it {kept}."

    def report(self) -> Report:
        """Return what it is of and what it says; what it was measured with stands among the figures."""
        identity, evidence = self.identity, self.evidence
        of_what = {**asdict(identity), "device": identity.shown_device}
        facts = {**of_what, **asdict(evidence), "date": self.date, **self.gate}
        known = {name: str(value) for name, value in facts.items() if value is not None}
        measured = tuple((said, known[name]) for name, said in MEASURED.items() if name in known)
        rest = tuple((name.replace("_", " "), value) for name, value in known.items() if name not in MEASURED)
        type_and_device = f"{identity.dtype} on {identity.shown_device}"
        required = Table("What it counts for, and what was required", ("what", "value"), rest, folded=True)
        figures = (Table("Measured", ("what", "value"), measured), required)
        title = f"Certificate: {identity.model} in {type_and_device}"
        spoken = (f"{identity.model} is validated in {type_and_device} since {self.date}", self.summary)
        return Report(title, (self.summary,), figures=figures, spoken=spoken, status=OK)


def identity_of(spec: LoadSpec, dtype: str, device: str, computer: Computer) -> Identity:
    """Return the identity of a model in a type on a device; its files are fetched, and read once in a process."""
    import_torch()  # Its files may give another version than it gives itself: wheels for CUDA leave their build out.
    known = device_of(device)
    return Identity(
        model=spec.reference.name.encode("utf-8", "replace").decode(),  # The bytes of a path need not be text.
        **asdict(content_of(model_folder(spec))),
        dtype=dtype,
        device=known.type,
        device_name=known.own_name(computer.machine, computer.torch),
        torch=str(computer.torch.version),
        transformers=importlib.metadata.version("transformers"),
        simulated=computer.machine.simulated and known.can_be_simulated,
    )


@dataclass(frozen=True)
class Gate:
    """What is required of a reduced type."""

    span_agreement: float = SPAN_AGREEMENT  # The share of the entities found either way that must be the same.
    recall_loss: float = RECALL_LOSS  # How much of the reference's recall may be lost, where gold entities are given.
    minimum_entities: int = 50  # With fewer in the reference there is no verdict.
    minimum_distinct: int = 10  # With fewer entities that differ in their words or labels there is no verdict.
    # With fewer texts that differ in their words there is no verdict: a list of made-up sentences is no sample of notes.
    minimum_texts: int = 50


@dataclass(frozen=True)
class GateRefusal:
    """Why a type is refused, and one thing to do."""

    reason: str  # What was seen.
    remedy: str  # What to do.
    against: bool = True  # Whether that speaks against the type; too few texts do not.


def refusals(evidence: CertificateEvidence, dtype: str, gate: Gate) -> Iterator[GateRefusal]:
    """Yield why a type is refused, by what was measured now or when a certificate was made."""
    if evidence.not_numbers:
        what = f"{counted(evidence.not_numbers, 'token')} became NaN or infinity."
        yield GateRefusal(what, OTHER_NUMBERS.get(dtype, FLOAT32_INSTEAD))
    if evidence.agreement < gate.span_agreement:
        what = f"Only {evidence.exact:,} of {counted(evidence.all, 'entity', 'entities')} are the same."
        yield GateRefusal(what, FLOAT32_INSTEAD)
    if evidence.recall_loss > gate.recall_loss + ROUNDING:
        recalls = f"{evidence.recall:.1%} of the gold entities, float32 {evidence.recall_reference:.1%}"
        yield GateRefusal(f"It finds {recalls}.".replace("%", " %"), FLOAT32_INSTEAD)
    seen = (
        ("entities", evidence.reference, gate.minimum_entities),
        ("different entities", evidence.distinct, gate.minimum_distinct),
        ("different texts", evidence.texts, gate.minimum_texts),
    )
    few = [f"{count:,} of the {least} {what}" for what, count, least in seen if count < least]
    if few:
        what = f"Too little to tell: {', '.join(few)} that are needed."
        yield GateRefusal(what, "Repeat it with more texts, each different.", against=False)


def refused_because(certificate: Certificate) -> str:
    """Return why the counts of a certificate do not pass the gate of today, in words; empty where they do."""
    found = refusals(certificate.evidence, certificate.identity.dtype, Gate())
    return in_one_sentence([f"{one.reason[0].lower()}{one.reason[1:]}".removesuffix(".") for one in found])


def changes(before: Identity, now: Identity) -> set[str]:
    """Return the names of what differs between two identities: of files, versions and the device."""
    return {name for name in {*CHANGES, *OF_THE_DEVICE} if getattr(before, name) != getattr(now, name)}


def why_none(certificates: Sequence[Certificate], now: Identity) -> str:
    """Return why none of a model's certificates, which counted somewhere, counts now; empty where none says why."""
    real = [one for one in certificates if now.simulated or not one.simulated]
    here = [one for one in real if not changes(one.identity, now) & OF_THE_DEVICE]
    if here:
        before = min(here, key=lambda one: (len(changes(one.identity, now)), one.date)).identity
        words = [CHANGES[name].format(before=before, now=now) for name in CHANGES if name in changes(before, now)]
        return f"its certificate expired: {in_one_sentence(words)}"
    same_files = [one.identity for one in real if not changes(one.identity, now) & OF_THE_FILES]
    # Two devices of one kind are told apart by their own names.
    places = {one.device_name if one.shown_device == now.shown_device else one.shown_device for one in same_files}
    return f"it was validated on {' and '.join(sorted(places))} only" if places else ""


def in_one_sentence(reasons: Sequence[str]) -> str:
    """Return "one, two, and three"."""
    return ", and ".join([", ".join(reasons[:-1]), reasons[-1]]) if len(reasons) > 1 else "".join(reasons)


@dataclass(frozen=True)
class Learned:
    """How many tokens of a model run best at once, which counts for its identity as a certificate does."""

    identity: Identity
    batch_tokens: Annotated[int, Least(1)]
    by: str  # What measured it, such as ``nb.sweep()``.
    date: str  # The day, as ``2026-03-01``.


class CertificateStore:
    """The certificates of a person, and what was learned, a file each; any other file in the folder is left alone.

    The folder need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, identity: Identity) -> Certificate | None:
        """Return the certificate that counts for an identity."""
        found = self._own(identity)
        return found if isinstance(found, Certificate) and not refused_because(found) else None

    def explain(self, identity: Identity) -> str:
        """Return why no certificate counts for an identity, in words; empty where one does."""
        own = self._own(identity)
        if isinstance(own, Certificate):
            reason = refused_because(own)
            return reason and f"its certificate does not count: {reason}"
        if own is not None:
            return f"its certificate is damaged ({own})"
        found = [self._read(file) for file in sorted(self.folder.glob("*.json"))]
        others = [
            one
            for one in found
            if isinstance(one, Certificate)
            and one.identity.dtype == identity.dtype
            # By its name, or where that differs by its weights.
            and (one.identity.model == identity.model or one.identity.weights == identity.weights)
            # One without changes counts under its own name: this file was renamed.
            and changes(one.identity, identity)
            and not refused_because(one)
        ]
        damaged = sum(isinstance(one, str) for one in found)
        unreadable = f", and {counted(damaged, 'file')} in its folder cannot be read" if damaged else ""
        return why_none(others, identity) or f"there is no certificate{unreadable}"

    def store(self, certificate: Certificate) -> Path:
        """Write a certificate in one step, in the place of an older one of the same identity; return its file."""
        return self._write(self.file(certificate.identity), certificate.to_dict())

    def learn(self, learned: Learned) -> Path:
        """Write what was learned of an identity, in the place of what was there; return its file."""
        return self._write(self.file(learned.identity, LEARNED), asdict(learned))

    def learned(self) -> Iterator[Learned]:
        """Yield all that was learned; a file that is damaged says nothing, as if it was not there."""
        for file in sorted(self.folder.glob(f"*{LEARNED}")):
            with contextlib.suppress(OSError, ValueError, RecursionError):
                yield from_plain(Learned, read_json(file))

    def remove(self, identity: Identity, ending: str = CERTIFICATE) -> None:
        """Remove the certificate of an identity, or what was learned of it, where there is one."""
        file = self.file(identity, ending)
        if file.is_file():
            with self._writing():
                file.unlink(missing_ok=True)

    def file(self, identity: Identity, ending: str = CERTIFICATE) -> Path:
        """Return where the certificate of an identity is stored, or what was learned of it."""
        return self.folder / f"{identity.key}{ending}"

    def _write(self, file: Path, content: Mapping[str, Any]) -> Path:
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(content, indent=2))
        return file

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"Certificates cannot be kept in {str(self.folder)!r}: {cause(error)}."
            raise ConfigurationError(what, f"Set {DATA_VARIABLE} to a folder that can be written.") from error

    def _own(self, identity: Identity) -> Certificate | str | None:
        found = self._read(self.file(identity))
        return None if isinstance(found, Certificate) and found.identity.key != identity.key else found

    def _read(self, file: Path) -> Certificate | str | None:
        """Return the certificate of a file, what is wrong with it, or ``None`` where there is no file."""
        try:
            return Certificate.of(read_json(file))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            return cause(error)


def certificate_store(environ: Mapping[str, str]) -> CertificateStore:
    """Return the store of the person with this environment."""
    import platformdirs

    named = environ.get(DATA_VARIABLE)
    try:
        folder = Path(named).expanduser() if named else platformdirs.user_data_path("openmed_nb", appauthor=False)
    except RuntimeError as error:  # pathlib's, for a user without a home.
        what = f"{DATA_VARIABLE} is {named!r}, and that home is not known."
        raise ConfigurationError(what, f"Set {DATA_VARIABLE} to the full path of a folder.") from error
    return CertificateStore(folder / "certificates")


def learned_of(spec: LoadSpec, computer: Computer, environ: Mapping[str, str]) -> dict[str, int]:
    """Return how many tokens of a model run best at once, by kind of device, as it was learned on this computer.

    Its files are read only where something was learned of a model of that name.
    """
    found = {}
    with contextlib.suppress(ConfigurationError):  # Without a place for it, nothing was learned; a load goes on.
        for one in certificate_store(environ).learned():
            kind, named = one.identity.device, one.identity.model in spec.reference.names
            if named and identity_of(spec, spec.dtype, kind, computer).key == one.identity.key:
                found[kind] = one.batch_tokens
    return found


def remember(  # noqa: PLR0913, PLR0917 - each is one thing
    spec: LoadSpec, device: str, computer: Computer, environ: Mapping[str, str], batch_tokens: int | None, by: str
) -> None:
    """Keep how many tokens of a model run best at once on a device, or with ``None`` forget it; what fails is a warning."""
    identity = identity_of(spec, spec.dtype, device, computer)
    try:
        if batch_tokens is None:
            certificate_store(environ).remove(identity, LEARNED)
        else:
            certificate_store(environ).learn(Learned(identity, batch_tokens, by, utc()[:10]))
    except ConfigurationError as error:
        warn(one_line(str(error)))


# Which type a model is loaded in.

# The types that need a certificate, in the order in which equally fast ones are taken.
REDUCED = ("bfloat16", "float16", "int8")

# A reduced type counts as faster than float32 when it is more than this many times as fast.
WORTH = 1.05


@dataclass(frozen=True)
class ReducedType(Plain):
    """A reduced type, and its certificate that counts here, or the reason why none does."""

    dtype: str
    certificate: Certificate | None
    reason: str

    ALSO, HIDDEN = ("faster", "said"), ("certificate", "reason")

    @property
    def faster(self) -> bool | None:
        """Whether it was measured to be worth it; ``None`` where the device is simulated, and no speed is measured."""
        if self.certificate is None:
            return False
        gain = self.certificate.evidence.speed_up
        return None if gain is None else gain > WORTH

    @property
    def said(self) -> str:
        """What is known of the type, without a figure of time."""
        if self.certificate is None:
            return f"{self.reason[0].upper()}{self.reason[1:]}."
        return f"{self.certificate.summary}{' It is not clearly faster than float32.' if self.faster is False else ''}"


@dataclass(frozen=True, repr=False)
class DtypeChoice(Shown):
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
    candidates: tuple[ReducedType, ...]

    def report(self) -> Report:
        """Return the type, who asked, and what is known of the reduced types."""
        if self.dtype not in REDUCED:
            why = "no reduced type is validated here for this model and faster"
        elif shows_simulated(self.device):
            why = "it is the first that is validated here; under the simulation no speed is measured"
        else:
            why = "it is validated here for this model, and the fastest of those that are"
        reason = "It was asked for." if self.requested == self.dtype else f"'auto' took it: {why}."
        rows = tuple((one.dtype, one.said) for one in self.candidates)
        return Report(f"Type: {self.dtype} on {self.device}", (reason,), (Table("", ("type", "certificate"), rows),))


def in_chosen_dtype(
    spec: LoadSpec, device: str, computer: Computer, environ: Mapping[str, str]
) -> tuple[LoadSpec, DtypeChoice]:
    """Return a model in the type that it is loaded in on a device, and why that one; its files are fetched."""
    here, store = replace(spec, folder=model_folder(spec)), certificate_store(environ)
    identity = identity_of(here, spec.dtype, device, computer)
    wanted = REDUCED if spec.dtype == "auto" else (spec.dtype,)
    identities = [replace(identity, dtype=one) for one in wanted if one != INT8 or device_of(device).has_int8]
    known = tuple(ReducedType(one.dtype, store.find(one), store.explain(one)) for one in identities)
    taken = spec.dtype
    if taken == "auto":
        worth_it = [(one.dtype, one.certificate) for one in known if one.certificate and one.faster is not False]
        taken, _ = max(worth_it, key=lambda one: one[1].evidence.speed_up or 1.0, default=("float32", None))
    return here.in_dtype(taken), DtypeChoice(taken, spec.dtype, identity.shown_device, known)


@dataclass(frozen=True)
class Validation:
    """What is known of a model that is loaded in a reduced type."""

    dtype: str
    device: str  # Marked where it is simulated.
    reason: str  # Why it is not validated there; empty where it is.
    command: str  # The command that validates it.


def validation_of(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> Validation | None:
    """Return what is known on a device of a model that was loaded in a reduced type; ``None`` in float32."""
    spec = key.spec
    if spec.dtype not in REDUCED:
        return None
    identity = identity_of(spec, spec.dtype, device, computer)
    reason, folder = certificate_store(environ).explain(identity), spec.reference.location
    if spec.files and (not Path(folder).is_dir() or files_in(folder) != spec.files):
        reason = "its files changed since it was loaded"  # What is in memory is then not known.
    return Validation(identity.dtype, identity.shown_device, reason, validating_command(spec, key.device))


def warn_unless_validated(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> None:
    """Warn of a model that comes to a device in a reduced type that was not validated there, with the command that does."""
    known = validation_of(key, device, computer, environ)
    if known and known.reason:
        what = (
            f"{describe_value(key.spec.reference.name)} is used in {known.dtype} on {known.device}, and {known.reason}."
        )
        text = one_line(f"{what} Its answers may differ from those in float32. To validate it: {known.command}")
        warn(text)


def validating_command(spec: LoadSpec, device: str | None) -> str:
    """Return the command that validates a model in its type; ``device`` is ``None`` where it was not loaded for one."""
    config = spec.config
    cache = None if config.cache_dir is None else os.fspath(config.cache_dir)
    options = {"dtype": spec.dtype, "device": device, "revision": config.revision, "cache_dir": cache}
    named = {**options, "allow_pickle": config.allow_pickle or None}
    words = ", ".join(f"{name}={value!r}" for name, value in named.items() if value is not None)
    return f"nb.runbook.validate_precision({spec.reference.name!r}, texts, {words})"
