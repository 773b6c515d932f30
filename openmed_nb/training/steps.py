"""Steps of an optimizer: the numbers that they are computed in, AdamW in its fused form, gradients over several batches.

On MPS torch never chooses the fused form itself: it loops over the tensors, one small kernel after the other
(``torch/optim/optimizer.py``, ``torch/utils/_foreach_utils.py``); fused, one kernel updates many.

The loss of a batch is a mean over its examples or labels, and the mean of such means is the mean over all only where all
batches are alike: not for a last, shorter group, and not for tokens
(https://huggingface.co/blog/gradient_accumulation, transformers#34191, #34198). So the batches of a group are read ahead,
and each gets its share of the group.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._render.display import Displayable, Report
from .._utils.text import describe_error, describe_value, short_type_name
from .._utils.validation import check_bool, check_integer, check_number, invalid_type
from .._utils.warning import warn
from ..devices.backend import import_torch, parse_release
from ..devices.machine import MachineInfo
from ..devices.memory import ACCUMULATE_REMEDY
from ..devices.mps import IGNORES_SCALER
from ..devices.registry import parse_device_argument
from ..errors import ConfigurationError
from ..session import SESSION
from .batch_checks import IGNORE_INDEX, get_labels

if TYPE_CHECKING:
    import torch

# How a precision may be requested: as torch spells it, and as Accelerate and the Trainer do; auto takes the best 16 bits.
DTYPE_SPELLINGS = {
    **dict.fromkeys(("float32", "fp32", "no"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
    "auto": "auto",
}


@dataclass(frozen=True, repr=False)
class Precision(Displayable):
    """The numbers that a model is trained in, and why.

    Attributes:
        device: The device, such as ``"mps"`` or ``"cuda:1"``.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``: what matrix products run in; weights stay float32.
        reason: Why this type, in one sentence.
        needs_scaler: Whether small gradients would become 0 without a ``GradScaler``.
        notes: What to know about it.
    """

    device: str
    dtype: str
    reason: str
    needs_scaler: bool = False
    notes: tuple[str, ...] = ()

    JSON_PROPERTIES = ("enabled",)

    @property
    def enabled(self) -> bool:
        """Whether products run in another type than float32."""
        return self.dtype != "float32"

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for the forward pass and the loss; ``backward`` stands outside of it."""
        import torch

        dtype = getattr(torch, self.dtype) if self.enabled else None
        context: contextlib.AbstractContextManager[Any] = torch.autocast(
            parse_device_argument(self.device).type, dtype=dtype, enabled=self.enabled
        )
        return context

    def scaler(self) -> torch.amp.GradScaler:
        """Return a ``GradScaler``, which does nothing where none is needed."""
        import torch

        return torch.amp.GradScaler(parse_device_argument(self.device).type, enabled=self.needs_scaler)

    def to_report(self) -> Report:
        """Return the type, why, and what to know about it."""
        scaled = " with a GradScaler" if self.needs_scaler else ""
        title = f"Precision on {self.device}: {'autocast to ' if self.enabled else ''}{self.dtype}{scaled}"
        return Report(title, (self.reason, *self.notes))


def precision(requested: str | None = None, device: Any = None) -> Precision:
    """Return in which numbers a model is trained on a device, and why.

    Args:
        requested: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"auto"``, the best of the 16-bit types; ``None`` is
            float32.
        device: As for :func:`~openmed_nb.training.to_device`.

    Returns:
        The precision, with ``autocast()`` for the forward pass and ``scaler()`` for the backward pass.

    Raises:
        ConfigurationError: For a precision that cannot be had on the device; it is never replaced.

    Example:
        >>> precision(device="cpu").dtype
        'float32'
    """
    name = SESSION.device(device).device
    computer = SESSION.device_manager
    return select_precision(
        name, computer.torch.release, computer.machine, requested, parse_device_argument(name).capability()
    )


def select_precision(
    device: str,
    torch_release: tuple[int, ...],
    machine: MachineInfo,
    requested: str | None = None,
    capability: tuple[int, int] | None = None,
) -> Precision:
    """Decide in which numbers a model is trained; nothing but float32 is chosen without a request."""
    spelling = "float32" if requested is None else str(requested).strip().lower().removeprefix("torch.")
    if spelling not in DTYPE_SPELLINGS:
        accepted = ", ".join(map(repr, DTYPE_SPELLINGS))
        raise ConfigurationError(f"The precision cannot be {describe_value(requested)}.", f"Use one of {accepted}.")
    known = parse_device_argument(device)
    dtype = DTYPE_SPELLINGS[spelling]
    reason = "float32 was asked for."
    why = "was asked for"
    if requested is None or (dtype == "auto" and not known.is_accelerator):  # No 16-bit type is faster on the CPU.
        dtype = "float32"
        reason = f"float32 is the default: {known.float32_reason}."
    elif dtype == "auto":  # bfloat16 has the range of float32 and needs no scaler.
        dtype = "float16" if known.half_precision_obstacle("bfloat16", torch_release, capability) else "bfloat16"
        why = "is the best of the 16-bit types here"
    if dtype == "float32":
        return Precision(device, dtype, reason)
    if obstacle := known.half_precision_obstacle(dtype, torch_release, capability):
        raise ConfigurationError(f"{dtype} cannot be used on {device}: {obstacle.reason}.", obstacle.remedy)
    reason = f"bfloat16 {why}; it has the range of float32 and needs no GradScaler."
    if dtype == "float16":
        reason = f"float16 {why}; its range is small, so a GradScaler keeps small gradients from becoming 0."
    notes = known.half_precision_notes(dtype, torch_release, machine)
    return Precision(device, dtype, reason, dtype == "float16", notes)


