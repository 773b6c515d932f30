"""The drop-in token-classification pipeline: transformers' own class, with batches of its own.

This file imports transformers, because a subclass needs its base; it is itself imported only where a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from transformers import TokenClassificationPipeline

from .._utils.text import describe_error, describe_value, short_type_name
from .._utils.validation import check_bool, check_integer, check_optional_integer
from ..devices.backend import TENSOR_LOCK, gc_disabled
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError, UnknownDeviceError
from ..models.config import check_strategy
from ..models.files import max_positions, usable_length
from ..models.loading import LoadedModel, is_quantized, move_model
from ..session import SESSION
from .decoding import Decoder, Detokenizer, LabelTables
from .forward import TokenBudget, TokenClassifier, evaluation_mode, input_names
from .results import Entity, TextResult
from .stream import AnnotationSettings, Annotator, unwrap_result
from .tokens import SpecialTokens
from .tuning import Calibration, Compilation, compare_compiled, is_padding_masked, measure_batches

# The methods of transformers' class that a subclass may override to change answers; ours has another way to the same.
OVERRIDABLE_METHODS = {
    name: getattr(TokenClassificationPipeline, name)
    for name in (
        *("preprocess", "_forward", "postprocess", "gather_pre_entities", "aggregate", "aggregate_word"),
        *("aggregate_words", "group_sub_entities", "get_tag", "group_entities"),
    )
}

# Options of preprocessing that transformers' own steps do not know.
OWN_OPTIONS = {"truncation", "transformers_boundaries"}

CachedT = TypeVar("CachedT")


class AnnotationPipeline(TokenClassificationPipeline):
    r"""transformers' ``TokenClassificationPipeline`` near the speed of the bare model, with the same answers.

    It takes and returns what that class does, with every argument of it. What differs:

    - A text longer than the model takes is read whole, in overlapping windows, and a word is never cut by an edge.
      transformers silently drops the rest (``truncation=True`` does that here too) or, with ``stride``, keeps the
      longer of two overlapping entities (``stride`` gives exactly its answers here).
    - Texts run sorted by length in batches of at most ``batch_tokens`` tokens; ``batch_size`` limits the rows as well,
      but for 1 in a call, which is also transformers' default.
    - ``pipe.device`` is always the device of ``pipe.model``, and setting it moves the model.
    - Scores are Python floats, so that answers can be written as JSON.
    - ``first``, ``average`` and ``max`` label a word as a whole, and a word starts where the tokenizer's pre-tokenizer starts a
      piece: for WordPiece at a token without ``##``, for byte-level BPE and Unigram also after white space and punctuation.
      transformers compares lengths, or sees spaces alone: it takes ``"cc:\tAnna"`` for one word with the label of ``cc``,
      and drops the name. ``transformers_boundaries=True`` or ``stride`` gives its boundaries.
    - Several threads may call it at once; all work on the device runs under one lock.
    - A subclass that overrides a step of transformers' class, such as ``postprocess``, runs transformers' steps.

    Args:
        kwargs: Those of transformers' class, and ``batch_tokens``: how many tokens run at once, by default what suits
            the device; ``truncation``: whether what is longer than the model takes is dropped;
            ``transformers_boundaries``: whether words start where transformers has them start. ``load_pipeline`` also
            takes ``compile``: whether to try ``torch.compile`` (see :meth:`compile`).

    Attributes:
        compilation: What came of ``compile``; ``None`` if it was not asked for.
        precision: Why its model has the type that it has (:class:`openmed_nb.models.records.DtypeChoice`); ``None`` if
            nothing but float32 was asked for.
        learned: How many tokens run best at once, by kind of device, where that was measured on this computer.

    Example:
        >>> from openmed_nb import load_pipeline
        >>> pipe = load_pipeline("bundled_small", device="cpu")
        >>> [[entity["word"] for entity in entities] for entities in pipe(["Type 2 diabetes.", "No asthma."])]
        [['type 2 diabetes'], ['asthma']]
    """

    compilation: Compilation | None = None
    precision: Any = None
    tuned_batch_tokens: Mapping[str, int | None] = MappingProxyType({})

    _compiled: Any = None

    @property
    def device(self) -> torch.device:
        """The device of the model, where all work is done."""
        return self.model.device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        try:
            wanted = torch.device(device)
        except (RuntimeError, TypeError):
            wanted = None
        if wanted is None:  # Outside of the handler: torch's error quotes the value.
            raise UnknownDeviceError(
                f"{describe_value(device)} names no device of torch.", "Pass one such as 'cpu' or 'cuda:0'."
            )
        if getattr(self.model, "hf_device_map", None) is None and wanted != self.model.device:
            move_model(self.model, str(wanted), type(self.model).__name__)

    @property
    def batch_tokens(self) -> int:
        """How many tokens run at once."""
        return self._tokens_at_once(self._forward_params, self.device)

    @batch_tokens.setter
    def batch_tokens(self, tokens: int) -> None:
        self._forward_params["batch_tokens"] = check_integer("batch_tokens", tokens)

    def _tokens_at_once(self, forward_params: Mapping[str, Any], device: torch.device) -> int:
        measured = self.tuned_batch_tokens.get(device.type) or budget_for_device(device, self.model).max_tokens
        return int(forward_params.get("batch_tokens", measured))

    @property
    def special_tokens(self) -> SpecialTokens | None:
        """What the tokenizer puts around the tokens of a text; ``None`` if it makes no tokens with offsets."""
        tokenizer = self.tokenizer
        return self._cached(
            "frame", tokenizer, lambda: SpecialTokens.from_tokenizer(tokenizer) if tokenizer.is_fast else None
        )

    def _cached(self, name: str, about: Any, learn: Callable[[], CachedT]) -> CachedT:
        """Return what was learnt about a model or a tokenizer; for another one, learn it again."""
        kept: dict[str, Any] = self.__dict__.setdefault("_kept", {})
        if name not in kept or kept[name][0] is not about:
            kept[name] = about, learn()
        learnt: CachedT = kept[name][1]
        return learnt

    def calibrate(self) -> Calibration:
        """Measure how many tokens should run at once, use that on this kind of device, and return the figures.

        The smallest number is taken that no larger one beats by more than three percent. It takes some seconds, and
        replaces what was set as ``batch_tokens``. Later sessions on this computer take it too, until the model's files,
        torch or transformers change, or :meth:`forget` is called.
        """
        annotator = self.default_annotator()
        network = annotator.network
        calibration = measure_batches(
            network, annotator.settings.max_tokens + network.special_tokens.num_special_tokens
        )
        self._forward_params.pop("batch_tokens", None)
        self._store_batch_tokens(calibration.batch_tokens, "pipe.calibrate()")
        return calibration

    def reset_calibration(self) -> None:
        """Forget how many tokens run best at once on this kind of device, here and for later sessions."""
        self._store_batch_tokens(None)

    def _store_batch_tokens(self, batch_tokens: int | None, by: str = "") -> None:
        if spec := SESSION.models.spec_of(self.model):
            SESSION.save_batch_size(spec, str(self.device), batch_tokens, by)
        if self.tuned_batch_tokens.get(self.device.type) != batch_tokens:  # It shares what was learned with no model.
            self.tuned_batch_tokens = {**self.tuned_batch_tokens, self.device.type: batch_tokens}

    def compile(self) -> Compilation:
        """Try ``torch.compile`` with its default backend, keep it only if it pays, and return what came of it.

        A few built-in sentences are read both ways; compiling is kept if the entities are the same and come at least
        five percent sooner. It takes up to minutes, and again for every device that the model is moved to.
        """
        self._compiled = None
        compiled = torch.compile(self.model, dynamic=True)
        plain, other = self.default_annotator(), self.default_annotator()
        other = replace(other, network=replace(other.network, model=compiled, compiled=True))
        self.compilation = compare_compiled(plain.entities, other.entities, str(self.device))
        self._compiled = compiled if self.compilation.kept else None
        return self.compilation

    def _sanitize_parameters(
        self,
        batch_tokens: int | None = None,
        truncation: bool | None = None,
        transformers_boundaries: bool | None = None,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        if kwargs.get("aggregation_strategy") is not None:
            kwargs["aggregation_strategy"] = check_strategy(kwargs["aggregation_strategy"])
        refused = ""
        try:
            preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        except (TypeError, ValueError) as error:
            refused = f"The pipeline does not take these options: {describe_error(error)}."
        if refused:  # Outside of the handler: the other error quotes the options, and would be the context of this one.
            raise ConfigurationError(refused, "Use those of TokenClassificationPipeline.")
        if "ignore_labels" in postprocess:
            postprocess["ignore_labels"] = normalize_ignore_labels(postprocess["ignore_labels"])
        if batch_tokens is not None:
            forward["batch_tokens"] = check_integer("batch_tokens", batch_tokens)
        if truncation is not None:
            preprocess["truncation"] = bool(truncation)
        if transformers_boundaries is not None:
            check_bool("transformers_boundaries", transformers_boundaries)
            preprocess["transformers_boundaries"] = transformers_boundaries
        return preprocess, forward, postprocess

    def forward(self, model_inputs: Any, **_forward_params: Any) -> Any:
        """Run transformers' own forward pass, in evaluation mode and under the lock of all device work."""
        with evaluation_mode(self.model):
            return super().forward(model_inputs)

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Return the entities of a text, a list or an iterator of them for several; see the class."""
        # transformers reads a whole generator of lists of words to look at their types, and then has nothing left.
        split = kwargs.get("is_split_into_words", False)
        return super().__call__(list(inputs) if split and isinstance(inputs, Iterator) else inputs, **kwargs)

    def get_iterator(  # noqa: PLR0913, PLR0917 - transformers' signature
        self,
        inputs: Iterable[Any],
        num_workers: int,
        batch_size: int,
        preprocess_params: Mapping[str, Any],
        forward_params: Mapping[str, Any],
        postprocess_params: Mapping[str, Any],
    ) -> Iterator[list[Entity]]:
        """Return an iterator over the answers to texts; transformers calls this for every kind of input.

        Texts whose offsets the caller brings along are left to transformers, and so are tokenizers without offsets, and all
        texts if a step of transformers is overridden.
        """
        if "offset_mapping" in preprocess_params or self.special_tokens is None or self.overridden_methods:
            reading = {name: value for name, value in preprocess_params.items() if name not in OWN_OPTIONS}
            theirs: Iterator[list[Entity]] = super().get_iterator(
                inputs, num_workers, batch_size, reading, {}, postprocess_params
            )
            return theirs
        check_integer("batch_size", batch_size)
        rows = batch_size if batch_size > 1 or self._batch_size == 1 else None  # 1 is also transformers' default.
        return ResultIterator(inputs, self.build_annotator(preprocess_params, forward_params, postprocess_params, rows))

    @property
    def overridden_methods(self) -> tuple[str, ...]:
        """The names of transformers' steps that a subclass, or this pipeline alone, has replaced."""
        return tuple(
            name
            for name, step in OVERRIDABLE_METHODS.items()
            if getattr(type(self), name) is not step or name in vars(self)
        )

    def default_annotator(self, batch_tokens: int | None = None) -> Annotator:
        """Return what annotates a stream of texts, with the pipeline's own parameters but for the budget of tokens."""
        if self.overridden_methods:
            what = f"{short_type_name(self)} overrides {', '.join(self.overridden_methods)}, which would not run here."
            raise ConfigurationError(what, "Call the pipeline itself on the texts.")
        forward = {**self._forward_params, **self._sanitize_parameters(batch_tokens)[1]}
        return self.build_annotator(self._preprocess_params, forward, self._postprocess_params, self._batch_size)

    def build_annotator(
        self,
        preprocess_params: Mapping[str, Any],
        forward_params: Mapping[str, Any],
        postprocess_params: Mapping[str, Any],
        rows: int | None = None,
    ) -> Annotator:
        """Return what annotates a stream of texts, from transformers' three mappings of parameters."""
        model, frame = self.model, self.special_tokens
        if frame is None:
            what = f"The tokenizer of {short_type_name(model)} makes no tokens with offsets."
            raise ConfigurationError(what, "Use a model with a fast tokenizer (a tokenizer.json).")
        strategy = postprocess_params.get("aggregation_strategy")
        ignored = postprocess_params.get("ignore_labels")
        longest = usable_length(self.tokenizer, self._cached("positions", model, lambda: max_positions(model)))
        limit = longest - frame.num_special_tokens
        settings = AnnotationSettings(
            aggregation_strategy="none" if strategy is None else strategy.value,
            ignore_labels=("O",) if ignored is None else tuple(ignored),
            max_tokens=limit,
            delimiter=preprocess_params.get("delimiter") if preprocess_params["is_split_into_words"] else None,
            stride=check_optional_integer(
                "stride", preprocess_params.get("tokenizer_params", {}).get("stride"), 0, limit - 1
            ),
            truncation=preprocess_params.get("truncation", False),
            transformers_boundaries=preprocess_params.get("transformers_boundaries", False),
        )
        names = input_names(model, self.tokenizer.model_input_names)
        network = plain = TokenClassifier(model, frame, names, settings.aggregation_strategy == "average")
        tokens = self._tokens_at_once(forward_params, network.device)
        budget = replace(budget_for_device(network.device, model), max_tokens=tokens, max_rows=rows)
        if getattr(self._compiled, "_orig_mod", None) is model:
            network = replace(network, model=self._compiled, compiled=True)
        tables = LabelTables.from_id2label(model.config.id2label, settings.ignore_labels)
        speller = Detokenizer(self.tokenizer)  # Of this call alone: what it remembers are words of the texts.
        decoder = Decoder(speller, tables, settings.aggregation_strategy, len(frame.prefix_ids))

        def may_pad() -> bool:
            """Return whether rows may be padded; measured when the first several texts come."""
            if self._cached("quantized", model, lambda: is_quantized(model)):
                # One in int8 rounds by what is in a batch anyway.
                return "attention_mask" in names
            return self._cached("padding", model, lambda: is_padding_masked(plain, longest))

        join = self.aggregate_overlapping_entities
        return Annotator(network, self.tokenizer, decoder, settings, budget, join, may_pad)


