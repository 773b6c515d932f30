"""NaN and infinity: seen in one number, and found by repeating the pass with a look at every layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..devices.conversion import numbers_in
from .nested import named_tensors
from .passes import Pass, loss_of

if TYPE_CHECKING:
    import torch

Kind = Literal["input", "weight", "output", "loss", "input gradient", "weight gradient", "output gradient", "unknown"]

REMEDIES: dict[Kind, str] = {
    "input": "Correct the data.",
    "weight": "Go back to a checkpoint from before this step, and lower the learning rate.",
    "output": "Lower the learning rate, or compute in float32.",
    "loss": "Look at what the loss is given: an empty batch, labels that are all left out, a logarithm of zero.",
    "unknown": "Lower the learning rate, clip gradients, or compute in float32.",
}


@dataclass(frozen=True)
class Found:
    """Where the first number appeared that is NaN or infinite.

    Attributes:
        kind: What it is.
        name: The name of the layer, the weight or the input; why it was not found, where it is unknown.
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        sentences = {
            "input": f"the input {self.name!r} is already NaN or infinite",
            "weight": f"the weight {self.name} is already NaN or infinite, from an earlier step",
            "output": f"it first appears in what {self.name} computes",
            "loss": "it first appears in the loss",
            "input gradient": f"it first appears in the backward pass of {self.name}",
            "weight gradient": f"it first appears in the gradient of {self.name}",
            "output gradient": f"it first appears in the gradient that comes back to {self.name}",
            "unknown": f"where it first appears was not found ({self.name})",
        }
        return sentences[self.kind]

    @property
    def remedy(self) -> str:
        """One thing to do."""
        return REMEDIES.get(self.kind, REMEDIES["unknown"])


@dataclass(frozen=True)
class Arrival:
    """A gradient that came to a place in a backward pass."""

    kind: Kind
    name: str
    finite: bool