AS_TORCH = "Pass model.parameters(), or groups such as [{'params': model.parameters(), 'lr': 1e-4}]."
# The arguments of torch.optim.AdamW by which a person chooses the implementation.
CONFLICTING_OPTIONS = ("fused", "foreach", "differentiable", "capturable")


@dataclass(frozen=True, repr=False)
class FusedSupport(Displayable):
    """Whether AdamW runs fused, and why.

    Attributes:
        fused: Whether it does.
        reason: Why, in one sentence.
    """

    fused: bool
    reason: str

    def to_report(self) -> Report:
        """Return both."""
        return Report(f"AdamW: {'fused' if self.fused else 'not fused'}", (self.reason,))


def adamw(parameters: Iterable[Any], *, scaled: bool = False, **options: Any) -> torch.optim.AdamW:
    """Return ``torch.optim.AdamW``, fused where torch has that for these parameters.

    Args:
        parameters: As for torch: tensors, pairs of name and tensor, or dicts with ``params``. Move the model to its
            device before. Each iterator is read once, and the dict that held it then holds a list, as torch does.
        scaled: Whether a ``GradScaler`` is used; on MPS before torch 2.13 the fused form ignores it
            (pytorch#186360).
        options: Any argument of ``torch.optim.AdamW``; none is changed.

    Returns:
        The optimizer. ``nb.training.adamw.explain`` tells why it is fused or not.

    Raises:
        ConfigurationError: For parameters of another kind, for none, and for an argument that ``AdamW`` refuses.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> adamw(model.parameters(), lr=1e-3).defaults["fused"], adamw(model.parameters(), fused=False).defaults["fused"]
        (True, False)
    """
    import torch

    kept = _listed(parameters)
    support = explain_fused(kept, scaled=scaled, **options)
    try:
        return torch.optim.AdamW(kept, **{**options, "fused": True} if support.fused else options)
    except (TypeError, ValueError, RuntimeError) as error:
        refused = f"torch.optim.AdamW refuses its arguments: {describe_error(error)}."
    # Outside of the handler: torch's error quotes the arguments, and would be the context of this one.
    raise ConfigurationError(refused, "Pass what help(torch.optim.AdamW) names.")


def explain_fused(parameters: Iterable[Any], *, scaled: bool = False, **options: Any) -> FusedSupport:
    """Return whether :func:`adamw` runs fused with these arguments, and why.

    Args:
        parameters: As for :func:`adamw`; an iterator that is passed alone is at its end afterwards.
        scaled: Whether a ``GradScaler`` is used.
        options: As for :func:`adamw`.

    Returns:
        ``fused`` and the ``reason``.

    Raises:
        ConfigurationError: For parameters that :func:`adamw` does not take.

    Example:
        >>> import torch
        >>> print(explain_fused(torch.nn.Linear(2, 1, dtype=torch.complex64).parameters()))
        AdamW: not fused
          torch has it on cpu for float64, float32, float16, bfloat16, and there are parameters in complex64.
    """
    check_bool("scaled", scaled)
    torch = import_torch()
    kinds = set()
    for group in _listed(parameters):
        for entry in group["params"] if isinstance(group, dict) else [group]:
            tensor = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry  # noqa: PLR2004 - name and tensor
            if not isinstance(tensor, torch.Tensor):
                what = f"A parameter must be a tensor, and one is of type {short_type_name(tensor)}."
                raise ConfigurationError(what, AS_TORCH)
            kinds.add((tensor.device.type, str(tensor.dtype).removeprefix("torch.")))
    return fused_support(kinds, parse_release(torch.__version__), options, scaled=scaled)


adamw.explain = explain_fused  # type: ignore[attr-defined]  # nb.training.adamw.explain


