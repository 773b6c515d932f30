"""Find where a loss or gradient became NaN or infinite, and keep the batch that made it so."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .._utils.text import describe_error, short_type_name
from ..devices.backend import RngStates, get_rng_states, use_rng_states
from ..devices.moving import map_tensors, named_tensors, safe_key_name, underlying_values
from ..devices.request import device_type

if TYPE_CHECKING:
    import torch

# The most passes that are held: those of one step with accumulation. What they hold are inputs, no activations.
MAX_RECORDED_PASSES = 32


@dataclass(frozen=True)
class RecordedPass:
    """What a forward pass was given, cut off from any graph, and the random numbers with which it began."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: RngStates
    autocast: torch.dtype | None  # None where autocast was off.
    device: str  # Its kind, such as "mps".
    module: str = ""  # The name of the module that was called, in the watched model; empty for the model itself.

    @property
    def named_arguments(self) -> dict[str, Any]:
        """The arguments by name, those without one by their number."""
        return {**{f"argument {number}": value for number, value in enumerate(self.args)}, **self.kwargs}

    @contextmanager
    def replay_context(self, model: torch.nn.Module) -> Iterator[None]:
        """Let a pass run as this one did; afterwards, buffers and random numbers are as they were before."""
        import torch

        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            autocast = torch.autocast(self.device, self.autocast, enabled=self.autocast is not None)
            with use_rng_states(self.states), torch.enable_grad(), autocast:
                yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


