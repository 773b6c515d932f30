"""Locate the first NaN or infinity in a forward or backward pass, and save the batch that produced it."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .._utils.text import describe_error, short_type_name
from ..devices.backend import RngStates, get_rng_states, use_rng_states
from ..devices.moving import map_tensors, named_tensors, safe_key_name, underlying_values
from ..devices.registry import get_device
from ..devices.request import device_type

if TYPE_CHECKING:
    import torch

# Maximum number of recorded passes, those of one step with accumulation. They store inputs, no activations.
MAX_RECORDED_PASSES = 32


@dataclass(frozen=True)
class RecordedPass:
    """Inputs of a forward pass, detached from any graph, and the random number states at its start.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        states: Random number states.
        autocast: Dtype of autocast, or ``None`` if autocast was disabled.
        device: Device type, such as ``"mps"``.
        module: Name of the called module in the watched model; empty for the model itself.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: RngStates
    autocast: torch.dtype | None
    device: str
    module: str = ""

    @property
    def named_arguments(self) -> dict[str, Any]:
        """Arguments by name; positional arguments are numbered."""
        return {**{f"argument {number}": value for number, value in enumerate(self.args)}, **self.kwargs}


class ForwardRecorder:
    """Recorder of the forward passes of a model in training with gradients; inactive in a copy of the model."""

    def __init__(self, device: str | None) -> None:
        self.device = device
        self._depth = 0
        self.passes: deque[RecordedPass] = deque(maxlen=MAX_RECORDED_PASSES)
        self.losses: deque[torch.Tensor] = deque(maxlen=MAX_RECORDED_PASSES)

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardRecorder, (None,)

    def watch(self, model: torch.nn.Module, called: Iterable[str] = ("",)) -> list[Callable[[], None]]:
        """Record the passes of the named modules of a model; return the functions that remove the hooks."""
        removers = []
        for name in called:
            module = model.get_submodule(name)
            removers.append(module.register_forward_pre_hook(partial(self.before, name), with_kwargs=True).remove)
            # Called even after an error.
            removers.append(module.register_forward_hook(self.after, always_call=True).remove)
        return removers

    def _should_record(self, model: torch.nn.Module) -> bool:
        """Return whether a pass is recorded: in training, with gradients, and not inside another pass."""
        import torch

        return self.device is not None and not self._depth and model.training and torch.is_grad_enabled()

    def before(self, name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the inputs of a pass; a forward pre-hook."""
        import torch

        if self._should_record(model) and self.device is not None:
            kind = device_type(self.device)
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            args, kwargs = map_tensors((args, kwargs), torch.Tensor.detach)
            self.passes.append(RecordedPass(args, kwargs, get_rng_states(self.device), autocast, kind, name))
        self._depth += 1

    def after(self, model: torch.nn.Module, _args: object, output: object) -> None:
        """Record the loss of a pass without waiting for it; a forward hook."""
        self._depth = max(0, self._depth - 1)  # If an earlier hook failed, the start of the pass was not recorded.
        if self._should_record(model) and (loss := get_loss(output)) is not None:
            self.losses.append(loss.detach())

    def clear(self) -> None:
        self.passes.clear()
        self.losses.clear()


def get_loss(output: object) -> torch.Tensor | None:
    """Return the loss in the output of a model: its ``loss``, or its first value if that is a scalar."""
    import torch

    if isinstance(output, Mapping):  # A ModelOutput of transformers is a mapping.
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


# Suffixes of the names of integer tensors that are not token ids.
NON_TOKEN_SUFFIXES = ("labels", "label", "mask", "type_ids", "position_ids")


def save_batch(batch: object, folder: Path, step: int) -> str:
    """Save a batch if there is one, and return a sentence about the result; this function never raises."""
    if batch is None:
        return "No batch is available."
    try:
        return _save_tensors(batch, folder, step)
    except Exception as error:  # noqa: BLE001 - a failure here must not hide the error of the training
        reason = describe_error(error) if isinstance(error, OSError) else short_type_name(error)
        return f"The batch could not be saved: {reason}."


def _save_tensors(batch: object, folder: Path, step: int) -> str:
    """Write the tensors of a batch into a new safetensors file; return a sentence with its path and any omissions."""
    from safetensors.torch import save

    saved: dict[str, torch.Tensor] = {}
    omitted: list[str] = []
    clinical = ""
    for index, (name, tensor) in enumerate(named_tensors(batch)):
        try:
            copy = tensor.detach().cpu().contiguous().clone()
            save({"tensor": copy})
        except Exception:  # noqa: BLE001 - each unsupported kind of tensor fails with another error
            omitted.append(safe_key_name(name, index))
            continue
        base_key = name or "batch"
        numbered_keys = (f"{base_key} ({number})" for number in itertools.count(2))
        saved[next(key for key in itertools.chain([base_key], numbered_keys) if key not in saved)] = copy
        is_integer_matrix = copy.ndim > 1 and str(copy.dtype) in {"torch.int32", "torch.int64"}
        if name.endswith("input_ids") or (is_integer_matrix and not name.endswith(NON_TOKEN_SUFFIXES)):
            clinical = "; its token ids are clinical content"
    omissions = ""
    if omitted:
        total = len(saved) + len(omitted)
        omissions = f" {len(omitted)} of its {total} tensors could not be saved: {', '.join(omitted)}."
    if not saved:
        return f"The batch could not be saved:{omissions or ' it has no tensors.'}"
    return f"The batch is in {str(_write_new(save(saved), folder, step))!r}{clinical}.{omissions}"


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
# Description and remedy for each kind of origin.
ORIGINS: dict[Kind, tuple[str, str]] = {
    "input": ("the input {!r} is already NaN or infinite", "Fix the data."),
    "weight": (
        "the weight {} is already NaN or infinite, from an earlier step",
        "Return to a checkpoint from before this step, and lower the learning rate.",
    ),
    "output": ("it first appears in the output of {}", "Lower the learning rate, or compute in float32."),
    "loss": (
        "it first appears in the loss",
        "Check the inputs of the loss for an empty batch, labels that are all ignored, or a logarithm of zero.",
    ),
    "input gradient": ("it first appears in the backward pass of {}", GENERIC_REMEDY),
    "weight gradient": ("it first appears in the gradient of {}", GENERIC_REMEDY),
    "output gradient": ("it first appears in the gradient with respect to the output of {}", GENERIC_REMEDY),
    "update": ("it first appears in the optimizer step of {}", "Create the optimizer with fused=False."),
    "unknown": ("its origin was not found ({})", GENERIC_REMEDY),
}


@dataclass(frozen=True)
class Origin:
    """Location of the first value that is NaN or infinite.

    Attributes:
        kind: Kind of the location.
        name: Name of the layer, weight or input; if the kind is unknown, the reason.
    """

    kind: Kind
    name: str

    def __str__(self) -> str:
        return ORIGINS[self.kind][0].format(self.name)

    @property
    def remedy(self) -> str:
        return ORIGINS[self.kind][1]


# Locations that gradients reach in a backward pass, in order, each with whether its gradient was finite.
Arrivals = list[tuple[Origin, bool]]


def get_gradients(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of weights; for sparse gradients, return their values."""
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]  # noqa: SLF001 - uncoalesced


