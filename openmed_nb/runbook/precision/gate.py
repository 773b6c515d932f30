"""The precision gate: whether a model may be used in a reduced type, by what became of its entities on texts of the person."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...devices.computer import Computer
from ...devices.moving import level_of_caller
from ...devices.request import kind_of
from ...devices.simulated import shows_simulated
from ...display import Report, Shown, Table, counted
from ...errors import ConfigurationError, ModelUnusable, OpenMedWarning, one_line
from ...models.config import OpenMedConfig, dtype_name
from ...models.files import content_of
from ...models.loading import LoadSpec, files_in, load, model_folder
from ...models.quantization import INT8
from ...models.store import ModelKey
from .certificates import (
    Certificate,
    CertificateStore,
    Evidence,
    Gate,
    Identity,
    Refusal,
    certificate_store,
    identity_of,
    refusals,
)
from .measurement import (
    WORTH,
    Pair,
    distinct,
    in_every_strategy,
    pair_of_files,
    parity_of,
    speed_up,
    undisturbed,
    with_model,
)
from .parity import ParityReport
from .spans import Score

if TYPE_CHECKING:
    from ...annotation.stream import Annotator


REDUCED = ("bfloat16", "float16", "int8")
"""The types that need a certificate, in the order in which equally fast ones are taken."""

SETTINGS = ("revision", "cache_dir", "allow_pickle")
"""Settings of a load that say which files are loaded, and so belong to the command that validates them."""


@dataclass(frozen=True)
class Validation:
    """What is known of a model that is loaded in a reduced type.

    Attributes:
        dtype: The type.
        device: The device, marked where it is simulated.
        reason: Why it is not validated there; empty where it is.
        command: The command that validates it.
    """

    dtype: str
    device: str
    reason: str
    command: str


@dataclass(frozen=True)
class Candidate:
    """A reduced type that could be taken.

    Attributes:
        dtype: The type.
        certificate: The certificate that counts here; ``None`` where none does.
        reason: Why none does, empty where one does.
    """

    dtype: str
    certificate: Certificate | None
    reason: str

    @property
    def faster(self) -> bool | None:
        """Whether it was measured to be worth it; ``None`` where the device is simulated, and no speed is measured."""
        if self.certificate is None:
            return False
        gain = self.certificate.evidence.speed_up
        return None if gain is None else gain > WORTH

    def said(self) -> str:
        """Return what is known of the type, without a figure of time."""
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
        candidates: The reduced types that were looked at.
    """

    dtype: str
    requested: str
    device: str
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain mappings and strings, ready for JSON."""
        return {
            "dtype": self.dtype,
            "requested": self.requested,
            "device": self.device,
            "candidates": [{"dtype": one.dtype, "faster": one.faster, "said": one.said()} for one in self.candidates],
        }

    def report(self) -> Report:
        """Return the type, who asked, and what is known of the reduced types."""
        rows = tuple((one.dtype, one.said()) for one in self.candidates)
        reason = "It was asked for." if self.requested == self.dtype else self._reason_of_auto()
        return Report(f"Type: {self.dtype} on {self.device}", (reason,), (Table("", ("type", "certificate"), rows),))

    def _reason_of_auto(self) -> str:
        if self.dtype in REDUCED and shows_simulated(self.device):
            return "'auto' took it: it is the first that is validated here; under the simulation no speed is measured."
        if self.dtype in REDUCED:
            return "'auto' took it: it is validated here for this model, and the fastest of those that are."
        return "'auto' took it: no reduced type is validated here for this model and faster."


def in_chosen_dtype(
    spec: LoadSpec, device: str, computer: Computer, environ: Mapping[str, str]
) -> tuple[LoadSpec, DtypeChoice]:
    """Return a model in the type that it is loaded in on a device, and why that one; its files are here by then.

    Args:
        spec: The model in the type that was asked for.
        device: The device.
        computer: What knows the names of devices, and torch.
        environ: The environment variables, of which one may name the folder of the certificates.
    """
    here = replace(spec, folder=model_folder(spec))
    identity = partial(identity_of, here, device=device, computer=computer)
    chosen = choose_dtype(certificate_store(environ), identity, spec.dtype)
    return here.in_dtype(chosen.dtype), chosen


def choose_dtype(store: CertificateStore, identity: Callable[[str], Identity], requested: str) -> DtypeChoice:
    """Return the type to load a model in.

    Args:
        store: The certificates.
        identity: Returns the identity of the model in a type, on the device that it goes to.
        requested: A reduced type, which is taken in any case, or ``"auto"``.
    """
    wanted = [identity(dtype) for dtype in (REDUCED if requested == "auto" else (requested,))]
    wanted = [one for one in wanted if one.dtype != INT8 or one.device == "cpu"]
    candidates = tuple(Candidate(one.dtype, store.find(one), store.explain(one)) for one in wanted)
    taken = fastest(candidates) if requested == "auto" else requested
    return DtypeChoice(taken, requested, wanted[0].shown_device, candidates)


def fastest(candidates: tuple[Candidate, ...]) -> str:
    """Return the fastest validated type that is worth it, the first where no speed is known, float32 where there is none."""
    worth_it = {one.dtype: one.certificate for one in candidates if one.certificate and one.faster is not False}
    speeds = {dtype: certificate.evidence.speed_up or 1.0 for dtype, certificate in worth_it.items()}
    return max(speeds, key=speeds.__getitem__, default="float32")


def warn_unless_validated(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> None:
    """Warn of a model that comes to a device in a reduced type that was not validated there, with the command that does.

    Args:
        key: The model, and the device that it was loaded for by name.
        device: The device that it comes to.
        computer: What knows the names of devices, and torch.
        environ: The environment variables.
    """
    known = validation_of(key, device, computer, environ)
    if known and known.reason:
        what = f"{key.spec.reference.name!r} is used in {known.dtype} on {known.device}, and {known.reason}."
        text = one_line(f"{what} Its answers may differ from those in float32. To validate it: {known.command}")
        warnings.warn(text, OpenMedWarning, stacklevel=level_of_caller())


def validation_of(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> Validation | None:
    """Return what is known of a loaded model in a reduced type; ``None`` in float32. The arguments are those above."""
    if key.spec.dtype not in REDUCED:
        return None
    identity = identity_of(key.spec, key.spec.dtype, device, computer)
    changed = "its files changed since it was loaded" if files_changed(key.spec) else ""
    reason = changed or certificate_store(environ).explain(identity)
    return Validation(identity.dtype, identity.shown_device, reason, validating_command(key.spec, key.device))


def files_changed(spec: LoadSpec) -> bool:
    """Tell whether a folder holds other files than when a model was asked for; what is loaded of it is then not known."""
    folder = spec.reference.location
    return bool(spec.files) and (not Path(folder).is_dir() or files_in(folder) != spec.files)


def validating_command(spec: LoadSpec, device: str | None) -> str:
    """Return the command that validates a model in its type.

    Args:
        spec: The model.
        device: The device, where it was loaded for a named one.

    Example:
        >>> validating_command(LoadSpec.of("bundled", OpenMedConfig(dtype="bfloat16")), None)
        "nb.validate_precision('bundled', texts, dtype='bfloat16')"
    """
    usual = OpenMedConfig()
    options = {name: getattr(spec.config, name) for name in SETTINGS}
    options = {name: value for name, value in options.items() if value != getattr(usual, name)}
    if "cache_dir" in options:
        options["cache_dir"] = os.fspath(options["cache_dir"])
    named = {"dtype": spec.dtype, **({"device": device} if device else {}), **options}
    words = ", ".join(f"{name}={value!r}" for name, value in named.items())
    return f"nb.validate_precision({spec.reference.name!r}, texts, {words})"


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
    refusals: tuple[Refusal, ...] = ()
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


def evidence_of(report: ParityReport, gain: float | None) -> Evidence:
    """Return what a certificate keeps of a comparison: counts, and no place of an entity."""
    spans = report.spans
    recalls = [one.recall if one.gold else None for one in report.gold or (Score(), Score())]
    return Evidence(
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
