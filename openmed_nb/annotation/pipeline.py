"""Drop-in token-classification pipeline: a subclass of the transformers class with its own batching.

This module imports transformers, so it is imported only when a pipeline is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedModel, TokenClassificationPipeline

from .._utils.text import describe_error, describe_value, short_type_name
from .._utils.validation import check_bool, check_integer
from ..devices.backend import TENSOR_LOCK, gc_disabled
from ..devices.linear import fast_linear
from ..devices.registry import get_device
from ..errors import ConfigurationError, UnknownDeviceError
from ..models.config import check_strategy
from ..models.files import max_input_length, max_positions
from ..models.loading import LoadedModel, is_quantized, move_model
from .decoding import Decoder, Detokenizer, build_label_tables
from .forward import TokenBudget, TokenClassifier, evaluation_mode, input_names, is_padding_masked
from .references import raise_if_error
from .storage import Entity
from .stream import AnnotationSettings, Annotator
from .tokens import SpecialTokens

if TYPE_CHECKING:
    from ..models.records import DtypeChoice

# Preprocessing options that the methods of transformers do not accept.
CUSTOM_OPTIONS = {"truncation", "transformers_boundaries"}

# Options that only the methods of transformers support, by the name of their preprocessing parameter.
TRANSFORMERS_OPTIONS = {
    "tokenizer_params": "stride",
    "truncation": "truncation",
    "is_split_into_words": "is_split_into_words",
    "offset_mapping": "offset_mapping",
}

OPTIONS_REMEDY = "Use the options of TokenClassificationPipeline."

# Parameters of transformers, whose values have any type.
Parameters = dict[str, Any]

CachedT = TypeVar("CachedT")


class AnnotationPipeline(TokenClassificationPipeline):
    r"""``TokenClassificationPipeline`` of transformers near the speed of the bare model, with the same results.

    It accepts all arguments of the transformers class and returns the same types. The differences are:

    - A text that is longer than the model supports is processed in full, in overlapping windows that do not split words.
      transformers silently truncates the text.
    - Texts are sorted by length and run in batches of at most ``batch_tokens`` tokens. ``batch_size`` has no effect.
    - ``pipe.device`` is always the device of ``pipe.model``. Setting it moves the model.
    - Scores are Python floats, so that results are JSON-serializable.
    - ``first``, ``average`` and ``max`` label whole words. A word starts where the pre-tokenizer of the tokenizer starts a piece:
      for WordPiece at a token without ``##``, for byte-level BPE and Unigram also after white space and punctuation.
      transformers compares lengths, or only considers spaces: it treats ``"cc:\tAnna"`` as one word with the label of ``cc``,
      and loses the name. An entity ends where its line ends, so that two diagnoses on two lines are two entities.
      ``transformers_boundaries=True`` selects the boundaries of transformers.
    - Several threads can call the pipeline at the same time. All work on the device runs under one lock.
    - With ``truncation=True``, ``stride``, ``is_split_into_words`` or ``offset_mapping``, the methods of transformers process
      the texts, at their speed.

    Args:
        kwargs: The arguments of the transformers class, and these:

            - ``batch_tokens``: Maximum number of tokens per batch. The default depends on the device.
            - ``truncation``: Whether to truncate texts that are longer than the model supports.
            - ``transformers_boundaries``: Whether to use the word boundaries of transformers.

    Attributes:
        precision: Reason for the dtype of the model (:class:`openmed_nb.models.records.DtypeChoice`), or ``None`` if only
            float32 was requested.
        tuned_batch_tokens: Best number of tokens per batch by device type, as :func:`openmed_nb.sweep` measured on this computer.

    Example:
        >>> from openmed_nb import load_pipeline
        >>> pipe = load_pipeline("bundled_small", device="cpu")
        >>> [[entity["word"] for entity in entities] for entities in pipe(["Type 2 diabetes.", "No asthma."])]
        [['type 2 diabetes'], ['asthma']]
    """

    precision: DtypeChoice | None = None
    tuned_batch_tokens: Mapping[str, int | None] = MappingProxyType({})

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = self.model.device
        return device

    @device.setter
    def device(self, device: torch.device | str) -> None:
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError):
            target = None
        if target is None:  # Raised outside of the handler, because the error of torch quotes the value.
            raise UnknownDeviceError(
                f"{describe_value(device)} is not a valid torch device.", "Pass a device such as 'cpu' or 'cuda:0'."
            )
        if getattr(self.model, "hf_device_map", None) is None and target != self.model.device:
            move_model(self.model, str(target), type(self.model).__name__)

    @property
    def batch_tokens(self) -> int:
        """The maximum number of tokens per batch."""
        return self._resolve_batch_tokens(self._forward_params, self.device)

    def _resolve_batch_tokens(self, forward_params: Mapping[str, int], device: torch.device) -> int:
        measured = self.tuned_batch_tokens.get(device.type) or budget_for_device(device, self.model).max_tokens
        return int(forward_params.get("batch_tokens", measured))

    @property
    def special_tokens(self) -> SpecialTokens | None:
        """The special tokens of the tokenizer, or ``None`` if the tokenizer does not return offsets."""
        tokenizer = self.tokenizer
        return self._cached(
            "special_tokens", tokenizer, lambda: SpecialTokens.from_tokenizer(tokenizer) if tokenizer.is_fast else None
        )

    @property
    def _max_length(self) -> int:
        """The maximum number of tokens per row, including special tokens."""
        model = self.model
        return max_input_length(self.tokenizer, self._cached("positions", model, lambda: max_positions(model)))

    @property
    def _max_tokens(self) -> int:
        """The maximum number of text tokens per window."""
        special_tokens = self.special_tokens
        return self._max_length - (special_tokens.num_special_tokens if special_tokens else 0)

    def _cached(self, name: str, subject: object, compute: Callable[[], CachedT]) -> CachedT:
        """Return a cached property of a model or a tokenizer. It is computed again if the object has been replaced."""
        cache: dict[str, Any] = self.__dict__.setdefault("_property_cache", {})
        if name not in cache or cache[name][0] is not subject:
            cache[name] = subject, compute()
        value: CachedT = cache[name][1]
        return value

    def _sanitize_parameters(
        self,
        batch_tokens: int | None = None,
        truncation: bool | None = None,
        transformers_boundaries: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Parameters, Parameters, Parameters]:
        if kwargs.get("aggregation_strategy") is not None:
            kwargs["aggregation_strategy"] = check_strategy(kwargs["aggregation_strategy"])
        message = ""
        try:
            preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"The pipeline does not take these options: {describe_error(error)}."
        # Raised outside of the handler, so that the original error, which quotes the options, is not the context.
        if message:
            raise ConfigurationError(message, OPTIONS_REMEDY)
        if "ignore_labels" in postprocess:
            labels = postprocess["ignore_labels"]
            is_collection = isinstance(labels, Collection) and not isinstance(labels, str)
            if not is_collection or not all(isinstance(label, str) for label in labels):
                raise ConfigurationError(
                    f"Invalid value for ignore_labels: {describe_value(labels)}.", "Use a list of labels."
                )
            postprocess["ignore_labels"] = tuple(sorted({*labels}))  # Equal sets of labels are equal settings.
        if batch_tokens is not None:
            forward["batch_tokens"] = check_integer("batch_tokens", batch_tokens)
        if truncation is not None:
            preprocess["truncation"] = bool(truncation)
        if transformers_boundaries is not None:
            check_bool("transformers_boundaries", transformers_boundaries)
            preprocess["transformers_boundaries"] = transformers_boundaries
        return preprocess, forward, postprocess

    def forward(self, model_inputs: Parameters, **_forward_params: object) -> Parameters:
        """Run the forward pass of transformers in evaluation mode, under the lock of all device work."""
        with evaluation_mode(self.model):
            outputs: Parameters = super().forward(model_inputs)
        return outputs

    def get_iterator(  # noqa: PLR0913, PLR0917 - signature of transformers
        self,
        inputs: Iterable[object],
        num_workers: int,
        batch_size: int,
        preprocess_params: Parameters,
        forward_params: Parameters,
        postprocess_params: Parameters,
    ) -> Iterator[list[Entity]]:
        """Return an iterator over the results of texts. transformers calls this method for every kind of input."""
        check_integer("batch_size", batch_size)
        if self.special_tokens is None or _transformers_options(preprocess_params):
            if (stride := preprocess_params.get("tokenizer_params", {}).get("stride")) is not None:
                check_integer("stride", stride, 0, self._max_tokens - 1)
            parent_params = {name: value for name, value in preprocess_params.items() if name not in CUSTOM_OPTIONS}
            results: Iterator[list[Entity]] = super().get_iterator(
                inputs, num_workers, batch_size, parent_params, {}, postprocess_params
            )
            return results
        annotator = self.build_annotator(preprocess_params, forward_params, postprocess_params)
        chunks = annotator.annotate(inputs, in_memory=isinstance(inputs, Sequence))
        # Unlike a generator, a map continues with the next text after an error.
        return map(raise_if_error, chain.from_iterable(chunk.outcomes() for chunk in chunks))

    def default_annotator(self, batch_tokens: int | None = None) -> Annotator:
        """Return an annotator with the parameters of the pipeline.

        Args:
            batch_tokens: Maximum number of tokens per batch. If ``None``, use the value of the pipeline.
        """
        if options := _transformers_options(self._preprocess_params):
            raise ConfigurationError(
                f"{', '.join(options)} cannot be used here, because only transformers supports it.",
                "Pass it in a call of the pipeline.",
            )
        forward = {**self._forward_params, **self._sanitize_parameters(batch_tokens)[1]}
        return self.build_annotator(self._preprocess_params, forward, self._postprocess_params)

    def build_annotator(
        self, preprocess_params: Parameters, forward_params: Parameters, postprocess_params: Parameters
    ) -> Annotator:
        """Return an annotator with the three parameter mappings of transformers."""
        model = self.model
        special_tokens = self.special_tokens
        if special_tokens is None:
            raise ConfigurationError(
                f"The tokenizer of {short_type_name(model)} does not return offset mappings.",
                "Use a model with a fast tokenizer (a tokenizer.json).",
            )
        strategy = postprocess_params.get("aggregation_strategy")
        settings = AnnotationSettings(
            aggregation_strategy="none" if strategy is None else strategy.value,
            ignore_labels=postprocess_params.get("ignore_labels", ("O",)),
            max_tokens=self._max_tokens,
            transformers_boundaries=preprocess_params.get("transformers_boundaries", False),
        )
        names = input_names(model, self.tokenizer.model_input_names)
        needs_all_labels = settings.aggregation_strategy == "average"
        network = TokenClassifier(model, special_tokens, names, fast_linear, needs_all_labels)
        batch_tokens = self._resolve_batch_tokens(forward_params, network.device)
        budget = replace(budget_for_device(network.device, model), max_tokens=batch_tokens)
        id2label = model.config.id2label
        names_of_labels = tuple(id2label[label] for label in range(len(id2label)))
        tables = build_label_tables(names_of_labels, settings.ignore_labels)
        detokenizer = Detokenizer(
            self.tokenizer
        )  # Not shared between calls, because its cache contains words of the texts.
        decoder = Decoder(
            detokenizer,
            tables,
            settings.aggregation_strategy,
            len(special_tokens.prefix_ids),
            ends_at_lines=not settings.transformers_boundaries,
        )

        def may_pad() -> bool:
            """Return whether rows may be padded. This is measured at the first call with several texts."""
            if self._cached("quantized", model, lambda: is_quantized(model)):
                # The rounding of an int8 model depends on the other rows of a batch anyway.
                return "attention_mask" in names
            try:
                return self._cached("padding", model, lambda: is_padding_masked(network, self._max_length))
            except Exception:  # noqa: BLE001 - an error of the model is reported when it runs on texts
                return False

        return Annotator(network, self.tokenizer, decoder, settings, budget, may_pad)


def _transformers_options(preprocess_params: Parameters) -> list[str]:
    """Return the names of the given options that only the methods of transformers support."""
    return [option for name, option in TRANSFORMERS_OPTIONS.items() if preprocess_params.get(name)]


def budget_for_device(device: torch.device, model: PreTrainedModel) -> TokenBudget:
    """Return the default token budget of a model on a device."""
    known_device = get_device(device)
    max_padding = known_device.max_padding_tokens(getattr(model.config, "hidden_size", None))
    return TokenBudget(known_device.batch_tokens, max_padding, limit_shapes=known_device.recompiles_for_new_shapes)


def get_pipeline(loaded: LoadedModel, strategy: str, options: Parameters) -> AnnotationPipeline:
    """Return a cached token-classification pipeline over a loaded model."""
    key = strategy, repr(sorted(options.items()))
    with TENSOR_LOCK:
        if key not in loaded.pipelines:
            loaded.pipelines[key] = build_pipeline(loaded, strategy, options)
        pipe: AnnotationPipeline = loaded.pipelines[key]
    return pipe


@gc_disabled()
def build_pipeline(loaded: LoadedModel, strategy: str, options: Parameters) -> AnnotationPipeline:
    """Build a pipeline. If there are options, the pipeline is checked on one word."""
    try:
        pipe = AnnotationPipeline(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            device=loaded.model.device,
            aggregation_strategy=strategy,
            **options,
        )
        if options:  # transformers checks most options only when it processes a text.
            pipe("word")
    except ConfigurationError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"The pipeline does not take these options: {describe_error(error)}.", OPTIONS_REMEDY
        ) from None
    return pipe
