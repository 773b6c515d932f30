"""The precision gate: whether a model may be used in a reduced type, by what became of its entities on texts of the person."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ...devices.request import kind_of
from ...display import Report, Shown, counted
from ...errors import ConfigurationError, ModelUnusable
from ...models.certificates import (
    Certificate,
    CertificateEvidence,
    CertificateStore,
    Gate,
    GateRefusal,
    Identity,
    refusals,
)
from ...models.config import dtype_name
from ...models.dtypes import REDUCED
from ...models.files import content_of
from ...models.loading import LoadSpec, load, model_folder
from .measurement import Pair, distinct, in_every_strategy, pair_of_files, parity_of, speed_up, undisturbed, with_model
from .parity import ParityReport
from .spans import Score

if TYPE_CHECKING:
    from ...annotation.stream import Annotator


USED = {
    False: "dtype='auto' takes it from now on where it is faster than float32.",
    True: "dtype='auto' takes it from now on under the simulation, where no speed is measured.",
}
"""What an accepted type is good for, by whether the device is simulated."""


@dataclass(frozen=True, repr=False)
class PrecisionVerdict(Shown):
    """Whether a model may be used in a reduced type on a device.

    Attributes:
        parity: What was measured.
        gate: What was asked for.
        refusals: Why it may not; empty where it may.
        certificate: The certificate, where it may.
    """

    parity: ParityReport
    gate: Gate
    refusals: tuple[GateRefusal, ...] = ()
    certificate: Certificate | None = None

    @property
    def accepted(self) -> bool:
        """Whether the model may be used so."""
        return not self.refusals

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists, strings and numbers, ready for JSON."""
        return {
            "accepted": self.accepted,
            "refusals": [asdict(one) for one in self.refusals],
            "gate": asdict(self.gate),
            "certificate": self.certificate and self.certificate.to_dict(),
            "parity": self.parity.to_dict(),
        }

    def report(self) -> Report:
        """Return the verdict with its reasons, and what was measured."""
        parity, measured = self.parity, self.parity.report()
        verdict = "Accepted" if self.accepted else "Refused"
        title = f"{verdict}: {parity.model} in {parity.dtype} on {parity.device}"
        asked = f"Asked for: {self.gate.span_agreement:.0%} of the entities the same, in every strategy."
        reasons = [f"{one.reason} {one.remedy}" for one in self.refusals]
        if self.certificate:
            reasons = [self.certificate.summary, USED[self.certificate.identity.simulated]]
        figures = self.certificate.report().figures if self.certificate else ()
        return Report(
            title,
            (*reasons, asked, *measured.sentences),
            measured.tables,
            figures=(*figures, *measured.figures),
        )


def judge(
    report: ParityReport, gate: Gate, identity: Identity, gain: float | None = None, date: str = ""
) -> PrecisionVerdict:
    """Return whether a model may be used in a reduced type.

    Args:
        report: What was measured.
        gate: What is asked for.
        identity: The model, its type, the device and the versions that a certificate is made of.
        gain: How many times faster it is than float32; ``None`` where that was not measured.
        date: The day, as ``2026-03-01``.
    """
    evidence = evidence_of(report, gain)
    found = tuple(refusals(evidence, report.dtype, gate))
    certificate = None if found else Certificate(identity, evidence, date, asdict(gate))
    return PrecisionVerdict(report, gate, found, certificate)


def evidence_of(report: ParityReport, gain: float | None) -> CertificateEvidence:
    """Return what a certificate keeps of a comparison: counts, and no place of an entity."""
    spans = report.spans
    recalls = [one.recall if one.gold else None for one in report.gold or (Score(), Score())]
    return CertificateEvidence(
        texts=report.texts,
        texts_fingerprint=report.texts_fingerprint,
        tokens=report.tokens,
        not_numbers=report.not_numbers,
        exact=spans.exact,
        moved=spans.moved,
        relabelled=spans.relabelled,
        missing=spans.missing,
        extra=spans.extra,
        distinct=report.distinct,
        recall_reference=recalls[0],
        recall=recalls[1],
        speed_up=gain and round(gain, 3),
    )


def check_reduced(dtype: object) -> str:
    """Return a type that needs a certificate.

    Raises:
        ConfigurationError: For any other.

    Example:
        >>> check_reduced("int8")
        'int8'
    """
    name = dtype_name(dtype)
    if name not in REDUCED:
        raise ConfigurationError(f"{name!r} is no reduced type.", f"Use one of {', '.join(REDUCED)}.")
    return name


def check_named(model: Any) -> None:
    """Check that a model is named, so that a certificate can be of its files.

    Raises:
        ConfigurationError: For a pipeline or anything else; its weights need not be those of any file.
    """
    if model is not None and not isinstance(model, (str, os.PathLike)):
        what = f"A certificate is of the files of a model, and {type(model).__name__} names none."
        raise ConfigurationError(what, "Pass the name or the folder of the model first, and then the texts.")


def validate(  # noqa: PLR0913, PLR0917 - what is measured, on what, and where it is kept
    spec: LoadSpec, device: str, texts: list[Any], gold: Any, identity: Identity, store: CertificateStore
) -> PrecisionVerdict:
    """Measure a model in a reduced type, judge it, and store its certificate, or remove an older one that is refuted.

    Args:
        spec: The model in the reduced type.
        device: The device.
        texts: The texts.
        gold: Their gold entities, ``None`` where there are none.
        identity: What a certificate would be of.
        store: Where it is stored.
    """
    pair, gate = pair_of_files(spec, device), Gate()
    given, (texts, gold) = len(texts), distinct(texts, gold)
    report = parity_of(in_every_strategy(pair), texts, gold)
    if len(texts) < given:
        repeated = f"{counted(given - len(texts), 'text')} with the words of another one did not count."
        report = replace(report, notes=(*report.notes, repeated))
    verdict = judge(report, gate, identity)
    if verdict.accepted:
        gain = None
        if not identity.simulated:
            with undisturbed(pair):
                gain = speed_up(float32_there(pair, spec, device), pair.candidate, texts)
        verdict = judge(report, gate, identity, gain, today())
    check_unchanged(spec, identity)
    settle(verdict, identity, store)
    return verdict


def settle(verdict: PrecisionVerdict, identity: Identity, store: CertificateStore) -> None:
    """Store the certificate of a verdict, or remove an older one where something speaks against the type."""
    if verdict.certificate:
        store.store(verdict.certificate)
    elif any(one.against for one in verdict.refusals):
        store.remove(identity)


def check_unchanged(spec: LoadSpec, identity: Identity) -> None:
    """Check that the files of a model are those that a certificate would be of, after they were read and measured.

    Raises:
        ModelUnusable: Where one was changed meanwhile.
    """
    if replace(identity, **asdict(content_of(model_folder(spec)))) != identity:
        what = f"The files of {identity.model!r} changed while it was measured."
        raise ModelUnusable(what, "Repeat it when they are complete.")


def float32_there(pair: Pair, spec: LoadSpec, device: str) -> Annotator:
    """Return the model in float32 on the device of the candidate, which on a CPU is the reference itself."""
    if kind_of(device) == "cpu":
        return pair.reference
    return with_model(pair.candidate, load(spec.in_dtype("float32"), device).model)


def today() -> str:
    """Return the day in UTC, as ``2026-03-01``."""
    return datetime.now(timezone.utc).date().isoformat()
