"""The loaded models: one copy of the weights for each device asked for, and what they occupy.

A model that was loaded without naming a device follows the session: it moves when the session's device changes. A
model that was loaded for a named device stays there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .._events.activity import LOADING, ProgressEvent
from .._render.display import Displayable, Report, Table, format_bytes, pluralize
from .._utils.text import model_label
from ..devices.backend import TENSOR_LOCK
from ..devices.machine import format_device
from ..devices.memory import empty_cache
from ..devices.request import normalize_device
from .loading import INT8, LoadedModel, LoadSpec, dtype_of, load_from_spec, move_model, packed_bytes


@dataclass(frozen=True)
class LoadedModelInfo:
    """One copy of a model.

    Attributes:
        name: What the person calls it.
        device: Where it is, marked where that is simulated.
        dtype: The type of its weights, such as ``"float32"``.
        size: Its weights and buffers, in bytes.
        follows: Whether it moves along when the session's device changes.
    """

    name: str
    device: str
    dtype: str
    size: int
    follows_session: bool

    @property
    def follow_status(self) -> str:
        """Whether it moves along, or why not, in a few words."""
        if self.follows_session:
            return "yes"
        return "no: int8 stays on the CPU" if self.dtype == INT8 else "no: asked for there"


@dataclass(frozen=True, repr=False)
class LoadedModels(Displayable, Sequence[LoadedModelInfo]):
    """The models that are loaded, in the order of loading.

    Example:
        >>> print(Inventory((LoadedModelInfo("bundled", "cpu", "float32", 3 << 20, True),)))
        1 model in memory
          model    device  type     size     follows the device
          bundled  cpu     float32  3.0 MiB  yes
    """

    models: tuple[LoadedModelInfo, ...]

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: Any) -> Any:
        return self.models[index]

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once."""
        return tuple(dict.fromkeys(one.name for one in self.models))

    def table(self) -> Table:
        """Return a row for each model."""
        rows = tuple(
            (one.name, one.device, one.dtype, format_bytes(one.size), one.follow_status) for one in self.models
        )
        return Table("", ("model", "device", "type", "size", "follows the device"), rows)

    def to_report(self) -> Report:
        """Return the table under the number of models."""
        loaded = pluralize(len(self.models), "model") if self.models else "No models"
        return Report(f"{loaded} in memory", tables=(self.table(),))


def describe_model(loaded: LoadedModel, follows: bool) -> LoadedModelInfo:
    """Return the row of an inventory for a model, from the sizes of its tensors; nothing is computed."""
    model = loaded.model
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
    size = sum(one.numel() * one.element_size() for one in tensors) + packed_bytes(model)
    return LoadedModelInfo(
        loaded.name, format_device(normalize_device(str(model.device))), dtype_of(model), size, follows
    )


@dataclass(frozen=True)
class ModelKey:
    """One copy of a model in memory; ``device`` is ``None`` where it follows the session."""

    spec: LoadSpec
    device: str | None


def noop(*_news: object) -> None:
    """Do nothing about what happens to models."""