class ForwardRecorder:
    """Holds the passes that a model makes in training with gradients, from its hooks; in a copy of a model, nothing."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self._depth = 0
        self.passes: deque[RecordedPass] = deque(maxlen=MAX_RECORDED_PASSES)
        self.losses: deque[torch.Tensor] = deque(maxlen=MAX_RECORDED_PASSES)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecorder, (None,)

    def watch(self, model: torch.nn.Module, called: Iterable[str] = ("",)) -> list[Callable[[], None]]:
        """Hold the passes of the modules that may be called, by their names in a model; return what ends that."""
        ends = []
        for name in called:
            module = model.get_submodule(name)
            ends.append(module.register_forward_pre_hook(partial(self.before, name), with_kwargs=True).remove)
            ends.append(module.register_forward_hook(self.after, always_call=True).remove)  # After an error, too.
        return ends

    def _holds(self, model: torch.nn.Module) -> bool:
        """Whether this pass is held: one in training with gradients that is no part of another."""
        import torch

        return self.device is not None and not self._depth and model.training and torch.is_grad_enabled()

    def before(self, name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold what a pass is given; a forward pre-hook."""
        import torch

        if self._holds(model):
            kind = device_type(self.device or "")
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            cut_args, cut_kwargs = map_tensors((args, kwargs), torch.Tensor.detach)
            self.passes.append(
                RecordedPass(cut_args, cut_kwargs, get_rng_states(self.device or ""), autocast, kind, name)
            )
        self._depth += 1

    def after(self, model: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Hold the loss of a pass, without waiting for it; a forward hook."""
        self._depth = max(0, self._depth - 1)  # Where a hook before this one failed, its beginning was not seen.
        if self._holds(model) and (loss := loss_of(output)) is not None:
            self.losses.append(loss.detach())

    def clear(self) -> None:
        self.passes.clear()
        self.losses.clear()


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in what a model returned: its ``loss``, or its first value where that is a single number."""
    import torch

    if isinstance(output, Mapping):  # transformers' ModelOutput is one.
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


# The ends of names of whole numbers that are not token ids.
NO_TOKENS = ("labels", "label", "mask", "type_ids", "position_ids")


def save_batch(batch: Any, folder: Path, step: int) -> str:
    """Save a batch where there is one, and return a sentence about it; whatever goes wrong, there is a sentence."""
    if batch is None:
        return "No batch is held."
    try:
        return _saved(batch, folder, step)
    except Exception as error:  # noqa: BLE001 - the error of the training must be shown, whatever fails after it
        why = describe_error(error) if isinstance(error, OSError) else short_type_name(error)
        return f"The batch could not be saved: {why}."


def _saved(batch: Any, folder: Path, step: int) -> str:
    """Write the tensors of a batch into a new safetensors file, and return where it is and what is not in it."""
    from safetensors.torch import save

    kept: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    clinical = ""
    for place, (name, tensor) in enumerate(named_tensors(batch)):
        try:
            plain = tensor.detach().cpu().contiguous().clone()
            save({"tensor": plain})
        except Exception:  # noqa: BLE001 - each kind of tensor that cannot be kept fails with an error of its own
            left_out.append(safe_key_name(name, place))
            continue
        key = name or "batch"
        numbered = (f"{key} ({number})" for number in itertools.count(2))
        kept[next(new for new in itertools.chain([key], numbered) if new not in kept)] = plain
        numbers = plain.ndim > 1 and str(plain.dtype) in {"torch.int32", "torch.int64"}
        if name.endswith("input_ids") or (numbers and not name.endswith(NO_TOKENS)):
            clinical = "; its token ids are clinical content"
    lost = ""
    if left_out:
        total = len(kept) + len(left_out)
        lost = f" {len(left_out)} of its {total} tensors could not be kept: {', '.join(left_out)}."
    if not kept:
        return f"The batch could not be kept:{lost or ' it has no tensors.'}"
    return f"The batch is in {str(_write_new(save(kept), folder, step))!r}{clinical}.{lost}"


def _write_new(content: bytes, folder: Path, step: int) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in itertools.count(1):
        file = folder / (f"step_{step}.safetensors" if number == 1 else f"step_{step}_{number}.safetensors")
        with suppress(FileExistsError), open(file, "xb", opener=partial(os.open, mode=0o600)) as stream:
            stream.write(content)
            break
    return file


Kind = Literal[
    "input", "weight", "output", "loss", "input gradient", "weight gradient", "output gradient", "update", "unknown"
]

GENERIC_REMEDY = "Lower the learning rate, clip gradients, or compute in float32."
# Of each kind of origin, where that is, and what to do about it.
ORIGINS: dict[Kind, tuple[str, str]] = {
    "input": ("the input {!r} is already NaN or infinite", "Correct the data."),
    "weight": (
        "the weight {} is already NaN or infinite, from an earlier step",
        "Go back to a checkpoint from before this step, and lower the learning rate.",
    ),
    "output": ("it first appears in what {} computes", "Lower the learning rate, or compute in float32."),
    "loss": (
        "it first appears in the loss",
        "Look at what the loss is given: an empty batch, labels that are all left out, a logarithm of zero.",
    ),
    "input gradient": ("it first appears in the backward pass of {}", GENERIC_REMEDY),
    "weight gradient": ("it first appears in the gradient of {}", GENERIC_REMEDY),
    "output gradient": ("it first appears in the gradient that comes back to {}", GENERIC_REMEDY),
    "update": ("it first appears in the optimizer's step of {}", "Make the optimizer with fused=False."),
    "unknown": ("where it first appears was not found ({})", GENERIC_REMEDY),
}


@dataclass(frozen=True)
class Origin:
    """Where the first number appeared that is NaN or infinite."""

    kind: Kind
    name: str  # Of the layer, the weight or the input; why it was not found, where it is unknown.

    def __str__(self) -> str:
        return ORIGINS[self.kind][0].format(self.name)

    @property
    def remedy(self) -> str:
        return ORIGINS[self.kind][1]


# The places that a gradient comes to in a backward pass, in order, each with whether it was finite there.
Arrivals = list[tuple[Origin, bool]]


def gradients_of(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of weights, of sparse ones what they hold."""
    found = [weight.grad for weight in weights if weight.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in found]  # noqa: SLF001 - uncoalesced


def all_finite(gradients: Sequence[torch.Tensor], losses: Sequence[torch.Tensor] = ()) -> bool:
    """Tell whether gradients and losses are finite, from one number for each tensor: the device is waited for once.

    A sum of finite numbers can be infinite, so ``False`` means that a closer look is needed.
    """
    import torch

    numbers = [loss.reshape(()) for loss in losses]
    if gradients and gradients[0].is_cuda:  # One kernel for many tensors; elsewhere there is none: sums are cheapest.
        numbers.append(torch.nn.utils.get_total_norm(gradients))
    else:
        real = (torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in gradients)
        numbers += [one.sum(dtype=torch.float32) for one in real]
    if not numbers:
        return True
    return math.isfinite(torch.stack([number.to(numbers[-1].device) for number in numbers]).sum())


def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def locate_non_finite(
    model: torch.nn.Module | None, passes: Iterable[RecordedPass]
) -> tuple[Origin, RecordedPass | None]:
    """Return where a step went wrong and in which of its passes; the last one where none goes wrong when repeated."""
    held = None
    for held in list(passes):  # Of those below, a repeated pass may be watched too.
        if model is not None and (origin := replay_pass(model, held)) is not None:
            return origin, held
    if model is None or held is None:
        return Origin("unknown", "no pass of a watched model is held"), None
    return locate_from_gradients(model), held


def replay_pass(model: torch.nn.Module, held: RecordedPass) -> Origin | None:
    """Repeat a pass and return where the first number appeared that is not finite; the model stays as it was."""
    try:
        for name, value in held.named_arguments.items():
            if not is_finite(iter_float_tensors(value)):
                return Origin("input", name)
        for name, weight in model.named_parameters():
            if not is_finite(iter_float_tensors(weight)):
                return Origin("weight", name)
        with held.replay_context(model):
            return _repeat(model.get_submodule(held.module), held)
    except Exception as error:  # noqa: BLE001 - whatever the model fails with the second time; its text may be clinical
        return Origin("unknown", f"the pass could not be repeated: {short_type_name(error)}")


def _repeat(model: torch.nn.Module, held: RecordedPass) -> Origin | None:
    """Run forward and, where the model computes its loss, backward, and look at each output and gradient of a layer."""
    import torch

    outputs: list[str] = []
    arrivals: Arrivals = []

    def look(origin: Origin, tensors: list[torch.Tensor]) -> None:
        if origin.kind != "output":
            arrivals.append((origin, is_finite(tensors)))
        elif not is_finite(tensors):
            outputs.append(origin.name)

    with watched_layers(model, look, held.module):
        loss = loss_of(model(*held.args, **held.kwargs))
        if outputs:
            return Origin("output", outputs[0])
        if loss is None:
            return None
        if not is_finite([loss]):
            return Origin("loss", "")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        torch.autograd.grad(loss, weights, allow_unused=True)  # Unlike backward(), this leaves .grad as it is.
    return origin_of(arrivals)


@contextmanager
def watched_layers(
    model: torch.nn.Module, look: Callable[[Origin, list[torch.Tensor]], object], prefix: str = ""
) -> Iterator[None]:
    """Look at what each layer of a model returns, innermost first, and at the gradients that come to it."""

    def note(kind: Kind, name: str, gradient: torch.Tensor) -> None:
        look(Origin(kind, name), [gradient])

    def watch(kind: Kind, name: str, tensors: Iterable[torch.Tensor]) -> list[Any]:
        return [tensor.register_hook(partial(note, kind, name)) for tensor in tensors if tensor.requires_grad]

    def returned(name: str, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = list(iter_float_tensors(output))
        if layer is not model:
            look(Origin("output", name), tensors)
        watch("output gradient", name, tensors)
        watch("input gradient", name, iter_float_tensors([args, kwargs]))

    hooks = []
    for name, layer in model.named_modules(prefix=prefix):
        hooks.append(layer.register_forward_hook(partial(returned, name), with_kwargs=True))
    for name, weight in model.named_parameters(prefix):
        hooks += watch("weight gradient", name, [weight])
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def origin_of(arrivals: Arrivals) -> Origin | None:
    """Return where a backward pass made the first number that is not finite."""
    # That is a layer whose output has a finite gradient, and whose input or weight has not.
    fine = set()
    first = None
    for place, finite in arrivals:
        if finite:
            if first is not None:
                break
            if place.kind == "output gradient":
                fine.add(place.name)
            continue
        first = first or place
        layer = place.name.rpartition(".")[0] if place.kind == "weight gradient" else place.name
        if place.kind != "output gradient" and layer in fine:
            return place
    return first


def locate_from_gradients(model: torch.nn.Module) -> Origin:
    """Return where a step went wrong by its gradients, where repeating its passes did not show it."""
    # Backward passes run from the last layer to the first: the last weight whose gradient is not finite came first, if
    # others are fine. After clipping none is, nor where the loss went wrong outside of the model.
    named = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
    wrong = [name for name, gradient in named if not is_finite([gradient])]
    if wrong and len(wrong) < len(named):
        return Origin("weight gradient", wrong[-1])
    return Origin("unknown", "all is finite in the model when the pass is repeated: look at what comes after it")


def iter_float_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of fractions in a value; of sparse and nested ones what they hold, of those without any none."""
    found = (tensor for _, tensor in named_tensors(value) if tensor.is_floating_point() or tensor.is_complex())
    return (underlying_values(tensor) for tensor in found if not tensor.is_meta)
