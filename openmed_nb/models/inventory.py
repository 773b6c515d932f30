"""What is in memory of the models: where each is, of which type, how large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.request import canonical
from ..devices.simulation import shown_device
from ..interface.display import Report, Shown, Table
from ..quantities import in_bytes
from .quantization import INT8, dtype_of, packed_bytes

if TYPE_CHECKING:
    from .loading import LoadedModel


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
