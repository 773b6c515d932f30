"""The loaded models, with one copy of the weights per requested device, and their size in memory.

A model that was loaded without a device follows the session device. A model that was loaded for a device stays there.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._events.activity import LOADING, ProgressEvent
from .._render.values import Displayable, Report, Table, format_bytes, pluralize
from .._utils.text import model_label
from ..devices.backend import TENSOR_LOCK
from ..devices.machine import format_device
from ..devices.registry import empty_cache
from ..devices.request import normalize_device
from .loading import LoadedModel, LoadSpec, dtype_of, load_from_spec, move_model, packed_layers


@dataclass(frozen=True)
class LoadedModelInfo:
    """One copy of a model in memory.

    Attributes:
        name: Name that the user gave the model.
        device: Device, labeled if it is simulated.
        dtype: Data type of the weights, such as ``"float32"``.
        size: Size of weights and buffers in bytes.
        follows_session: Whether the model follows the session device.
    """

    name: str
    device: str
    dtype: str
    size: int
    follows_session: bool


@dataclass(frozen=True, repr=False)
class LoadedModels(Displayable, Sequence[LoadedModelInfo]):
    """The loaded models, in the order of loading.

    Example:
        >>> print(LoadedModels((LoadedModelInfo("bundled", "cpu", "float32", 3 << 20, True),)))
        1 model loaded
          model    device  dtype    size     moves when you change the device
          bundled  cpu     float32  3.0 MiB  yes
    """

    models: tuple[LoadedModelInfo, ...]

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: Any) -> Any:
        return self.models[index]

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names of the models."""
        return tuple(dict.fromkeys(model.name for model in self.models))

    def table(self) -> Table:
        """Return a table with one row per model."""
        rows = tuple(
            (model.name, model.device, model.dtype, format_bytes(model.size), "yes" if model.follows_session else "no")
            for model in self.models
        )
        return Table("", ("model", "device", "dtype", "size", "moves when you change the device"), rows)

    def to_report(self) -> Report:
        """Return the number of models and the table."""
        count = pluralize(len(self.models), "model") if self.models else "No models"
        return Report(f"{count} loaded", tables=(self.table(),))


def describe_model(loaded: LoadedModel, follows_session: bool) -> LoadedModelInfo:
    """Return a description of a model with its size, without running any computation."""
    model = loaded.model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # Packed weights are not unpacked: they have one byte per weight and four per bias.
    size += sum((layer.in_features + 4) * layer.out_features for _name, layer in packed_layers(model))
    return LoadedModelInfo(loaded.name, format_device(str(model.device)), dtype_of(model), size, follows_session)


@dataclass(frozen=True)
class ModelKey:
    """Identifies one copy of a model in memory; ``device`` is ``None`` if it follows the session device."""

    spec: LoadSpec
    device: str | None


