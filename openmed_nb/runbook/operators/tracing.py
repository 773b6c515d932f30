"""Run a copy of a model on the CPU, without gradients and for one training step, and note what it calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...devices.backend import TENSOR_LOCK
from ...errors import ConfigurationError, cause
from ...training.nested import named_tensors
from ...training.passes import loss_of
from .calls import BACKWARD, FORWARD, INFERENCE, OPTIMIZER, Call, Trace
from .copies import cpu_copy, random_numbers_kept
from .examples import Example
from .places import Place
from .refusals import FLOAT64
from .table import OperatorTable

if TYPE_CHECKING:
    import torch

    from .call_recorder import CallRecord


def trace(model: torch.nn.Module, example: Example, table: OperatorTable, training: bool = True) -> Trace:
    """Return what a copy of a model calls on the CPU; the model stays as it is, and so do random numbers.

    Args:
        model: The model, on any device.
        example: What it is called with.
        table: What MPS has, which decides what is taken apart.
        training: Whether to trace one training step too: the loss, its backward pass, clipped gradients, AdamW.

    Raises:
        ConfigurationError: Where the model cannot be copied, or fails by itself with this example.
    """
    import torch

    from .call_recorder import CallRecord

    with TENSOR_LOCK, random_numbers_kept(), torch.inference_mode(mode=False):
        record = CallRecord(table)
        Runs(cpu_copy(model), example.copied(), record).inference()
        notes = Runs(cpu_copy(model), example.copied(), record).training_step() if training else ()
        return Trace(dict(record.calls), dict(record.refusals), notes)


@dataclass(frozen=True)
class Runs:
    """The runs of a copied model that are traced, each on a copy of its own: a step changes its numbers."""

    model: torch.nn.Module
    example: Example
    record: CallRecord

    def inference(self) -> None:
        """Trace a pass without gradients, below autograd where the model can run so: there, MPS's own choice is seen."""
        import torch

        self._check()
        for name, place, _tensor in self._wide_tensors():
            self.record.refuse(Call(name, INFERENCE, place), [FLOAT64])
        seen = Counter(self.record.calls), Counter(self.record.refusals)
        try:
            with torch.inference_mode():
                self._traced(self._forward)
        except RuntimeError:  # The model computes gradients of its own, which inference mode forbids.
            self.record.calls, self.record.refusals = seen
            with torch.no_grad():
                self._traced(self._forward)

    def _check(self) -> None:
        """Run a pass that nobody watches, so that what fails then is the model's own error."""
        import torch

        self.model.eval()
        with torch.no_grad():
            error = _own_error(lambda: self.example.copied()(self.model))
        if error is not None:
            what = f"The forward pass of {self._name} failed on the CPU: {type(error).__name__}: {cause(error)}."
            raise ConfigurationError(what, "Check example_inputs: the model must run with them.") from error

    def training_step(self) -> tuple[str, ...]:
        """Trace a training step; return what could not be traced.

        Attention is taken apart, as on MPS where gradients are needed; optimizer and clipping go one by one, as MPS is
        none of the devices of ``torch.utils._foreach_utils``.
        """
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self._check()  # After which lazy weights have their shapes.
        self._wide_tensors()
        self.model.train()
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            return ("No training step: no parameter of the model needs gradients.",)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            try:
                return self._traced(self._step)
            except Exception:
                error = _own_error(self._step)
                if error is None:
                    raise
                what = f"A training step of {self._name} failed on the CPU: {type(error).__name__}: {cause(error)}."
                raise ConfigurationError(what, "Check example_inputs, or pass training=False.") from error

    def _wide_tensors(self) -> list[tuple[str, Place, torch.Tensor]]:
        """Return the tensors of the model, and of its inputs, that have a type that MPS does not have, and know them."""
        from .call_recorder import WIDE

        places = {id(module): Place(name, type(module).__name__) for name, module in self.model.named_modules()}
        named = [
            (f"{kind} {name}", places[id(module)], tensor)
            for module in self.model.modules()
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers))  # noqa: SLF001
            for name, tensor in tensors.items()
            if tensor is not None
        ]
        named += [(f"example input {name}", Place(), tensor) for name, tensor in named_tensors(self.example.tensors)]
        wide = [one for one in named if one[2].dtype in WIDE]
        self.record.wide.update((tensor, True) for _, _, tensor in wide)
        return wide

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _forward(self) -> tuple[str, ...]:
        self.record.phase = INFERENCE
        self.example(self.model)
        return ()

    def _step(self) -> tuple[str, ...]:
        import torch

        self.record.phase = FORWARD
        output = self.example(self.model)
        loss = loss_or_mean(output)
        if loss is None:
            nothing = "no tensor was found that depends on the parameters in what the model returns"
            return (f"No training step: {nothing}, a {type(output).__name__}.",)
        self.record.phase = BACKWARD
        loss.backward()
        self.record.phase = OPTIMIZER
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        torch.optim.AdamW(parameters, foreach=False, fused=False).step()
        return ()

    def _traced(self, run: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
        from .call_recorder import watching

        with watching(self.record, self.model):
            return run()


def _own_error(run: Callable[[], Any]) -> Exception | None:
    """Return what a run raises while nobody watches."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - the code of any model, which can raise anything; told to the person
        return error
    return None


def loss_or_mean(output: Any) -> torch.Tensor | None:
    """Return the loss that a model returned, or the sum of the means of its outputs; ``None`` where none has a gradient.

    Example:
        >>> import torch
        >>> loss_or_mean((torch.tensor([1.0, 3.0], requires_grad=True), torch.tensor([1]))).item()
        2.0
    """
    import torch

    loss = loss_of(output)
    if loss is not None and loss.requires_grad:
        return loss
    learnt = [tensor for tensor in returned_tensors(output) if tensor.requires_grad]
    means = [(tensor.real if tensor.is_complex() else tensor).mean() for tensor in learnt]
    return torch.stack(means).sum() if means else None


def returned_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of what a model returned, also those in the fields of dataclasses.

    Example:
        >>> import torch
        >>> [tensor.item() for tensor in returned_tensors({"first": torch.tensor(1), "others": [torch.tensor(2), "text"]})]
        [1, 2]
    """
    import torch

    if isinstance(output, torch.Tensor):
        yield output
    for part in _parts_of(output):
        yield from returned_tensors(part)


def _parts_of(output: Any) -> Iterable[Any]:
    if isinstance(output, Mapping):
        return output.values()
    if isinstance(output, (list, tuple)):
        return output
    fields = getattr(type(output), "__dataclass_fields__", ())  # ``dataclasses.fields`` checks for these too.
    return [getattr(output, name, None) for name in fields]
