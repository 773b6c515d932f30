"""Gradient accumulation: several small batches give exactly the gradient of one large batch.

The loss of a batch is a mean, over its examples or over its labels. The mean of such means is the mean over all only
where all batches are alike: not for a last, shorter group, and not for tokens, of which every batch has another number
(https://huggingface.co/blog/gradient_accumulation, transformers#34191, #34198). So the batches of a group are read
ahead, and each is given its share of the group.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..devices.backend import import_torch, release_of
from ..errors import ConfigurationError, OpenMedWarning, shorten
from .batch_checks import labels_of
from .model_limits import IGNORE_INDEX
from .optimizers import IGNORES_SCALER, ignores_scaler

if TYPE_CHECKING:
    import torch

Weight = Callable[[Any], float]

LEFT_OUT = (
    "backward() failed, so that the gradients of this group of batches are forgotten and the rest of it is left out. "
    "Where memory ran out, use smaller batches and more of them in a group."
)
"""What is said where a loop goes on after a failure."""


@dataclass(frozen=True)
class MicroBatch:
    """A batch with its share of the group that makes one step of the optimizer.

    Attributes:
        batch: The batch, as it came.
        share: The factor by which its mean loss counts, 0 to 1; those of a group make 1, or 0 if nothing has weight.
        last: Whether it is the last of its group.
    """

    batch: Any
    share: float
    last: bool


def accumulation_groups(batches: Iterable[Any], steps: int, weight: Weight) -> Iterator[MicroBatch]:
    """Yield batches with their share of their group.

    Args:
        batches: Any iterable; its length need not be known.
        steps: How many batches make a group; the last may be shorter.
        weight: Tells how much a batch weighs: a number of examples or of labels.

    Raises:
        ConfigurationError: For a weight that is no finite number from 0 up.

    Example:
        >>> groups = accumulation_groups(["aaa", "b", "cc"], 2, len)
        >>> [(micro.share, micro.last) for micro in groups]
        [(0.75, False), (0.25, True), (1.0, True)]
    """
    check_steps(steps)
    remaining = iter(batches)
    while group := list(itertools.islice(remaining, steps)):
        weights = [checked_weight(weight(batch)) for batch in group]
        total = sum(weights) or 1.0
        for own in weights:  # A batch that was handed out is not held any longer.
            yield MicroBatch(group.pop(0), own / total, last=not group)


def count_labels(batch: Any, ignore_index: int = IGNORE_INDEX, *, shifted: bool = False) -> int:
    """Return over how many labels the mean loss of a batch is.

    Args:
        batch: A mapping with ``labels``, or a pair of inputs and labels. Whole labels of any shape count unless they
            are left out; labels with fractions, as for regression or several labels at once, all count.
        ignore_index: The label that the loss leaves out.
        shifted: Whether the model moves the labels by one, as causal language models do: the first of a row is then
            never asked for.

    Raises:
        ConfigurationError: For a batch in which no labels are found.

    Example:
        >>> import torch
        >>> count_labels({"labels": torch.tensor([[-100, 3, 0], [-100, 1, -100]])})
        3
    """
    labels = _labels(batch)
    if labels.is_floating_point():
        return int(labels.numel())
    return int((labels[..., 1:] if shifted else labels).ne(ignore_index).sum())


def count_examples(batch: Any) -> int:
    """Return how many rows a batch has: the length of its first tensor.

    Raises:
        ConfigurationError: For a batch in which no tensor with rows is found.

    Example:
        >>> import torch
        >>> count_examples({"input_ids": torch.zeros(4, 128)}), count_examples((torch.zeros(3, 32), torch.zeros(3)))
        (4, 3)
    """
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else (batch,)
    for value in values:
        if getattr(value, "shape", ()):
            return int(value.shape[0])
    raise _weightless(batch, "tensor with rows")


def _labels(batch: Any) -> torch.Tensor:
    import torch

    found = labels_of(batch)
    if not isinstance(found, torch.Tensor):
        raise _weightless(batch, "labels")
    return found


def _weightless(batch: Any, missing: str) -> ConfigurationError:
    what = f"A batch of type {type(batch).__name__} has no {missing} to weigh it by."
    return ConfigurationError(
        what, "Pass weight=, a function that returns over how many items the batch's mean loss is."
    )


def check_steps(steps: int) -> None:
    """Refuse a number of batches that makes no group."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"A group of {steps!r} batches cannot be accumulated.", "Pass steps=1 or more.")


def check_clip(clip: Any) -> None:
    """Refuse a norm that no gradient can be clipped to.

    Raises:
        ConfigurationError: For what is no number above 0.
    """
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool)
    if clip is not None and not (number and clip > 0):
        raise ConfigurationError(
            f"Gradients cannot be clipped to the norm {shorten(repr(clip))}.", "Pass clip=1.0, or None."
        )


