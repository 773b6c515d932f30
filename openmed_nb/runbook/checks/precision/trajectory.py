"""``nb.runbook.loss_parity``: one training on the CPU and on a device, step by step, and the layer in which they part.

The tolerance is measured in the same call: the CPU trains beside itself with other roundings, in float32 those of
``rounding.RoundedOnce`` and in bfloat16 its own, and as far as that comes, times :data:`FACTOR`, rounding explains. Weights
differ after the first step, so the drift grows, and with it the tolerance.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ....training.nonfinite import Origin, origin_of, watched_layers
from ....training.steps import Precision, adamw, check_fused, precision
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
from .parity import SMALLEST
from .report import REFERENCE

if TYPE_CHECKING:
    import torch

STEPS = 200
RATE = 5e-5  # As transformers' Trainer trains by default (TrainingArguments.learning_rate).
SYNTHETIC, LENGTH = 8, 32  # How many synthetic batches there are, and the tokens of a row, where nobody passes batches.

# How many times as far as other roundings of the CPU a device may come. Over 60 steps of the smaller bundled model, kernels
# without oneDNN came 0.8 times as far as RoundedOnce, matrix products in 2, 3 and 7 parts up to 0.4 times, the rows of batches
# in reverse 0.4 times, AdamW unfused 0.3 times, and two threads instead of one 0.2 times.
FACTOR = 8.0

# By chance one step rounds to nearly the same loss: bfloat16 came 1e-3 apart in step 1 and 4e-2 in step 2 with the larger bundled
# model. So the first EARLY steps have the largest drift of them all.
EARLY = 8

EPSILON = 2.0**-23  # Of float32, in which losses are summed.
MOST = 1000.0  # A layer that is further off than this many roundings is wrong, however wrong others are.

DTYPES = ("float32", "bfloat16")
SAMPLES = (1, 2, 5)  # The steps that are shown, times each power of ten.
NO_LAYER = "each layer and the optimizer give the CPU's numbers, repeated from the CPU's weights"


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
        origin: Where the two part; ``None`` if they do not.
        notes: What to know about the comparison.
    """

    model: str
    device: str
    dtype: str
    reference: tuple[float, ...]
    rounded: tuple[float, ...]
    candidate: tuple[float, ...]
    origin: Origin | None = None
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
        return apart(self.candidate, self.reference)

    @property
    def tolerance(self) -> tuple[float, ...]:
        """How far rounding lets them be apart at each step; it never becomes smaller."""
        return tolerance_of(self.reference, self.rounded)

    @property
    def parted(self) -> int | None:
        """The first step, counted from 1, that is beyond its tolerance; ``None`` if none is."""
        return first_beyond(self.drift, self.tolerance)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Whether the losses are numbers, whether rounding explains the drift, and where the two part."""
        there = math.isfinite(self.candidate[-1])
        numbers = "every loss is a number" if there else f"NaN or infinity in step {self.steps}"
        in_float32 = "Look whether it is so in float32, and train in that."
        way_out = "Train on the CPU." if self.dtype == "float32" else in_float32
        found = [Finding("numbers", OK if there else FAILED, numbers, "" if there else way_out)]
        if self.parted is None:
            return (*found, Finding("drift", OK, f"rounding of {self.dtype} explains it"))
        what = f"more than rounding of {self.dtype} explains, from step {self.parted}"
        found.append(Finding("drift", FAILED, what, way_out))
        if self.origin is not None:
            remedy = "nb.doctor() knows silent errors of devices; compute this on the CPU, or another way."
            found.append(Finding("origin", FAILED, str(self.origin), remedy))
        return tuple(found)

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"`` or ``"failed"``."""
        return worst(self.findings)

    def report(self) -> Report:
        """Return the judgement; the losses are among the figures."""
        title = f"Loss parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}"
        otherwise = "where it rounds otherwise" if self.dtype == "float32" else f"in {self.dtype}"
        sentences = (
            f"{counted(self.steps, 'step')} of training from the same weights, with the same batches and without dropout.",
            f"The tolerance is {FACTOR:g} times as far as the CPU drifts from its own losses {otherwise}.",
            *self.notes,
        )
        columns = ("step", "loss on the CPU", f"loss on {self.device}", "drift", "tolerance")
        values = zip(self.reference, self.candidate, self.drift, self.tolerance, strict=True)
        shown = sampled(self.steps, self.parted)
        rows = tuple(
            (str(step), f"{right:.6g}", f"{found:.6g}", f"{far:.2g}", f"{most:.2g}")
            for step, (right, found, far, most) in enumerate(values, 1)
            if step in shown
        )
        table = Table("Losses at some steps", columns, rows, folded=True)
        steps = (*(step for step in ticks(self.steps, whole=True) if 0 < step < self.steps), self.steps)
        marks = (Mark(self.parted, f"they part in step {self.parted}"),) if self.parted else ()
        axes = Axes("loss", "step", tuple(Mark(step, f"{step:g}") for step in steps), marks=marks)
        curves = {"CPU": self.reference, self.device: tuple(filter(math.isfinite, self.candidate))}
        lines = tuple(
            Line(name, tuple(range(1, len(losses) + 1)), losses, tuple(f"{name}: {loss:.6g}" for loss in losses))
            for name, losses in curves.items()
        )
        learns = "as" if self.parted is None else f"until step {self.parted} as"
        spoken = (f"{self.model} learns on {self.device} in {self.dtype} {learns} on {REFERENCE}", *sentences)
        tables = (findings_table("", self.findings),)
        return Report(
            title,
            sentences,
            tables,
            figures=(table,),
            spoken=spoken,
            status=self.status,
            pictures=(Picture("Losses", lines=lines, axes=axes),),
        )


