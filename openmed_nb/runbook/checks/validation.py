"""``nb.runbook.validate_precision``: validation of a model in a reduced dtype."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..._events.activity import ProgressEvent
from ..._render.display import FAILED, OK, WARNING, Displayable, Report, format_percent, pluralize
from ..._utils.clock import current_time, time_call
from ..._utils.plain import utc_timestamp
from ..._utils.text import model_label, short_type_name
from ..._utils.validation import check_names
from ...annotation.gold import read_gold
from ...annotation.references import is_missing, iter_texts
from ...devices.backend import without_autocast
from ...devices.registry import get_device
from ...devices.system_status import BackgroundLoadReader
from ...errors import ConfigurationError
from ...models.config import normalize_dtype
from ...models.loading import load_from_spec
from ...models.records import (
    MIN_SPEEDUP,
    REDUCED_DTYPES,
    ModelIdentity,
    RejectedDtype,
    ValidationMetrics,
    ValidationRecord,
    identify_model,
    record_store,
)
from ...models.registry import is_model_name
from ...session import SESSION, check_options
from ..bench.timing import MIN_VALUES, Disturbance, find_disturbance, interleave, limit_rounds
from ..bench.workloads import validate_texts
from .parity import pair_from_files, read_notes, run_parity, select_gold
from .parity_report import (
    MAX_RECALL_LOSS,
    MIN_ENTITIES,
    MIN_SPAN_AGREEMENT,
    MIN_TEXTS,
    ParityReport,
    RejectionReason,
    rejection_reasons,
)

if TYPE_CHECKING:
    from ...annotation.stream import Annotator


# A word of a text. Numbers, white space and punctuation do not make a text different.
WORD_PATTERN = re.compile(r"[^\W\d_]+")
# Acceptance criteria, as a validation record stores them.
CRITERIA = {
    "span_agreement": MIN_SPAN_AGREEMENT,
    "recall_loss": MAX_RECALL_LOSS,
    "minimum_entities": MIN_ENTITIES,
    "minimum_texts": MIN_TEXTS,
}
# Number of interleaved rounds of both dtypes.
TIMING_ROUNDS = 9
# Duration in seconds after which no further round starts.
MAX_TIMING_SECONDS = 30.0
# Approximate number of characters that a round processes.
NUM_TIMED_CHARACTERS = 16384


@dataclass(frozen=True, repr=False)
class PrecisionVerdict(Displayable):
    """Result of the validation of a model in a reduced dtype on a device.

    Attributes:
        parity: Comparison with the CPU in float32.
        reasons: Reasons for a rejection, or an empty tuple if the dtype is accepted.
        record: Validation record, or ``None`` if the dtype is rejected.
        disturbance: Why the speedup could not be measured; ``None`` if it was measured or is not needed.
    """

    parity: ParityReport
    reasons: tuple[RejectionReason, ...] = ()
    record: ValidationRecord | None = None
    disturbance: Disturbance | None = None

    JSON_PROPERTIES = ("accepted",)

    @property
    def accepted(self) -> bool:
        """Whether the dtype is accepted."""
        return not self.reasons

    @property
    def is_refuted(self) -> bool:
        """Whether there is evidence against the dtype. Too few texts or entities are not."""
        return any(reason.conclusive for reason in self.reasons)

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated."""
        return self.parity.simulated

    def to_report(self) -> Report:
        """Return the report: verdict, reasons and the comparison."""
        parity = self.parity
        parity_report = parity.to_report()
        verdict = "Rejected" if self.is_refuted else "Not validated"
        status = FAILED if self.is_refuted else WARNING
        title = f"{parity.model} in {parity.dtype} on {parity.device}"
        reasons = [f"{reason.reason} {reason.remedy}" for reason in self.reasons]
        if self.record:
            verdict = "Accepted"
            status = OK
            spans = parity.spans
            bound = spans.upper_bound or 1.0
            seen = f"{pluralize(spans.all - spans.exact, 'difference')} in {pluralize(spans.all, 'entity', 'entities')}"
            title += f": {seen}, up to {format_percent(bound, '.2g')} possible"
            speedup = self.record.evidence.speedup or 1.0
            speed = f"{speedup:.1f} times as fast as" if speedup > MIN_SPEEDUP else "Not faster than"
            effect = f"{speed} float32 here. dtype='auto' selects the first validated dtype that is faster."
            if self.simulated:
                effect = "dtype='auto' now selects it under the simulation, where no speed is measured."
            if self.disturbance:
                effect = f"Its speed was not measured: {self.disturbance}. {self.disturbance.remedy}"
            reasons = [self.record.summary, effect]
            limit = 1 - MIN_SPAN_AGREEMENT
            if spans.exact == spans.all and round(bound, 3) > limit:
                texts = math.ceil(parity.texts * bound / limit)
                reasons.append(f"About {texts:,} such texts without a difference show at most {format_percent(limit)}.")
        reasons.append(
            f"The observed share decides: {format_percent(MIN_SPAN_AGREEMENT)} of the entities in these texts must be identical."
        )
        return Report(
            f"{verdict}: {title}",
            (*reasons, *parity_report.sentences),
            parity_report.tables,
            metrics=parity_report.metrics,
            status=status,
        )


