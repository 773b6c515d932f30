"""A torch module, as something that is measured: forward passes, or training steps, with batches like an example."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...devices.conversion import to_device
from ...errors import ConfigurationError
from ...training.nested import named_tensors, with_tensors
from ...training.optimizers import adamw
from ..operators.copies import random_numbers_kept
from ..operators.examples import Example, read_example
from ..operators.tracing import loss_or_mean
from .batches import Repeated, first_of, generators_kept, rows_in
from .copying import check_call, copy_on
from .workload import (
    BACKWARD,
    FORWARD,
    FORWARD_PASS,
    OPTIMIZER,
    TRAINING_STEP,
    TRANSFER,
    Phase,
    Subject,
    Workload,
    read_ahead,
)

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
        written: Whether the model was seen to write into its first batch.
    """

    name: str
    model: torch.nn.Module
    place: str
    training: bool
    example: Example
    loader: Iterable[Any] | None = None
    optimizers: list[Any] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)

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
        return self._workload(rows_of(self.example), Repeated(self.loader, example_of))

    def transfer(self, example: Example) -> Example:
        """Return a batch on the device.

        On the CPU that is the person's own, so that a model which writes into its first batch gets copies.
        """
        return moved(example, self.place) if self.place != "cpu" or self.written == [False] else example.copied()

    def called(self, example: Example) -> Any:
        """Return what the model returns, and note at its first batch whether it writes into that."""
        if self.written:
            return example(self.model)
        before = versions(example)
        answer = example(self.model)
        self.written.append(None in before or versions(example) != before)
        return answer

    def forward(self, example: Example) -> Any:
        """Run a forward pass without gradients."""
        import torch

        with torch.no_grad():
            return self.called(example)

    def loss(self, example: Example) -> Any:
        """Run a forward pass and return the loss.

        Raises:
            ConfigurationError: Where nothing that the model returns has a gradient.
        """
        import torch

        with torch.enable_grad():
            loss = loss_or_mean(self.called(example))
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
        transfer = Phase(TRANSFER, self.transfer)
        training = (
            Phase(FORWARD, self.loss),
            Phase(BACKWARD, self.backward),
            Phase(OPTIMIZER, self.optimizer_step),
        )
        phases = (transfer, *(training if self.training else (Phase(FORWARD, self.forward),)))
        dtype = next((str(one.dtype).removeprefix("torch.") for one in self.model.parameters()), None)
        task = TRAINING_STEP if self.training else FORWARD_PASS
        length = length_of(self.example) if self.loader is None else None
        workers, ahead = read_ahead(self.loader)
        return Workload(
            self.name,
            task,
            self.place,
            rows,
            length,
            lambda: iter(batches),
            phases,
            workers,
            dtype,
            ahead,
            sizes=batches.sizes if isinstance(batches, Repeated) else Counter(),
            row_shape=row_shape_of(self.example),
        )


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
    return rows_in(example.tensors)


def versions(example: Example) -> list[int | None]:
    """Return how often each tensor of a batch was written into, ``None`` where torch does not count that."""
    tensors = [tensor for _, tensor in named_tensors(example.tensors)]
    return [None if one.is_inference() else one._version for one in tensors]  # noqa: SLF001 - torch's only name for it


def length_of(example: Example) -> int | None:
    """Return how many tokens the rows of a batch have, ``None`` where they have no ``input_ids``."""
    ids = example.kwargs.get("input_ids")
    return int(ids.shape[-1]) if ids is not None and ids.dim() > 1 else None


def row_shape_of(example: Example) -> str | None:
    """Return the shape of a row of a batch: of its first tensor with rows that have a shape.

    Example:
        >>> import torch
        >>> row_shape_of(Example((torch.ones(4, 3, 16, 16),))), row_shape_of(Example((torch.ones(4),)))
        ('3x16x16', None)
    """
    shapes = (tensor.shape[1:] for _, tensor in named_tensors(example.tensors) if tensor.dim() > 1)
    return next(("x".join(map(str, shape)) for shape in shapes), None)


def with_rows(example: Example, rows: int) -> Example:
    """Return a batch with another number of rows, which repeats those that there are; tensors without rows stay.

    A tensor has rows whose first size is that of the first tensor: a mask of 4 times 4 too, where the batch has 4 rows.

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
        with random_numbers_kept(), generators_kept(data):  # A loader draws a seed whenever it is read.
            example = read_example(data if loader is None else first_of(loader))
    check_call(model, name, example)

    def on(device: str) -> ModuleBench:
        copied = copy_on(model, name, device)
        return ModuleBench(name, copied.train() if training else copied.eval(), device, training, example, loader)

    return Subject(name, TRAINING_STEP if training else FORWARD_PASS, on, data)
