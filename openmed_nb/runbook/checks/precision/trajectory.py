"""``nb.runbook.loss_parity``: one training on the CPU and on a device, step by step, and whether rounding explains how they part.

The tolerance is measured in the same call: the CPU trains beside itself with other roundings, in float32 those of
``rounding.RoundedOnce`` and in bfloat16 its own, and as far as that comes, times :data:`FACTOR`, rounding explains. Weights
differ after the first step, so the drift grows, and with it the tolerance.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ...._events.activity import Activity
from ...._render.display import FAILED, OK, Finding, Report, Shown, Table, counted, findings_table, worst
from ...._render.drawing import Axes, Line, Mark, Picture, ticks
from ...._utils.text import cause
from ...._utils.validation import cannot_be, choice, whole
from ....devices.backend import TENSOR_LOCK, random_numbers_from, random_numbers_kept, random_states, set_random_states
from ....devices.machine import shown_device, shows_simulated
from ....devices.memory import empty_cache, is_out_of_memory, out_of_memory_explained
from ....devices.moving import copy_of, module_in, to_device, with_tensors
from ....devices.registry import device_of
from ....errors import ConfigurationError, DeviceUnavailable, ModelUnusable, OpenMedError
from ....models.registry import is_named
from ....session import SESSION
from ....training.steps import adamw, check_fused, precision
from ...bench.workloads import (
    Repeated,
    check_no_arguments,
    check_series,
    example_of,
    generators_kept,
    labelled_rows,
    loss_or_mean,
    pipeline_of_files,
)
from .report import REFERENCE

if TYPE_CHECKING:
    import torch

STEPS = 200
RATE = 5e-5  # As transformers' Trainer trains by default (TrainingArguments.learning_rate).
SYNTHETIC = 8  # How many synthetic batches there are, where nobody passes batches.
LENGTH = 32  # The tokens of a row of them.

# How many times as far as other roundings of the CPU a device may come. Over 60 steps of the smaller bundled model, kernels
# without oneDNN came 0.8 times as far as RoundedOnce, matrix products in 2, 3 and 7 parts up to 0.4 times, the rows of batches
# in reverse 0.4 times, AdamW unfused 0.3 times, and two threads instead of one 0.2 times.
FACTOR = 8.0

# By chance one step rounds to nearly the same loss: bfloat16 came 1e-3 apart in step 1 and 4e-2 in step 2 with the larger bundled
# model. So the first EARLY steps have the largest drift of them all.
EARLY = 8

EPSILON = 2.0**-23  # Of float32, in which losses are summed.

DTYPES = ("float32", "bfloat16")
SAMPLES = (1, 2, 5)  # The steps that are shown, times each power of ten.


@dataclass(frozen=True, repr=False)
class LossParity(Shown):
    """The losses of one training on the CPU and on a device, and whether rounding explains how far they are apart.

    Attributes:
        model: What the person calls the model.
        device: The device, marked if it is simulated.
        dtype: The type that the device computes products in.
        reference: The losses on the CPU in float32, step by step.
        rounded: Those of the CPU with other roundings, of that type, from which the tolerance follows.
        candidate: Those on the device; they end where one is no finite number.
        notes: What to know about the comparison.
    """

    model: str
    device: str
    dtype: str
    reference: tuple[float, ...]
    rounded: tuple[float, ...]
    candidate: tuple[float, ...]
    notes: tuple[str, ...] = ()

    SCHEMA = "openmed_nb/loss_parity/1"
    ALSO = ("steps", "drift", "tolerance", "parted", "findings", "status", "simulated")

    @property
    def simulated(self) -> bool:
        """Whether the device is a simulated one."""
        return shows_simulated(self.device)

    @property
    def steps(self) -> int:
        """How many steps were done on the device."""
        return len(self.candidate)

    @property
    def drift(self) -> tuple[float, ...]:
        """How far the losses are apart at each step; infinite where one is no finite number."""
        return _apart(self.candidate, self.reference)

    @property
    def tolerance(self) -> tuple[float, ...]:
        """How far rounding lets them be apart at each step; it never becomes smaller."""
        # Of the loss itself, where other roundings happen to give it.
        rounding = (abs(loss) * EPSILON for loss in self.reference)
        there = [far + own for far, own in zip(_apart(self.rounded, self.reference), rounding, strict=True)]
        there[:EARLY] = [max(there[:EARLY])] * len(there[:EARLY])
        return tuple(FACTOR * far for far in accumulate(there, max))

    @property
    def parted(self) -> int | None:
        """The first step, counted from 1, that is beyond its tolerance; ``None`` if none is."""
        limits = zip(self.drift, self.tolerance, strict=False)
        return next((step for step, (far, most) in enumerate(limits, 1) if far > most), None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Whether the losses are numbers, and whether rounding explains the drift."""
        way_out = "Look whether it is so in float32, and train in that."
        if self.dtype == "float32":
            way_out = "Train on the CPU."
        numbers = Finding("numbers", OK, "every loss is a number")
        if not math.isfinite(self.candidate[-1]):
            numbers = Finding("numbers", FAILED, f"NaN or infinity in step {self.steps}", way_out)
        drift = Finding("drift", OK, f"rounding of {self.dtype} explains it")
        if self.parted is not None:
            what = f"more than rounding of {self.dtype} explains, from step {self.parted}"
            drift = Finding("drift", FAILED, what, way_out)
        return numbers, drift

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"`` or ``"failed"``."""
        return worst(self.findings)

    def report(self) -> Report:
        """Return the judgement; the losses are among the figures."""
        otherwise = "where it rounds otherwise" if self.dtype == "float32" else f"in {self.dtype}"
        sentences = (
            f"{counted(self.steps, 'step')} of training from the same weights, with the same batches and without dropout.",
            f"The tolerance is {FACTOR:g} times as far as the CPU drifts from its own losses {otherwise}.",
            *self.notes,
        )
        learns = "as" if self.parted is None else f"until step {self.parted} as"
        return Report(
            f"Loss parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}",
            sentences,
            (findings_table("", self.findings),),
            figures=(self._table(),),
            spoken=(f"{self.model} learns on {self.device} in {self.dtype} {learns} on {REFERENCE}", *sentences),
            status=self.status,
            pictures=(self._picture(),),
        )

    def _table(self) -> Table:
        """Return the losses at some steps: the more apart the later they are, the last, and the one in which two part."""
        powers = (10**power for power in range(len(str(self.steps))))
        shown = {sample * power for power in powers for sample in SAMPLES} | {self.steps, self.parted}
        values = zip(self.reference, self.candidate, self.drift, self.tolerance, strict=True)
        rows = tuple(
            (str(step), f"{right:.6g}", f"{loss:.6g}", f"{far:.2g}", f"{most:.2g}")
            for step, (right, loss, far, most) in enumerate(values, 1)
            if step in shown
        )
        columns = ("step", "loss on the CPU", f"loss on {self.device}", "drift", "tolerance")
        return Table("Losses at some steps", columns, rows, folded=True)

    def _picture(self) -> Picture:
        steps = (*(step for step in ticks(self.steps, whole=True) if 0 < step < self.steps), self.steps)
        marks = (Mark(self.parted, f"they part in step {self.parted}"),) if self.parted else ()
        axes = Axes("loss", "step", tuple(Mark(step, f"{step:g}") for step in steps), marks=marks)
        curves = {"CPU": self.reference, self.device: tuple(filter(math.isfinite, self.candidate))}
        lines = tuple(
            Line(name, tuple(range(1, len(losses) + 1)), losses, tuple(f"{name}: {loss:.6g}" for loss in losses))
            for name, losses in curves.items()
        )
        return Picture("Losses", lines=lines, axes=axes)


