"""Certificates: that a model kept its answers in a reduced type, what that was measured on, and until when it counts.

A certificate is of one :class:`Identity`. With another file of the model or another torch it has expired,
and on another device it does not count. It holds counts and fingerprints of the texts, and no word of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from ..devices.backend import import_torch
from ..devices.computer import Computer
from ..devices.machine import own_name
from ..devices.request import kind_of
from ..display import MARK, NOTE, Report, Shown, Table, counted
from ..errors import ConfigurationError, cause
from .files import content_of
from .loading import LoadSpec, model_folder

FORMAT = "openmed_nb certificate, 2"

# The share of entities that must be the same, else a comparison has failed.
SPAN_AGREEMENT = 0.99

# How much of the reference's recall of gold entities may be lost.
RECALL_LOSS = 0.01

ROUNDING = 1e-9

# What to do about NaN and infinity in a type whose range is short.
OTHER_NUMBERS = {"float16": "Use bfloat16, which has the range of float32."}

FLOAT32_INSTEAD = "Use float32."

Value = TypeVar("Value")


@dataclass(frozen=True)
class Identity:
    """What a certificate is of: it counts for exactly this.

    Attributes:
        model: What the person calls the model; two names for the same files are the same.
        weights: A fingerprint of its weights, of every byte.
        settings: A fingerprint of its config.json.
        tokenizer: A fingerprint of its tokenizer.
        dtype: ``"float16"``, ``"bfloat16"`` or ``"int8"``.
        device: ``"mps"``, ``"cuda"`` or ``"cpu"``.
        device_name: What the device calls itself.
        torch: The version of torch.
        transformers: The version of transformers.
        simulated: Whether the device is simulated.
    """

    model: str
    weights: str
    settings: str
    tokenizer: str
    dtype: str
    device: str
    device_name: str
    torch: str
    transformers: str
    simulated: bool

    @property
    def key(self) -> str:
        """A short text that all identities share which are the same but for the model's name."""
        return hashlib.blake2b(json.dumps(astuple(self)[1:]).encode(), digest_size=12).hexdigest()

    @property
    def shown_device(self) -> str:
        """The kind of device, marked where it is simulated."""
        return f"{self.device}{MARK}" if self.simulated else self.device


class EntityCounts:
    """Shares of what became of the entities of a reference, for a class that counts them in these fields."""

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
class Evidence(EntityCounts):
    """What was measured; of the counts of entities and of the recalls, those of the strategy that lost most.

    Attributes:
        texts: How many texts, each of other words.
        texts_fingerprint: Tells them from others.
        tokens: How many tokens they have.
        not_numbers: How many of them became NaN or infinity.
        exact: How many entities of the reference, the CPU in float32, were found at the same place with the same label.
        moved: How many with other borders.
        relabelled: How many with another label.
        missing: How many not at all.
        extra: How many entities were found that the reference has not.
        distinct: How many entities of the reference differ in their words or labels.
        recall_reference: The reference's recall of gold entities; ``None`` where no gold was given.
        recall: The recall in the reduced type.
        speed_up: How many times faster than float32 on the same device, measured in turn; 1 where that is not certain,
            ``None`` where the device is simulated.
    """

    texts: int
    texts_fingerprint: str
    tokens: int
    not_numbers: int
    exact: int
    moved: int
    relabelled: int
    missing: int
    extra: int
    distinct: int
    recall_reference: float | None
    recall: float | None
    speed_up: float | None

    @property
    def recall_loss(self) -> float:
        """How much of the reference's recall was lost; 0 where no gold was given."""
        return 0.0 if self.recall_reference is None or self.recall is None else self.recall_reference - self.recall


