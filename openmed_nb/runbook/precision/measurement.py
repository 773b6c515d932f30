"""Running a model in two ways over the same texts, batch by batch, and counting how far apart they are.

Tokens, windows and padded batches are made once, on the CPU, and given to both; nothing is truncated. Of the logits only
the difference of each token is kept, four bytes on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...annotation.chunks import in_chunks
from ...annotation.corpus import stream_of
from ...annotation.fingerprints import fingerprint_of
from ...annotation.stream import chunk_characters
from ...devices.allocators import empty_cache
from ...devices.backend import TENSOR_LOCK, synchronize
from ...devices.memory import is_out_of_memory
from ...devices.simulation import shown_device
from ...devices.transfer import to_array
from ...errors import ConfigurationError, DeviceUnavailable, ModelUnusable, OpenMedError, cause
from ...models.quantization import INT8
from .gradients import gradient_difference
from .inputs import checked_gold, no_text, other_number, words_of
from .pairs import Pair, evaluating, undisturbed
from .parity import Differences, GradientDifference, ParityReport
from .spans import Score, Span, Spans, compare_spans, score

if TYPE_CHECKING:
    import numpy as np

    from ...annotation.batches import Batch
    from ...annotation.decoding import Entity
    from ...annotation.forward import Inputs, Network
    from ...annotation.stream import Annotator, Answer, Prepared


def parity_of(pair: Pair, texts: Any, gold: Any = None, gradients: bool = False) -> ParityReport:
    """Run a model in two ways over texts, and return how far apart they are.

    Args:
        pair: The model in two ways.
        texts: A series of texts, at least one.
        gold: The gold entities of each text; see :func:`.gold.gold_spans`.
        gradients: Whether the gradients of one step are compared too.

    Raises:
        ConfigurationError: For no text, for gold of another number of texts, and for gradients in int8.
        UnreadableText: For a text that cannot be read, by its number.
        ModelUnusable: Where the reference itself computes no numbers.
        DeviceUnavailable: Where the device fails.
    """
    tally = Tally(pair, None if gold is None else checked_gold(gold, texts, pair))
    if gradients and pair.dtype == INT8:
        raise ConfigurationError("Layers in int8 have no gradients.", "Leave gradients=True out.")
    step: GradientDifference | None = None
    with undisturbed(pair), evaluating(pair.reference.network.model), evaluating(pair.candidate.network.model):
        for prepared in prepared_chunks(pair.candidate, stream_of(texts)):
            if gradients and step is None and len(prepared.tokens):
                step = gradient_difference(pair.reference, pair.candidate, prepared)
            tally.add(prepared)
    return tally.report(step)


def prepared_chunks(annotator: Annotator, texts: Iterable[Any]) -> Iterator[Prepared]:
    """Yield texts ready for both ways, some hundred at a time.

    Raises:
        UnreadableText: For the first text that cannot be read.
        Exception: What the stream itself raises.
    """
    for chunk in in_chunks(texts, chunk_characters(annotator.budget)):
        prepared = annotator.prepare(chunk)
        if chunk.error:
            raise chunk.error
        if prepared:
            for failure in prepared.failures.values():
                raise failure
            yield prepared


@dataclass
class Tally:
    """What is counted while two ways run, for each strategy; the report is of the one that lost most.

    Attributes:
        pair: The model in two ways.
        gold: The gold entities of each text; ``None`` where none were given.
    """

    pair: Pair
    gold: tuple[tuple[Span, ...], ...] | None
    texts: list[int] = field(default_factory=list)
    tokens: int = 0
    windows: int = 0
    differences: list[np.ndarray] = field(default_factory=list)
    other_labels: int = 0
    not_numbers: int = 0
    spans: dict[str, Spans] = field(default_factory=lambda: defaultdict(Spans))
    scores: dict[str, tuple[Score, Score]] = field(default_factory=lambda: defaultdict(lambda: (Score(), Score())))
    distinct: set[int] = field(default_factory=set)

    @property
    def own(self) -> str:
        """The strategy of the reference, whose labels the gold has."""
        return self.pair.reference.decoder.strategy

    def add(self, prepared: Prepared) -> None:
        """Run a chunk of texts both ways, and count."""
        from ...annotation.forward import ForwardRun, settled

        reference, candidate = self.pair.reference, self.pair.candidate
        outputs: tuple[list[Any], list[Any]] = ([], [])
        for batch in candidate.batches(prepared, candidate.budget):
            for part, outcomes in run_both(reference.network, candidate.network, prepared, batch):
                self.count_logits(prepared, part, *(outcome.logits for outcome in outcomes))
                for kept, outcome in zip(outputs, outcomes, strict=True):
                    kept.append((part, outcome.answers))
        run = ForwardRun(prepared.tokens, prepared.windows)
        said = [
            (side, settled(run, side.network, kept)) for side, kept in zip((reference, candidate), outputs, strict=True)
        ]
        for strategy in dict.fromkeys((self.own, *self.pair.strategies)):  # Of equal ones the report is of its own.
            first, second = (
                replace(side, decoder=replace(side.decoder, strategy=strategy)).decode(prepared, of_tokens)
                for side, of_tokens in said
            )
            self.count_entities(strategy, prepared, first, second)
        self.texts += [fingerprint_of(text) for text in prepared.texts]
        self.tokens += len(prepared.tokens)
        self.windows += len(prepared.windows.firsts)

    def count_logits(self, prepared: Prepared, batch: Batch, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Count how far apart the logits of a batch are, each token in the window that owns it.

        Raises:
            ModelUnusable: Where those of the reference are no numbers.
        """
        import numpy as np

        from ...annotation.forward import owned_positions

        owned = owned_positions(prepared.windows, batch, self.pair.candidate.network.frame)[1]
        ours, theirs = (logits[: len(batch.rows)][owned] for logits in (reference, candidate))
        if not np.isfinite(ours).all():
            what = f"The model {self.pair.name!r} computes no numbers (NaN) on the CPU in float32."
            raise ModelUnusable(what, "Use another model: there is nothing to compare with.")
        numbers = np.isfinite(theirs).all(-1)
        self.not_numbers += int((~numbers).sum())
        self.other_labels += int(((ours.argmax(-1) != theirs.argmax(-1)) | ~numbers).sum())
        self.differences.append(np.abs(ours[numbers] - theirs[numbers]).max(-1, initial=0.0))

    def count_entities(
        self, strategy: str, prepared: Prepared, reference: Sequence[Answer], candidate: Sequence[Answer]
    ) -> None:
        """Count what became of the entities of a strategy; a text for which a way has no answer has none in it."""
        for place, answers in enumerate(zip(reference, candidate, strict=True)):
            number, text = prepared.first + place, prepared.texts[place]
            ours, theirs = (spans_of_answer(answer) for answer in answers)
            self.spans[strategy] += compare_spans(ours, theirs, number)
            if strategy == self.own:
                self.distinct.update(
                    fingerprint_of(f"{label} {words_of(text[start:end])}") for start, end, label in ours
                )
            if self.gold is not None and (strategy == "none") == (self.own == "none"):  # Gold has labels of one kind.
                gold = self.gold_of(number, len(text))
                before = self.scores[strategy]
                self.scores[strategy] = before[0] + score(gold, ours), before[1] + score(gold, theirs)

    def gold_of(self, number: int, length: int) -> tuple[Span, ...]:
        """Return the gold entities of a text.

        Raises:
            ConfigurationError: Where there are none for it, or one ends after the text.
        """
        remedy = "Pass the gold of the same texts, in the same order."
        if self.gold is None or number >= len(self.gold):
            raise ConfigurationError(f"There is no gold for text {number}.", remedy)
        if any(end > length for _, end, _ in self.gold[number]):
            what = f"An entity in the gold of text {number} ends after character {length}, the last of the text."
            raise ConfigurationError(what, remedy)
        return self.gold[number]

    def report(self, gradients: GradientDifference | None) -> ParityReport:
        """Return what was counted.

        Raises:
            ConfigurationError: Where there was no text, or gold for more texts than there were.
        """
        if not self.texts:
            raise no_text()
        if self.gold is not None and len(self.gold) != len(self.texts):
            raise other_number(len(self.gold), len(self.texts))
        scores = sorted(self.scores.values(), key=lambda both: both[1].recall - both[0].recall)
        return ParityReport(
            model=self.pair.name,
            device=shown_device(str(self.pair.candidate.network.model.device)),
            dtype=self.pair.dtype,
            texts=len(self.texts),
            texts_fingerprint=f"{fingerprint_of(' '.join(map(str, self.texts))):016x}",
            tokens=self.tokens,
            windows=self.windows,
            logits=quantiles(self.differences),
            other_labels=self.other_labels,
            not_numbers=self.not_numbers,
            spans=min(self.spans.values(), key=lambda spans: spans.agreement),
            gold=None if self.gold is None else scores[0],
            gradients=gradients,
            distinct=len(self.distinct),
            notes=self.pair.notes,
        )