def budget_for_device(device: torch.device, model: Any) -> TokenBudget:
    """Return how much of a model runs at once on a device."""
    known = parse_device_argument(device)
    waste = known.batch_waste_of(getattr(model.config, "hidden_size", None))
    return TokenBudget(known.batch_tokens, waste, limit_shapes=known.few_shapes)


class ResultIterator(Iterator[list[Entity]]):
    """The answers to texts, one at a time; as long as the texts, if these have a length."""

    def __init__(self, inputs: Iterable[Any], annotator: Annotator) -> None:
        self._inputs, self._annotator = inputs, annotator
        self._answers = self._begin()

    def _begin(self) -> Iterator[TextResult]:  # Nothing is read before the first answer is asked for.
        chunks = self._annotator.annotate(self._inputs, in_memory=isinstance(self._inputs, Sequence))
        return chain.from_iterable(chunk.outcomes() for chunk in chunks)

    def __iter__(self) -> ResultIterator:
        if not isinstance(self._inputs, Iterator):  # Texts can be read again, a stream cannot.
            self._answers = self._begin()
        return self

    def __len__(self) -> int:
        if isinstance(self._inputs, Sized):
            return len(self._inputs)
        raise TypeError("Answers to a generator have no length.")

    def __next__(self) -> list[Entity]:
        return unwrap_result(next(self._answers))