def _apart(losses: Iterable[float], reference: Iterable[float]) -> tuple[float, ...]:
    """Return how far two curves are apart at each step of the shorter; infinite where either is no finite number."""
    differences = (abs(loss - right) for loss, right in zip(losses, reference, strict=False))
    return tuple(far if math.isfinite(far) else math.inf for far in differences)


def loss_parity(  # noqa: PLR0913 - each is one thing that a person may want to set
    model: Any = None,
    batches: Any = None,
    *,
    steps: int = STEPS,
    device: str | None = None,
    dtype: str | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[list[Any]], Any] | None = None,
    progress: bool = True,
    **arguments: Any,
) -> LossParity:
    """Train a model on the CPU and on a device beside it, and tell whether rounding explains how far the losses drift apart.

    Copies of the model begin with the same weights and random numbers and take the same batches, step by step, without dropout:
    a seed gives other numbers on each device. Another copy on the CPU shows how far rounding alone leads: in float32 each of its
    operators computes in float64 and rounds once; for bfloat16 it computes in that. Eight times its largest drift so far, of
    the first eight steps at least, is the tolerance. The model and random numbers stay as they are.

    Args:
        model: The name of a model, ``None`` for the bundled one; a pipeline of :func:`load_pipeline`; or a torch module.
        batches: A ``DataLoader``, or a list of batches as the model is called with them, with labels; again from the first
            where there are fewer than steps. ``None`` for synthetic rows, for a model for token classification.
        steps: How many steps, at least 1.
        device: The device; ``None`` is the session's. The CPU is compared with itself, with another number of threads.
        dtype: ``"float32"`` (also the default), or ``"bfloat16"``: the device then computes in autocast to it, as
            :func:`openmed_nb.training.precision` does; its weights stay in float32.
        loss: Takes the model and a batch and returns the loss, a tensor of one number; by default the ``loss`` of what the
            model returns, or the mean of that where there is none.
        optimizer: Takes a list of parameters and returns an optimizer of torch; by default
            :func:`openmed_nb.training.adamw` with a learning rate of 5e-5.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: For a name, those of :func:`openmed_nb.load_model`, such as ``revision``.

    Returns:
        The losses and their tolerance, ``parted``, the first step beyond it, and ``findings``. Its text form has
        no loss, and no form of it has anything of a batch. It takes the memory of three copies of the model with
        their optimizers on the CPU, and of one on the device; the copy that rounds otherwise takes about four times as long.

    Raises:
        ConfigurationError: For what is no model, no series of batches, another type, and for a model that gives no loss.
        ModelError: If the model cannot be loaded, or its loss on the CPU is no finite number.
        DeviceError: If the device cannot be used, fails, or has too little memory.

    Example:
        >>> import torch
        >>> found = loss_parity(torch.nn.Linear(4, 1), [torch.ones(2, 4)], steps=3, device="cpu")
        >>> found.steps, found.parted, found.findings[1].evidence
        (3, None, 'rounding of float32 explains it')
    """
    steps = whole("steps", steps)
    dtype = "float32" if dtype is None else dtype
    choice("dtype", dtype, DTYPES)
    for argument, function in {"loss": loss, "optimizer": optimizer}.items():
        if not (function is None or callable(function)):
            raise cannot_be(argument, function, "Pass a function.")
    with SESSION.told_after(progress):
        module, batches, name = _subject(model, batches, arguments)
        place = SESSION.device(device).device
        recipe = _Recipe(name, dtype, loss or _loss_of_model, optimizer or (lambda weights: adamw(weights, lr=RATE)))
        with contextlib.ExitStack() as kept:
            kept.callback(empty_cache, place)
            kept.callback(gc.collect)
            kept.enter_context(generators_kept(batches))
            kept.enter_context(random_numbers_kept())
            kept.enter_context(random_numbers_from(random_states(place)))
            kept.enter_context(out_of_memory_explained(f"A step of {name}", place, "Pass smaller batches."))
            return _trained(module, Repeated(batches, Counter()), steps, recipe, place)