@dataclass(frozen=True, repr=False)
class Certificate(Shown):
    """That a model kept its answers.

    Attributes:
        identity: What it is of.
        evidence: What was measured.
        date: The day, as ``2026-03-01``.
        gate: What was asked for then, by the names of :class:`.requirements.Gate`; what is asked for now counts.
    """

    identity: Identity
    evidence: Evidence
    date: str
    gate: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate as plain mappings, strings and numbers, ready for JSON."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def of(cls, stored: Any) -> Certificate:
        """Return the certificate that a mapping holds.

        Raises:
            ValueError: For anything else, with what is wrong.
        """
        if not isinstance(stored, Mapping) or stored.get("format") != FORMAT:
            raise ValueError(f"it does not say {FORMAT!r}")
        if not isinstance(stored.get("date"), str) or not isinstance(stored.get("gate"), Mapping):
            raise ValueError("it has no date or no gate")  # noqa: TRY004 - one error for whatever is wrong in a file
        identity = value_of(Identity, stored.get("identity"))
        return cls(identity, value_of(Evidence, stored.get("evidence")), stored["date"], stored["gate"])

    @property
    def summary(self) -> str:
        """What it says, in one sentence."""
        evidence = self.evidence
        kept = f"kept {evidence.exact:,} of {counted(evidence.reference, 'entity', 'entities')}"
        return f"On {counted(evidence.texts, 'text')} it {kept}."

    def report(self) -> Report:
        """Return what it is of and what it says; what it was measured with stands among the figures."""
        identity = self.identity
        of_what = {**asdict(identity), "device": identity.shown_device}
        facts = {**of_what, **asdict(self.evidence), "date": self.date, **self.gate}
        rows = tuple((name, str(value)) for name, value in facts.items() if value is not None)
        title = f"Certificate: {identity.model} in {identity.dtype} on {identity.shown_device}"
        simulated = (NOTE,) if identity.simulated else ()
        return Report(title, (self.summary, *simulated), figures=(Table("Measured", ("what", "value"), rows),))


KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (float, int),
    "float | None": (float, int, type(None)),
}
"""What a field may hold, by how its type is written."""


