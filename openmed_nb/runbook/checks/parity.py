"""``nb.runbook.parity``: comparison of a model on a device in a dtype with the same model on the CPU in float32.

Tokens, windows and padded batches are created once on the CPU and used by both models, without truncation. The gradients of one training step can be compared as well.
Dropout is disabled, because a seed produces different numbers on MPS, and the labels are the predictions of the reference.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..._annotate import length_or_none, resolve_notes, validate_pipeline
from ..._events.activity import ProgressEvent
from ..._render.display import pluralize
from ..._utils.text import describe_error, describe_value, short_type_name
from ..._utils.validation import check_bool
from ...annotation.gold import align_gold, read_gold
from ...annotation.references import is_missing, iter_texts, text_fingerprint
from ...devices.backend import TENSOR_LOCK, without_autocast
from ...devices.machine import format_device
from ...devices.moving import to_numpy
from ...devices.registry import get_device
from ...errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, OpenMedError
from ...models.config import DEFAULT_STRATEGY
from ...models.loading import INT8, LoadSpec, load_from_spec
from ...models.registry import is_model_name
from ...session import SESSION, check_options
from ..bench.workloads import is_token_classifier, spec_of_pipeline
from .parity_report import BASELINE, EntityAgreement, GoldScore, GradientDifference, ParityReport, Span, compare_spans

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

    from ...annotation.forward import Batch, Inputs, TokenClassifier
    from ...annotation.gold import GoldTexts
    from ...annotation.inputs import NoteInputs
    from ...annotation.storage import TextResult
    from ...annotation.stream import Annotator, TokenizedChunk

# Maximum number of texts with which the CPU is compared with itself, which shows nothing about another device.
MAX_BASELINE_TEXTS = 8
# Maximum number of tokens in the training step, because its activations are stored on both devices.
MAX_GRADIENT_TOKENS = 1024
# Scale of the loss, as in a GradScaler. Without it, small gradients underflow to 0 in float16.
LOSS_SCALE = 1024.0
# Gradients whose norm is below this fraction of the largest norm are compared relative to that fraction. Some gradients, such as
# those of the key biases in attention, are zero except for rounding.
MIN_GRADIENT_FRACTION = 1e-2


def parity(  # noqa: PLR0913 - each is an independent option of the public API
    model: Any = None,
    texts: Iterable[Any] | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    gold: Any = None,
    labels: Mapping[str, str] | None = None,
    gradients: bool = False,
    **arguments: Any,
) -> ParityReport:
    """Compare the logits, labels and entities of a model on a device with the same model on the CPU in float32.

    Both models use the same tokens, windows and padded batches, created on the CPU without truncation. A model that the session
    has already loaded for :func:`annotate` is compared unmodified, in evaluation mode. Other models are loaded for the
    comparison and released afterwards. The models and the device of the session stay unchanged.

    Args:
        model: An alias, a Hub id, a bare name, a folder, or ``None`` for the bundled model. The model of a
            pipeline from :func:`load_pipeline` is compared unmodified, with its files in float32 on the CPU.
        texts: At least one text, as for :func:`annotate`. Missing values are skipped. With ``gold``, they are stored in memory.
        device: Device of the candidate. If ``None``, use the device of the session.
        dtype: Dtype of the candidate: ``"float32"`` (the default), ``"float16"``, ``"bfloat16"``, ``"int8"`` on the CPU, or
            ``"auto"``.
        gold: Gold entities of all texts, as for :meth:`Annotations.score`. The ids of the texts are the index of a Series or the
            keys of a mapping. Both models are scored against them, with exact boundaries and labels.
        labels: New names for labels of the gold, such as ``{"Disease": "DISEASE"}``.
        gradients: Whether to compare the gradients of one training step as well, without dropout. The labels are the
            predictions of the reference.
        arguments: Arguments of :func:`openmed_nb.load_model`, such as ``revision``, if ``model`` is a name.

    Returns:
        The report with counts, metrics and findings, without text content: differing entities are given by text index and
        character offsets. On the CPU in float32, nothing is compared but the CPU with itself: without ``gold``, a named model
        then reads only the first eight texts.

    Raises:
        ConfigurationError: If there are no texts, if ``gold`` is not valid or does not match the texts, if gradients
            are requested in int8, or if the device does not support the dtype.
        InvalidTextError: If a text cannot be processed. The error names its index.
        ModelError: If the model cannot be loaded, or has non-finite logits on the CPU in float32.
        DeviceError: If the device is unavailable or fails.

    Example:
        >>> report = parity("bundled_small", ["She has asthma.", "No fever."], device="cpu", dtype="bfloat16")
        >>> report.spans.exact, report.spans.missing, report.findings[0].evidence
        (2, 0, 'all logits are finite')
    """
    options = {"device": device, "dtype": dtype, **arguments}
    options = {name: value for name, value in options.items() if value is not None}
    check_options(parity, arguments)
    check_bool("gradients", gradients)
    with SESSION.operation():
        notes = read_notes(model, texts)
        compared = notes.texts
        if is_model_name(model):
            spec, candidate_device = SESSION.load_spec(model, options)
            loaded = SESSION.models.loaded_on(spec, candidate_device)
            pair = pair_from_files(spec, candidate_device, loaded.model if loaded else None)
            if gold is None and (candidate_device, spec.dtype) == BASELINE:
                compared = list(itertools.islice(iter_texts(compared), MAX_BASELINE_TEXTS))
        else:
            if hasattr(model, "named_parameters"):
                raise ConfigurationError(
                    f"{short_type_name(model)} is a torch module, and parity compares the entities of a pipeline.",
                    "Use nb.runbook.loss_parity(model, batches), or compare outputs with torch.testing.assert_close.",
                )
            pipe = validate_pipeline(model, options)
            pair = pair_from_files(spec_of_pipeline(pipe), str(pipe.device), pipe.model)
        if gold is None:
            return run_parity(pair, compared, None, gradients)
        text_list = list(iter_texts(compared))
        spans = select_gold(read_gold(gold, labels), notes.ids, text_list)
        return run_parity(pair, text_list, spans, gradients)


def read_notes(model: object, texts: object) -> NoteInputs:
    """Return texts and their ids, without iterating over them.

    Raise ``ConfigurationError`` if ``texts`` is not an iterable of texts, or is swapped with ``model``.
    """
    if texts is None or (is_token_classifier(texts) and not is_token_classifier(model)):
        message = NO_TEXTS if texts is None else f"{short_type_name(model)} is not a model."
        raise ConfigurationError(message, TEXTS_REMEDY)
    return resolve_notes(texts)


NO_TEXTS = "There are no texts to compare."
TEXTS_REMEDY = "Pass the model first and then a list of texts. None selects the bundled model."


def select_gold(gold: GoldTexts, ids: Sequence[Any] | None, texts: Sequence[Any]) -> list[tuple[Span, ...]]:
    """Return the gold entities of each text, or raise an error if a text has no gold."""
    aligned = align_gold(gold, ids, texts, len(texts))
    remedy = "Pass the gold of the same texts, with the same ids or in the same order."
    if len(texts) != len(aligned):
        raise ConfigurationError(
            f"The gold covers {pluralize(len(aligned), 'text')}, but there are {len(texts):,}.", remedy
        )
    for text_index, text in enumerate(texts):
        if isinstance(text, str) and any(span.end > len(text) for span in aligned[text_index].spans):
            raise ConfigurationError(
                f"An entity in the gold of text {text_index} ends after the end of the text (character {len(text)}).",
                remedy,
            )
    return [aligned[text_index].spans for text_index in range(len(texts))]


def _validate_labels(spans: Sequence[Sequence[Span]], candidate: Annotator) -> None:
    """Raise an error if the gold has labels that the model does not have."""
    # Labels that are not entities, such as "O", are not valid in gold.
    valid_labels = set(candidate.decoder.entity_labels)
    labels = [label for entities in spans for _, _, label in entities]
    unknown = sum(label not in valid_labels for label in labels)
    if unknown:  # The labels are not quoted, because they may be text content.
        raise ConfigurationError(
            f"The model does not have the labels of {unknown:,} of {pluralize(len(labels), 'gold entity', 'gold entities')}.",
            f"Use the labels of the model only: {', '.join(sorted(valid_labels))}; labels= renames those of the gold.",
        )


@dataclass(frozen=True)
class ModelPair:
    """A model as reference and as candidate.

    Attributes:
        name: Name of the model as given by the user.
        reference: Model on the CPU in float32.
        candidate: Model that is compared with the reference.
        dtype: Dtype of the candidate.
    """

    name: str
    reference: Annotator
    candidate: Annotator
    dtype: str


def pair_from_files(spec: LoadSpec, device: str, model: PreTrainedModel | None = None) -> ModelPair:
    """Load a model on the CPU in float32, and on a device in the dtype of the specification.

    If ``model`` is given, it is the candidate.
    """
    from ...annotation.pipeline import budget_for_device, build_pipeline

    if model is None:
        model = load_from_spec(spec, device).model
    # Building a pipeline runs the model once. Only the reference is built, so that a failure of the candidate is a
    # finding of the report, not an error.
    pipe = build_pipeline(load_from_spec(spec.in_dtype("float32"), "cpu"), DEFAULT_STRATEGY, {})
    reference = pipe.default_annotator()
    budget = replace(budget_for_device(model.device, model), allow_padding=reference.budget.allow_padding)
    candidate = replace(reference.with_model(model), budget=budget)
    return ModelPair(spec.reference.name, reference, candidate, spec.dtype)


def _gradient_difference(pair: ModelPair, tokenized: TokenizedChunk) -> GradientDifference | None:
    """Return the difference of the gradients of one batch, or ``None`` if no parameter has a gradient."""
    import torch

    from ...annotation.forward import pad_batch

    reference = pair.reference.network
    candidate = pair.candidate.network
    batch = pair.candidate.plan_batches(tokenized, pair.candidate.budget.capped_at(MAX_GRADIENT_TOKENS))[0]
    inputs = pad_batch(tokenized.tokens, tokenized.windows, batch, candidate)
    with TENSOR_LOCK, torch.no_grad():
        labels = reference.logits(inputs).argmax(-1)  # (rows, length)
    expected = _compute_gradients(reference, inputs, labels)
    if not expected:
        return None
    try:
        computed = _compute_gradients(candidate, inputs, labels)
    except RuntimeError as error:
        raise DeviceUnavailableError(
            f"A training step failed on {format_device(str(candidate.device))}: {describe_error(error)}.",
            "Remove gradients=True, or use another device or dtype.",
        ) from error
    norms = {name: float(gradient.norm()) for name, gradient in expected.items()}
    min_norm = MIN_GRADIENT_FRACTION * max(norms.values()) or 1.0
    differences = {}
    for name, gradient in expected.items():
        # A missing gradient counts as zero, and NaN as an infinite difference.
        difference = float((computed.get(name, 0) - gradient).norm()) / max(norms[name], min_norm)
        differences[name] = math.inf if math.isnan(difference) else difference
    worst = max(differences, key=differences.__getitem__)
    return GradientDifference(differences[worst], worst, len(differences))


def _compute_gradients(network: TokenClassifier, inputs: Inputs, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter on the host in float32, without changing ``parameter.grad``."""
    import torch

    from ...annotation.forward import evaluation_mode, read_logits

    model = network.model
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not parameters:
        return {}
    device = model.device
    model_inputs = {name: torch.from_numpy(array).to(device) for name, array in inputs.items()}
    labels = labels.to(device)
    is_token = model_inputs.get("attention_mask", torch.ones_like(labels)).bool()
    with evaluation_mode(model), torch.enable_grad():
        logits = read_logits(model(**model_inputs))
        loss = torch.nn.functional.cross_entropy(logits.float()[is_token], labels[is_token])
        gradients = torch.autograd.grad(LOSS_SCALE * loss, list(parameters.values()), allow_unused=True)
        get_device(device).synchronize()
        computed = zip(parameters, gradients, strict=True)
        return {
            name: gradient.detach().cpu().float() / LOSS_SCALE for name, gradient in computed if gradient is not None
        }


