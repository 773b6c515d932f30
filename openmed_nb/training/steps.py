"""Training steps: precision, fused AdamW, gradient accumulation, and activation checkpointing.

On MPS, torch never selects the fused implementation by default: it loops over the tensors, one small kernel at a time
(``torch/optim/optimizer.py``, ``torch/utils/_foreach_utils.py``). With the fused implementation, one kernel updates
many tensors.

The loss of a batch is a mean over its examples or labels. The mean of such means equals the overall mean only if all
batches have the same size. That is false for a shorter last group, and for tokens
(https://huggingface.co/blog/gradient_accumulation, transformers#34191, #34198). So the batches of a group are read
ahead, and each is weighted by its fraction of the group.

On MPS, torch does not restore the random number state for the recomputation of activations. Dropout would then drop
different elements than in the loss, and gradients would be silently wrong (pytorch#127676, #194478, open in torch 2.14).
``checkpoint_activations`` restores that state.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from .._render.display import Displayable, Report
from .._utils.text import describe_error, describe_value, short_type_name
from .._utils.validation import check_integer, invalid_type
from ..devices.backend import get_rng_states, parse_release, use_rng_states
from ..devices.machine import MachineInfo
from ..devices.registry import get_device
from ..errors import ConfigurationError
from ..session import SESSION
from .guards import IGNORE_INDEX, get_labels

if TYPE_CHECKING:
    import torch
    from torch.optim.optimizer import ParamsT
    from transformers import PreTrainedModel

    from .loader import DeviceArgument

Result = TypeVar("Result")
PrecisionName = Literal["float32", "bfloat16", "float16"]
# Accepted names of a precision: those of torch, Accelerate and Trainer.
DTYPE_SPELLINGS: dict[str, PrecisionName] = {
    **dict.fromkeys(("float32", "fp32", "no"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
}


@dataclass(frozen=True, repr=False)
class Precision(Displayable):
    """Precision of a training, with its reason.

    Attributes:
        device: Device, such as ``"mps"`` or ``"cuda:1"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: the type of matrix products; weights stay float32.
        reason: Reason for this type, in one sentence.
        needs_scaler: Whether small gradients would underflow to 0 without a ``GradScaler``.
        notes: Notes on this type.
    """

    device: str
    dtype: PrecisionName
    reason: str
    needs_scaler: bool = False
    notes: tuple[str, ...] = ()

    JSON_PROPERTIES = ("enabled",)

    @property
    def enabled(self) -> bool:
        """Whether autocast uses a type other than float32."""
        return self.dtype != "float32"

    def autocast(self) -> torch.autocast:
        """Return a context manager for the forward pass and the loss; call ``backward`` outside it."""
        import torch

        dtype = getattr(torch, self.dtype) if self.enabled else None
        return torch.autocast(get_device(self.device).type, dtype=dtype, enabled=self.enabled)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a ``GradScaler``, which is disabled if it is not needed."""
        import torch

        return torch.amp.GradScaler(get_device(self.device).type, enabled=self.needs_scaler)

    def to_report(self) -> Report:
        """Return the type, its reason and the notes."""
        scaled = " with a GradScaler" if self.needs_scaler else ""
        return Report(
            f"Precision on {self.device}: {'autocast to ' if self.enabled else ''}{self.dtype}{scaled}",
            (self.reason, *self.notes),
        )


def precision(requested: str | torch.dtype | None = None, device: DeviceArgument = None) -> Precision:
    """Return the precision for training a model on a device, with its reason.

    Args:
        requested: ``"float32"``, ``"bfloat16"`` or ``"float16"``. If ``None``, use float32.
        device: Device, as in :func:`~openmed_nb.training.to_device`.

    Returns:
        The precision, with ``autocast()`` for the forward pass and ``scaler()`` for the backward pass.

    Raises:
        ConfigurationError: If the device does not support the precision; it is never replaced by another one.

    Example:
        >>> precision(device="cpu").dtype
        'float32'
    """
    name = SESSION.device(device).device
    manager = SESSION.device_manager
    return select_precision(name, manager.torch.release, manager.machine, requested, get_device(name).capability())


def select_precision(
    device: str,
    torch_release: tuple[int, ...],
    machine: MachineInfo,
    requested: str | torch.dtype | None = None,
    capability: tuple[int, int] | None = None,
) -> Precision:
    """Select the precision for training a model; without a request, always select float32."""
    spelling = "float32" if requested is None else str(requested).strip().lower().removeprefix("torch.")
    if spelling not in DTYPE_SPELLINGS:
        accepted = ", ".join(map(repr, DTYPE_SPELLINGS))
        raise ConfigurationError(
            f"Invalid value for precision: {describe_value(requested)}.", f"Use one of {accepted}."
        )
    backend = get_device(device)
    dtype = DTYPE_SPELLINGS[spelling]
    if dtype == "float32":
        reason = "float32 was requested."
        if requested is None:
            reason = f"float32 is the default: {backend.float32_reason}."
        return Precision(device, dtype, reason)
    obstacle = backend.dtype_rejection(dtype, torch_release, machine)
    obstacle = obstacle or backend.half_precision_rejection(dtype, torch_release, capability)
    if obstacle:
        raise ConfigurationError(f"{dtype} cannot be used on {device}: {obstacle.reason}.", obstacle.remedy)
    reason = "bfloat16 was requested; it has the range of float32 and needs no GradScaler."
    if dtype == "float16":
        reason = "float16 was requested; its range is small, so a GradScaler prevents underflow of small gradients."
    notes = backend.half_precision_notes(dtype, torch_release, machine)
    return Precision(device, dtype, reason, dtype == "float16", notes)