def check_fused(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, torch_release: tuple[int, ...]
) -> None:
    """Refuse what is no optimizer, and a scaler with a fused one that ignores it and would step with infinite gradients."""
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(
            f"{type(optimizer).__name__} is no optimizer.", "Pass one of torch.optim, or nb.adamw()."
        )
    fused = [one for group in optimizer.param_groups if group.get("fused") for one in group["params"]]
    ignored = any(ignores_scaler(one.device.type, torch_release) for one in fused)
    if scaler is not None and scaler.is_enabled() and ignored:
        raise ConfigurationError(
            f"{IGNORES_SCALER}.", "Make the optimizer with fused=False, or train in bfloat16, which needs no scaler."
        )


def checked_weight(weight: Any) -> float:
    """Return a weight as a number.

    Raises:
        ConfigurationError: For one that is not finite, or below 0.

    Example:
        >>> checked_weight(7)
        7.0
    """
    number = float(weight)
    if not math.isfinite(number) or number < 0:
        raise ConfigurationError(f"A batch cannot weigh {number}.", "Let weight= return a count, 0 or more.")
    return number


@dataclass
class GradientAccumulation:
    """Steps of an optimizer over groups of batches, each with exactly the gradient of the mean over its group.

    Where a backward pass fails and the loop goes on, as after running out of memory, the gradients of its group are not
    those of the group any more: they are forgotten, the rest of the group is left out, and a warning says so.

    Args:
        optimizer: The optimizer; its gradients are set to ``None`` before the first step and after each.
        steps: How many batches make a group; the last group may be shorter.
        weight: What the mean of a batch's loss is over: how many labels, as :func:`count_labels` says, or how many
            rows, as :func:`count_examples` says. A class-weighted loss needs the sum of the weights of its labels.
        clip: The largest norm, above 0, that the gradient of a group may have; ``None`` for any.
        scaler: The ``GradScaler`` of float16; ``None`` for none.
        before_step: Called before each step, with the gradients unscaled and not yet clipped.

    Raises:
        ConfigurationError: For steps below 1, a norm that is not above 0, and a scaler that the optimizer would ignore.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulation = GradientAccumulation(optimizer, steps=2, weight=count_examples)
        >>> for inputs in accumulation.batches([torch.ones(3, 2), torch.ones(1, 2), torch.ones(5, 2)]):
        ...     accumulation.backward(model(inputs).square().mean())
        False
        True
        True
    """

    optimizer: torch.optim.Optimizer
    steps: int
    weight: Weight = count_labels
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    before_step: Callable[[], object] | None = None
    _current: MicroBatch | None = field(default=None, init=False, repr=False)
    _weighed: bool = field(default=False, init=False, repr=False)
    _broken: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        check_steps(self.steps)
        check_clip(self.clip)
        check_fused(self.optimizer, self.scaler, release_of(import_torch().__version__))

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches as they come; the loss of each goes to :meth:`backward` before the next is taken.

        Args:
            batches: A loader, or any iterable; its length need not be known. One group is held in memory.

        Raises:
            ConfigurationError: Where the loss of a batch was not handed over: the shares of its group would be wrong.
        """
        self._forget()
        micro = None
        try:
            for micro in accumulation_groups(batches, self.steps, self.weight):
                self._current, broken_before = micro, self._broken
                yield micro.batch
                self._check_handed_over()
                if self._broken and not broken_before:
                    warnings.warn(LEFT_OUT, OpenMedWarning, stacklevel=2)
                self._broken = self._broken and not micro.last
        finally:
            if self._current is micro:  # After a break there is no batch for backward().
                self._current = None

    def _check_handed_over(self) -> None:
        if self._current is not None:
            raise ConfigurationError(
                "The loss of a batch was not handed to backward().",
                "Call accumulation.backward(loss) for every batch; filter batches before they reach the loop.",
            )

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
        micro, self._current = self._current, None
        if micro is None:
            raise ConfigurationError(
                "backward() was called without a batch.", "Loop over accumulation.batches(loader), one call for each."
            )
        if self._broken:
            return False
        self._broken = True
        try:
            if micro.share:
                self._add(loss * micro.share)
            stepped = micro.last and self._step()
            self._broken = False
        finally:
            if self._broken:  # Perhaps a part of a gradient was added, or a part of a step done.
                self._forget()
                self._broken = True
        return stepped

    def _forget(self) -> None:
        """Begin a group without gradients."""
        self._weighed = self._broken = False
        self.optimizer.zero_grad(set_to_none=True)

    def _add(self, loss: torch.Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        self._weighed = True

    def _step(self) -> bool:
        """Let the optimizer step and forget the gradients; not where no batch of the group had weight."""
        weighed = self._weighed
        if weighed:
            if self.scaler and (self.clip is not None or self.before_step):
                self.scaler.unscale_(self.optimizer)
            if self.before_step:
                self.before_step()
            self._clip()
            _take_step(self.optimizer, self.scaler)
        self._forget()
        return weighed

    def _clip(self) -> None:
        if self.clip is not None:
            import torch

            groups = self.optimizer.param_groups
            torch.nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], self.clip)


def _take_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