def fused_support(
    tensors: Iterable[tuple[str, str]],
    torch_release: tuple[int, ...],
    options: Mapping[str, Any],
    *,
    scaled: bool = False,
) -> FusedSupport:
    """Decide whether AdamW runs fused for parameters of these devices and types, such as ``("mps", "float32")``.

    What a person sets among the options to choose an implementation is left alone.
    """
    chosen = [name for name in CONFLICTING_OPTIONS if options.get(name) is not None]
    if chosen:
        named = ", ".join(f"{name}={describe_value(options[name])}" for name in chosen)
        return FusedSupport(bool(options.get("fused")), f"{named} was set, and is left as it is.")
    support = []
    for kind, dtype in sorted({(parse_device_argument(device).type, dtype) for device, dtype in tensors}):
        known = parse_device_argument(kind)
        types = known.fused_adamw_types
        if not known.fused_adamw_since:
            return FusedSupport(fused=False, reason=f"torch is not known to have it on {kind}.")
        if dtype not in types:
            missing = f"torch has it on {kind} for {', '.join(types)}, and there are parameters in {dtype}."
            return FusedSupport(fused=False, reason=missing)
        if scaled and known.ignores_scaler(torch_release):
            return FusedSupport(fused=False, reason=f"{IGNORES_SCALER}.")
        support.append(f"{dtype} on {kind} since {known.fused_adamw_since}")
    if not support:
        return FusedSupport(fused=False, reason="There are no parameters.")
    return FusedSupport(fused=True, reason=f"torch has it for {', '.join(support)}.")


def _listed(parameters: Any) -> list[Any]:
    """Return what an optimizer takes as a list, with a list in each group; what a group held can be read only once."""
    tensor = import_torch().Tensor
    if isinstance(parameters, tensor) or not isinstance(parameters, Iterable):
        what = f"The parameters must be several tensors, and they are of type {short_type_name(parameters)}."
        raise ConfigurationError(what, AS_TORCH)
    kept = [parameters] if isinstance(parameters, dict) else list(parameters)
    for group in kept:
        if isinstance(group, dict):
            held = group.get("params")
            group["params"] = [held] if isinstance(held, tensor) else _listed(held)
    return kept


Weight = Callable[[Any], float]
WEIGH = "Pass weight=, a function that returns over how many items the batch's mean loss is."

INCOMPLETE_GROUP_WARNING = (
    "backward() failed, so that the gradients of this group of batches are forgotten and the rest of it is left out. "
    + ACCUMULATE_REMEDY
)


@dataclass(frozen=True)
class MicroBatch:
    """A batch with its share of the group that makes one step of the optimizer."""

    batch: Any
    fraction: float  # The factor of its mean loss, 0 to 1; those of a group make 1, or 0 if nothing has weight.
    last: bool  # Of its group.


def accumulation_groups(batches: Iterable[Any], steps: int, weight: Weight) -> Iterator[MicroBatch]:
    """Yield batches with their share of their group of some steps; the last group may be shorter."""
    remaining = iter(batches)
    while group := list(itertools.islice(remaining, steps)):
        weights = [float(weight(batch)) for batch in group]
        for own in weights:
            if not 0 <= own < math.inf:
                raise ConfigurationError(f"A batch cannot weigh {own}.", "Let weight= return a count, 0 or more.")
        total = sum(weights) or 1.0
        for own in weights:  # A batch that was handed out is not held any longer.
            yield MicroBatch(group.pop(0), own / total, last=not group)


def count_labels(batch: Any, ignore_index: int = IGNORE_INDEX, *, shifted: bool = False) -> int:
    """Return over how many labels the mean loss of a batch is: a mapping with ``labels``, or a pair of inputs and labels.

    Labels with fractions, as for regression or several labels at once, all count. With ``shifted`` the model moves the
    labels by one, as causal language models do: the first of a row is then never asked for.
    """
    labels = get_labels(batch)
    if not isinstance(labels, import_torch().Tensor):
        raise ConfigurationError(f"A batch of type {short_type_name(batch)} has no labels to weigh it by.", WEIGH)
    if labels.is_floating_point():
        return int(labels.numel())
    return int((labels[..., 1:] if shifted else labels).ne(ignore_index).sum())