def _loss_of_model(model: Any, batch: Any) -> Any:
    return loss_or_mean(example_of(batch)(model))


def _subject(model: Any, batches: Any, arguments: Mapping[str, Any]) -> tuple[torch.nn.Module, Any, str]:
    """Return the module that is trained, its batches, and what a person calls it."""
    if is_named(model):
        spec = SESSION.files(model, arguments)[0]
        name = spec.reference.name
        model = pipeline_of_files(spec)
    else:
        name = type(module_in(model)).__name__
        check_no_arguments(name, arguments)
    if batches is None:
        if not hasattr(model, "own_annotator"):
            what = f"There is nothing to train {name} with."
            raise ConfigurationError(what, "Pass a list of batches, or a DataLoader.")
        batches = _synthetic_batches(model)
    check_series(name, batches)
    return module_in(model), batches, name


def _synthetic_batches(pipe: Any) -> list[dict[str, Any]]:
    """Return batches of full rows of any tokens, each token with a label that depends on it, so that there is much to learn."""
    import torch

    rows = labelled_rows(pipe, LENGTH).kwargs
    config = pipe.model.config
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(config.vocab_size, rows["labels"].shape, generator=generator) for _ in range(SYNTHETIC))
    return [{**rows, "input_ids": ids, "labels": ids % config.num_labels} for ids in drawn]


Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class _Recipe:
    """How a model is trained, on any side."""

    name: str
    dtype: str  # In which the device computes.
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[list[Any]], Any]

    def copy(self, model: torch.nn.Module, device: str, dtype: str, around: Around | None = None) -> _Training:
        """Return a copy of a model that learns on a device; ``around`` stands around each step, such as other threads."""
        copied = copy_of(model, device)
        learning = [weight for weight in copied.parameters() if weight.requires_grad]
        if not learning:
            what = f"{self.name} has no parameter that learns."
            raise ConfigurationError(what, "Call requires_grad_() on what shall learn.")
        optimizer = self.optimizer(learning)
        check_fused(optimizer, None, ())
        autocast = precision(dtype, device).autocast
        return _Training(self, copied, device, autocast, optimizer, around or contextlib.nullcontext)


