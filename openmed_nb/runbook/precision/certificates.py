"""Certificates: that a model kept its answers in a reduced type, what that was measured on, and until when it counts.

A certificate is of one :class:`Identity`. With another file of the model or another torch it has expired,
and on another device it does not count. It holds counts and fingerprints of the texts, and no word of them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any, TypeVar

from ...devices.backend import import_torch
from ...devices.computer import Computer
from ...devices.names import own_name
from ...devices.request import kind_of
from ...devices.simulation import MARK, NOTE
from ...interface.display import Report, Shown, Table
from ...models.content import content_of
from ...models.loading import LoadSpec, model_folder
from ...quantities import counted
from .spans import Spans

FORMAT = "openmed_nb certificate, 2"

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


@dataclass(frozen=True)
class Evidence:
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
    def spans(self) -> Spans:
        """What became of the entities."""
        return Spans(self.exact, self.moved, self.relabelled, self.missing, self.extra)

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
        kept = f"kept {evidence.exact:,} of {counted(evidence.spans.reference, 'entity', 'entities')}"
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