def all_finite(gradients: Sequence[torch.Tensor], losses: Sequence[torch.Tensor] = ()) -> bool:
    """Return whether gradients and losses are finite, from one number per tensor, which waits for the device once.

    The sum of finite values can be infinite, so ``False`` means that each tensor must be checked.
    """
    import torch

    numbers = [loss.reshape(()) for loss in losses]
    if gradients and get_device(gradients[0].device).has_multi_tensor_norm:  # Sums are fastest on other devices.
        numbers.append(torch.nn.utils.get_total_norm(gradients))
    else:
        real = (
            torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient for gradient in gradients
        )
        numbers += [gradient.sum(dtype=torch.float32) for gradient in real]
    if not numbers:
        return True
    return math.isfinite(torch.stack([number.to(numbers[-1].device) for number in numbers]).sum())


def is_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def locate_non_finite(
    model: torch.nn.Module | None, passes: Iterable[RecordedPass]
) -> tuple[Origin, RecordedPass | None]:
    """Return the origin and the pass in which it appears, or the last pass if no repeated pass shows it."""
    recorded = None
    for recorded in list(passes):  # A copy, because a repeated pass may be recorded too.
        if model is not None and (origin := replay_pass(model, recorded)) is not None:
            return origin, recorded
    if model is None or recorded is None:
        return Origin("unknown", "no pass of a watched model was recorded"), None
    return locate_from_gradients(model), recorded


