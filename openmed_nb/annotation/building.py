"""A loaded model -> a pipeline over it, proven on a word, and the same one when asked again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK
from ..errors import ConfigurationError
from ..models.importing import collector_at_rest
from ..models.loading import LoadedModel

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline


def pipeline_over(loaded: LoadedModel, strategy: str, options: Mapping[str, Any]) -> AnnotationPipeline:
    """Return a token-classification pipeline over a model, the same one when asked again.

    Args:
        loaded: The model.
        strategy: How tokens become entities, one of ``STRATEGIES``.
        options: Further arguments of :class:`.pipeline.AnnotationPipeline`, and ``compile``.

    Raises:
        ConfigurationError: For an option that the pipeline does not have.
    """
    key = strategy, repr(sorted(options.items()))
    arguments = {name: value for name, value in options.items() if name != "compile"}
    with TENSOR_LOCK:
        if key not in loaded.pipelines:
            loaded.pipelines[key] = build_pipeline(loaded, strategy, arguments)
        pipe: AnnotationPipeline = loaded.pipelines[key]
    if options.get("compile") and pipe.compilation is None:
        pipe.compile()
    return pipe


@collector_at_rest()
def build_pipeline(loaded: LoadedModel, strategy: str, options: Mapping[str, Any]) -> AnnotationPipeline:
    """Build a pipeline; most options are only read when there is a text, so it proves itself on one word.

    Raises:
        ConfigurationError: Where the pipeline does not work with the options.
    """
    from .pipeline import AnnotationPipeline

    try:
        pipe = AnnotationPipeline(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            device=loaded.model.device,
            aggregation_strategy=strategy,
            **options,
        )
        pipe("word")
    except ConfigurationError:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"The pipeline does not take these options: {error}.", "Use those of TokenClassificationPipeline."
        ) from error
    return pipe