def validate_precision(
    model: Any = None,
    texts: Iterable[Any] | None = None,
    dtype: str = "bfloat16",
    *,
    device: str | None = None,
    gold: Any = None,
    **arguments: Any,
) -> PrecisionVerdict:
    """Validate a reduced dtype of a model on your texts, and store a validation record if it passes.

    The dtype is accepted under these conditions:

    - At least 99 percent of the entities are identical to those on the CPU in float32.
    - At most one percent of the gold entities is lost.
    - There are at least 50 entities in 50 texts with different words. A text that differs from an
      earlier one in numbers or spaces only is ignored.

    If accepted, a validation record is stored in the folder ``OPENMED_NB_DATA``, or in the data folder of the system. It
    contains counts and fingerprints, but no text content. ``dtype="auto"`` then selects the dtype if nearly every timing round
    was faster than float32, and loading the model in this dtype no longer warns. On a busy or hot computer, the speed of an
    older record is kept. The record is valid for the same model files, device, torch and transformers. If the dtype is not
    accepted, loading the model in this dtype warns each time. If there is evidence against it, an older record is removed.
    Too few texts or entities are not evidence: an older record stays valid.

    Args:
        model: An alias, a Hub id, a bare name, a folder, or ``None`` for the bundled model.
        texts: Texts as for :func:`annotate`, preferably from the intended application. They are stored in memory.
        dtype: ``"bfloat16"``, ``"float16"``, or ``"int8"`` on the CPU.
        device: Device to validate. If ``None``, use the device of the session.
        gold: Gold entities as for :func:`parity`, with labels of the model only.
        arguments: Arguments of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The verdict with its reasons, the comparison, and the validation record.

    Raises:
        ConfigurationError: As for :func:`parity`. Also if ``model`` is a pipeline, which has no files, if the record cannot be
            stored, or if the dtype can end the process on this device (bfloat16 on macOS 27 before torch 2.14).
        InvalidTextError, ModelError, DeviceError: As for :func:`parity`.

    Example:
        >>> validate_precision("bundled_small", ["She has asthma."], dtype="float64")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: 'float64' is not a reduced dtype. Did you mean 'float16'? \
Valid values: float16, bfloat16, int8.
    """
    check_options(validate_precision, arguments)
    with SESSION.operation():
        if not is_model_name(model):
            kind = short_type_name(model)
            raise ConfigurationError(
                f"A validation record requires the files of a model, but {kind} is not a model name.",
                "Pass the name or the folder of the model first and then the texts.",
            )
        notes = read_notes(model, texts)
        text_list = list(iter_texts(notes.texts))
        validate_texts(text_list)
        name = normalize_dtype(dtype)
        check_names("a reduced dtype", [name], REDUCED_DTYPES)
        if device is not None:
            arguments["device"] = device
        spec, target_device = SESSION.load_spec(model, {**arguments, "dtype": name})
        SESSION.device_manager.check_dtype(name, target_device)
        identity = identify_model(spec, spec.dtype, target_device, SESSION.device_manager)
        SESSION.notify(ProgressEvent("Validating", model_label(spec.reference.name)))
        pair = pair_from_files(spec, target_device)
        spans = None if gold is None else select_gold(read_gold(gold), notes.ids, text_list)
        unique_texts, unique_spans = _deduplicate_texts(text_list, spans)
        report = run_parity(pair, unique_texts, unique_spans)
        verdict = judge(report, identity)
        store = record_store(SESSION.environ)
        if verdict.accepted and not identity.simulated:
            with without_autocast(target_device):
                read_load = BackgroundLoadReader()
                disturbance = find_disturbance()
                if not disturbance:
                    baseline = pair.reference  # Float32 on the device of the candidate.
                    if get_device(target_device).is_accelerator:
                        float32_model = load_from_spec(spec.in_dtype("float32"), target_device).model
                        baseline = pair.candidate.with_model(float32_model)
                    is_over = limit_rounds(read_load, current_time() + MAX_TIMING_SECONDS)
                    seconds = time_dtypes(baseline, pair.candidate, unique_texts, is_over)
                    # Rounds are missing only if other programs slowed them down.
                    is_complete = len(seconds) >= MIN_VALUES or shows_no_speedup(seconds[1:])
                    disturbance = find_disturbance(read_load(), 1.0 if is_complete else 0.0)
            if disturbance:  # An earlier measurement remains valid. Without one, "auto" does not select the dtype.
                earlier = store.get(identity)
                speedup = earlier.evidence.speedup if earlier else None
            else:
                speedup = median_speedup(seconds[1:])  # The first round is the warm-up.
            verdict = replace(judge(report, identity, speedup), disturbance=disturbance)
        if verdict.record:
            store.store(verdict.record)
            store.remove(identity, RejectedDtype)
        elif verdict.is_refuted or not (store.get(identity) or store.get(identity, RejectedDtype)):
            store.remove(identity)  # An older record contradicts the evidence.
            store.store(RejectedDtype(identity, verdict.reasons[0].reason, verdict.reasons[0].remedy))
        return verdict