def run_parity(  # noqa: C901, PLR0912, PLR0915 - one loop over the texts
    pair: ModelPair,
    texts: Iterable[str] | None,
    gold: Sequence[Sequence[Span]] | None = None,
    gradients: bool = False,
) -> ParityReport:
    """Run both models of a pair over texts and return the report, see :func:`parity`.

    Args:
        pair: Models that are compared.
        texts: Texts.
        gold: Gold entities of each text, or ``None``.
        gradients: Whether to compare the gradients of one training step.
    """
    import numpy as np

    from ...annotation.storage import entity_span
    from ...annotation.stream import chunk_characters, iter_chunks

    if gradients and pair.dtype == INT8:
        raise ConfigurationError("int8 layers do not support gradients.", "Remove gradients=True.")
    candidate = pair.candidate
    if gold is not None:
        _validate_labels(gold, candidate)
    total = length_or_none(texts)
    counts = Counter[str]()
    logit_difference = 0.0
    agreement = EntityAgreement()
    found = Counter[str]()
    fingerprints: list[int] = []
    distinct: set[int] = set()
    difference: GradientDifference | None = None
    with without_autocast(candidate.network.model.device.type):
        for chunk in iter_chunks(iter_texts(texts), chunk_characters(candidate.budget)):
            SESSION.notify(ProgressEvent("Comparing", pair.name, len(fingerprints), total, "text"))
            if chunk.error:
                raise chunk.error
            tokenized = candidate.tokenize(chunk)
            for position, failure in tokenized.errors.items():
                if not is_missing(chunk.texts[position]):
                    raise failure
            batches = candidate.plan_batches(tokenized, candidate.budget)
            expected_logits, expected_results = _predict(pair.reference, tokenized, batches)
            logits, results = _predict(candidate, tokenized, batches)
            if not np.isfinite(expected_logits).all():
                raise InvalidModelError(
                    f"The model {describe_value(pair.name)} has non-finite logits on the CPU in float32.",
                    "Use another model: this one has no valid reference.",
                )
            if gradients and difference is None and len(tokenized.tokens):
                difference = _gradient_difference(pair, tokenized)
            is_finite = np.isfinite(logits).all(-1)
            differs = expected_logits.argmax(-1) != logits.argmax(-1)
            largest = np.abs(expected_logits[is_finite] - logits[is_finite]).max(initial=0.0)
            logit_difference = max(logit_difference, float(largest))
            counts["non_finite_tokens"] += int((~is_finite).sum())
            counts["label_mismatches"] += int((differs | ~is_finite).sum())
            counts["tokens"] += len(tokenized.tokens)
            counts["windows"] += len(tokenized.windows.starts)
            for text_index, sides in enumerate(zip(expected_results, results, strict=True), tokenized.first_index):
                position = text_index - tokenized.first_index
                if is_missing(tokenized.texts[position]):
                    continue
                expected, computed = (
                    [] if isinstance(side, OpenMedError) else list(map(entity_span, side)) for side in sides
                )
                compared = compare_spans(expected, computed, text_index)
                fingerprint = text_fingerprint(tokenized.texts[position])
                # A text that repeats is no further evidence, unless its entities differ this time.
                if fingerprint not in distinct or compared.exact < compared.all:
                    agreement += compared
                distinct.add(fingerprint)
                fingerprints.append(fingerprint)
                if gold is not None:
                    entities = set(gold[text_index])
                    found["entities"] += len(entities)
                    found["reference"] += len(entities.intersection(expected))
                    found["candidate"] += len(entities.intersection(computed))
    if not fingerprints:
        raise ConfigurationError(NO_TEXTS, TEXTS_REMEDY)
    return ParityReport(
        model=pair.name,
        device=format_device(str(candidate.network.device)),
        dtype=pair.dtype,
        texts=len(fingerprints),
        texts_fingerprint=f"{text_fingerprint(' '.join(map(str, fingerprints))):016x}",
        logit_difference=logit_difference,
        spans=agreement,
        gold=None if gold is None else GoldScore(**found),
        gradients=difference,
        **counts,
    )


def _predict(
    annotator: Annotator, tokenized: TokenizedChunk, batches: Sequence[Batch]
) -> tuple[np.ndarray, Iterable[TextResult]]:
    """Run a model and return the logits of each token, float32 of shape ``(tokens, labels)``, and the results of the texts.

    Each token has the logits of the window that owns it. A text whose predictions are not finite has an error as its result.
    """
    import numpy as np

    recorded: list[tuple[Batch, np.ndarray]] = []
    run = annotator.predict(
        tokenized, batches, lambda batch, logits: recorded.append((batch, to_numpy(logits.float())))
    )
    for error in run.window_errors.values():
        raise error
    num_labels = recorded[0][1].shape[-1] if recorded else 1
    token_logits = np.zeros((len(tokenized.tokens), num_labels), np.float32)
    for batch, array in recorded:
        owned, inside = run.owned_positions(batch)
        token_logits[owned] = array.reshape(-1, num_labels)[inside]
    return token_logits, annotator.decode(tokenized, run).outcomes()