def apart(ones: Iterable[float], others: Iterable[float]) -> tuple[float, ...]:
    """Return how far two curves are apart at each step of the shorter; infinite where either is no finite number.

    Example:
        >>> apart([1.0, 2.0], [1.5, float("nan"), 3.0])
        (0.5, inf)
    """
    differences = (abs(one - other) for one, other in zip(ones, others, strict=False))
    return tuple(one if math.isfinite(one) else math.inf for one in differences)


def tolerance_of(reference: Sequence[float], rounded: Sequence[float]) -> tuple[float, ...]:
    """Return how far rounding lets a curve be from the reference at each step, by a curve with other roundings.

    Example:
        >>> [one / FACTOR for one in tolerance_of([0.0, 0.0, 0.0], [0.25, 1.0, 0.5])]
        [1.0, 1.0, 1.0]
    """
    # Of the loss itself, where other roundings happen to give it.
    rounding = (abs(loss) * EPSILON for loss in reference)
    there = [far + own for far, own in zip(apart(rounded, reference), rounding, strict=True)]
    there[:EARLY] = [max(there[:EARLY])] * len(there[:EARLY])
    return tuple(FACTOR * far for far in accumulate(there, max))


def first_beyond(drift: Sequence[float], tolerance: Sequence[float]) -> int | None:
    """Return the first step, counted from 1, whose drift is beyond its tolerance."""
    return next((step for step, (far, most) in enumerate(zip(drift, tolerance, strict=False), 1) if far > most), None)


def sampled(steps: int, parted: int | None) -> list[int]:
    """Return which steps are shown: some, the more apart the later they are, the last, and the one in which two part.

    Example:
        >>> sampled(60, 7)
        [1, 2, 5, 7, 10, 20, 50, 60]
    """
    usual = {one * 10**power for power in range(len(str(steps))) for one in SAMPLES if one * 10**power <= steps}
    return sorted({*usual, steps, *([parted] if parted else [])})


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
    the first eight steps at least, is the tolerance. Where the device goes beyond, layers, gradients and the optimizer's step are computed on both from the same
    weights, and the first that differs by more than rounding is named. The model and random numbers stay as they are.

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
        The losses and their tolerance, ``parted``, the first step beyond it, ``origin``, and ``findings``. Its text form has
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
    steps, dtype = whole("steps", steps), "float32" if dtype is None else dtype
    choice("dtype", dtype, DTYPES)
    for argument, function in {"loss": loss, "optimizer": optimizer}.items():
        if not (function is None or callable(function)):
            raise cannot_be(argument, function, "Pass a function.")
    with SESSION.told_after(progress):
        module, batches, name = subject(model, batches, arguments)
        place = SESSION.device(device).device
        recipe = Recipe(name, dtype, loss or of_model, optimizer or (lambda weights: adamw(weights, lr=RATE)))
        with contextlib.ExitStack() as kept:
            kept.callback(empty_cache, place)
            kept.callback(gc.collect)
            kept.enter_context(generators_kept(batches))
            kept.enter_context(random_numbers_kept())
            kept.enter_context(random_numbers_from(random_states(place)))
            kept.enter_context(out_of_memory_explained(f"A step of {name}", place, "Pass smaller batches."))
            return trained(module, Repeated(batches, Counter()), steps, recipe, place)


def of_model(model: Any, batch: Any) -> Any:
    return loss_or_mean(example_of(batch)(model))


def subject(model: Any, batches: Any, arguments: Mapping[str, Any]) -> tuple[torch.nn.Module, Any, str]:
    """Return the module that is trained, its batches, and what a person calls it."""
    if is_named(model):
        spec = SESSION.files(model, arguments)[0]
        model, name = pipeline_of_files(spec), spec.reference.name
    else:
        name = type(module_in(model)).__name__
        check_no_arguments(name, arguments)
    if batches is None and not hasattr(model, "own_annotator"):
        raise ConfigurationError(f"There is nothing to train {name} with.", "Pass a list of batches, or a DataLoader.")
    batches = synthetic_batches(model) if batches is None else batches
    check_series(name, batches)
    return module_in(model), batches, name