@dataclass
class _Training:
    """A copy of a model that learns on a device."""

    recipe: _Recipe
    model: torch.nn.Module
    device: str
    autocast: Around
    optimizer: Any
    around: Around
    losses: list[float] = field(default_factory=list)

    def step(self, batch: Any) -> None:
        """Do a step of training with a batch, which stays as it is even for a model that writes into it, and keep its loss."""
        import torch

        with self.around(), TENSOR_LOCK, torch.enable_grad():
            moved = to_device(with_tensors(batch, torch.Tensor.clone), self.device)
            with self.autocast():
                loss = self.recipe.loss(self.model, moved)
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                remedy = "Pass batches with labels, or loss=, which takes the model and a batch and returns one number."
                raise ConfigurationError(f"{self.recipe.name} gives no loss to learn from.", remedy)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))


def _trained(model: torch.nn.Module, batches: Iterator[Any], steps: int, recipe: _Recipe, place: str) -> LossParity:
    """Train copies of a model beside each other, and return their losses."""
    from .rounding import RoundedOnce

    begun = copy_of(model)
    _leave_dropout_out(begun)
    reference = recipe.copy(begun, "cpu", "float32")
    rounded = recipe.copy(begun, "cpu", recipe.dtype, RoundedOnce if recipe.dtype == "float32" else None)
    candidate = recipe.copy(begun, place, recipe.dtype, None if device_of(place).is_accelerator else _other_threads)
    for done in range(steps):
        SESSION.tell(Activity("Training on both", recipe.name, done, steps, "step"))
        batch = next(batches)
        states = random_states(place)
        for side in (reference, rounded, candidate):
            set_random_states(states)
            with _failing_on(side.device):
                side.step(batch)
        if not math.isfinite(reference.losses[-1]):
            what = f"The loss of {recipe.name} is no finite number on the CPU, in step {done + 1}."
            raise ModelUnusable(what, "Use a lower learning rate, or batches without faults.")
        if not math.isfinite(candidate.losses[-1]):
            break
    SESSION.tell(Activity("Training on both", recipe.name, steps, steps, "step"))
    itself = "The CPU is compared with itself, with another number of threads."
    return LossParity(
        model=recipe.name,
        device=shown_device(place),
        dtype=recipe.dtype,
        reference=tuple(reference.losses),
        rounded=tuple(rounded.losses),
        candidate=tuple(candidate.losses),
        notes=() if device_of(place).is_accelerator else (itself,),
    )


@contextlib.contextmanager
def _failing_on(device: str) -> Iterator[None]:
    """Say of an error on a device that it is one of the device; the CPU would show it too, if it were one of the model."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not device_of(device).is_accelerator or isinstance(error, OpenMedError) or is_out_of_memory(error):
            raise
        what = f"A step could not be computed on {shown_device(device)}: {cause(error)}."
        raise DeviceUnavailable(what, "Use another device or type.") from error


@contextlib.contextmanager
def _other_threads() -> Iterator[None]:
    """Let the CPU compute with one thread, or with two where it has one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _leave_dropout_out(model: torch.nn.Module) -> None:
    """Let a model compute as in training but for dropout, whose random numbers differ from device to device."""
    from torch import nn

    model.eval()
    for part in model.modules():
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
        if isinstance(part, (nn.RNNBase, nn.modules.batchnorm._NormBase)):  # noqa: SLF001 - what all of them are
            part.train()  # cuDNN computes gradients only so, and the norm of a batch is that of its own numbers.
