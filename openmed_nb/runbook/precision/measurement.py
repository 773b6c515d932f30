"""One model run in two ways over the same texts: what is given, the pair, their entities, gradients and speed.

The gradients of one training step in two ways: on the CPU in float32, and on a device in a type.

Dropout is off, the labels are those that the reference itself gives, and the inputs are made on the CPU: a seed gives other
numbers on MPS.

Running a model in two ways over the same texts, batch by batch, and counting how far apart they are.

Tokens, windows and padded batches are made once, on the CPU, and given to both; nothing is truncated. Of the logits only
the difference of each token is kept, four bytes on the host.
"""

from __future__ import annotations

import contextlib
import copy
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...annotation.corpus import stream_of
from ...annotation.fingerprints import fingerprint_of
from ...annotation.pipeline import build_pipeline
from ...annotation.results import span_of
from ...annotation.stream import chunk_characters, in_chunks
from ...devices.backend import TENSOR_LOCK, synchronize, to_array
from ...devices.memory import empty_cache, is_out_of_memory
from ...devices.simulated import shown_device
from ...display import counted
from ...errors import ConfigurationError, DeviceUnavailable, ModelUnusable, OpenMedError, cause, whole_number
from ...models.config import DEFAULT_STRATEGY, STRATEGIES
from ...models.dtypes import WORTH
from ...models.loading import LoadSpec, load
from ...models.quantization import INT8, dtype_of, is_quantized
from .parity import TOLERANCES, Differences, GradientDifference, ParityReport
from .spans import Score, Span, Spans, compare_spans, score

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ...annotation.forward import Batch, Inputs, Network
    from ...annotation.pipeline import AnnotationPipeline
    from ...annotation.stream import Annotator, Answer, Prepared


GOLD_REMEDY = (
    "For each text give a list of (start, end, label), or of mappings with start, end, and label or entity_group."
)


def gold_spans(gold: Any) -> tuple[tuple[Span, ...], ...]:
    """Return the gold entities of each text.

    Args:
        gold: For each text a list of ``(start, end, label)``, or of mappings with ``start``, ``end``, and ``label``,
            ``entity_group`` or ``entity``.

    Raises:
        ConfigurationError: For anything else, with the number of the text.

    Example:
        >>> gold_spans([[(0, 6, "DISEASE")], [{"start": 4, "end": 9, "entity_group": "DISEASE"}]])
        (((0, 6, 'DISEASE'),), ((4, 9, 'DISEASE'),))
        >>> gold_spans([[], [(0, "6", "DISEASE")]])
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: The gold of text 1 has no entity at its place 0. For each text give a list \
of (start, end, label), or of mappings with start, end, and label or entity_group.
    """
    if not is_list(gold):
        raise ConfigurationError(f"The gold cannot be {type(gold).__name__}.", GOLD_REMEDY)
    return tuple(spans_of(entities, number) for number, entities in enumerate(gold))


def spans_of(entities: Any, number: int) -> tuple[Span, ...]:
    """Return the gold entities of one text."""
    if not is_list(entities):
        raise ConfigurationError(f"The gold of text {number} cannot be {type(entities).__name__}.", GOLD_REMEDY)
    spans = [gold_span(entity) for entity in entities]
    if None in spans:
        what = f"The gold of text {number} has no entity at its place {spans.index(None)}."
        raise ConfigurationError(what, GOLD_REMEDY)
    return tuple(span for span in spans if span)


def gold_span(entity: Any) -> Span | None:
    """Return an entity as a span, ``None`` where it is none."""
    if isinstance(entity, Mapping):
        label = next((entity[key] for key in ("entity_group", "label", "entity") if key in entity), None)
        entity = (entity.get("start"), entity.get("end"), label)
    if not (isinstance(entity, (tuple, list)) and len(entity) == 3):  # noqa: PLR2004 - start, end, label
        return None
    start, end, label = entity
    first, last = whole_number(start), whole_number(end)
    if first is None or last is None or not isinstance(label, str):
        return None
    return (first, last, label) if 0 <= first < last else None


def is_list(thing: Any) -> bool:
    """Tell whether something is a series of things, and no text and no mapping."""
    return hasattr(thing, "__iter__") and not isinstance(thing, (str, bytes, Mapping))


WORD = re.compile(r"[^\W\d_]+")
"""Letters that stand together."""


def checked_texts(texts: Any) -> Any:
    """Return texts as they are, where they are a series of texts.

    Raises:
        ConfigurationError: For anything else, and for none at all.

    Example:
        >>> checked_texts(None)
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: There is no text to compare on. Pass the model first and then the texts; None is \
the bundled model.
    """
    if texts is None:
        raise no_text()
    if isinstance(texts, str):
        raise ConfigurationError("str is no series of texts.", "Pass the model first and then a list of texts.")
    stream = stream_of(texts)
    if not isinstance(texts, Sized):
        return stream
    if not len(texts):
        raise no_text()
    return texts