def synthetic_batches(pipe: Any) -> list[dict[str, Any]]:
    """Return batches of full rows of any tokens, each token with a label that depends on it, so that there is much to learn."""
    import torch

    rows, config = labelled_rows(pipe, LENGTH).kwargs, pipe.model.config
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(config.vocab_size, rows["labels"].shape, generator=generator) for _ in range(SYNTHETIC))
    return [{**rows, "input_ids": ids, "labels": ids % config.num_labels} for ids in drawn]


Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained, on any side."""

    name: str
    dtype: str  # In which the device computes.
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[list[Any]], Any]

    def reference(self, model: torch.nn.Module) -> Training:
        """Return a copy of a model that learns as is right: on the CPU in float32."""
        return self._training(model, "cpu", "float32")

    def rounded(self, model: torch.nn.Module) -> Training:
        """Return a copy that learns on the CPU with other roundings."""
        from .rounding import RoundedOnce

        return self._training(model, "cpu", self.dtype, RoundedOnce if self.dtype == "float32" else None)

    def candidate(self, model: torch.nn.Module, device: str) -> Training:
        """Return a copy that learns on the device in question."""
        return self._training(model, device, self.dtype, None if device_of(device).is_accelerator else other_threads)

    def _training(self, model: torch.nn.Module, device: str, dtype: str, around: Around | None = None) -> Training:
        copied = copy_of(model, device)
        learning = [one for one in copied.parameters() if one.requires_grad]
        if not learning:
            what = f"{self.name} has no parameter that learns."
            raise ConfigurationError(what, "Call requires_grad_() on what shall learn.")
        optimizer = self.optimizer(learning)
        check_fused(optimizer, None, ())
        return Training(self, copied, precision(dtype, device), optimizer, around or contextlib.nullcontext)


@dataclass
class Training:
    """A copy of a model that learns on a device."""

    recipe: Recipe
    model: torch.nn.Module
    precision: Precision
    optimizer: Any
    around: Around  # What stands around each step, such as another number of threads.
    losses: list[float] = field(default_factory=list)

    @property
    def device(self) -> str:
        return self.precision.device

    def loss(self, batch: Any) -> Any:
        """Return the loss of a batch, which stays as it is even for a model that writes into it."""
        import torch

        moved = to_device(with_tensors(batch, torch.Tensor.clone), self.device)
        with self.precision.autocast():
            loss = self.recipe.loss(self.model, moved)
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad):
            remedy = "Pass batches with labels, or loss=, which takes the model and a batch and returns one number."
            raise ConfigurationError(f"{self.recipe.name} gives no loss to learn from.", remedy)
        return loss

    def step(self, batch: Any) -> None:
        """Do a step of training with a batch, and keep its loss."""
        import torch

        with self.around(), TENSOR_LOCK, torch.enable_grad():
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def looked_at(self, batch: Any, look: Callable[[Origin, list[Any]], object], gradients: Any = None) -> Any:
        """Do a step, with given gradients or its own, which are returned, and look at all that it computes on the way."""
        import torch

        weights = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        with self.around(), TENSOR_LOCK, torch.enable_grad():
            with watched_layers(self.model, look):
                loss = self.loss(batch)
                look(Origin("loss", ""), [loss])
                own = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for weight, gradient in zip(weights.values(), gradients or own, strict=True):
                weight.grad = None if gradient is None else gradient.to(weight.device, copy=True)
            self.optimizer.step()
        for name, weight in weights.items():
            look(Origin("update", name), [weight])
        return own


def trained(model: torch.nn.Module, batches: Iterator[Any], steps: int, recipe: Recipe, place: str) -> LossParity:
    """Train copies of a model beside each other, and return their losses."""
    begun = copy_of(model)
    without_dropout(begun)
    reference, rounded, candidate = recipe.reference(begun), recipe.rounded(begun), recipe.candidate(begun, place)
    origin, recent = None, deque[Any](maxlen=2)
    for done in range(steps):
        SESSION.tell(Activity("Training on both", recipe.name, done, steps, "step"))
        recent.appendleft(next(batches))
        states = random_states(place)
        for side in (reference, rounded, candidate):
            set_random_states(states)
            with failing_on(side.device):
                side.step(recent[0])
        if not math.isfinite(reference.losses[-1]):
            what = f"The loss of {recipe.name} is no finite number on the CPU, in step {done + 1}."
            raise ModelUnusable(what, "Use a lower learning rate, or batches without faults.")
        last = done + 1 == steps or not math.isfinite(candidate.losses[-1])
        if origin is None and (last or done + 1 >= EARLY):
            tolerance = tolerance_of(reference.losses, rounded.losses)
            if first_beyond(apart(candidate.losses, reference.losses), tolerance):
                origin = where_they_part(reference, place, recent)
        if last:
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
        origin=origin,
        notes=() if device_of(place).is_accelerator else (itself,),
    )


@contextlib.contextmanager
def failing_on(device: str) -> Iterator[None]:
    """Say of an error on a device that it is one of the device; the CPU would show it too, if it were one of the model."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not device_of(device).is_accelerator or isinstance(error, OpenMedError) or is_out_of_memory(error):
            raise
        what = f"A step could not be computed on {shown_device(device)}: {cause(error)}."
        raise DeviceUnavailable(what, "Use another device or type.") from error


