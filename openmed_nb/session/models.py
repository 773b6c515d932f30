"""The verbs about models: load them, find entities with them, forget them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..devices.request import Wish
from ..devices.simulation import shown_device
from ..errors import ConfigurationError
from ..models.config import OpenMedConfig, check_strategy, check_task, with_arguments
from .devices import DeviceVerbs

if TYPE_CHECKING:
    from ..annotation.annotated import AnnotatedText
    from ..annotation.annotations import Annotations
    from ..annotation.corpus import Source
    from ..models.inventory import Inventory
    from ..models.loading import LoadedModel, LoadSpec
    from ..runbook.precision.dtype_choice import DtypeChoice


@dataclass(frozen=True)
class LoadPlan:
    """What a load will do.

    Attributes:
        spec: What is loaded.
        device: The device, confirmed.
        follows: Whether the model follows the session.
        options: The arguments that are left for the pipeline.
        precision: Why the model has that type; ``None`` where nothing but float32 was asked for.
    """

    spec: LoadSpec
    device: str
    follows: bool
    options: dict[str, Any]
    precision: DtypeChoice | None


class ModelVerbs(DeviceVerbs):
    """What a session can be asked and told about models."""

    def load_model(self, name: str | None, config: OpenMedConfig, /, **arguments: Any) -> LoadedModel:
        """Return a model on the device that the configuration or the session says."""
        with self._unchanged_on_error():
            plan = self._load_plan(name, config, arguments)
            if plan.options:
                unknown = ", ".join(sorted(plan.options))
                raise ConfigurationError(f"load_model() has no option {unknown}.", "Leave it out.")
            return self.models.model(plan.spec, plan.device, plan.follows)

    def create_pipeline(
        self,
        name: str | None,
        config: OpenMedConfig,
        /,
        task: str = "token-classification",
        aggregation_strategy: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a token-classification pipeline on the device that the configuration or the session says."""
        with self._unchanged_on_error():
            from ..annotation.building import pipeline_over

            check_task(task)
            strategy = check_strategy(aggregation_strategy)
            plan = self._load_plan(name, config, arguments)
            pipe = pipeline_over(self.models.model(plan.spec, plan.device, plan.follows), strategy, plan.options)
            pipe.precision = plan.precision
            return pipe

    def annotate(
        self,
        texts: Any,
        model: Any,
        arguments: Mapping[str, Any],
        /,
        client: Any = None,
        batch_tokens: int | None = None,
        **running: Any,
    ) -> Annotations:
        """Return the entities that a model finds in many texts.

        Args:
            texts: Any series of texts, or the paths of files of text.
            model: The name of a model, ``None`` for the bundled one, or a pipeline of ours.
            arguments: Those of :meth:`create_pipeline`, for a name.
            client: The Dask client of a cluster whose workers do it; ``None`` does it here.
            batch_tokens: How many tokens run at once; ``None`` takes what suits the device.
            running: Those of ``annotation.corpus.annotate_from``.
        """
        from ..annotation.corpus import NothingLost, annotate_from, check_running

        check_running(**running)
        with self._listeners.told_after(), NothingLost(running.get("resume")):
            if client is None:
                name, texts, source = self._source(texts, model, arguments, batch_tokens)
            else:
                from .cluster import source_on_workers

                name, texts, source = source_on_workers(client, texts, model, arguments, batch_tokens)
            self._listeners.tell(Activity("Annotating", name))
            return annotate_from(source, texts, name, **running)

    def _source(
        self, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
    ) -> tuple[str, Any, Source]:
        """Return the name of a model, the texts to read, and what answers them here."""
        from ..annotation.cluster.columns import counted_here, referred
        from ..annotation.corpus import Source, check_series, checked_pipeline

        found = referred(texts, counted_here, lambda function, *files: function(*files))
        check_series(found)
        if model is None or isinstance(model, (str, os.PathLike)):
            name = "bundled" if model is None else str(model)
            pipe = self.create_pipeline(name, OpenMedConfig(), **arguments)
        else:
            pipe, name = checked_pipeline(model, arguments), type(model.model).__name__
        return name, found, Source.of(pipe, batch_tokens)

    def annotate_text(
        self,
        text: str,
        name: str | None = None,
        device: str | None = None,
        strategy: str | None = None,
        show_text: bool = True,
    ) -> AnnotatedText:
        """Return the entities that a model finds in one text; ``show_text`` tells whether the result may show it."""
        from ..annotation.annotated import AnnotatedText
        from ..annotation.texts import check_text

        with self._listeners.told_after():
            check_text(text)
            pipe = self.create_pipeline(name, OpenMedConfig(), aggregation_strategy=strategy, device=device)
            model = name or "bundled"
            self._listeners.tell(Activity("Annotating", model))
            return AnnotatedText(text, tuple(pipe(text)), model, shown_device(str(pipe.device)), show_text)

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names."""
        with self._listeners.told_after(), self._lock:
            return self.models.unload(name)

    def inventory(self) -> Inventory:
        """Return the models that are loaded, with device, type and size."""
        from ..models.inventory import Inventory

        with self._lock:
            return self._models.inventory() if self._models else Inventory(())

    def _load_plan(self, name: str | None, config: OpenMedConfig, arguments: dict[str, Any]) -> LoadPlan:
        """Return what to load, where, and in which type."""
        from ..models.loading import LoadSpec
        from ..models.quantization import INT8, check_int8
        from ..runbook.precision.dtype_choice import in_chosen_dtype

        arguments = dict(arguments)
        device = arguments.pop("device", None)
        remote_code = bool(arguments.pop("trust_remote_code", False))
        wish = config.device if device is None else str(device)
        config, options = with_arguments(config, arguments)
        source = "argument" if device is not None else "OpenMedConfig"
        choice = self.device(wish, source)
        spec, precision = LoadSpec.of(name, config, remote_code), None
        check_int8(spec.dtype, choice.device)
        if spec.dtype != "float32":
            spec = replace(spec, folder=self.models.folder(spec))
            spec, precision = in_chosen_dtype(spec, choice.device, self.computer, self._environ)
        follows = not Wish(source, wish).asks and spec.dtype != INT8
        return LoadPlan(spec, choice.device, follows, options, precision)

    def _files(self, name: Any, arguments: Mapping[str, Any]) -> tuple[LoadSpec, str]:
        """Return a model to be loaded beside those of the session, with its files here, and the device for it."""
        from ..models.loading import model_folder

        with self._unchanged_on_error():
            named = "bundled" if name is None else str(name)
            plan = self._load_plan(named, OpenMedConfig(), dict(arguments))
            if plan.options:
                raise ConfigurationError(f"There is no option {', '.join(sorted(plan.options))}.", "Leave it out.")
            return replace(plan.spec, folder=model_folder(plan.spec)), plan.device