def no_text() -> ConfigurationError:
    """Return the error for no text at all."""
    what = "Pass the model first and then the texts; None is the bundled model."
    return ConfigurationError("There is no text to compare on.", what)


def distinct(texts: list[Any], gold: Any) -> tuple[list[Any], Any]:
    """Return texts without those whose words were there before, each with its gold: the same note twice tells nothing new.

    Gold of another number of texts is left as it is, for :func:`checked_gold` to refuse.

    Example:
        >>> distinct(["1. Asthma.", "Fever.", "2. asthma "], [[1], [], [1]])
        (['1. Asthma.', 'Fever.'], [[1], []])
    """
    gold = list(gold) if isinstance(gold, Iterator) else gold
    if gold is not None and not (isinstance(gold, Sequence) and len(gold) == len(texts)):
        return texts, gold
    first: dict[int, int] = {}
    for place, text in enumerate(texts):
        first.setdefault(fingerprint_of(words_of(text)), place)
    return [texts[place] for place in first.values()], gold and [gold[place] for place in first.values()]


def words_of(text: Any) -> Any:
    """Return the words of a text in one form: numbers, white space, punctuation and capitals make no other text.

    Example:
        >>> words_of("12. She has  Asthma!")
        'she has asthma'
    """
    return " ".join(WORD.findall(text)).casefold() if isinstance(text, str) else text


def checked_gold(gold: Any, texts: Any, pair: Pair) -> tuple[tuple[Span, ...], ...]:
    """Return gold entities, checked before anything runs.

    Raises:
        ConfigurationError: For what is no gold, gold of another number of texts, and labels that the model does not have.
    """
    spans = gold_spans(gold)
    if isinstance(texts, Sized) and len(texts) != len(spans):
        raise other_number(len(spans), len(texts))
    known = labels_given(pair.candidate)
    labels = [label for entities in spans for _, _, label in entities]
    unknown = sum(label not in known for label in labels)
    if unknown:  # They are not named: they could be words of a text.
        what = f"{unknown:,} of {counted(len(labels), 'gold entity', 'gold entities')} have a label that the model does not have."
        raise ConfigurationError(what, f"Use those of the model, and leave others out: {', '.join(sorted(known))}.")
    return spans


def labels_given(annotator: Annotator) -> set[str]:
    """Return the labels that entities can have, without those that are no answer, such as ``O``."""
    tables = annotator.decoder.tables
    if annotator.settings.aggregation_strategy == "none":
        return {name for name, kept in zip(tables.names, tables.label_kept, strict=True) if kept}
    return {group for group, kept in zip(tables.groups, tables.group_kept, strict=True) if kept}


def other_number(gold: int, texts: int) -> ConfigurationError:
    """Return the error for gold of another number of texts."""
    return ConfigurationError(
        f"The gold is of {counted(gold, 'text')}, and there are {texts:,}.", "Pass the gold of the same texts."
    )


ROUNDED = "The reference has this pipeline's weights, rounded to {dtype} already; pass the model's name to compare with its files."


@dataclass(frozen=True)
class Pair:
    """A model in two ways.

    Attributes:
        name: What the person calls the model.
        reference: The way that is right: on the CPU in float32.
        candidate: The way in question.
        dtype: The candidate's type.
        notes: What to know about the comparison.
        strategies: How tokens become the entities that are compared; empty where as the reference does it.
    """

    name: str
    reference: Annotator
    candidate: Annotator
    dtype: str
    notes: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()


def pair_of_files(spec: LoadSpec, device: str) -> Pair:
    """Return a model from its files twice: on the CPU in float32, and on a device in the type of the specification."""
    from ...annotation.pipeline import device_budget

    model = load(spec, device).model
    # A pipeline proves itself on a word: a candidate that fails at it shall be judged, and is no error.
    pipe = build_pipeline(load(spec.in_dtype("float32"), "cpu"), DEFAULT_STRATEGY, {})
    reference = whole_texts(pipe.own_annotator())
    budget = replace(device_budget(model.device), padding=reference.budget.padding)
    candidate = replace(with_model(reference, model), budget=budget)
    return Pair(spec.reference.name, reference, candidate, spec.dtype)