@contextlib.contextmanager
def other_threads() -> Iterator[None]:
    """Let the CPU compute with one thread, or with two where it has one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def without_dropout(model: torch.nn.Module) -> None:
    """Let a model compute as in training but for dropout, whose random numbers differ from device to device."""
    from torch import nn

    model.eval()
    for part in model.modules():
        if isinstance(part, nn.RNNBase):
            part.dropout = 0.0
        if isinstance(part, (nn.RNNBase, nn.modules.batchnorm._NormBase)):  # noqa: SLF001 - what all of them are
            part.train()  # cuDNN computes gradients only so, and the norm of a batch is that of its own numbers.


# What was computed, and how many things of that name before it.
Place = tuple[Origin, int]


def where_they_part(reference: Training, device: str, batches: Iterable[Any]) -> Origin:
    """Return what a device computes otherwise than the CPU first, from the weights of the CPU, of the last batches."""
    recipe, model = reference.recipe, reference.model
    for batch in batches:
        states, kept = random_states(device), StepNumbers()
        gradients = recipe.reference(model).looked_at(batch, kept.keep)
        others = []
        for side in (recipe.rounded(model), recipe.candidate(model, device)):
            set_random_states(states)
            others.append(StepNumbers(kept))
            side.looked_at(batch, others[-1].keep, gradients)
        if origin := first_wrong(kept.far, *(one.far for one in others)):
            return origin
    return Origin("unknown", NO_LAYER)


class StepNumbers:
    """What is computed in a step: how long each tensor is, or how far from those of another step."""

    def __init__(self, other: StepNumbers | None = None) -> None:
        self.far: dict[Place, float] = {}
        self.kept: dict[Place, list[Any]] = {}
        self._seen = Counter[Origin]()
        self._other = other

    def keep(self, origin: Origin, tensors: list[Any]) -> None:
        """Take tensors; they are kept on the host where other steps will be compared with this one."""
        self._seen[origin] += 1
        place, found = (origin, self._seen[origin]), [on_host(one) for one in tensors]
        if self._other is None:
            self.kept[place], self.far[place] = found, length(found)
        elif (there := self._other.kept.get(place)) is not None:
            alike = [one.shape for one in found] == [one.shape for one in there]
            self.far[place] = length([one - two for one, two in zip(found, there, strict=True)]) if alike else math.inf


def on_host(tensor: Any) -> Any:
    """Return a copy in the memory of the host that is wide enough for differences."""
    import torch

    return tensor.detach().to("cpu", tensor.dtype if tensor.is_complex() else torch.float32, copy=True)


def length(tensors: Iterable[Any]) -> float:
    """Return the length of tensors together; infinite where one of their numbers is no finite one."""
    found = math.hypot(*(float(one.norm()) for one in tensors))
    return found if math.isfinite(found) else math.inf


def first_wrong(
    lengths: Mapping[Place, float], rounding: Mapping[Place, float], far: Mapping[Place, float]
) -> Origin | None:
    """Return the first thing that is further off than rounding explains: of layers, else of gradients, else of an update.

    What is off by the most roundings is off because of the first that is; so all between both is looked at on the scale of
    ratios, and the first beyond their geometric mean with one rounding is it.
    """
    longest: dict[str, float] = {}
    for (origin, _), own in lengths.items():
        longest[origin.kind] = max(own, longest.get(origin.kind, 0.0))
    ratios = []
    for place, apart_by in far.items():
        least = EPSILON * max(lengths[place], SMALLEST * longest[place[0].kind])
        ratios.append((place[0], apart_by / max(least, rounding.get(place, 0.0), sys.float_info.min)))
    limit = min(max(FACTOR, math.sqrt(max((ratio for _, ratio in ratios), default=0.0))), MOST)
    arrivals = [(origin, ratio <= limit) for origin, ratio in ratios]
    wrong = [origin for origin, fine in arrivals if not fine]
    forwards = (origin for origin in wrong if origin.kind in {"output", "loss"})
    backwards = origin_of([one for one in arrivals if one[0].kind.endswith("gradient")])
    return next(forwards, None) or backwards or next(iter(wrong), None)
