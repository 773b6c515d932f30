"""The models that are loaded, and the pipelines over them: one copy of the weights for each device asked for.

A model that was loaded without naming a device follows the session: it moves when the session's device changes. A
model that was loaded for a named device stays there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..devices.backend import TENSOR_LOCK, empty_cache
from ..devices.request import canonical
from ..errors import ConfigurationError, DeviceUnavailable, cause
from .importing import collector_at_rest
from .loading import LoadedModel, LoadSpec, load, move

if TYPE_CHECKING:
    from transformers import TokenClassificationPipeline

LARGEST_STRIDE = 64
"""The overlap of two windows over a long text, in tokens."""


@dataclass(frozen=True)
class ModelKey:
    """One copy of a model in memory; ``device`` is ``None`` where it follows the session."""

    spec: LoadSpec
    device: str | None


@dataclass(frozen=True)
class PipelineKey:
    """One pipeline over a model; ``options`` is the text of the remaining arguments."""

    model: ModelKey
    strategy: str
    options: str


class ModelStore:
    """The loaded models and pipelines of a session."""

    def __init__(self) -> None:
        self._models: dict[ModelKey, LoadedModel] = {}
        self._pipelines: dict[PipelineKey, TokenClassificationPipeline] = {}

    def model(self, spec: LoadSpec, device: str, follows: bool) -> LoadedModel:
        """Return a model on a device, loading it the first time.

        Args:
            spec: Which model, and how it is loaded.
            device: The device, already confirmed.
            follows: Whether the model follows the session's device from now on.

        Raises:
            ModelError: Where it cannot be found or loaded.
            DeviceUnavailable: Where it does not fit on the device.
        """
        key = ModelKey(spec, None if follows else canonical(device))
        if follows:
            self.follow(device)
        if key not in self._models:
            loaded = load(spec, device)
            self._forget(
                old for old in self._models if old.spec != spec and replace(old.spec, files=spec.files) == spec
            )
            self._models[key] = loaded
        return self._models[key]

    def pipeline(
        self, spec: LoadSpec, device: str, follows: bool, strategy: str, options: Mapping[str, Any]
    ) -> TokenClassificationPipeline:
        """Return a token-classification pipeline over a model, the same one when asked again.

        Args:
            spec: Which model, and how it is loaded.
            device: The device, already confirmed.
            follows: Whether the model follows the session's device from now on.
            strategy: How tokens become entities, one of ``STRATEGIES``.
            options: Further arguments of transformers' pipeline, such as ``stride`` or ``ignore_labels``.

        Raises:
            ConfigurationError: For an option that the pipeline does not have.
            ModelError, DeviceUnavailable: As for :meth:`model`.
        """
        loaded = self.model(spec, device, follows)
        model_key = ModelKey(spec, None if follows else canonical(device))
        key = PipelineKey(model_key, strategy, repr(sorted(options.items())))
        if key not in self._pipelines:
            self._pipelines[key] = build_pipeline(loaded, strategy, options)
        return self._pipelines[key]

    def follow(self, device: str) -> tuple[str, ...]:
        """Move every model that follows the session to a device; return the names of those that moved.

        Raises:
            DeviceUnavailable: Where one does not fit; all are then where they were before.
        """
        with TENSOR_LOCK:
            return self._follow(device)

    def _follow(self, device: str) -> tuple[str, ...]:
        followers = [loaded for key, loaded in self._models.items() if key.device is None]
        movers = [loaded for loaded in followers if not same_device(str(loaded.model.device), device)]
        done: list[tuple[LoadedModel, str]] = []
        try:
            for loaded in movers:
                former = str(loaded.model.device)
                move(loaded.model, device, loaded.name)
                done.append((loaded, former))
        except BaseException:  # An interrupted move too.
            for loaded, former in done:
                move(loaded.model, former, loaded.name)
            raise
        self._tell_pipelines()
        return tuple(dict.fromkeys(loaded.name for loaded in movers))

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names.

        A model that a variable of yours still holds stays in memory until that variable is gone.
        """
        gone = [key for key in self._models if name is None or name in key.spec.reference.names]
        devices = {str(self._models[key].model.device) for key in gone}
        self._forget(gone)
        gc.collect()
        for device in devices:
            empty_cache(device)
        return tuple(dict.fromkeys(key.spec.reference.name for key in gone))

    def _forget(self, keys: Iterable[ModelKey]) -> None:
        gone = set(keys)
        self._pipelines = {key: pipe for key, pipe in self._pipelines.items() if key.model not in gone}
        self._models = {key: loaded for key, loaded in self._models.items() if key not in gone}

    def _tell_pipelines(self) -> None:
        for pipe in self._pipelines.values():
            pipe.device = pipe.model.device


@collector_at_rest()
def build_pipeline(loaded: LoadedModel, strategy: str, options: Mapping[str, Any]) -> TokenClassificationPipeline:
    """Build transformers' pipeline over a loaded model, so that no text is cut off at the model's longest input.

    Most options are only read when there is a text, so the pipeline proves itself on one word.

    Raises:
        ConfigurationError: Where the pipeline does not work with the options.
    """
    from transformers import TokenClassificationPipeline
    from transformers.pipelines.token_classification import AggregationStrategy

    stride = default_stride(loaded) if options.get("stride") is None else options["stride"]
    arguments = {**options, "stride": stride, "aggregation_strategy": "simple"}
    try:
        pipe = TokenClassificationPipeline(
            model=loaded.model, tokenizer=loaded.tokenizer, device=loaded.model.device, **arguments
        )
        # Set afterwards, because transformers refuses windows for "none", although it can join them.
        pipe._postprocess_params["aggregation_strategy"] = AggregationStrategy(strategy)  # noqa: SLF001
        with TENSOR_LOCK:
            pipe("word")
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigurationError(
            f"The pipeline does not take these options: {error}.", "Use those of TokenClassificationPipeline."
        ) from error
    return pipe


def run(pipe: TokenClassificationPipeline, text: str) -> list[dict[str, Any]]:
    """Return the entities that a pipeline finds in a text.

    Raises:
        DeviceUnavailable: Where the device fails, for lack of memory above all.
    """
    try:
        with TENSOR_LOCK:
            return list(pipe(text))
    except (RuntimeError, MemoryError, IndexError) as error:
        raise DeviceUnavailable(
            f"The model could not run on {canonical(str(pipe.device))}: {cause(error)}.",
            "Shorten the text or unload other models, or use the CPU.",
        ) from error


def default_stride(loaded: LoadedModel) -> int:
    """Return the overlap with which long texts are read in windows."""
    return min(LARGEST_STRIDE, int(loaded.tokenizer.model_max_length) // 4)


def same_device(one: str, other: str) -> bool:
    """Tell whether two spellings mean the same device; torch says ``mps`` and ``mps:0`` differ.

    Example:
        >>> same_device("mps:0", "mps"), same_device("cuda", "cuda:1")
        (True, False)
    """
    return canonical(one) == canonical(other)