def pair_of_pipeline(pipe: AnnotationPipeline) -> Pair:
    """Return a pipeline as it is, and with a float32 copy of its model on the CPU.

    Raises:
        ConfigurationError: For a pipeline in int8, whose weights were rounded away, and in a type without a tolerance.
    """
    dtype, name = dtype_of(pipe.model), type(pipe.model).__name__
    if is_quantized(pipe.model):
        what = f"The float32 weights of this {name} in int8 are gone."
        raise ConfigurationError(what, f"Pass the model's name and dtype={INT8!r}.")
    if dtype not in TOLERANCES:
        what = f"{name} in {dtype} cannot be compared: there is no tolerance for that type."
        raise ConfigurationError(what, "Call .float() on its model.")
    candidate = whole_texts(pipe.own_annotator())
    notes = () if dtype == "float32" else (ROUNDED.format(dtype=dtype),)
    return Pair(name, with_model(candidate, float32_copy(pipe.model)), candidate, dtype, notes)


def in_every_strategy(pair: Pair) -> Pair:
    """Return a pair whose entities are compared as each strategy makes them of the same probabilities."""
    reference, candidate = (
        replace(side, network=replace(side.network, whole=True)) for side in (pair.reference, pair.candidate)
    )
    return replace(pair, reference=reference, candidate=candidate, strategies=STRATEGIES)


def whole_texts(annotator: Annotator) -> Annotator:
    """Return an annotator that drops nothing of a long text."""
    return replace(annotator, settings=replace(annotator.settings, truncation=False))


def with_model(annotator: Annotator, model: Any) -> Annotator:
    """Return an annotator that does the same with another model."""
    return replace(annotator, network=replace(annotator.network, model=model, compiled=False))


def float32_copy(model: Any) -> Any:
    """Return a copy of a model on the CPU in float32; the device holds nothing more for it.

    Raises:
        ConfigurationError: Where the model cannot be copied.
    """
    import torch

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        kind = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to("cpu", kind, copy=True)

    with TENSOR_LOCK:
        parameters: dict[int, Any] = {
            id(one): torch.nn.Parameter(copied(one), requires_grad=one.requires_grad) for one in model.parameters()
        }
        buffers = {id(one): copied(one) for one in model.buffers()}
        try:
            return copy.deepcopy(model, {**parameters, **buffers}).eval()
        except Exception as error:
            # A model can hold anything, such as a hook with a lock, and each thing fails in its own way.
            what = f"{type(model).__name__} cannot be copied: {cause(error)}."
            raise ConfigurationError(what, "Take out of the model what cannot be copied, or pass its name.") from error


@contextlib.contextmanager
def undisturbed(pair: Pair) -> Iterator[None]:
    """Compute as if the caller had set nothing: an autocast around would round the reference as it rounds the candidate."""
    import torch

    kinds = dict.fromkeys(("cpu", pair.candidate.network.model.device.type))
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.amp.is_autocast_available, kinds):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Switch dropout off, and give every part of the model its former mode back."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


TOKENS = 1024
"""How many tokens the step has at most; its activations are kept on both devices."""

SCALE = 1024.0
"""The loss is multiplied by this, and the gradients divided, as a ``GradScaler`` does: float16 would make 0 of small ones."""

SMALLEST = 1e-2
"""Gradients shorter than this share of the longest are compared with that: some, such as those of the biases of keys in
attention, are zero but for rounding."""


def gradient_difference(reference: Annotator, candidate: Annotator, prepared: Prepared) -> GradientDifference | None:
    """Return how far the gradients of one batch are apart; ``None`` where no parameter has one.

    Raises:
        DeviceUnavailable: Where the device fails.
    """
    from ...annotation.forward import fill

    batch = candidate.batches(prepared, candidate.budget.within(TOKENS))[0]
    inputs = fill(prepared.tokens, prepared.windows, batch, candidate.network)
    labels = best_labels(reference.network, inputs)
    try:
        ours, theirs = (gradients_of(side.network, inputs, labels) for side in (reference, candidate))
    except RuntimeError as error:
        place = shown_device(str(candidate.network.model.device))
        what = f"A step could not be computed on {place}: {cause(error)}."
        raise DeviceUnavailable(what, "Leave gradients=True out, or use another device or type.") from error
    return largest_difference(ours, theirs) if ours else None


def best_labels(network: Network, inputs: Inputs) -> np.ndarray:
    """Return the labels that a model gives to a batch, ``(rows, length)`` int64."""
    import torch

    with TENSOR_LOCK, torch.no_grad():
        labels: np.ndarray = network.logits(inputs).argmax(-1).cpu().numpy()
    return labels


