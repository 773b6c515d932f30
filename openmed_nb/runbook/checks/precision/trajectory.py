"""``nb.runbook.loss_parity``: one training on the CPU and on a device, step by step, and whether rounding explains how they part.

The tolerance is measured in the same call: the CPU trains beside itself with other roundings, in float32 those of
``rounding.Float64RoundingMode`` and in bfloat16 its own, and as far as that comes, times :data:`FACTOR`, rounding explains. Weights
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

from ...._events.activity import ProgressEvent
from ...._render.display import FAILED, OK, Displayable, Finding, Report, Table, findings_table, pluralize, worst_status
from ...._render.drawing import Axes, AxisMarker, Chart, Series, nice_ticks
from ...._utils.text import describe_error
from ...._utils.validation import check_choice, check_integer, invalid_value
from ....devices.backend import TENSOR_LOCK, get_rng_states, preserve_rng_states, set_rng_states, use_rng_states
from ....devices.machine import format_device, is_marked_simulated
from ....devices.memory import empty_cache, explain_out_of_memory, is_out_of_memory
from ....devices.moving import copy_model, get_module, map_tensors, to_device
from ....devices.registry import parse_device_argument
from ....errors import ConfigurationError, DeviceUnavailableError, InvalidModelError, OpenMedError
from ....models.registry import is_model_name
from ....session import SESSION
from ....training.steps import adamw, check_fused, precision
from ...bench.workloads import (
    RepeatingLoader,
    check_batches,
    check_no_arguments,
    loss_or_mean,
    model_inputs,
    pipeline_from_files,
    preserve_generators,
    synthetic_labeled_batch,
)
from .report import REFERENCE

if TYPE_CHECKING:
    import torch

STEPS = 200
LEARNING_RATE = 5e-5  # As transformers' Trainer trains by default (TrainingArguments.learning_rate).
NUM_SYNTHETIC_BATCHES = 8  # How many synthetic batches there are, where nobody passes batches.
LENGTH = 32  # The tokens of a row of them.

# How many times as far as other roundings of the CPU a device may come. Over 60 steps of the smaller bundled model, kernels
# without oneDNN came 0.8 times as far as Float64RoundingMode, matrix products in 2, 3 and 7 parts up to 0.4 times, the rows of batches
# in reverse 0.4 times, AdamW unfused 0.3 times, and two threads instead of one 0.2 times.
TOLERANCE_FACTOR = 8.0

# By chance one step rounds to nearly the same loss: bfloat16 came 1e-3 apart in step 1 and 4e-2 in step 2 with the larger bundled
# model. So the first EARLY steps have the largest drift of them all.
EARLY_STEPS = 8

EPSILON = 2.0**-23  # Of float32, in which losses are summed.

DTYPES = ("float32", "bfloat16")
LATENCY_SAMPLES = (1, 2, 5)  # The steps that are shown, times each power of ten.


@dataclass(frozen=True, repr=False)
class LossParity(Displayable):
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
    JSON_PROPERTIES = ("steps", "drift", "tolerance", "divergence_step", "findings", "status", "simulated")

    @property
    def simulated(self) -> bool:
        """Whether the device is a simulated one."""
        return is_marked_simulated(self.device)

    @property
    def steps(self) -> int:
        """How many steps were done on the device."""
        return len(self.candidate)

    @property
    def drift(self) -> tuple[float, ...]:
        """How far the losses are apart at each step; infinite where one is no finite number."""
        return _loss_differences(self.candidate, self.reference)

    @property
    def tolerance(self) -> tuple[float, ...]:
        """How far rounding lets them be apart at each step; it never becomes smaller."""
        # Of the loss itself, where other roundings happen to give it.
        rounding = (abs(loss) * EPSILON for loss in self.reference)
        there = [far + own for far, own in zip(_loss_differences(self.rounded, self.reference), rounding, strict=True)]
        there[:EARLY_STEPS] = [max(there[:EARLY_STEPS])] * len(there[:EARLY_STEPS])
        return tuple(TOLERANCE_FACTOR * far for far in accumulate(there, max))

    @property
    def divergence_step(self) -> int | None:
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
        if self.divergence_step is not None:
            what = f"more than rounding of {self.dtype} explains, from step {self.divergence_step}"
            drift = Finding("drift", FAILED, what, way_out)
        return numbers, drift

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"`` or ``"failed"``."""
        return worst_status(self.findings)

    def to_report(self) -> Report:
        """Return the judgement; the losses are among the figures."""
        otherwise = "where it rounds otherwise" if self.dtype == "float32" else f"in {self.dtype}"
        sentences = (
            f"{pluralize(self.steps, 'step')} of training from the same weights, with the same batches and without dropout.",
            f"The tolerance is {TOLERANCE_FACTOR:g} times as far as the CPU drifts from its own losses {otherwise}.",
            *self.notes,
        )
        learns = "as" if self.divergence_step is None else f"until step {self.divergence_step} as"
        return Report(
            f"Loss parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}",
            sentences,
            (findings_table("", self.findings),),
            metrics=(self._table(),),
            html_sentences=(
                f"{self.model} learns on {self.device} in {self.dtype} {learns} on {REFERENCE}",
                *sentences,
            ),
            status=self.status,
            charts=(self._picture(),),
        )

    def _table(self) -> Table:
        """Return the losses at some steps: the more apart the later they are, the last, and the one in which two part."""
        powers = (10**power for power in range(len(str(self.steps))))
        shown = {sample * power for power in powers for sample in LATENCY_SAMPLES} | {self.steps, self.divergence_step}
        values = zip(self.reference, self.candidate, self.drift, self.tolerance, strict=True)
        rows = tuple(
            (str(step), f"{right:.6g}", f"{loss:.6g}", f"{far:.2g}", f"{most:.2g}")
            for step, (right, loss, far, most) in enumerate(values, 1)
            if step in shown
        )
        columns = ("step", "loss on the CPU", f"loss on {self.device}", "drift", "tolerance")
        return Table("Losses at some steps", columns, rows, collapsed=True)

    def _picture(self) -> Chart:
        steps = (*(step for step in nice_ticks(self.steps, whole=True) if 0 < step < self.steps), self.steps)
        marks = (
            (AxisMarker(self.divergence_step, f"they part in step {self.divergence_step}"),)
            if self.divergence_step
            else ()
        )
        axes = Axes("loss", "step", tuple(AxisMarker(step, f"{step:g}") for step in steps), vertical_markers=marks)
        curves = {"CPU": self.reference, self.device: tuple(filter(math.isfinite, self.candidate))}
        lines = tuple(
            Series(name, tuple(range(1, len(losses) + 1)), losses, tuple(f"{name}: {loss:.6g}" for loss in losses))
            for name, losses in curves.items()
        )
        return Chart("Losses", lines=lines, axes=axes)