# Arguments of torch.optim.AdamW that select the implementation.
IMPLEMENTATIONS = ("fused", "foreach", "differentiable", "capturable")


def adamw(parameters: ParamsT, **options: Any) -> torch.optim.AdamW:
    """Return ``torch.optim.AdamW``, fused if torch supports that for these parameters.

    On MPS before torch 2.13 it is not fused, because the fused implementation ignores a ``GradScaler`` (pytorch#186360).

    Args:
        parameters: Parameters as for torch: tensors, pairs of name and tensor, or dicts with ``params``. Move the model
            to its device before.
        options: Other arguments of ``torch.optim.AdamW``, passed unchanged. ``fused``, ``foreach``, ``differentiable`` and
            ``capturable`` select the implementation.

    Returns:
        The optimizer.

    Raises:
        ConfigurationError: If ``AdamW`` rejects an argument.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> adamw(model.parameters(), lr=1e-3).defaults["fused"], adamw(model.parameters(), fused=False).defaults["fused"]
        (True, False)
    """
    import torch

    # An error of a generator is raised unchanged, because it is one of the user's code.
    if isinstance(parameters, Iterator):
        parameters = list(parameters)
    try:
        optimizer = torch.optim.AdamW(parameters, **options)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        rejection = f"torch.optim.AdamW rejects its arguments: {describe_error(error)}."
    else:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        kinds = {(weight.device.type, str(weight.dtype).removeprefix("torch.")) for weight in weights}
        is_selected = any(options.get(name) is not None for name in IMPLEMENTATIONS)
        if is_selected or not supports_fused(kinds, parse_release(torch.__version__)):
            return optimizer
        groups = [{**group, "fused": True} for group in optimizer.param_groups]
        return torch.optim.AdamW(groups, **{**options, "fused": True})
    # Raised outside the handler, because the torch error quotes the arguments and would be the context of this error.
    raise ConfigurationError(rejection, "Pass model.parameters(), and arguments that help(torch.optim.AdamW) lists.")


def supports_fused(tensors: Collection[tuple[str, str]], torch_release: tuple[int, ...]) -> bool:
    """Return whether AdamW can run fused for parameters of these devices and types, such as ``("mps", "float32")``."""
    for kind, dtype in tensors:
        backend = get_device(kind)
        if dtype not in backend.fused_adamw_types or backend.fused_step_ignores_found_inf(torch_release):
            return False
    return len(tensors) > 0


Weight = Callable[[Any], float]
WEIGHT_REMEDY = "Pass weight=, a function that returns the number of items in the mean loss of the batch."


class _MicroBatch(NamedTuple):
    """Position of a batch in its group.

    Attributes:
        fraction: Factor of its mean loss, in [0, 1]. The fractions of a group add up to 1, or to 0 if no batch has
            weight.
        last: Whether it is the last batch of its group.
    """

    fraction: float
    last: bool


def count_labels(batch: object) -> int:
    """Return the number of labels in the mean loss of a batch.

    The batch is a mapping with ``labels`` or a pair of inputs and labels. Floating-point labels, as for regression or
    multi-label tasks, all count.
    """
    import torch

    labels = get_labels(batch)
    if not isinstance(labels, torch.Tensor):
        raise ConfigurationError(
            f"A batch of type {short_type_name(batch)} has no labels to compute its weight.", WEIGHT_REMEDY
        )
    if labels.is_floating_point():
        return labels.numel()
    return int(labels.ne(IGNORE_INDEX).sum())