def gradients_of(network: Network, inputs: Inputs, labels: np.ndarray) -> dict[str, Any]:
    """Return the gradient of each parameter on the host in float32; the parameters themselves keep theirs."""
    import torch

    model = getattr(network.model, "_orig_mod", network.model)
    learning = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not learning:
        return {}
    device = model.device
    with TENSOR_LOCK, torch.enable_grad():
        output = model(**{name: torch.from_numpy(array).to(device) for name, array in inputs.items()})
        logits = output["logits"] if isinstance(output, dict) else output[0]
        inside = torch.from_numpy(inputs.get("attention_mask", labels >= 0)).to(device).bool()
        loss = torch.nn.functional.cross_entropy(logits.float()[inside], torch.from_numpy(labels).to(device)[inside])
        gradients = torch.autograd.grad(SCALE * loss, list(learning.values()), allow_unused=True)
        synchronize(device)
        found = zip(learning, gradients, strict=True)
        return {name: one.detach().cpu().float() / SCALE for name, one in found if one is not None}


def largest_difference(reference: Mapping[str, Any], candidate: Mapping[str, Any]) -> GradientDifference:
    """Return the largest relative difference of two sets of gradients, and the parameter where it is.

    Args:
        reference: Gradients by the names of parameters, as tensors on the CPU.
        candidate: The same in another way; one that is missing counts as zero.

    Example:
        >>> import torch
        >>> ones = {"weight": torch.ones(4), "bias": torch.ones(2)}
        >>> largest_difference(ones, {**ones, "bias": torch.tensor([1.0, 2.0])}).parameter
        'bias'
    """
    lengths = {name: float(one.norm()) for name, one in reference.items()}
    least = SMALLEST * max(lengths.values()) or 1.0
    apart = {
        name: float((candidate[name] - one).norm() if name in candidate else one.norm()) / max(lengths[name], least)
        for name, one in reference.items()
    }
    unknown = float("inf")
    apart = {name: unknown if one != one else one for name, one in apart.items()}  # noqa: PLR0124 - NaN is unlike itself
    worst = max(apart, key=apart.__getitem__)
    return GradientDifference(apart[worst], worst, len(apart))


PAIRS = 9
"""How many times both ways read the texts, in turn, to be timed."""

TIMED_CHARACTERS = 16384
"""About how many characters of the texts are read to be timed."""


def speed_up(plain: Annotator, reduced: Annotator, texts: Sequence[Any]) -> float:
    """Return how many times faster one way is than another on the same device, 1 where that is not certain."""
    some = first_texts(texts, TIMED_CHARACTERS)
    return gain_of(seconds_in_turn(lambda: plain.entities(some), lambda: reduced.entities(some), PAIRS))


def gain_of(seconds: Sequence[tuple[float, float]]) -> float:
    """Return how many times faster the second way is: the middle of all pairs, 1 where two of them do not say so.

    On a busy computer a pair can say anything: one way read against itself gave ratios from 0.66 to 2.16.

    Args:
        seconds: How long each way took, in pairs, at least two.

    Example:
        >>> gain_of([(2.0, 1.0)] * 8 + [(1.0, 3.0)]), gain_of([(2.0, 1.0), (1.0, 1.0), (1.0, 2.0)])
        (2.0, 1.0)
    """
    ratios = sorted(plain / reduced for plain, reduced in seconds)
    return statistics.median(ratios) if ratios[1] > WORTH else 1.0


def seconds_in_turn(first: Callable[[], object], second: Callable[[], object], pairs: int) -> list[tuple[float, float]]:
    """Return how long two functions take, in pairs that begin with either in turn, after a pair for warming up."""
    seconds = []
    for number in range(pairs + 1):
        if number % 2:
            one = timed(first)
            seconds.append((one, timed(second)))
        else:
            other = timed(second)
            seconds.append((timed(first), other))
    return seconds[1:]


def first_texts(texts: Sequence[Any], characters: int) -> list[Any]:
    """Return the first texts, of about so many characters together.

    Example:
        >>> first_texts(["aaaa", "bbbb", "cccc"], 6)
        ['aaaa', 'bbbb']
    """
    return next((chunk.texts for chunk in in_chunks(texts, 8 * characters)), [])


def timed(function: Callable[[], object]) -> float:
    """Return how long a function takes, in seconds."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


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
    return [] if isinstance(answer, OpenMedError) else [span_of(entity) for entity in answer]


def quantiles(differences: Sequence[np.ndarray]) -> Differences:
    """Return the largest of differences, and their quantiles."""
    import numpy as np

    together = np.concatenate([np.zeros(0, np.float32), *differences])
    if not len(together):
        return Differences()
    middle, ninety, ninety_nine = np.quantile(together, [0.5, 0.9, 0.99]).tolist()
    return Differences(float(together.max()), middle, ninety, ninety_nine)