def normalize_ignore_labels(labels: Any) -> tuple[str, ...]:
    """Return labels to leave out, each once and sorted, so that equal sets of them are equal settings."""
    if isinstance(labels, Collection) and not isinstance(labels, str):
        names = tuple(labels)
        if all(isinstance(name, str) for name in names):
            return tuple(sorted({*names}))
    raise ConfigurationError(f"ignore_labels cannot be {describe_value(labels)}.", "Use a list of labels.")


def get_pipeline(loaded: LoadedModel, strategy: str, options: Mapping[str, Any]) -> AnnotationPipeline:
    """Return a token-classification pipeline over a model, the same one when asked again."""
    key = strategy, repr(sorted(options.items()))
    arguments = {name: value for name, value in options.items() if name != "compile"}
    with TENSOR_LOCK:
        if key not in loaded.pipelines:
            loaded.pipelines[key] = build_pipeline(loaded, strategy, arguments)
        pipe: AnnotationPipeline = loaded.pipelines[key]
    if options.get("compile") and pipe.compilation is None:
        pipe.compile()
    return pipe


@gc_disabled()
def build_pipeline(loaded: LoadedModel, strategy: str, options: Mapping[str, Any]) -> AnnotationPipeline:
    """Build a pipeline; with options it proves itself on one word."""
    try:
        pipe = AnnotationPipeline(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            device=loaded.model.device,
            aggregation_strategy=strategy,
            **options,
        )
        if options:  # transformers reads most of them only when there is a text.
            pipe("word")
    except ConfigurationError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        what = f"The pipeline does not take these options: {describe_error(error)}."
        raise ConfigurationError(what, "Use those of TokenClassificationPipeline.") from None
    return pipe
