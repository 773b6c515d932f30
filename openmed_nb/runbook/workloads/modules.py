"""A torch module, as something that is measured: forward passes, or training steps, with batches like an example."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...devices.conversion import to_device
from ...errors import ConfigurationError
from ...training.nested import named_tensors, with_tensors
from ...training.optimizers import adamw
from ..operators.copies import cpu_copy, random_numbers_kept
from ..operators.examples import Example, read_example
from ..operators.tracing import loss_or_mean
from .workload import BACKWARD, FORWARD, FORWARD_PASS, OPTIMIZER, TRAINING_STEP, TRANSFER, Phase, Subject, Workload

if TYPE_CHECKING:
    import torch

RATE = 1e-5
"""The learning rate of measured steps; it makes no difference to their speed."""


@dataclass(frozen=True)
class ModuleBench:
    """A copy of a module on a device, and batches for it.

    Attributes:
        name: What the person calls it, or the name of the class.
        model: The copy.
        place: The device, as torch spells it.
        training: Whether a step trains.
        example: A batch, on the CPU, for rows of one shape.
        loader: Gives batches, again and again; ``None`` to take the example.
    """

    name: str
    model: torch.nn.Module
    place: str
    training: bool
    example: Example
    loader: Iterable[Any] | None = None
    optimizers: list[Any] = field(default_factory=list)

    @property
    def device(self) -> str:
        """Where the copy is."""
        return self.place

    def bucket(self, rows: int) -> Workload:
        """Return steps over batches like the example, with so many rows."""
        return self._workload(rows, itertools.repeat(with_rows(self.example, rows)))

    def stream(self, rows: int | None = None) -> Workload:
        """Return steps over the batches of the loader, or over the example where there is none.

        Raises:
            ConfigurationError: Where a number of rows is asked of a loader, which has its own.
        """
        if self.loader is None:
            return self.bucket(rows or rows_of(self.example))
        if rows is not None:
            raise ConfigurationError("A loader has a batch size of its own.", "Leave batch_size out.")
        return self._workload(rows_of(self.example), Examples(self.loader))

    def forward(self, example: Example) -> Any:
        """Run a forward pass without gradients."""
        import torch

        with torch.no_grad():
            return example(self.model)

    def loss(self, example: Example) -> Any:
        """Run a forward pass and return the loss.

        Raises:
            ConfigurationError: Where nothing that the model returns has a gradient.
        """
        import torch

        with torch.enable_grad():
            loss = loss_or_mean(example(self.model))
        if loss is None:
            what = f"Nothing that {self.name} returns depends on a parameter that learns."
            raise ConfigurationError(what, "Leave training=True out.")
        return loss

    def backward(self, loss: Any) -> None:
        """Run the backward pass."""
        loss.backward()

    def optimizer_step(self, _done: None) -> None:
        """Do the optimizer's step, and drop the gradients."""
        if not self.optimizers:
            self.optimizers.append(adamw([one for one in self.model.parameters() if one.requires_grad], lr=RATE))
        self.optimizers[0].step()
        self.optimizers[0].zero_grad()

    def _workload(self, rows: int, batches: Iterable[Example]) -> Workload:
        transfer = Phase(TRANSFER, lambda example: moved(example, self.place))
        training = (
            Phase(FORWARD, self.loss),
            Phase(BACKWARD, self.backward),
            Phase(OPTIMIZER, self.optimizer_step),
        )
        phases = (transfer, *(training if self.training else (Phase(FORWARD, self.forward),)))
        workers = int(getattr(self.loader, "num_workers", 0))
        dtype = next((str(one.dtype).removeprefix("torch.") for one in self.model.parameters()), None)
        task = TRAINING_STEP if self.training else FORWARD_PASS
        length = length_of(self.example) if self.loader is None else None
        return Workload(self.name, task, self.place, rows, length, lambda: iter(batches), phases, workers, dtype)