class ModelStore:
    """The loaded models of a session.

    ``tell`` is called before each model is loaded or moved, and ``arriving`` for each model that comes to a device, before
    it is loaded or after it was moved there; where ``arriving`` raises, the model does not come. ``learned`` says what batch
    was measured of a model that is loaded, by kind of device.
    """

    def __init__(
        self,
        on_progress: Callable[[ProgressEvent], None] = noop,
        on_placement: Callable[[ModelKey, str], None] = noop,
        load_batch_sizes: Callable[[LoadSpec], Mapping[str, int]] = lambda _spec: {},
    ) -> None:
        self._tell = on_progress
        self._arriving = on_placement
        self._learned = load_batch_sizes
        self._models: dict[ModelKey, LoadedModel] = {}

    def get(self, spec: LoadSpec, device: str, follows: bool, reload: bool = False) -> LoadedModel:
        """Return a model on a confirmed device, loaded the first time, or anew; one that follows brings all others that do."""
        key = ModelKey(spec, None if follows else normalize_device(device))
        if follows:
            self.move_followers(device)
        if reload or key not in self._models:
            self._tell(ProgressEvent(LOADING, model_label(spec.reference.name)))
            self._arriving(key, device)
            loaded = load_from_spec(spec, device)
            loaded.tuned_batch_tokens.update(self._learned(replace(spec, folder=loaded.folder)))
            # The copies of a folder whose files were others.
            former = (old for old in self._models if old.spec != spec and replace(old.spec, files=spec.files) == spec)
            self._forget(former)
            self._models[key] = loaded
        return self._models[key]

    def move_followers(self, device: str, skip_checks: bool = False) -> tuple[str, ...]:
        """Move every model that follows the session to a device; return the names of those that moved.

        Where one does not fit, all are where they were before. ``quietly`` leaves out ``arriving``, which may object.
        """
        with TENSOR_LOCK:
            there = normalize_device(device)
            moving = {key: one for key, one in self._followers() if normalize_device(str(one.model.device)) != there}
            done: list[tuple[LoadedModel, str]] = []
            try:
                for number, loaded in enumerate(moving.values()):
                    former = str(loaded.model.device)
                    self._tell(ProgressEvent(f"Moving to {device}", loaded.name, number, len(moving)))
                    move_model(loaded.model, device, loaded.name)
                    done.append((loaded, former))
                for key in () if skip_checks else moving:
                    self._arriving(key, device)
            except BaseException:  # An interrupted move too.
                for loaded, former in done:
                    move_model(loaded.model, former, loaded.name)
                raise
        return tuple(dict.fromkeys(loaded.name for loaded in moving.values()))

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names.

        A model that a variable of the person still holds stays in memory until that variable is gone.
        """
        gone = [key for key in self._models if name is None or name in key.spec.reference.names]
        devices = {str(self._models[key].model.device) for key in gone}
        self._forget(gone)
        if gone:
            gc.collect()
        for device in devices:
            empty_cache(device)
        return tuple(dict.fromkeys(key.spec.reference.name for key in gone))

    def inventory(self) -> LoadedModels:
        """Return what is loaded, in the order of loading."""
        return LoadedModels(tuple(describe_model(one, key.device is None) for key, one in self._models.items()))

    def find(self, name: str | None = None) -> tuple[LoadedModel, ...]:
        """Return the loaded models of a name, or all, in the order of loading."""
        return tuple(one for key, one in self._models.items() if name is None or name in key.spec.reference.names)

    def loaded_on(self, spec: LoadSpec, device: str) -> LoadedModel | None:
        """Return the copy of a model on a device, ``None`` if it is not loaded there."""
        there = normalize_device(device)
        copies = (one for key, one in self._models.items() if key.spec == spec)
        return next((one for one in copies if normalize_device(str(one.model.device)) == there), None)

    def key_of(self, model: Any) -> ModelKey | None:
        """Return what a model was loaded as, ``None`` for one that was not loaded here."""
        return next((key for key, one in self._models.items() if one.model is model), None)

    def spec_of(self, model: Any) -> LoadSpec | None:
        """Return what a model was loaded as, with its files, ``None`` for one that was not loaded here."""
        key = self.key_of(model)
        return None if key is None else replace(key.spec, folder=self._models[key].folder)

    def set_batch_tokens(self, spec: LoadSpec, kind: str, batch_tokens: int | None) -> None:
        """Let the copies of a model take a batch on a kind of device; ``None`` is what suits the device."""
        for key, loaded in self._models.items():
            if key.spec == spec and batch_tokens:
                loaded.tuned_batch_tokens[kind] = batch_tokens
            elif key.spec == spec:
                loaded.tuned_batch_tokens.pop(kind, None)

    def batch_tokens_by_model(self, kind: str) -> tuple[tuple[str, int], ...]:
        """Return the models on a kind of device whose batches were measured, with how many tokens run at once."""
        here = [
            one for one in self._models.values() if one.model.device.type == kind and kind in one.tuned_batch_tokens
        ]
        return tuple({one.name: one.tuned_batch_tokens[kind] for one in here}.items())

    def recheck_followers(self) -> None:
        """Call ``arriving`` for each model that follows the session, as if it had just come where it is."""
        for key, loaded in self._followers():
            self._arriving(key, str(loaded.model.device))

    def model_folder(self, spec: LoadSpec) -> Path | None:
        """Return where the files of a model are that is loaded already, in whatever type."""
        same = (one for key, one in self._models.items() if key.spec.in_dtype(spec.dtype) == spec)
        return next((one.folder for one in same), None)

    def unload_device(self, device: str) -> None:
        """Forget the models that were loaded for a device by name; variables that hold them keep them."""
        self._forget([key for key in self._models if key.device == normalize_device(device)])

    def _followers(self) -> list[tuple[ModelKey, LoadedModel]]:
        return [(key, loaded) for key, loaded in self._models.items() if key.device is None]

    def _forget(self, keys: Iterable[ModelKey]) -> None:
        gone = set(keys)
        self._models = {key: loaded for key, loaded in self._models.items() if key not in gone}
