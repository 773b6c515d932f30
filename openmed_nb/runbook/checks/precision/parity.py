"""``nb.runbook.parity``: one model run in two ways over the same texts, on the CPU in float32 and on a device in a type.

Tokens, windows and padded batches are made once, on the CPU, and given to both; nothing is truncated. Of the logits only
the difference of each token is kept, four bytes on the host. The gradients of one training step can be compared too, with
dropout off and against the labels that the reference itself gives: a seed gives other numbers on MPS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ...._events.activity import ProgressEvent
from ...._render.display import pluralize
from ...._utils.text import describe_error, describe_value
from ...._utils.validation import check_bool
from ....devices.backend import TENSOR_LOCK, without_autocast
from ....devices.machine import format_device
from ....devices.memory import empty_cache, is_out_of_memory
from ....devices.moving import copy_model, to_numpy
from ....devices.registry import parse_device_argument
from ....errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, OpenMedError
from ....models.config import DEFAULT_STRATEGY, STRATEGIES
from ....models.loading import INT8, LoadedModel, LoadSpec, dtype_of, is_quantized, load_from_spec
from ....models.registry import is_model_name
from ....session import SESSION
from .policy import TOLERANCES
from .report import (
    EntityAgreement,
    EntityScore,
    GradientDifference,
    LogitDifferences,
    ParityReport,
    Span,
    compare_spans,
    parse_gold,
    score,
)

if TYPE_CHECKING:
    import numpy as np

    from ....annotation.forward import Batch, Inputs, TokenClassifier
    from ....annotation.pipeline import AnnotationPipeline
    from ....annotation.results import TextResult
    from ....annotation.stream import Annotator, TokenizedChunk

LETTERS = re.compile(r"[^\W\d_]+")

# One training step has at most this many tokens; its activations are kept on both devices.
MAX_GRADIENT_TOKENS = 1024
# The loss is multiplied by this and the gradients divided, as a GradScaler does: float16 would make 0 of small ones.
LOSS_SCALE = 1024.0
# Gradients shorter than this share of the longest are compared with that: some, such as those of the biases of keys in
# attention, are zero but for rounding.
MIN_GRADIENT_FRACTION = 1e-2


def parity(  # noqa: PLR0913 - each is one thing that a person may want to set
    model: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    gold: Iterable[Any] | None = None,
    gradients: bool = False,
    progress: bool = True,
    **arguments: Any,
) -> ParityReport:
    """Compare a model on a device, in a type, with the same model on the CPU in float32: logits, labels and entities.

    Both read the same tokens, windows and padded batches, which are made on the CPU; nothing is truncated. A model that the
    session has loaded there, which :func:`annotate` runs, is compared as it is, in evaluation mode. Others are loaded for the
    comparison and let go after it: the models of the session, and its device, stay as they are.

    Args:
        model: An alias, a hub id, a bare name, a folder, ``None`` for the bundled model; or a pipeline of
            :func:`load_pipeline`, which is compared as it is with a float32 copy of its model on the CPU.
        texts: Any series of texts, at least one.
        device: The device of the candidate; ``None`` is the session's.
        dtype: Its type: ``"float32"`` (also the default), ``"float16"``, ``"bfloat16"``, ``"int8"`` on the CPU, or ``"auto"``.
        gold: For each text its true entities, as ``(start, end, label)`` or as mappings like those of :func:`annotate`;
            both ways are scored against them, with borders and labels exact.
        gradients: Whether the gradients of one training step are compared too: without dropout, against the labels that
            the reference itself gives.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        Counts, figures and what they mean. Its text form has no figure that differs from run to run; no form of it has a
        word of a text, and where entities differ, it names numbers of texts and characters.

    Raises:
        ConfigurationError: Without a text, for gold that is not gold or of other texts, for gradients in int8, and for a
            type that the device does not have.
        InvalidTextError: For a text that cannot be read, by its number.
        ModelError: If the model cannot be loaded, or computes no numbers on the CPU in float32.
        DeviceError: If the device cannot be used, or fails.

    Example:
        >>> report = parity("bundled_small", ["She has asthma.", "No fever."], device="cpu", dtype="bfloat16")
        >>> report.spans.exact, report.spans.missing, report.findings[0].evidence
        (2, 0, 'every logit is a number')
    """
    from ...._annotate import validate_pipeline

    named = {"device": device, "dtype": dtype, **arguments}
    given = {name: value for name, value in named.items() if value is not None}
    check_bool("gradients", gradients)
    with SESSION.operation(progress):
        check_texts(texts)
        if is_model_name(model):
            spec, on = SESSION.load_spec(model, given)
            pair = pair_from_files(spec, on, SESSION.models.loaded_on(spec, on))
        else:
            pair = pair_from_pipeline(validate_pipeline(model, given))
        return run_parity(pair, texts, gold, gradients)


def check_texts(texts: Any) -> None:
    """Refuse what is not a series of texts, and one that is empty, without reading it."""
    from ....annotation.references import check_iterable

    if isinstance(texts, str):
        raise ConfigurationError("str is not a series of texts.", "Pass the model first and then a list of texts.")
    if texts is not None:
        check_iterable(texts)
    if texts is None or (isinstance(texts, Sized) and not len(texts)):
        raise _no_texts_error()


def _no_texts_error() -> ConfigurationError:
    what = "Pass the model first and then the texts; None is the bundled model."
    return ConfigurationError("There is no text to compare on.", what)


def normalize_text(text: Any) -> Any:
    """Return the words of a text in one form: numbers, white space, punctuation and capitals make no other text."""
    return " ".join(LETTERS.findall(text)).casefold() if isinstance(text, str) else text


def _validate_gold(gold: Any, texts: Any, candidate: Annotator) -> tuple[tuple[Span, ...], ...]:
    """Return gold entities, checked before anything runs."""
    spans = parse_gold(gold)
    if isinstance(texts, Sized) and len(texts) != len(spans):
        raise _gold_length_error(len(spans), len(texts))
    tables = candidate.decoder.tables  # Labels that are no answer, such as "O", are not kept.
    kept = zip(tables.entity_names, tables.keep_entity, strict=True)
    if candidate.settings.aggregation_strategy == "none":
        kept = zip(tables.names, tables.keep_label, strict=True)
    known = {label for label, is_kept in kept if is_kept}
    labels = [label for entities in spans for _, _, label in entities]
    unknown = sum(label not in known for label in labels)
    if unknown:  # They are not named: they could be words of a text.
        what = f"{unknown:,} of {pluralize(len(labels), 'gold entity', 'gold entities')} have a label that the model does not have."
        raise ConfigurationError(what, f"Use those of the model, and leave others out: {', '.join(sorted(known))}.")
    return spans


def _gold_length_error(gold: int, texts: int) -> ConfigurationError:
    what = f"The gold is of {pluralize(gold, 'text')}, and there are {texts:,}."
    return ConfigurationError(what, "Pass the gold of the same texts.")


@dataclass(frozen=True)
class ModelPair:
    """A model in two ways."""

    name: str  # What the person calls the model.
    reference: Annotator  # The way that is right: on the CPU in float32.
    candidate: Annotator  # The way in question.
    dtype: str  # The candidate's type.
    notes: tuple[str, ...] = ()  # What to know about the comparison.
    # How tokens become the entities that are compared; empty for the reference's own strategy.
    strategies: tuple[str, ...] = ()

    def in_every_strategy(self) -> ModelPair:
        """Return the pair with its entities compared as each strategy makes them of the same probabilities."""
        whole = [
            replace(side, network=replace(side.network, return_all_probabilities=True))
            for side in (self.reference, self.candidate)
        ]
        return replace(self, reference=whole[0], candidate=whole[1], strategies=STRATEGIES)


def pair_from_files(spec: LoadSpec, device: str, loaded: LoadedModel | None = None) -> ModelPair:
    """Return a model from its files on the CPU in float32, and on a device in the type of the specification.

    That one is loaded from the same files, if it is not ``loaded``.
    """
    from ....annotation.pipeline import budget_for_device, build_pipeline

    model = (loaded or load_from_spec(spec, device)).model
    # A pipeline proves itself on a word: a candidate that fails at it shall be judged, and is no error.
    pipe = build_pipeline(load_from_spec(spec.in_dtype("float32"), "cpu"), DEFAULT_STRATEGY, {})
    reference = pipe.default_annotator().whole_texts()
    budget = replace(budget_for_device(model.device, model), allow_padding=reference.budget.allow_padding)
    candidate = replace(reference.with_model(model), budget=budget)
    return ModelPair(spec.reference.name, reference, candidate, spec.dtype)


def pair_from_pipeline(pipe: AnnotationPipeline) -> ModelPair:
    """Return a pipeline as it is, and with a float32 copy of its model on the CPU."""
    import torch

    dtype = dtype_of(pipe.model)
    name = type(pipe.model).__name__
    if is_quantized(pipe.model):
        what = f"The float32 weights of this {name} in int8 are gone."
        raise ConfigurationError(what, f"Pass the model's name and dtype={INT8!r}.")
    if dtype not in TOLERANCES:
        what = f"{name} in {dtype} cannot be compared: there is no tolerance for that type."
        raise ConfigurationError(what, "Call .float() on its model.")
    candidate = pipe.default_annotator().whole_texts()
    notes: tuple[str, ...] = ()
    if dtype != "float32":
        rounded = f"The reference has this pipeline's weights, rounded to {dtype} already"
        notes = (f"{rounded}; pass the model's name to compare with its files.",)
    with TENSOR_LOCK:
        reference = candidate.with_model(copy_model(pipe.model, dtype=torch.float32).eval())
    return ModelPair(name, reference, candidate, dtype, notes)


def _gradient_difference(
    reference: Annotator, candidate: Annotator, prepared: TokenizedChunk
) -> GradientDifference | None:
    """Return how far the gradients of one batch are apart; ``None`` if no parameter has one."""
    import torch

    from ....annotation.forward import pad_batch

    batch = candidate.plan_batches(prepared, candidate.budget.capped_at(MAX_GRADIENT_TOKENS))[0]
    inputs = pad_batch(prepared.tokens, prepared.windows, batch, candidate.network)
    with TENSOR_LOCK, torch.no_grad():
        labels: np.ndarray = reference.network.logits(inputs).argmax(-1).cpu().numpy()  # (rows, length) int64
    try:
        expected = _gradients_of(reference.network, inputs, labels)
        computed = _gradients_of(candidate.network, inputs, labels)
    except RuntimeError as error:
        what = (
            f"A step could not be computed on {format_device(str(candidate.network.device))}: {describe_error(error)}."
        )
        raise DeviceUnavailableError(what, "Leave gradients=True out, or use another device or type.") from error
    if not expected:
        return None
    lengths = {name: float(gradient.norm()) for name, gradient in expected.items()}
    least = MIN_GRADIENT_FRACTION * max(lengths.values()) or 1.0
    apart = {}
    for name, gradient in expected.items():
        # One that is missing counts as zero, and one that is no number is infinitely far.
        far = float((computed[name] - gradient).norm()) if name in computed else lengths[name]
        apart[name] = math.inf if math.isnan(far) else far / max(lengths[name], least)
    worst = max(apart, key=apart.__getitem__)
    return GradientDifference(apart[worst], worst, len(apart))


def _gradients_of(network: TokenClassifier, inputs: Inputs, labels: np.ndarray) -> dict[str, Any]:
    """Return the gradient of each parameter on the host in float32; the parameters themselves keep theirs."""
    import torch

    from ....annotation.forward import evaluation_mode

    model = getattr(network.model, "_orig_mod", network.model)
    learning = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not learning:
        return {}
    device = model.device
    with evaluation_mode(model), torch.enable_grad():
        output = model(**{name: torch.from_numpy(array).to(device) for name, array in inputs.items()})
        logits = output["logits"] if isinstance(output, dict) else output[0]
        inside = torch.from_numpy(inputs.get("attention_mask", labels >= 0)).to(device).bool()
        loss = torch.nn.functional.cross_entropy(logits.float()[inside], torch.from_numpy(labels).to(device)[inside])
        gradients = torch.autograd.grad(LOSS_SCALE * loss, list(learning.values()), allow_unused=True)
        parse_device_argument(device).finish()
        computed = zip(learning, gradients, strict=True)
        return {
            name: gradient.detach().cpu().float() / LOSS_SCALE for name, gradient in computed if gradient is not None
        }


def run_parity(pair: ModelPair, texts: Any, gold: Any = None, gradients: bool = False) -> ParityReport:
    """Run a model in two ways over texts, and return how far apart they are; see :func:`parity`."""
    from ...._annotate import length_or_none
    from ....annotation.references import iter_texts
    from ....annotation.stream import chunk_characters, iter_chunks

    tally = _ParityAccumulator(pair, None if gold is None else _validate_gold(gold, texts, pair.candidate))
    total = length_or_none(texts)
    if gradients and pair.dtype == INT8:
        raise ConfigurationError("Layers in int8 have no gradients.", "Leave gradients=True out.")
    difference: GradientDifference | None = None
    SESSION.notify(ProgressEvent("Comparing", pair.name, 0, total, "text"))
    with without_autocast(pair.candidate.network.model.device.type):
        for chunk in iter_chunks(iter_texts(texts), chunk_characters(pair.candidate.budget)):
            prepared = pair.candidate.tokenize(chunk)
            if chunk.error:
                raise chunk.error
            if prepared is None:
                continue
            for failure in prepared.errors.values():
                raise failure
            if gradients and difference is None and len(prepared.tokens):
                difference = _gradient_difference(pair.reference, pair.candidate, prepared)
            tally.add(prepared)
            SESSION.notify(ProgressEvent("Comparing", pair.name, len(tally.texts), total, "text"))
    return tally.report(difference)


@dataclass
class _ParityAccumulator:
    """What is counted while two ways run, for each strategy; the report is of the one that lost most."""

    pair: ModelPair  # The model in two ways.
    gold: tuple[tuple[Span, ...], ...] | None  # The gold entities of each text; None if none were given.
    texts: list[int] = field(default_factory=list)
    tokens: int = 0
    windows: int = 0
    differences: list[np.ndarray] = field(default_factory=list)
    other_labels: int = 0
    non_finite_tokens: int = 0
    spans: dict[str, EntityAgreement] = field(default_factory=dict)
    scores: dict[str, tuple[EntityScore, EntityScore]] = field(default_factory=dict)
    distinct: set[int] = field(default_factory=set)

    @property
    def own(self) -> str:
        """The strategy of the reference, whose labels the gold has."""
        return self.pair.reference.decoder.strategy

    def add(self, prepared: TokenizedChunk) -> None:
        """Run a chunk of texts both ways, and count."""
        from ....annotation.forward import ForwardRun, assemble_predictions
        from ....annotation.references import text_fingerprint

        reference = self.pair.reference
        candidate = self.pair.candidate
        outputs: tuple[list[Any], list[Any]] = ([], [])
        for batch in candidate.plan_batches(prepared, candidate.budget):
            for outcome in _run_both(reference.network, candidate.network, prepared, batch):
                self._count_logits(prepared, outcome)
                outputs[0].append((outcome.batch, outcome.reference[1]))
                outputs[1].append((outcome.batch, outcome.candidate[1]))
        run = ForwardRun(prepared.tokens, prepared.windows)
        expected = assemble_predictions(run, reference.network, outputs[0])
        computed = assemble_predictions(run, candidate.network, outputs[1])
        for strategy in dict.fromkeys((self.own, *self.pair.strategies)):  # Of equal ones the report is of its own.
            first, second = (
                replace(side, decoder=replace(side.decoder, strategy=strategy)).decode(prepared, predictions)
                for side, predictions in ((reference, expected), (candidate, computed))
            )
            self._count_entities(strategy, prepared, first, second)
        self.texts += [text_fingerprint(text) for text in prepared.texts]
        self.tokens += len(prepared.tokens)
        self.windows += len(prepared.windows.starts)

    def _count_logits(self, prepared: TokenizedChunk, outcome: _Outcome) -> None:
        """Count how far apart the logits of a batch are, each token in the window that owns it."""
        import numpy as np

        from ....annotation.forward import owned_token_positions

        owned = owned_token_positions(prepared.windows, outcome.batch, self.pair.candidate.network.special_tokens)[1]
        expected, computed = (
            logits.reshape(-1, logits.shape[-1])[owned] for logits, _ in (outcome.reference, outcome.candidate)
        )
        if not np.isfinite(expected).all():
            what = f"The model {describe_value(self.pair.name)} computes no numbers (NaN) on the CPU in float32."
            raise InvalidModelError(what, "Use another model: there is nothing to compare with.")
        numbers = np.isfinite(computed).all(-1)
        self.non_finite_tokens += int((~numbers).sum())
        self.other_labels += int(((expected.argmax(-1) != computed.argmax(-1)) | ~numbers).sum())
        self.differences.append(np.abs(expected[numbers] - computed[numbers]).max(-1, initial=0.0))

    def _count_entities(
        self, strategy: str, prepared: TokenizedChunk, reference: Sequence[TextResult], candidate: Sequence[TextResult]
    ) -> None:
        """Count what became of the entities of a strategy; a text for which a way has no answer has none in it."""
        from ....annotation.references import text_fingerprint
        from ....annotation.results import entity_span

        for place, answers in enumerate(zip(reference, candidate, strict=True)):
            number = prepared.first + place
            text = prepared.texts[place]
            expected, computed = (
                [] if isinstance(answer, OpenMedError) else list(map(entity_span, answer)) for answer in answers
            )
            self.spans[strategy] = self.spans.get(strategy, EntityAgreement()) + compare_spans(
                expected, computed, number
            )
            if strategy == self.own:
                words = (f"{label} {normalize_text(text[start:end])}" for start, end, label in expected)
                self.distinct.update(map(text_fingerprint, words))
            if self.gold is not None and (strategy == "none") == (self.own == "none"):  # Gold has labels of one kind.
                gold = self._gold_of(number, len(text))
                before = self.scores.get(strategy, (EntityScore(), EntityScore()))
                self.scores[strategy] = before[0] + score(gold, expected), before[1] + score(gold, computed)

    def _gold_of(self, number: int, length: int) -> tuple[Span, ...]:
        """Return the gold entities of a text."""
        remedy = "Pass the gold of the same texts, in the same order."
        if self.gold is None or number >= len(self.gold):
            raise ConfigurationError(f"There is no gold for text {number}.", remedy)
        if any(end > length for _, end, _ in self.gold[number]):
            what = f"An entity in the gold of text {number} ends after character {length}, the last of the text."
            raise ConfigurationError(what, remedy)
        return self.gold[number]

    def report(self, gradients: GradientDifference | None) -> ParityReport:
        """Return what was counted."""
        import numpy as np

        from ....annotation.references import text_fingerprint

        if not self.texts:
            raise _no_texts_error()
        if self.gold is not None and len(self.gold) != len(self.texts):
            raise _gold_length_error(len(self.gold), len(self.texts))
        together = np.concatenate([np.zeros(0, np.float32), *self.differences])
        logits = LogitDifferences()
        if len(together):
            logits = LogitDifferences(float(together.max()), *np.quantile(together, [0.5, 0.9, 0.99]).tolist())
        gold = None
        if self.gold is not None:
            gold = min(self.scores.values(), key=lambda both: both[1].recall - both[0].recall)
        return ParityReport(
            model=self.pair.name,
            device=format_device(str(self.pair.candidate.network.device)),
            dtype=self.pair.dtype,
            texts=len(self.texts),
            texts_fingerprint=f"{text_fingerprint(' '.join(map(str, self.texts))):016x}",
            tokens=self.tokens,
            windows=self.windows,
            logits=logits,
            label_mismatches=self.other_labels,
            non_finite_tokens=self.non_finite_tokens,
            spans=min(self.spans.values(), key=lambda spans: spans.agreement),
            gold=gold,
            gradients=gradients,
            distinct=len(self.distinct),
            notes=self.pair.notes,
        )


class _Outcome(NamedTuple):
    """What both ways give for a batch, on the host: logits (rows, length, labels) float32, and what the network answers."""

    batch: Batch
    reference: tuple[np.ndarray, list[np.ndarray]]
    candidate: tuple[np.ndarray, list[np.ndarray]]


def _run_both(
    reference: TokenClassifier, candidate: TokenClassifier, prepared: TokenizedChunk, batch: Batch
) -> Iterator[_Outcome]:
    """Run a batch both ways; if memory is short, its halves."""
    from ....annotation.forward import pad_batch

    inputs = pad_batch(prepared.tokens, prepared.windows, batch, candidate)
    halves: list[Batch] = []
    try:
        yield _Outcome(batch, _run(reference, inputs), _run(candidate, inputs))
    except OpenMedError:
        raise
    except (RuntimeError, MemoryError, TypeError) as error:
        empty_cache(str(candidate.model.device))
        if is_out_of_memory(error):
            halves = batch.split(prepared.windows.lengths + candidate.special_tokens.num_special_tokens)
        if not halves:
            what = f"The model could not be compared on {format_device(str(candidate.model.device))}: {describe_error(error)}."
            raise DeviceUnavailableError(what, "Use another device or another type.") from error
    for half in halves:
        yield from _run_both(reference, candidate, prepared, half)


def _run(network: TokenClassifier, inputs: Inputs) -> tuple[np.ndarray, list[np.ndarray]]:
    """Run a batch one way, to its end."""
    import torch

    with TENSOR_LOCK, torch.no_grad():
        logits = network.logits(inputs)
        array, *answers = (to_numpy(tensor) for tensor in (logits.float(), *network.postprocess_logits(logits)))
    return array, answers