def gradients_of(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of weights, of sparse ones what they hold."""
    found = [weight.grad for weight in weights if weight.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in found]  # noqa: SLF001 - uncoalesced


def looks_finite(gradients: Sequence[torch.Tensor], losses: Sequence[torch.Tensor] = ()) -> bool:
    """Tell whether gradients and losses are finite, from one number for each tensor: the device is waited for once.

    A sum of finite numbers can be infinite, so ``False`` means that a closer look is needed.

    Example:
        >>> import torch
        >>> looks_finite([torch.ones(2), torch.tensor([float("nan")])]), looks_finite([torch.ones(2)])
        (False, True)
    """
    import torch

    numbers = [*summaries(gradients), *(loss.reshape(()) for loss in losses)]
    if not numbers:
        return True
    device = numbers[0].device
    same = [number if number.device == device else number.to(device) for number in numbers]
    return math.isfinite(float(torch.stack(same).sum()))


def summaries(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a few numbers that are not finite where a gradient is not.

    On CUDA one kernel makes the norm of many tensors; elsewhere there is no such kernel, and sums are cheapest.
    """
    import torch

    if gradients and gradients[0].is_cuda:
        return [torch.nn.utils.get_total_norm(gradients)]
    full = torch.float32
    real = (torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in gradients)
    return [one.sum() if one.dtype == full else one.sum(dtype=full) for one in real]


def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether every number is finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def search(model: torch.nn.Module | None, passes: Iterable[Pass]) -> tuple[Found, Pass | None]:
    """Return where a step went wrong and in which of its passes; the last one where none goes wrong when repeated."""
    held = list(passes)
    if model is None or not held:
        return Found("unknown", "no pass of a watched model is held"), None
    for one in held:
        if (found := find(model, one)) is not None:
            return found, one
    return from_gradients(model), held[-1]


def find(model: torch.nn.Module, held: Pass) -> Found | None:
    """Repeat a pass and return where the first number appeared that is not finite; ``None`` where all were.

    Weights, gradients, buffers, random numbers and the mode of the model are afterwards as they were before.
    """
    try:
        if (name := _first(held.given.items())) is not None:
            return Found("input", name)
        if (name := _first(model.named_parameters())) is not None:
            return Found("weight", name)
        with held.conditions(model):
            return _repeat(model.get_submodule(held.module), held)
    except Exception as error:  # noqa: BLE001 - whatever the model fails with the second time; its text may be clinical
        return Found("unknown", f"the pass could not be repeated: {type(error).__name__}")


def _repeat(model: torch.nn.Module, held: Pass) -> Found | None:
    """Run forward and backward, and look at what every layer returns and at every gradient that comes back.

    Where the loss is computed outside of the model, only the forward pass can be repeated.
    """
    import torch

    outputs: list[str] = []
    arrivals: list[Arrival] = []
    with watched_layers(model, outputs, arrivals, held.module):
        loss = loss_of(model(*held.args, **held.kwargs))
        if outputs:
            return Found("output", outputs[0])
        if loss is None:
            return None
        if not is_finite([loss]):
            return Found("loss", "")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        torch.autograd.grad(loss, weights, allow_unused=True)  # Unlike backward(), this leaves .grad as it is.
    return origin(arrivals)


@contextmanager
def watched_layers(
    model: torch.nn.Module, outputs: list[str], arrivals: list[Arrival], prefix: str = ""
) -> Iterator[None]:
    """Note the layers whose outputs are not finite, innermost first, and the gradients that come to each layer.

    Args:
        model: The model, or the part of one that is called.
        outputs: Where the names of layers are noted.
        arrivals: Where gradients are noted.
        prefix: The name of that part in the whole model.
    """

    def note(kind: Kind, name: str, gradient: torch.Tensor) -> None:
        arrivals.append(Arrival(kind, name, is_finite([gradient])))

    def look(layer: torch.nn.Module, args: Any, kwargs: Any, output: Any, name: str) -> None:
        returned = list(tensors_in(output))
        if layer is not model and not is_finite(returned):
            outputs.append(name)
        for tensor in (tensor for tensor in returned if tensor.requires_grad):
            tensor.register_hook(partial(note, "output gradient", name))
        for tensor in (tensor for tensor in tensors_in([args, kwargs]) if tensor.requires_grad):
            tensor.register_hook(partial(note, "input gradient", name))

    layers = list(model.named_modules(prefix=prefix))
    hooks = [
        layer.register_forward_hook(
            lambda layer, args, kwargs, output, name=name: look(layer, args, kwargs, output, name), with_kwargs=True
        )
        for name, layer in layers
    ]
    weights = ((name, weight) for name, weight in model.named_parameters(prefix) if weight.requires_grad)
    hooks += [weight.register_hook(partial(note, "weight gradient", name)) for name, weight in weights]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def origin(arrivals: Sequence[Arrival]) -> Found | None:
    """Return where a backward pass made the first number that is not finite, from the gradients in order of arrival.

    A layer made it where its output's gradient was finite and the gradient of its input or of its weight is not.

    Example:
        >>> came = [Arrival("output gradient", "head", True), Arrival("output gradient", "body", False)]
        >>> str(origin([*came, Arrival("input gradient", "head", False)]))
        'it first appears in the backward pass of head'
    """
    start = next((number for number, arrival in enumerate(arrivals) if not arrival.finite), None)
    if start is None:
        return None
    fine = {arrival.name for arrival in arrivals[:start] if arrival.kind == "output gradient"}
    for arrival in itertools.takewhile(lambda arrival: not arrival.finite, arrivals[start:]):
        layer = arrival.name.rpartition(".")[0] if arrival.kind == "weight gradient" else arrival.name
        if arrival.kind != "output gradient" and layer in fine:
            return Found(arrival.kind, arrival.name)
    return Found(arrivals[start].kind, arrivals[start].name)


def from_gradients(model: torch.nn.Module) -> Found:
    """Return what the gradients of a step tell of where it went wrong, where repeating its passes did not.

    Backward passes run from the last layer to the first: the last weight whose gradient is not finite came first, if
    some others are fine. After clipping none is, nor where the loss went wrong outside of the model.
    """
    named = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
    wrong = [name for name, gradient in named if not is_finite([gradient])]
    if wrong and len(wrong) < len(named):
        return Found("weight gradient", wrong[-1])
    return Found("unknown", "all is finite in the model when the pass is repeated: look at what comes after it")


def _first(named: Iterable[tuple[str, Any]]) -> str | None:
    return next((name for name, value in named if not is_finite(tensors_in(value))), None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of fractions in a value; of sparse and nested ones what they hold, of those without any none."""
    found = (tensor for _, tensor in named_tensors(value) if tensor.is_floating_point() or tensor.is_complex())
    return (numbers_in(tensor) for tensor in found if not tensor.is_meta)