def replay_pass(model: torch.nn.Module, recorded: RecordedPass) -> Origin | None:
    """Repeat a pass and return the origin of the first non-finite value; the model is not changed."""
    import torch

    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for name, value in recorded.named_arguments.items():
            if not is_finite(iter_float_tensors(value)):
                return Origin("input", name)
        for name, weight in model.named_parameters():
            if not is_finite(iter_float_tensors(weight)):
                return Origin("weight", name)
        buffers += [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        autocast = torch.autocast(recorded.device, recorded.autocast, enabled=recorded.autocast is not None)
        with use_rng_states(recorded.states), torch.enable_grad(), autocast:
            return _rerun_pass(model.get_submodule(recorded.module), recorded)
    except Exception as error:  # noqa: BLE001 - the model may fail with any error, whose text may be clinical
        return Origin("unknown", f"the pass could not be repeated: {short_type_name(error)}")
    finally:
        with torch.no_grad():
            for buffer, original in buffers:
                buffer.copy_(original)


def _rerun_pass(  # noqa: C901 - the hooks need what the pass finds
    model: torch.nn.Module, recorded: RecordedPass
) -> Origin | None:
    """Run the model forward, and backward if it computes its loss, and check each output and gradient of a layer."""
    import torch

    outputs: list[str] = []  # Layers with a non-finite output, innermost first.
    arrivals: Arrivals = []

    def watch_gradients(kind: Kind, name: str, tensors: Iterable[torch.Tensor]) -> None:
        def check_gradient(gradient: torch.Tensor) -> None:
            arrivals.append((Origin(kind, name), is_finite([gradient])))

        for tensor in tensors:
            if tensor.requires_grad:
                hooks.callback(tensor.register_hook(check_gradient).remove)

    def check_output(name: str, layer: torch.nn.Module, args: object, kwargs: object, output: object) -> None:
        tensors = list(iter_float_tensors(output))
        if layer is not model and not is_finite(tensors):
            outputs.append(name)
        watch_gradients("output gradient", name, tensors)
        watch_gradients("input gradient", name, iter_float_tensors([args, kwargs]))

    with ExitStack() as hooks:
        for name, layer in model.named_modules(prefix=recorded.module):
            hook = layer.register_forward_hook(partial(check_output, name), with_kwargs=True)
            hooks.callback(hook.remove)
        for name, weight in model.named_parameters(recorded.module):
            watch_gradients("weight gradient", name, [weight])
        loss = get_loss(model(*recorded.args, **recorded.kwargs))
        if outputs:
            return Origin("output", outputs[0])
        if loss is None:
            return None
        if not is_finite([loss]):
            return Origin("loss", "")
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        torch.autograd.grad(loss, weights, allow_unused=True)  # Unlike backward(), this does not change .grad.
    return find_backward_origin(arrivals)


def find_backward_origin(arrivals: Arrivals) -> Origin | None:
    """Return the origin of the first non-finite value in a backward pass."""
    # It is a layer whose output has a finite gradient, and whose input or weight has not.
    finite_layers = set()
    first = None
    for origin, is_finite_here in arrivals:
        if is_finite_here:
            if first is not None:
                break
            if origin.kind == "output gradient":
                finite_layers.add(origin.name)
            continue
        first = first or origin
        layer = origin.name.rpartition(".")[0] if origin.kind == "weight gradient" else origin.name
        if origin.kind != "output gradient" and layer in finite_layers:
            return origin
    return first


def locate_from_gradients(model: torch.nn.Module) -> Origin:
    """Return the origin according to the gradients, if repeating the passes did not show it."""
    # Backward passes run from the last layer to the first. So the last weight with a non-finite gradient was reached
    # first, if other gradients are finite. After clipping, or after a non-finite loss outside the model, none is.
    gradients = [(name, weight.grad) for name, weight in model.named_parameters() if weight.grad is not None]
    non_finite = [name for name, gradient in gradients if not is_finite([gradient])]
    if non_finite and len(non_finite) < len(gradients):
        return Origin("weight gradient", non_finite[-1])
    reason = "all values in the model are finite when the pass is repeated; check the code after the model"
    return Origin("unknown", reason)


def iter_float_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the float and complex tensors in a value; of sparse and nested tensors, yield the values."""
    tensors = (tensor for _, tensor in named_tensors(value) if tensor.is_floating_point() or tensor.is_complex())
    return (underlying_values(tensor) for tensor in tensors if not tensor.is_meta)