def _loss_differences(losses: Iterable[float], reference: Iterable[float]) -> tuple[float, ...]:
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
        >>> found.steps, found.divergence_step, found.findings[1].evidence
        (3, None, 'rounding of float32 explains it')
    """
    steps = check_integer("steps", steps)
    dtype = "float32" if dtype is None else dtype
    check_choice("dtype", dtype, DTYPES)
    for argument, function in {"loss": loss, "optimizer": optimizer}.items():
        if not (function is None or callable(function)):
            raise invalid_value(argument, function, "Pass a function.")
    with SESSION.operation(progress):
        module, batches, name = _training_target(model, batches, arguments)
        place = SESSION.device(device).device
        recipe = _TrainingRecipe(
            name, dtype, loss or _loss_of_model, optimizer or (lambda weights: adamw(weights, lr=LEARNING_RATE))
        )
        with contextlib.ExitStack() as kept:
            kept.callback(empty_cache, place)
            kept.callback(gc.collect)
            kept.enter_context(preserve_generators(batches))
            kept.enter_context(preserve_rng_states())
            kept.enter_context(use_rng_states(get_rng_states(place)))
            kept.enter_context(explain_out_of_memory(f"A step of {name}", place, "Pass smaller batches."))
            return _train_replicas(module, RepeatingLoader(batches, Counter()), steps, recipe, place)


def _loss_of_model(model: Any, batch: Any) -> Any:
    return loss_or_mean(model_inputs(batch)(model))


def _training_target(model: Any, batches: Any, arguments: Mapping[str, Any]) -> tuple[torch.nn.Module, Any, str]:
    """Return the module that is trained, its batches, and what a person calls it."""
    if is_model_name(model):
        spec = SESSION.load_spec(model, arguments)[0]
        name = spec.reference.name
        model = pipeline_from_files(spec)
    else:
        name = type(get_module(model)).__name__
        check_no_arguments(name, arguments)
    if batches is None:
        if not hasattr(model, "default_annotator"):
            what = f"There is nothing to train {name} with."
            raise ConfigurationError(what, "Pass a list of batches, or a DataLoader.")
        batches = _synthetic_batches(model)
    check_batches(name, batches)
    return get_module(model), batches, name


def _synthetic_batches(pipe: Any) -> list[dict[str, Any]]:
    """Return batches of full rows of any tokens, each token with a label that depends on it, so that there is much to learn."""
    import torch

    rows = synthetic_labeled_batch(pipe, LENGTH).kwargs
    config = pipe.model.config
    generator = torch.Generator().manual_seed(0)
    drawn = (
        torch.randint(config.vocab_size, rows["labels"].shape, generator=generator)
        for _ in range(NUM_SYNTHETIC_BATCHES)
    )
    return [{**rows, "input_ids": ids, "labels": ids % config.num_labels} for ids in drawn]


ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class _TrainingRecipe:
    """How a model is trained, on any side."""

    name: str
    dtype: str  # In which the device computes.
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[list[Any]], Any]

    def copy(
        self, model: torch.nn.Module, device: str, dtype: str, around: ContextFactory | None = None
    ) -> _TrainingReplica:
        """Return a copy of a model that learns on a device; ``around`` stands around each step, such as other threads."""
        copied = copy_model(model, device)
        learning = [weight for weight in copied.parameters() if weight.requires_grad]
        if not learning:
            what = f"{self.name} has no parameter that learns."
            raise ConfigurationError(what, "Call requires_grad_() on what shall learn.")
        optimizer = self.optimizer(learning)
        check_fused(optimizer, None, ())
        autocast = precision(dtype, device).autocast
        return _TrainingReplica(self, copied, device, autocast, optimizer, around or contextlib.nullcontext)


@dataclass
class _TrainingReplica:
    """A copy of a model that learns on a device."""

    recipe: _TrainingRecipe
    model: torch.nn.Module
    device: str
    autocast: ContextFactory
    optimizer: Any
    around: ContextFactory
    losses: list[float] = field(default_factory=list)

    def step(self, batch: Any) -> None:
        """Do a step of training with a batch, which stays as it is even for a model that writes into it, and keep its loss."""
        import torch

        with self.around(), TENSOR_LOCK, torch.enable_grad():
            moved = to_device(map_tensors(batch, torch.Tensor.clone), self.device)
            with self.autocast():
                loss = self.recipe.loss(self.model, moved)
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
                remedy = "Pass batches with labels, or loss=, which takes the model and a batch and returns one number."
                raise ConfigurationError(f"{self.recipe.name} gives no loss to learn from.", remedy)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))


def _train_replicas(
    model: torch.nn.Module, batches: Iterator[Any], steps: int, recipe: _TrainingRecipe, place: str
) -> LossParity:
    """Train copies of a model beside each other, and return their losses."""
    from .rounding import Float64RoundingMode

    begun = copy_model(model)
    _leave_dropout_out(begun)
    reference = recipe.copy(begun, "cpu", "float32")
    rounded = recipe.copy(begun, "cpu", recipe.dtype, Float64RoundingMode if recipe.dtype == "float32" else None)
    candidate = recipe.copy(
        begun, place, recipe.dtype, None if parse_device_argument(place).is_accelerator else _alternate_thread_count
    )
    for done in range(steps):
        SESSION.notify(ProgressEvent("Training on both", recipe.name, done, steps, "step"))
        batch = next(batches)
        states = get_rng_states(place)
        for side in (reference, rounded, candidate):
            set_rng_states(states)
            with _translate_device_errors(side.device):
                side.step(batch)
        if not math.isfinite(reference.losses[-1]):
            what = f"The loss of {recipe.name} is no finite number on the CPU, in step {done + 1}."
            raise InvalidModelError(what, "Use a lower learning rate, or batches without faults.")
        if not math.isfinite(candidate.losses[-1]):
            break
    SESSION.notify(ProgressEvent("Training on both", recipe.name, steps, steps, "step"))
    itself = "The CPU is compared with itself, with another number of threads."
    return LossParity(
        model=recipe.name,
        device=format_device(place),
        dtype=recipe.dtype,
        reference=tuple(reference.losses),
        rounded=tuple(rounded.losses),
        candidate=tuple(candidate.losses),
        notes=() if parse_device_argument(place).is_accelerator else (itself,),
    )


@contextlib.contextmanager
def _translate_device_errors(device: str) -> Iterator[None]:
    """Say of an error on a device that it is one of the device; the CPU would show it too, if it were one of the model."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if (
            not parse_device_argument(device).is_accelerator
            or isinstance(error, OpenMedError)
            or is_out_of_memory(error)
        ):
            raise
        what = f"A step could not be computed on {format_device(device)}: {describe_error(error)}."
        raise DeviceUnavailableError(what, "Use another device or type.") from error


@contextlib.contextmanager
def _alternate_thread_count() -> Iterator[None]:
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