@dataclass(frozen=True)
class Outcome:
    """What one way says of a batch, on the host.

    Attributes:
        logits: ``(rows, length, labels)`` float32.
        answers: What the annotation makes of them, as ``Network.answers`` returns it.
    """

    logits: np.ndarray
    answers: list[np.ndarray]


def run_both(
    reference: Network, candidate: Network, prepared: Prepared, batch: Batch
) -> Iterator[tuple[Batch, tuple[Outcome, Outcome]]]:
    """Run a batch both ways; where memory is short, its halves.

    Raises:
        DeviceUnavailable: Where a single window does not fit, and where the device fails for another reason.
    """
    from ...annotation.forward import fill

    inputs = fill(prepared.tokens, prepared.windows, batch, candidate)
    try:
        outcomes = outcome(reference, inputs), outcome(candidate, inputs)
    except OpenMedError:
        raise
    except (RuntimeError, MemoryError, TypeError) as error:
        empty_cache(str(candidate.model.device))
        halves = batch.halves(prepared.windows.lengths + candidate.frame.size) if is_out_of_memory(error) else []
        if not halves:
            place = shown_device(str(candidate.model.device))
            what = f"The model could not be compared on {place}: {cause(error)}."
            raise DeviceUnavailable(what, "Use another device or another type.") from error
    else:
        yield batch, outcomes
        return
    for half in halves:
        yield from run_both(reference, candidate, prepared, half)


def outcome(network: Network, inputs: Inputs) -> Outcome:
    """Run a batch one way, to its end."""
    import torch

    with TENSOR_LOCK, torch.no_grad():
        logits = network.logits(inputs)
        tensors = logits.float(), *network.answers(logits)
        synchronize(network.model.device)
        array, *answers = (to_array(tensor) for tensor in tensors)
    return Outcome(array, answers)


def spans_of_answer(answer: Answer) -> list[Span]:
    """Return the places and labels of entities; none where a text has no answer."""
    return [] if isinstance(answer, OpenMedError) else [span_of_entity(entity) for entity in answer]


def span_of_entity(entity: Entity) -> Span:
    """Return the place and the label of an entity."""
    label = entity["entity_group"] if "entity_group" in entity else entity["entity"]
    return int(entity["start"]), int(entity["end"]), str(label)


def quantiles(differences: Sequence[np.ndarray]) -> Differences:
    """Return the largest of differences, and their quantiles."""
    import numpy as np

    together = np.concatenate([np.zeros(0, np.float32), *differences])
    if not len(together):
        return Differences()
    middle, ninety, ninety_nine = np.quantile(together, [0.5, 0.9, 0.99]).tolist()
    return Differences(float(together.max()), middle, ninety, ninety_nine)
