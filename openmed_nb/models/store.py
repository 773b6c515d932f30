"""The models that are loaded, and what they occupy.

The models that are loaded: one copy of the weights for each device asked for.

A model that was loaded without naming a device follows the session: it moves when the session's device changes. A
model that was loaded for a named device stays there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..activity import Activity
from ..devices.backend import TENSOR_LOCK
from ..devices.memory import empty_cache
from ..devices.request import canonical
from ..devices.simulated import shown_device
from ..display import Report, Shown, Table, in_bytes
from .loading import LoadedModel, LoadSpec, load, move
from .quantization import INT8, dtype_of, packed_bytes


@dataclass(frozen=True)
class ModelInMemory:
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
    follows: bool


@dataclass(frozen=True, repr=False)
class Inventory(Shown, Sequence[ModelInMemory]):
    """The models that are loaded, in the order of loading.

    Example:
        >>> print(Inventory((ModelInMemory("bundled", "cpu", "float32", 3 << 20, True),)))
        1 model in memory
          model    device  type     size     moves along
          bundled  cpu     float32  3.0 MiB  yes
    """

    models: tuple[ModelInMemory, ...]

    def __len__(self) -> int:
        return len(self.models)

    def __getitem__(self, index: Any) -> Any:
        return self.models[index]

    def __iter__(self) -> Iterator[ModelInMemory]:
        return iter(self.models)

    @property
    def names(self) -> tuple[str, ...]:
        """The names, each once."""
        return tuple(dict.fromkeys(one.name for one in self.models))

    def to_dict(self) -> dict[str, Any]:
        """Return the models as plain mappings, ready for JSON."""
        return {"models": [dict(vars(one)) for one in self.models]}

    def table(self) -> Table:
        """Return a row for each model."""
        rows = tuple((one.name, one.device, one.dtype, in_bytes(one.size), moves_along(one)) for one in self.models)
        return Table("", ("model", "device", "type", "size", "moves along"), rows)

    def report(self) -> Report:
        """Return what there is to show: a table."""
        count = len(self.models)
        return Report(f"{count or 'No'} {'model' if count == 1 else 'models'} in memory", tables=(self.table(),))


def model_in_memory(loaded: LoadedModel, follows: bool) -> ModelInMemory:
    """Return what there is to say of a loaded model; its tensors are asked for their sizes, and nothing is computed."""
    model = loaded.model
    tensors = {id(one): one for one in (*model.parameters(), *model.buffers())}.values()
    size = sum(one.numel() * one.element_size() for one in tensors) + packed_bytes(model)
    return ModelInMemory(loaded.name, shown_device(canonical(str(model.device))), dtype_of(model), size, follows)


def moves_along(one: ModelInMemory) -> str:
    """Return whether a model moves when the session's device changes, in a few words."""
    if one.follows:
        return "yes"
    return "no: int8 stays on the CPU" if one.dtype == INT8 else "no: asked for there"


@dataclass(frozen=True)
class ModelKey:
    """One copy of a model in memory; ``device`` is ``None`` where it follows the session."""

    spec: LoadSpec
    device: str | None


Arriving = Callable[[ModelKey, str], None]


def nobody(*_news: object) -> None:
    """Tell nobody."""


class ModelStore:
    """The loaded models of a session.

    Args:
        tell: Is told of each model that is being loaded or moved.
        arriving: Is told of each model that comes to a device, before it is loaded or when it was moved there; where it
            raises, the model does not come.
    """

    def __init__(
        self,
        tell: Callable[[Activity], None] = nobody,
        arriving: Arriving = nobody,
    ) -> None:
        self._tell, self._arriving = tell, arriving
        self._models: dict[ModelKey, LoadedModel] = {}

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
            self._tell(Activity("Loading", spec.reference.name))
            self._arriving(key, device)
            loaded = load(spec, device)
            self._forget(
                old for old in self._models if old.spec != spec and replace(old.spec, files=spec.files) == spec
            )
            self._models[key] = loaded
        return self._models[key]

    def follow(self, device: str, quietly: bool = False) -> tuple[str, ...]:
        """Move every model that follows the session to a device; return the names of those that moved.

        Args:
            device: The device, already confirmed.
            quietly: Whether nobody is told that they arrive, who could object.

        Raises:
            DeviceUnavailable: Where one does not fit; all are then where they were before.
        """
        with TENSOR_LOCK:
            return self._follow(device, nobody if quietly else self._arriving)

    def _follow(self, device: str, arriving: Arriving) -> tuple[str, ...]:
        moving = {key: one for key, one in self._followers() if not same_device(str(one.model.device), device)}
        movers = list(moving.values())
        done: list[tuple[LoadedModel, str]] = []
        try:
            for number, loaded in enumerate(movers):
                former = str(loaded.model.device)
                self._tell(Activity(f"Moving to {device}", loaded.name, number, len(movers)))
                move(loaded.model, device, loaded.name)
                done.append((loaded, former))
            for key in moving:
                arriving(key, device)
        except BaseException:  # An interrupted move too.
            for loaded, former in done:
                move(loaded.model, former, loaded.name)
            raise
        return tuple(dict.fromkeys(loaded.name for loaded in movers))

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names.

        A model that a variable of yours still holds stays in memory until that variable is gone.
        """
        gone = [key for key in self._models if name is None or name in key.spec.reference.names]
        devices = {str(self._models[key].model.device) for key in gone}
        self._forget(gone)
        if gone:
            gc.collect()
        for device in devices:
            empty_cache(device)
        return tuple(dict.fromkeys(key.spec.reference.name for key in gone))

    def inventory(self) -> Inventory:
        """Return what is loaded, in the order of loading."""
        return Inventory(tuple(model_in_memory(one, key.device is None) for key, one in self._models.items()))

    def named(self, name: str | None = None) -> tuple[LoadedModel, ...]:
        """Return the loaded models of a name, or all, in the order of loading."""
        return tuple(one for key, one in self._models.items() if name is None or name in key.spec.reference.names)

    def key_of(self, model: Any) -> ModelKey | None:
        """Return what a model was loaded as, ``None`` for one that was not loaded here."""
        return next((key for key, one in self._models.items() if one.model is model), None)

    def announce(self) -> None:
        """Tell of each model that follows the session where it is, as if it had just arrived."""
        for key, loaded in self._followers():
            self._arriving(key, str(loaded.model.device))

    def _followers(self) -> list[tuple[ModelKey, LoadedModel]]:
        return [(key, loaded) for key, loaded in self._models.items() if key.device is None]

    def folder(self, spec: LoadSpec) -> Path | None:
        """Return where the files of a model are that is loaded already, in whatever type; ``None`` where none is."""
        same = (one for key, one in self._models.items() if key.spec.in_dtype(spec.dtype) == spec)
        return next((one.folder for one in same), None)

    def forget_device(self, device: str) -> None:
        """Forget the models that were loaded for a device by name; variables that hold them keep them."""
        self._forget([key for key in self._models if key.device == canonical(device)])

    def _forget(self, keys: Iterable[ModelKey]) -> None:
        gone = set(keys)
        self._models = {key: loaded for key, loaded in self._models.items() if key not in gone}


def same_device(one: str, other: str) -> bool:
    """Tell whether two spellings mean the same device; torch says ``mps`` and ``mps:0`` differ.

    Example:
        >>> same_device("mps:0", "mps"), same_device("cuda", "cuda:1")
        (True, False)
    """
    return canonical(one) == canonical(other)