def count_rows(batch: Any) -> int:
    """Return how many rows a batch has: the length of its first tensor."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    for value in values if isinstance(values, Iterable) and not hasattr(values, "shape") else (values,):
        if getattr(value, "shape", ()):
            return int(value.shape[0])
    missing = "tensor with rows"
    raise ConfigurationError(f"A batch of type {short_type_name(batch)} has no {missing} to weigh it by.", WEIGH)


def check_fused(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, torch_release: tuple[int, ...]
) -> None:
    """Refuse another value than an optimizer, and a fused one that ignores its scaler and would step with infinite gradients."""
    if not isinstance(optimizer, import_torch().optim.Optimizer):
        raise invalid_type("The optimizer", optimizer, "Pass one of torch.optim, or nb.training.adamw().")
    if scaler is None or not scaler.is_enabled():
        return
    fused = (weight for group in optimizer.param_groups if group.get("fused") for weight in group["params"])
    if any(parse_device_argument(weight.device).ignores_scaler(torch_release) for weight in fused):
        remedy = "Make the optimizer with fused=False, or train in bfloat16, which needs no scaler."
        raise ConfigurationError(f"{IGNORES_SCALER}.", remedy)


@dataclass
class GradientAccumulation:
    """Steps of an optimizer over groups of batches, each with exactly the gradient of the mean over its group.

    Where a backward pass fails and the loop goes on, as after running out of memory, the gradients of its group are not
    those of the group any more: they are forgotten, the rest of the group is left out, and a warning says so.

    Args:
        optimizer: The optimizer; its gradients are set to ``None`` before the first step and after each.
        steps: How many batches make a group; the last group may be shorter.
        weight: What the mean of a batch's loss is over: how many labels, as :func:`count_labels` says, or how many
            rows, as :func:`count_rows` says. A class-weighted loss needs the sum of the weights of its labels.
        clip: The largest norm, above 0, that the gradient of a group may have; ``None`` for any.
        scaler: The ``GradScaler`` of float16; ``None`` for none.
        before_step: Called before each step, with the gradients unscaled and not yet clipped.

    Raises:
        ConfigurationError: For steps below 1, a norm that is not above 0, and a scaler that the optimizer would ignore.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = GradientAccumulation(optimizer, steps=2, weight=count_rows)
        >>> for inputs in accumulation.batches([torch.ones(3, 2), torch.ones(1, 2), torch.ones(5, 2)]):
        ...     accumulation.backward(model(inputs).square().mean())
        False
        True
        True
    """

    optimizer: torch.optim.Optimizer
    steps: int
    weight: Weight = count_labels
    max_norm: float | None = None
    scaler: torch.amp.GradScaler | None = None
    before_step: Callable[[], object] | None = None
    _current: MicroBatch | None = field(default=None, init=False, repr=False)
    _weighed: bool = field(default=False, init=False, repr=False)
    _broken: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_integer("steps", self.steps)
        if self.max_norm is not None:
            check_number("max_norm", self.max_norm, above=0, example="1.0, or None")
        check_fused(self.optimizer, self.scaler, parse_release(import_torch().__version__))

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as they come; the loss of each goes to :meth:`backward` before the next is taken.

        Args:
            batches: A loader, or any iterable; its length need not be known. One group is held in memory.

        Raises:
            ConfigurationError: Where the loss of a batch was not handed over: the shares of its group would be wrong.
        """
        self._begin_group()
        micro = None
        try:
            for micro in accumulation_groups(batches, self.steps, self.weight):
                self._current = micro
                broken_before = self._broken
                yield micro.batch
                if self._current is micro:
                    remedy = (
                        "Call accumulation.backward(loss) for every batch; filter batches before they reach the loop."
                    )
                    raise ConfigurationError("The loss of a batch was not handed to backward().", remedy)
                if self._broken and not broken_before:
                    warn(INCOMPLETE_GROUP_WARNING)
                if micro.last:
                    self._broken = False
        finally:
            if self._current is micro:  # After a break there is no batch for backward().
                self._current = None

    def backward(self, loss: torch.Tensor) -> bool:
        """Add the gradient of a batch's mean loss; with the last batch of a group, let the optimizer step.

        A batch without weight, such as one whose labels are all left out, adds nothing: its mean loss is NaN.

        Args:
            loss: The mean loss of the batch, a single number.

        Returns:
            Whether the optimizer stepped, such as for a scheduler that goes along. A group without any weight gives
            no step, nor does one in which a backward pass failed.

        Raises:
            ConfigurationError: Where no batch was taken since the last call.
        """
        micro = self._current
        self._current = None
        if micro is None:
            remedy = "Loop over accumulation.batches(loader), one call for each."
            raise ConfigurationError("backward() was called without a batch.", remedy)
        if self._broken:
            return False
        try:
            if micro.fraction:
                scaled = loss * micro.fraction
                (self.scaler.scale(scaled) if self.scaler else scaled).backward()
                self._weighed = True
            stepped = micro.last and self._weighed
            if stepped:
                self._step()
        except BaseException:  # Perhaps a part of a gradient was added, or a part of a step done.
            self._begin_group()
            self._broken = True
            raise
        if micro.last:
            self._begin_group()
        return stepped

    def _begin_group(self) -> None:
        """Begin a group without gradients."""
        self._weighed = False
        self._broken = False
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self) -> None:
        """Let the optimizer step."""
        if self.scaler and (self.max_norm is not None or self.before_step):
            self.scaler.unscale_(self.optimizer)
        if self.before_step:
            self.before_step()
        if self.max_norm is not None:
            weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
            import_torch().nn.utils.clip_grad_norm_(weights, self.max_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