class ModelStore:
    """The loaded models of a session.

    Args:
        on_progress: Called with an event before a model is loaded or moved.
        on_placement: Called with the key, the device, and whether the model was loaded there before: before a model is
            loaded on a device or returned again, and after it was moved there. If it raises, the model is not placed there.
        load_batch_sizes: Called for a loaded model; returns its tuned batch sizes by device type.
    """

    def __init__(
        self,
        on_progress: Callable[[ProgressEvent], None],
        on_placement: Callable[[ModelKey, str, bool], None],
        load_batch_sizes: Callable[[LoadSpec], Mapping[str, int]],
    ) -> None:
        self._on_progress = on_progress
        self._on_placement = on_placement
        self._load_batch_sizes = load_batch_sizes
        self._models: dict[ModelKey, LoadedModel] = {}

    def get(self, spec: LoadSpec, device: str, follows_session: bool, reload: bool = False) -> LoadedModel:
        """Return a model on a confirmed device, and load it if it is not loaded or ``reload`` is true.

        If the model follows the session device, all other models that follow it move to the device too.
        """
        key = ModelKey(spec, None if follows_session else normalize_device(device))
        if follows_session:
            self.move_followers(device)
        if reload or key not in self._models:
            self._on_progress(ProgressEvent(LOADING, model_label(spec.reference.name)))
            self._on_placement(key, device, False)
            loaded = load_from_spec(spec, device)
            spec = replace(spec, folder=loaded.folder)
            loaded.tuned_batch_tokens.update(self._load_batch_sizes(spec))
            # The files of a directory may have changed since an earlier load.
            self._drop(old for old in self._models if old.spec != spec and replace(old.spec, files=spec.files) == spec)
            key = replace(key, spec=spec)
            self._drop([key])
            self._models[key] = loaded
        else:
            self._on_placement(replace(key, spec=replace(spec, folder=self._models[key].folder)), device, True)
        return self._models[key]

    def move_followers(self, device: str, skip_checks: bool = False) -> tuple[str, ...]:
        """Move all models that follow the session to a device, and return the names of those that moved.

        If one move fails, all models return to their previous devices.

        Args:
            device: Device.
            skip_checks: Whether to skip ``on_placement``, which may raise.
        """
        with TENSOR_LOCK, contextlib.ExitStack() as rollback:
            target = normalize_device(device)
            moving = {
                key: loaded for key, loaded in self._followers() if normalize_device(str(loaded.model.device)) != target
            }
            for number, loaded in enumerate(moving.values()):
                previous = str(loaded.model.device)
                self._on_progress(ProgressEvent(f"Moving to {device}", loaded.name, number, len(moving)))
                move_model(loaded.model, device, loaded.name)
                rollback.callback(move_model, loaded.model, previous, loaded.name)
            for key in () if skip_checks else moving:
                self._on_placement(key, device, False)
            rollback.pop_all()
        return tuple(dict.fromkeys(loaded.name for loaded in moving.values()))

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Unload the models of a name, or all models, release their memory, and return their names.

        A model that a variable of the user references stays in memory until the variable is deleted.
        """
        keys = [key for key in self._models if name is None or name in key.spec.reference.names]
        devices = {str(self._models[key].model.device) for key in keys}
        self._drop(keys)
        if keys:
            gc.collect()
        for device in devices:
            empty_cache(device)
        return tuple(dict.fromkeys(key.spec.reference.name for key in keys))

    def inventory(self) -> LoadedModels:
        """Return the loaded models, in the order of loading."""
        return LoadedModels(tuple(describe_model(loaded, key.device is None) for key, loaded in self._models.items()))

    def find(self, name: str | None = None) -> tuple[LoadedModel, ...]:
        """Return the loaded models of a name, or all models, in the order of loading."""
        return tuple(loaded for key, loaded in self._models.items() if name is None or name in key.spec.reference.names)

    def loaded_on(self, spec: LoadSpec, device: str) -> LoadedModel | None:
        """Return the copy of a model on a device, or ``None`` if it is not loaded there."""
        target = normalize_device(device)
        copies = (loaded for key, loaded in self._models.items() if key.spec == spec)
        return next((loaded for loaded in copies if normalize_device(str(loaded.model.device)) == target), None)

    def key_of(self, model: object) -> ModelKey | None:
        """Return the key of a model, with its directory, or ``None`` if it was not loaded by this store."""
        return next((key for key, loaded in self._models.items() if loaded.model is model), None)

    def set_batch_tokens(self, spec: LoadSpec, kind: str, batch_tokens: int | None) -> None:
        """Set the tuned batch size of a model on a device type in tokens; ``None`` restores the default of the device."""
        for key, loaded in self._models.items():
            if key.spec == spec and batch_tokens:
                loaded.tuned_batch_tokens[kind] = batch_tokens
            elif key.spec == spec:
                loaded.tuned_batch_tokens.pop(kind, None)

    def batch_tokens_by_model(self, kind: str) -> tuple[tuple[str, int], ...]:
        """Return the models on a device type that have a tuned batch size, with the batch size in tokens."""
        tuned = {
            loaded.name: loaded.tuned_batch_tokens[kind]
            for loaded in self._models.values()
            if loaded.model.device.type == kind and kind in loaded.tuned_batch_tokens
        }
        return tuple(tuned.items())

    def recheck_followers(self) -> None:
        """Call ``on_placement`` for each model that follows the session, as if it had just been placed on its device."""
        for key, loaded in self._followers():
            self._on_placement(key, str(loaded.model.device), False)

    def model_folder(self, spec: LoadSpec) -> Path | None:
        """Return the directory of a model that is already loaded in any dtype, or ``None``."""
        copies = (loaded for key, loaded in self._models.items() if key.spec.in_dtype(spec.dtype) == spec)
        return next((loaded.folder for loaded in copies), None)

    def unload_device(self, device: str) -> None:
        """Drop the models that were loaded for a device; variables that reference a model keep it."""
        self._drop([key for key in self._models if key.device == normalize_device(device)])

    def _followers(self) -> list[tuple[ModelKey, LoadedModel]]:
        return [(key, loaded) for key, loaded in self._models.items() if key.device is None]

    def _drop(self, keys: Iterable[ModelKey]) -> None:
        dropped = set(keys)
        self._models = {key: loaded for key, loaded in self._models.items() if key not in dropped}