def _deduplicate_texts(texts: list[Any], gold: Sequence[Any] | None) -> tuple[list[str], Sequence[Any] | None]:
    """Return the texts without missing values and those that repeat the words of an earlier text, and their gold entities.

    Example:
        >>> _deduplicate_texts(["1. Asthma.", None, "Fever.", "2. asthma "], [[1], [], [], [1]])
        (['1. Asthma.', 'Fever.'], [[1], []])
    """
    unique: dict[str, int] = {}
    for index, text in enumerate(texts):
        if not is_missing(text):
            unique.setdefault(" ".join(WORD_PATTERN.findall(str(text))).casefold(), index)
    return [texts[index] for index in unique.values()], gold and [gold[index] for index in unique.values()]


def judge(report: ParityReport, identity: ModelIdentity, speedup: float | None = None) -> PrecisionVerdict:
    """Return the verdict of a comparison. ``speedup``, if measured, is relative to float32 on the same device."""
    reasons = tuple(rejection_reasons(report))
    if reasons:
        return PrecisionVerdict(report, reasons)
    gold = report.gold if report.gold and report.gold.entities else None
    evidence = ValidationMetrics(  # Counts only, no offsets of entities.
        texts=report.texts,
        texts_fingerprint=report.texts_fingerprint,
        tokens=report.tokens,
        non_finite_tokens=report.non_finite_tokens,
        **report.spans.counts,
        reference_recall=gold.reference_recall if gold else None,
        recall=gold.recall if gold else None,
        speedup=speedup and round(speedup, 3),
    )
    record = ValidationRecord(identity, evidence, utc_timestamp()[:10], CRITERIA)
    return PrecisionVerdict(report, (), record)


def time_dtypes(
    baseline: Annotator, reduced: Annotator, texts: Sequence[str], is_over: Callable[[int], bool]
) -> list[tuple[float, float]]:
    """Return the seconds of float32 and of a reduced dtype on the same device per interleaved round.

    No round follows two that show no speedup, because it could not change the result.
    """
    from ...annotation.stream import iter_chunks

    sample: list[str] = next((chunk.texts for chunk in iter_chunks(texts, 8 * NUM_TIMED_CHARACTERS)), [])
    measures = {
        index: partial(time_call, partial(annotator.entities, sample))
        for index, annotator in enumerate((baseline, reduced))
    }
    seconds: list[tuple[float, float]] = []
    for number in SESSION.track("Timing", "both dtypes", range(TIMING_ROUNDS + 1), "round"):
        if is_over(number) or shows_no_speedup(seconds[1:]):
            break
        seconds.extend(zip(*interleave(measures, [number]).values(), strict=True))
    return seconds


def shows_no_speedup(seconds: Sequence[tuple[float, float]]) -> bool:
    """Return whether the reduced dtype was not faster in two rounds. On a busy computer, a single round shows nothing."""
    return len([reduced for baseline, reduced in seconds if baseline / reduced <= MIN_SPEEDUP]) > 1


def median_speedup(seconds: Sequence[tuple[float, float]]) -> float:
    """Return the median speedup of at least two rounds, or 1 if two rounds show no speedup.

    On a busy machine a single round is not reliable: a model timed against itself had ratios from 0.66 to 2.16.
    """
    if shows_no_speedup(seconds):
        return 1.0
    return statistics.median(baseline / reduced for baseline, reduced in seconds)