@dataclass
class GradientAccumulation:
    """Optimizer steps over groups of batches, each with the exact gradient of the mean loss over its group.

    Args:
        optimizer: Optimizer; its gradients are set to ``None`` before the first step and after each step.
        steps: Number of batches per group; the last group may be shorter.
        weight: Function that returns the number of items in the mean loss of a batch. By default, it counts the labels
            that are not ignored. A class-weighted loss needs the sum of the weights of its labels.
        scaler: ``GradScaler`` for float16, or ``None``.

    Raises:
        ConfigurationError: If ``steps`` is below 1, or if ``optimizer`` is not an optimizer.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = GradientAccumulation(optimizer, steps=2, weight=len)
        >>> for inputs in accumulation.batches([torch.ones(3, 2), torch.ones(1, 2), torch.ones(5, 2)]):
        ...     accumulation.backward(model(inputs).square().mean())
        False
        True
        True
    """

    optimizer: torch.optim.Optimizer
    steps: int
    weight: Weight = count_labels
    scaler: torch.amp.GradScaler | None = None
    _current: _MicroBatch | None = field(default=None, init=False, repr=False)
    _has_weight: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        import torch

        check_integer("steps", self.steps)
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise invalid_type("the optimizer", self.optimizer, "Pass one of torch.optim, or nb.training.adamw().")

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches unchanged; pass the loss of each to :meth:`backward` before taking the next.

        Args:
            batches: Loader or other iterable; its length may be unknown. One group is kept in memory.

        Raises:
            ConfigurationError: If the loss of a batch was not passed to ``backward``, or if that call failed, because the
                weights would be wrong.
        """
        self._start_group()
        micro_batch = None
        remaining = iter(batches)
        try:
            while group := list(itertools.islice(remaining, self.steps)):
                weights = [float(self.weight(batch)) for batch in group]
                total = sum(weights) or 1.0
                for weight in weights:
                    micro_batch = _MicroBatch(weight / total, last=len(group) == 1)
                    self._current = micro_batch
                    yield group.pop(0)  # No reference to a batch remains after it was yielded.
                    if self._current is micro_batch:
                        raise ConfigurationError(
                            "backward() was not called for a batch, or failed.",
                            "Call accumulation.backward(loss) for every batch. If it ran out of memory, start the loop again with smaller batches.",
                        )
        finally:
            if self._current is micro_batch:  # After a break, there is no current batch for backward().
                self._current = None

    def backward(self, loss: torch.Tensor) -> bool:
        """Add the gradient of the mean loss of a batch; after the last batch of a group, run the optimizer step.

        A batch without weight, such as one whose labels are all ignored, adds nothing, because its mean loss is NaN.

        Args:
            loss: Mean loss of the batch, a scalar.

        Returns:
            Whether the optimizer stepped, for example to step a scheduler. A group without weight does not step.

        Raises:
            ConfigurationError: If no batch was taken since the last call.
        """
        micro_batch = self._current
        if micro_batch is None:
            raise ConfigurationError(
                "backward() was called without a batch.",
                "Loop over accumulation.batches(loader), and call it once per batch.",
            )
        try:
            if micro_batch.fraction:
                scaled = loss * micro_batch.fraction
                (self.scaler.scale(scaled) if self.scaler else scaled).backward()
                self._has_weight = True
            stepped = micro_batch.last and self._has_weight
            if stepped and self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif stepped:
                self.optimizer.step()
        except BaseException:  # A gradient or a step may be incomplete.
            self._start_group()
            raise
        self._current = None
        if micro_batch.last:
            self._start_group()
        return stepped

    def _start_group(self) -> None:
        """Start a group without gradients."""
        self._has_weight = False
        self.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing(Displayable):
    """Result of :func:`checkpoint_activations`.

    Attributes:
        modules: Names of the modules whose activations are recomputed.
    """

    modules: tuple[str, ...]

    def to_report(self) -> Report:
        """Return the names of the modules that recompute their activations."""
        count = len(self.modules)
        named = ", ".join(self.modules[:3]) + (f" and {count - 3} more" if count > 3 else "")  # noqa: PLR2004
        sentence = "Training recomputes their activations in the backward pass, which saves memory but takes more time."
        return Report(f"Activation checkpointing: {named}", (sentence,))


def checkpoint_activations(model: PreTrainedModel) -> ActivationCheckpointing:
    """Recompute activations in the backward pass of training instead of storing them.

    Gradients are unchanged, including with dropout. A cell with this call can be run again. On MPS, torch cannot compile
    a model with checkpointing.

    Args:
        model: Model of transformers, which defines the modules.

    Returns:
        The names of the modules.

    Raises:
        ConfigurationError: If ``model`` is not a model of transformers, or does not support checkpointing.

    Example:
        >>> import openmed_nb as nb
        >>> model = nb.load_model("bundled_small", device="cpu")["model"]
        >>> checkpoint_activations(model).modules[1]
        'bert.encoder.layer.0'
        >>> model.gradient_checkpointing_disable()
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigurationError(
            f"{short_type_name(model)} does not support activation checkpointing.",
            "Pass a model of transformers. In another module, call torch.utils.checkpoint.checkpoint.",
        )
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # transformers 5 added the new name, and from then on the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    names = []
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = functools.partial(_call_checkpointed, model)  # noqa: SLF001
            names.append(name)
    return ActivationCheckpointing(tuple(names))


def _call_checkpointed(model: torch.nn.Module, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function of a model without storing its intermediate activations.

    torch itself restores the random number state of the CPU and of CUDA. Only MPS needs a context function, which
    ``torch.compile`` does not support.
    """
    from torch.utils.checkpoint import checkpoint

    if not get_device(next(model.parameters()).device).checkpoints_restore_rng:
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _PreserveRngState("mps"))
    result: Result = checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result


class _PreserveRngState(contextlib.ExitStack):
    """Context manager that replays the random numbers that follow its creation; it can be entered repeatedly."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._states = get_rng_states(device)

    def __enter__(self) -> _PreserveRngState:  # noqa: PYI034 - Python 3.10 has no Self
        self.enter_context(use_rng_states(self._states))
        return self
