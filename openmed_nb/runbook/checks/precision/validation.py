"""``nb.runbook.validate_precision``: parity of a model in a reduced type on your texts, whose result is stored if it passes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...._events.activity import ProgressEvent
from ...._render.display import FAILED, OK, WARNING, Displayable, Report, pluralize
from ...._utils.clock import time_call
from ...._utils.plain import utc_timestamp
from ...._utils.text import describe_value, model_label, short_type_name
from ....devices.backend import without_autocast
from ....devices.registry import parse_device_argument
from ....errors import ConfigurationError, InvalidModelError
from ....models.config import normalize_dtype
from ....models.files import hash_model_files
from ....models.loading import LoadSpec, load_from_spec, model_folder
from ....models.records import (
    MIN_SPEEDUP,
    REDUCED_DTYPES,
    ModelIdentity,
    RecordStore,
    ValidationMetrics,
    ValidationRecord,
    identify_model,
    record_store,
)
from ....models.registry import is_model_name
from ....session import SESSION
from ...bench.timing import interleave
from .parity import ModelPair, check_texts, normalize_text, pair_from_files, run_parity
from .policy import AcceptanceCriteria, RejectionReason
from .report import ParityReport, rejection_reasons

if TYPE_CHECKING:
    from ....annotation.stream import Annotator


# How often both ways read the texts, in turn, to be timed; and about how many characters of the texts.
TIMING_ROUNDS = 9
TIMED_CHARACTERS = 16384

HEADLINES = {
    OK: "{} may be used in {} on {}",
    WARNING: "It is not known yet whether {} may be used in {} on {}",
    FAILED: "{} should not be used in {} on {}",
}


@dataclass(frozen=True, repr=False)
class PrecisionVerdict(Displayable):
    """Whether a model may be used in a reduced type on a device.

    Attributes:
        parity: What was measured.
        gate: What was asked for.
        refusals: Why it may not; empty if it may.
        certificate: The certificate, if it may.
    """

    parity: ParityReport
    gate: AcceptanceCriteria
    refusals: tuple[RejectionReason, ...] = ()
    certificate: ValidationRecord | None = None

    JSON_PROPERTIES = ("accepted",)

    @property
    def accepted(self) -> bool:
        """Whether the model may be used so."""
        return not self.refusals

    @property
    def refuted(self) -> bool:
        """Whether something speaks against the type, which too few texts do not."""
        return any(refusal.conclusive for refusal in self.refusals)

    @property
    def simulated(self) -> bool:
        """Whether the device is a simulated one."""
        return self.parity.simulated

    def to_report(self) -> Report:
        """Return the verdict with its reasons, and what was measured."""
        parity = self.parity
        measured = parity.to_report()
        verdict = "Accepted" if self.accepted else "Refused"
        status = FAILED if self.refuted else WARNING
        reasons = [f"{refusal.reason} {refusal.remedy}" for refusal in self.refusals]
        figures = measured.metrics
        if self.accepted:
            status = OK
        if self.certificate:
            where = "where it is faster than float32"
            if self.simulated:
                where = "under the simulation, where no speed is measured"
            reasons = [self.certificate.summary, f"dtype='auto' takes it from now on {where}."]
            figures = (*(replace(table, collapsed=True) for table in self.certificate.to_report().metrics), *figures)
        asked = f"Asked for: {100 * self.gate.span_agreement:.0f} % of the entities the same, in every strategy."
        said = (*reasons, asked, *measured.sentences)
        return Report(
            f"{verdict}: {parity.model} in {parity.dtype} on {parity.device}",
            said,
            measured.tables,
            metrics=figures,
            html_sentences=(HEADLINES[status].format(parity.model, parity.dtype, parity.device), *said),
            status=status,
        )


def validate_precision(  # noqa: PLR0913 - each is one thing that a person may want to say
    model: Any = None,
    texts: Iterable[Any] | None = None,
    dtype: str = "bfloat16",
    *,
    device: str | None = None,
    gold: Iterable[Any] | None = None,
    progress: bool = True,
    **arguments: Any,
) -> PrecisionVerdict:
    """Measure on your own texts whether a model keeps its entities in a reduced type, and remember it if it does.

    The type is accepted if at least 99 percent of the entities are the same as on the CPU in float32, in the aggregation
    strategy that loses most, and if at most one percent of the gold entities is lost; of at least 50 entities, 10 of them
    different, in 50 texts of different words. Then a certificate is stored in the folder that ``OPENMED_NB_DATA``
    names, else in the system's place for such things: it holds counts and fingerprints, no word of a text.
    ``dtype="auto"`` takes the type from then on if nearly every reading was faster than float32, and loading the model in
    this type warns no more. It counts for these very files on this device with this torch and transformers. If something
    speaks against the type, which too few texts do not, an older certificate of the same is removed. A text whose words come
    again, with other numbers or spaces, does not count.

    Args:
        model: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
        texts: Any series of texts, such as those that it will read; they are held in memory.
        dtype: ``"bfloat16"``, ``"float16"``, or ``"int8"`` on the CPU.
        device: The device; ``None`` is the session's.
        gold: As for :func:`parity`, with labels of the model alone.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: Those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The verdict with its reasons, what was measured, and the certificate.

    Raises:
        ConfigurationError: As for :func:`parity`, for a pipeline, which is no file, and if a certificate cannot be stored.
        InvalidTextError, ModelError, DeviceError: As for :func:`parity`.

    Example:
        >>> validate_precision("bundled_small", ["She has asthma."], dtype="float64")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'float64' is not a reduced type. Use one of bfloat16, float16, int8.
    """
    from ....annotation.references import iter_texts

    with SESSION.operation(progress):
        if not is_model_name(model):
            what = f"A certificate is of the files of a model, and {short_type_name(model)} names none."
            raise ConfigurationError(what, "Pass the name or the folder of the model first, and then the texts.")
        check_texts(texts)
        read = list(iter_texts(texts))
        name = normalize_dtype(dtype)
        if name not in REDUCED_DTYPES:
            what = f"{describe_value(name)} is not a reduced type."
            raise ConfigurationError(what, f"Use one of {', '.join(REDUCED_DTYPES)}.")
        if device is not None:
            arguments["device"] = device
        spec, place = SESSION.load_spec(model, {**arguments, "dtype": name})
        identity = identify_model(spec, spec.dtype, place, SESSION.device_manager)
        SESSION.notify(ProgressEvent("Validating", model_label(spec.reference.name)))
        pair = pair_from_files(spec, place)
        different, gold = _deduplicate_texts(read, gold)
        report = run_parity(pair.in_every_strategy(), different, gold)
        if len(different) < len(read):
            repeated = f"{pluralize(len(read) - len(different), 'text')} with the words of another one did not count."
            report = replace(report, notes=(*report.notes, repeated))
        verdict = judge(report, identity)
        if verdict.accepted and not identity.simulated:
            with without_autocast(place):
                gain = measure_speedup(float32_on_device(pair, spec, place), pair.candidate, different)
            verdict = judge(report, identity, gain)
        if replace(identity, **asdict(hash_model_files(model_folder(spec)))) != identity:
            what = f"The files of {identity.model!r} changed while it was measured."
            raise InvalidModelError(what, "Repeat it when they are complete.")
        update_store(verdict, identity, record_store(SESSION.environ))
        return verdict


def _deduplicate_texts(texts: list[Any], gold: Any) -> tuple[list[Any], Any]:
    """Return texts without those whose words were there before, each with its gold: the same note twice tells nothing new.

    Gold of another number of texts is left as it is, for ``run_parity`` to refuse.

    Example:
        >>> _deduplicate_texts(["1. Asthma.", "Fever.", "2. asthma "], [[1], [], [1]])
        (['1. Asthma.', 'Fever.'], [[1], []])
    """
    from ....annotation.references import text_fingerprint

    gold = list(gold) if isinstance(gold, Iterator) else gold
    if gold is not None and not (isinstance(gold, Sequence) and len(gold) == len(texts)):
        return texts, gold
    first: dict[int, int] = {}
    for place, text in enumerate(texts):
        first.setdefault(text_fingerprint(normalize_text(text)), place)
    return [texts[place] for place in first.values()], gold and [gold[place] for place in first.values()]


def judge(report: ParityReport, identity: ModelIdentity, gain: float | None = None, date: str = "") -> PrecisionVerdict:
    """Return whether a model may be used in a reduced type; ``gain``, if measured, is how many times faster it is."""
    gate = AcceptanceCriteria()
    refused = tuple(rejection_reasons(report, gate))
    if refused:
        return PrecisionVerdict(report, gate, refused)
    gold = report.gold if report.gold and report.gold[0].gold else None
    evidence = ValidationMetrics(  # Counts, and no place of an entity.
        texts=report.texts,
        texts_fingerprint=report.texts_fingerprint,
        tokens=report.tokens,
        non_finite_tokens=report.non_finite_tokens,
        **report.spans.counts,
        distinct_entities=report.distinct,
        reference_recall=gold and gold[0].recall,
        recall=gold and gold[1].recall,
        speedup=gain and round(gain, 3),
    )
    return PrecisionVerdict(
        report, gate, (), ValidationRecord(identity, evidence, date or utc_timestamp()[:10], asdict(gate))
    )


def update_store(verdict: PrecisionVerdict, identity: ModelIdentity, store: RecordStore) -> None:
    """Store the certificate of a verdict, or remove an older one if something speaks against the type."""
    if verdict.certificate:
        store.store(verdict.certificate)
    elif verdict.refuted:
        store.remove(identity)


def float32_on_device(pair: ModelPair, spec: LoadSpec, device: str) -> Annotator:
    """Return the model in float32 on the device of the candidate, which on a CPU is the reference itself."""
    if not parse_device_argument(device).is_accelerator:
        return pair.reference
    return pair.candidate.with_model(load_from_spec(spec.in_dtype("float32"), device).model)


def measure_speedup(plain: Annotator, reduced: Annotator, texts: Sequence[Any]) -> float:
    """Return how many times faster one way is than another on the same device, 1 if that is not certain."""
    from ....annotation.stream import iter_chunks

    some: list[Any] = next((chunk.texts for chunk in iter_chunks(texts, 8 * TIMED_CHARACTERS)), [])
    ways = {name: partial(time_call, partial(way.entities, some)) for name, way in enumerate((plain, reduced))}
    turns = interleave(ways, SESSION.track("Timing", "both types", range(TIMING_ROUNDS + 1), "pair"))
    return median_speedup(list(zip(*turns.values(), strict=True))[1:])  # The first pair warms up.


def median_speedup(seconds: Sequence[tuple[float, float]]) -> float:
    """Return how many times faster the second way is: the middle of at least two pairs, 1 if two of them do not say so.

    On a busy computer a pair can say anything: one way read against itself gave ratios from 0.66 to 2.16.
    """
    ratios = sorted(plain / reduced for plain, reduced in seconds)
    return statistics.median(ratios) if ratios[1] > MIN_SPEEDUP else 1.0