@dataclass(frozen=True)
class Repeated:
    """The batches of a loader, again and again.

    Raises:
        ConfigurationError: Where the loader gives none, such as one whose batches can be read only once.
    """

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield first_of(batches := iter(self.loader))
            yield from batches


@dataclass(frozen=True)
class Examples:
    """The batches of a loader, as a model is called with them, again and again."""

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Example]:
        return map(example_of, Repeated(self.loader))


def example_of(batch: Any) -> Example:
    """Return a batch of a loader as a model is called with it, without copies.

    Example:
        >>> import torch
        >>> example_of({"input_ids": torch.ones(2, 3)}).kwargs["input_ids"].shape
        torch.Size([2, 3])
    """
    from collections.abc import Mapping

    if isinstance(batch, Mapping):
        return Example(kwargs=dict(batch))
    return Example(tuple(batch) if isinstance(batch, (list, tuple)) else (batch,))


def moved(example: Example, device: str) -> Example:
    """Return a batch on a device."""
    return Example(to_device(example.args, device), to_device(example.kwargs, device))


def rows_of(example: Example) -> int:
    """Return how many rows a batch has: the first size of its first tensor that has one.

    Example:
        >>> import torch
        >>> rows_of(Example((torch.ones(4, 2),)))
        4
    """
    return next((int(tensor.shape[0]) for _, tensor in named_tensors(example.tensors) if tensor.dim()), 1)


def length_of(example: Example) -> int | None:
    """Return how many tokens the rows of a batch have, ``None`` where they have no ``input_ids``."""
    ids = example.kwargs.get("input_ids")
    return int(ids.shape[-1]) if ids is not None and ids.dim() > 1 else None


def with_rows(example: Example, rows: int) -> Example:
    """Return a batch with another number of rows, which repeats those that there are; tensors without rows stay.

    Example:
        >>> import torch
        >>> with_rows(Example((torch.tensor([[1], [2]]), torch.tensor(0.5))), 3).args
        (tensor([[1],
                [2],
                [1]]), tensor(0.5000))
    """
    import torch

    there = rows_of(example)
    index = torch.arange(rows) % there

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[index] if tensor.dim() and tensor.shape[0] == there else tensor

    return Example(with_tensors(example.args, repeated), with_tensors(example.kwargs, repeated))


def subject_of_module(
    model: torch.nn.Module,
    data: Any,
    training: bool,
    synthetic: Callable[[], Example] | None = None,
    name: str | None = None,
) -> Subject:
    """Return a torch module, of which a copy is measured on each device.

    Args:
        model: The module.
        data: Example inputs, or a ``DataLoader``.
        training: Whether a step trains.
        synthetic: Makes an example where nobody passes data.
        name: What the person calls it; the name of its class where nobody says.

    Raises:
        ConfigurationError: For a module without data, and for data that are none.
    """
    import torch

    name = name or type(model).__name__
    loader = data if isinstance(data, torch.utils.data.DataLoader) else None
    if data is None and synthetic is None:
        raise ConfigurationError(f"There is nothing to call {name} with.", "Pass a batch, or a DataLoader.")
    if data is None and synthetic is not None:
        example = synthetic()
    else:
        with random_numbers_kept():  # A loader draws a seed whenever it is read.
            example = read_example(data if loader is None else first_of(loader))

    def on(device: str) -> ModuleBench:
        copied = cpu_copy(model).to(torch.device(device))
        return ModuleBench(name, copied.train() if training else copied.eval(), device, training, example, loader)

    return Subject(name, TRAINING_STEP if training else FORWARD_PASS, on)


def first_of(loader: Iterable[Any]) -> Any:
    """Return the first batch of a loader.

    Raises:
        ConfigurationError: Where it gives none.
    """
    for batch in loader:
        return batch
    raise ConfigurationError("The loader gives no batch.", "Pass one with items, which can be read again and again.")