def value_of(kind: type[Value], stored: Any) -> Value:
    """Return a value made of a mapping that has exactly its fields, each of its type.

    Raises:
        ValueError: Where the mapping has others.
    """
    wanted = {field.name: KINDS[str(field.type)] for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(stored, Mapping) or set(stored) != set(wanted):
        raise ValueError(f"its {kind.__name__.lower()} has other fields")
    wrong = [name for name, kinds in wanted.items() if type(stored[name]) not in kinds]
    if wrong:
        raise ValueError(f"its {wrong[0]} cannot be {type(stored[wrong[0]]).__name__}")
    numbers = {name: value for name, value in stored.items() if isinstance(value, (int, float))}
    impossible = [name for name, value in numbers.items() if not 0 <= value < float("inf")]
    if impossible:
        raise ValueError(f"its {impossible[0]} cannot be {numbers[impossible[0]]}")
    return kind(**stored)


def identity_of(spec: LoadSpec, dtype: str, device: str, computer: Computer) -> Identity:
    """Return the identity of a model in a type on a device of a computer; its files are read once in a process.

    Args:
        spec: The model; its files are fetched where they are not here.
        dtype: The type.
        device: The device.
        computer: What knows the names of devices, and torch.
    """
    import_torch()  # Its files may say another version than it says itself: wheels for CUDA leave their build out.
    content = content_of(model_folder(spec))
    return Identity(
        model=spec.reference.name,
        weights=content.weights,
        settings=content.settings,
        tokenizer=content.tokenizer,
        dtype=dtype,
        device=kind_of(device),
        device_name=own_name(device, computer.machine, computer.torch),
        torch=str(computer.torch.version),
        transformers=importlib.metadata.version("transformers"),
        simulated=computer.machine.simulated and kind_of(device) == "mps",
    )


@dataclass(frozen=True)
class Gate:
    """What is asked of a reduced type.

    Attributes:
        span_agreement: The share of the entities that either way found which must be the same.
        recall_loss: How much of the reference's recall may be lost, where gold entities are given.
        minimum_entities: With fewer in the reference, nothing can be told.
        minimum_distinct: With fewer entities that differ in their words or labels, nothing can be told.
        minimum_texts: With fewer texts that differ in their words, nothing can be told.
    """

    span_agreement: float = SPAN_AGREEMENT
    recall_loss: float = RECALL_LOSS
    minimum_entities: int = 50
    minimum_distinct: int = 10
    minimum_texts: int = 20


@dataclass(frozen=True)
class Refusal:
    """Why a type is refused, and one thing to do.

    Attributes:
        reason: What was seen.
        remedy: What to do.
        against: Whether that speaks against the type; too few texts do not.
    """

    reason: str
    remedy: str
    against: bool = True


def refusals(evidence: Evidence, dtype: str, gate: Gate) -> Iterator[Refusal]:
    """Yield why a type is refused.

    Args:
        evidence: What was measured, now or when a certificate was made.
        dtype: The type.
        gate: What is asked for.

    Example:
        >>> evidence = Evidence(20, "f", 900, 0, 40, 8, 0, 0, 0, 12, None, None, 1.4)
        >>> [one.reason for one in refusals(evidence, "bfloat16", Gate())]
        ['Only 40 of 48 entities are the same.', 'Too little to tell: 48 of the 50 entities that are needed.']
    """
    if evidence.not_numbers:
        what = f"{counted(evidence.not_numbers, 'token')} became NaN or infinity."
        yield Refusal(what, OTHER_NUMBERS.get(dtype, FLOAT32_INSTEAD))
    if evidence.agreement < gate.span_agreement:
        what = f"Only {evidence.exact:,} of {counted(evidence.all, 'entity', 'entities')} are the same."
        yield Refusal(what, FLOAT32_INSTEAD)
    if evidence.recall_loss > gate.recall_loss + ROUNDING:
        recalls = f"{evidence.recall:.1%} of the gold entities, float32 {evidence.recall_reference:.1%}"
        yield Refusal(f"It finds {recalls}.", FLOAT32_INSTEAD)
    seen = {
        "entities": (evidence.reference, gate.minimum_entities),
        "different entities": (evidence.distinct, gate.minimum_distinct),
        "different texts": (evidence.texts, gate.minimum_texts),
    }
    few = [f"{count:,} of the {least} {what}" for what, (count, least) in seen.items() if count < least]
    if few:
        what = f"Too little to tell: {', '.join(few)} that are needed."
        yield Refusal(what, "Repeat it with more texts, each different.", against=False)


OF_THE_FILES = ("weights", "settings", "tokenizer")
OF_THE_DEVICE = ("device", "simulated", "device_name")

CHANGES = {
    "weights": "the weights changed",
    "settings": "its config.json changed",
    "tokenizer": "the tokenizer changed",
    "torch": "torch was {before.torch} and is {now.torch}",
    "transformers": "transformers was {before.transformers} and is {now.transformers}",
}
"""What makes a certificate expire, and how that is said."""


def changes(before: Identity, now: Identity) -> list[str]:
    """Return the names of what differs between two identities: of files, versions and the device."""
    return [name for name in (*CHANGES, *OF_THE_DEVICE) if getattr(before, name) != getattr(now, name)]


def why_none(certificates: Sequence[Certificate], identity: Identity) -> str:
    """Return why none of the certificates of a model counts for it as it is here, in words; empty where none says why.

    Args:
        certificates: Those of the model in its type that counted somewhere, at some time.
        identity: The model as it is here.
    """
    real = [one for one in certificates if identity.simulated or not one.identity.simulated]
    here = [one for one in real if not {*changes(one.identity, identity)} & {*OF_THE_DEVICE}]
    if here:
        nearest = min(here, key=lambda one: (len(changes(one.identity, identity)), one.date))
        return f"its certificate expired: {expired_because(nearest, identity)}"
    same_files = [one.identity for one in real if not {*changes(one.identity, identity)} & {*OF_THE_FILES}]
    places = sorted({other_device(one, identity) for one in same_files})
    return f"it was validated on {' and '.join(places)} only" if places else ""


def other_device(before: Identity, now: Identity) -> str:
    """Return what another device is called: its kind, or where that is the same, its own name."""
    return before.device_name if before.shown_device == now.shown_device else before.shown_device


def expired_because(certificate: Certificate, identity: Identity) -> str:
    """Return which files and versions changed since a certificate was made, in words; empty where none did.

    Example:
        >>> from .certificates import Evidence
        >>> before = Identity("bundled", "w", "s", "t", "bfloat16", "mps", "Apple M2 Pro", "2.13.0", "5.17.0", False)
        >>> after = Identity("bundled", "x", "s", "t", "bfloat16", "mps", "Apple M2 Pro", "2.14.0", "5.17.0", False)
        >>> evidence = Evidence(20, "f", 900, 0, 60, 0, 0, 0, 0, 12, None, None, 1.4)
        >>> expired_because(Certificate(before, evidence, "2026-03-01", {}), after)
        'the weights changed, and torch was 2.13.0 and is 2.14.0'
    """
    before = certificate.identity
    differing = [name for name in changes(before, identity) if name in CHANGES]
    return in_one_sentence([CHANGES[name].format(before=before, now=identity) for name in differing])


def refused_because(certificate: Certificate) -> str:
    """Return why the counts of a certificate are not enough for what is asked for now, in words; empty where they are."""
    found = refusals(certificate.evidence, certificate.identity.dtype, Gate())
    return in_one_sentence([f"{one.reason[0].lower()}{one.reason[1:]}".removesuffix(".") for one in found])


def in_one_sentence(said: Sequence[str]) -> str:
    """Return several things as one.

    Example:
        >>> in_one_sentence(["one", "two", "three"]), in_one_sentence([])
        ('one, two, and three', '')
    """
    return ", ".join(said[:-1]) + (", and " if len(said) > 1 else "") + said[-1] if said else ""


DATA_VARIABLE = "OPENMED_NB_DATA"
"""The folder of what is kept for the person; where it is not set, the system's own place for such things."""


class CertificateStore:
    """The certificates of a person, a file each; what is no certificate among them is left alone.

    Args:
        folder: Where they are; made when the first is stored.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, identity: Identity) -> Certificate | None:
        """Return the certificate that counts for an identity, ``None`` where there is none."""
        found = self.own(identity)
        return found if isinstance(found, Certificate) and not refused_because(found) else None

    def own(self, identity: Identity) -> Certificate | str | None:
        """Return what is stored for an identity: a certificate, why it is none, or ``None`` where there is nothing."""
        found = self.read(self.file(identity))
        return None if isinstance(found, Certificate) and found.identity.key != identity.key else found

    def store(self, certificate: Certificate) -> Path:
        """Write a certificate in one step, in the place of an older one of the same identity; return its file.

        Raises:
            ConfigurationError: Where it cannot be written.
        """
        file, text = self.file(certificate.identity), json.dumps(certificate.to_dict(), indent=2)
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.folder) as aside:
                part = Path(aside) / file.name
                part.write_text(text, "utf-8")
                part.replace(file)
        return file

    def remove(self, identity: Identity) -> bool:
        """Remove the certificate of an identity; return whether there was one.

        Raises:
            ConfigurationError: Where it cannot be removed.
        """
        file = self.file(identity)
        there = file.is_file()
        if there:
            with self.writing():
                file.unlink(missing_ok=True)
        return there

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn what a file system says into an error with a remedy.

        Raises:
            ConfigurationError: Where the folder cannot be written.
        """
        try:
            yield
        except OSError as error:
            what = f"Certificates cannot be kept in {str(self.folder)!r}: {cause(error)}."
            raise ConfigurationError(what, f"Set {DATA_VARIABLE} to a folder that can be written.") from error

    def explain(self, identity: Identity) -> str:
        """Return why no certificate counts for an identity, in words; empty where one does."""
        own = self.own(identity)
        if isinstance(own, Certificate):
            reason = refused_because(own)
            return reason and f"its certificate does not count: {reason}"
        if own is not None:
            return f"its certificate is damaged ({own})"
        certificates, damaged = self.others(identity)
        unreadable = f", and {counted(damaged, 'file')} in its folder cannot be read" if damaged else ""
        return why_none(certificates, identity) or f"there is no certificate{unreadable}"

    def others(self, identity: Identity) -> tuple[list[Certificate], int]:
        """Return the certificates of the same model in the same type that counted once, or elsewhere, and how many files are none."""
        found = [self.read(file) for file in sorted(self.folder.glob("*.json"))]
        others = [one for one in found if isinstance(one, Certificate) and of_same_model(one.identity, identity)]
        # One without changes counts under its own name: this file was renamed.
        certificates = [one for one in others if changes(one.identity, identity) and not refused_because(one)]
        return certificates, sum(isinstance(one, str) for one in found)

    def file(self, identity: Identity) -> Path:
        """Return where the certificate of an identity is stored."""
        return self.folder / f"{identity.key}.json"

    def read(self, file: Path) -> Certificate | str | None:
        """Return the certificate of a file, why it is none, or ``None`` where there is no file."""
        try:
            return Certificate.of(json.loads(file.read_text("utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError) as error:
            return cause(error)


def of_same_model(one: Identity, other: Identity) -> bool:
    """Tell whether two identities are of one model in one type: by its name, or where that differs by its weights."""
    return one.dtype == other.dtype and (one.model == other.model or one.weights == other.weights)


def certificate_store(environ: Mapping[str, str]) -> CertificateStore:
    """Return the store of the person whose environment this is.

    Raises:
        ConfigurationError: Where the variable names the home of nobody.

    Example:
        >>> certificate_store({"OPENMED_NB_DATA": "notes/data"}).folder.as_posix()
        'notes/data/certificates'
    """
    named = environ.get(DATA_VARIABLE)
    try:
        folder = Path(named).expanduser() if named else usual_folder()
    except RuntimeError as error:  # So pathlib says that a person has no home.
        what = f"{DATA_VARIABLE} is {named!r}, and that home is not known."
        raise ConfigurationError(what, f"Set {DATA_VARIABLE} to the full path of a folder.") from error
    return CertificateStore(folder / "certificates")


def usual_folder() -> Path:
    """Return the system's place for what a program keeps for a person."""
    import platformdirs

    return platformdirs.user_data_path("openmed_nb", appauthor=False)
