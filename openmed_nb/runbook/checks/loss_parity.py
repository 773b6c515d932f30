"""``nb.runbook.loss_parity``: comparison of a training run on the CPU and on a device, step by step.

The tolerance is measured in the same call by a second training run on the CPU that rounds differently: in float64, or in bfloat16
with autocast. Its drift, times :data:`TOLERANCE_FACTOR`, is attributed to rounding. The weights differ after the first step, so
that drift and tolerance grow.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..._events.activity import ProgressEvent
from ..._render.display import FAILED, OK, Displayable, Finding, Report, Table, findings_table, pluralize, worst_status
from ..._render.drawing import Axes, AxisMarker, Chart, Series
from ..._utils.text import describe_error, short_type_name
from ..._utils.validation import check_choice, check_integer
from ...devices.backend import TENSOR_LOCK, get_rng_states, preserve_rng_states, set_rng_states, use_rng_states
from ...devices.machine import format_device, is_marked_simulated
from ...devices.moving import copy_model, get_module, map_tensors, to_device
from ...devices.registry import empty_cache, explain_out_of_memory, get_device
from ...errors import ConfigurationError, InvalidModelError, OpenMedError
from ...models.registry import is_model_name
from ...session import SESSION, check_options
from ...training.steps import precision
from ..bench.workloads import (
    check_batches,
    check_no_arguments,
    loss_or_mean,
    model_inputs,
    pipeline_from_files,
    repeat_batches,
    synthetic_labeled_batch,
)
from .parity_report import REFERENCE

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from ...annotation.pipeline import AnnotationPipeline

    Batch = Any  # Whatever the loss function takes, such as a mapping, a tuple or a tensor.

DEFAULT_STEPS = 200
# Default of TrainingArguments.learning_rate in transformers.
LEARNING_RATE = 5e-5
# Number and length of the synthetic batches, which are used if no batches are passed.
NUM_SYNTHETIC_BATCHES = 8
SYNTHETIC_LENGTH_TOKENS = 32

# Maximum drift of a device, as a multiple of the drift of the CPU with different rounding. Measured over 60 steps of the smaller
# bundled model, relative to float64: 0.3 for kernels without oneDNN on two threads instead of one.
TOLERANCE_FACTOR = 8.0

# A single step can round to nearly the same loss by chance: with the larger bundled model, bfloat16 drifted by 1e-3 in step 1 and
# by 4e-2 in step 2. The first steps therefore share the largest drift among them.
EARLY_STEPS = 8

# Machine epsilon of float32, the dtype in which losses are summed.
EPSILON = 2.0**-23

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, repr=False)
class LossParity(Displayable):
    """Losses of a training run on the CPU and on a device, and whether rounding explains their difference.

    Attributes:
        model: Name of the model as given by the user.
        device: Device of the candidate, labeled if it is simulated.
        dtype: Dtype in which the device computes matrix products.
        reference: Loss of each step on the CPU in float32.
        rounded: Loss of each step on the CPU with different rounding, which determines the tolerance.
        candidate: Loss of each step on the device, up to the first non-finite loss.
        notes: Notes on the comparison, as sentences.
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
        """Whether the device is simulated."""
        return is_marked_simulated(self.device)

    @property
    def steps(self) -> int:
        """Number of steps on the device."""
        return len(self.candidate)

    @property
    def drift(self) -> tuple[float, ...]:
        """Absolute difference of the losses at each step, infinite if a loss is not finite."""
        return _loss_differences(self.candidate, self.reference)

    @property
    def tolerance(self) -> tuple[float, ...]:
        """Maximum difference at each step that rounding explains. It never decreases."""
        # The rounding error of the loss itself is a lower limit, because the losses can be equal by chance.
        rounding = (abs(loss) * EPSILON for loss in self.reference)
        differences = _loss_differences(self.rounded, self.reference)
        drift = [difference + error for difference, error in zip(differences, rounding, strict=True)]
        drift[:EARLY_STEPS] = [max(drift[:EARLY_STEPS])] * len(drift[:EARLY_STEPS])
        return tuple(TOLERANCE_FACTOR * largest for largest in accumulate(drift, max))

    @property
    def divergence_step(self) -> int | None:
        """First step, counted from 1, whose drift exceeds the tolerance, or ``None`` if there is none."""
        limits = zip(self.drift, self.tolerance, strict=False)
        return next((step for step, (drift, limit) in enumerate(limits, 1) if drift > limit), None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about non-finite losses and about the drift."""
        remedy = "Check whether float32 has the same problem, and train in float32."
        if self.dtype == "float32":
            remedy = "Train on the CPU."
        finite = Finding("finite values", OK, "all losses are finite")
        if not math.isfinite(self.candidate[-1]):
            finite = Finding("finite values", FAILED, f"NaN or infinity in step {self.steps}", remedy)
        drift = Finding("drift", OK, f"explained by rounding of {self.dtype}")
        if self.divergence_step is not None:
            evidence = f"exceeds rounding of {self.dtype} from step {self.divergence_step}"
            drift = Finding("drift", FAILED, evidence, remedy)
        return finite, drift

    @property
    def status(self) -> str:
        """Worst status of the findings: ``"ok"`` or ``"failed"``."""
        return worst_status(self.findings)

    def to_report(self) -> Report:
        """Return the report. The losses are among the metrics."""
        sentences = (
            f"{pluralize(self.steps, 'step')} of training with the same initial weights and batches, without dropout.",
            f"The tolerance is {TOLERANCE_FACTOR:g} times the drift of the CPU in {_rounding_dtype(self.dtype)}.",
            *self.notes,
        )
        return Report(
            f"Loss parity: {self.model} on {self.device} in {self.dtype}, compared with {REFERENCE}: {self.status}",
            sentences,
            (findings_table("", self.findings),),
            metrics=(self._table(),),
            status=self.status,
            charts=(self._chart(),),
        )

    def _table(self) -> Table:
        """Return the losses at the first and last step, at the end of the early steps and at the divergence step."""
        table_steps = {1, EARLY_STEPS, self.divergence_step, self.steps}
        values = zip(self.reference, self.candidate, self.drift, self.tolerance, strict=False)
        rows = tuple(
            (str(step), f"{expected:.6g}", f"{loss:.6g}", f"{drift:.2g}", f"{limit:.2g}")
            for step, (expected, loss, drift, limit) in enumerate(values, 1)
            if step in table_steps
        )
        columns = ("step", "loss on the CPU", f"loss on {self.device}", "drift", "tolerance")
        return Table("Losses at selected steps", columns, rows, collapsed=True)

    def _chart(self) -> Chart:
        marks = tuple(AxisMarker(step, f"diverges in step {step}") for step in filter(None, [self.divergence_step]))
        axes = Axes(
            "loss", "step", tuple(AxisMarker(step, str(step)) for step in (1, self.steps)), vertical_markers=marks
        )
        curves = {"CPU": self.reference, self.device: tuple(filter(math.isfinite, self.candidate))}
        lines = tuple(
            Series(name, tuple(range(1, len(losses) + 1)), losses, tuple(f"{name}: {loss:.6g}" for loss in losses))
            for name, losses in curves.items()
        )
        return Chart("Losses", lines=lines, axes=axes)


def _loss_differences(losses: Iterable[float], reference: Iterable[float]) -> tuple[float, ...]:
    """Return the absolute difference of two loss curves at each step, infinite if a loss is not finite."""
    differences = (abs(loss - expected) for loss, expected in zip(losses, reference, strict=False))
    return tuple(difference if math.isfinite(difference) else math.inf for difference in differences)


def loss_parity(
    model: Any = None,
    batches: Iterable[Batch] | None = None,
    *,
    steps: int = DEFAULT_STEPS,
    device: str | None = None,
    dtype: str | None = None,
    **arguments: Any,
) -> LossParity:
    """Train a model on the CPU and on a device, and check whether rounding explains the loss difference.

    Copies of the model start with the same weights and random numbers and use the same batches. Dropout is disabled, because a
    seed produces different numbers on each device. A third copy on the CPU measures the effect of rounding: it is trained in
    float64, or in bfloat16 if that is the dtype. The tolerance is eight times its largest drift so far, at least that of the
    first eight steps. The loss is the ``loss`` of the model output, or the mean of the output if it has no loss. The optimizer
    is AdamW, one tensor at a time. The model and the global random number generators stay unchanged.

    The CPU needs the memory of three copies of the model with their optimizers, and the device that of one copy.

    Args:
        model: The name of a model, ``None`` for the bundled model, a pipeline of :func:`load_pipeline`, or a torch module.
        batches: A ``DataLoader``, or a list of batches with labels, in the form that the model is called with. If there are
            fewer batches than steps, they repeat. If ``None``, use synthetic batches, which requires a token classification
            model.
        steps: Number of steps, at least 1.
        device: Device to compare. If ``None``, use the device of the session. The CPU is compared with itself.
        dtype: ``"float32"`` (the default) or ``"bfloat16"``. In bfloat16 the device uses autocast, as in
            :func:`openmed_nb.training.precision`, and the weights stay in float32.
        arguments: Arguments of :func:`openmed_nb.load_model`, such as ``revision``, if ``model`` is a name.

    Returns:
        The losses, the tolerance, ``divergence_step`` (the first step that exceeds the tolerance) and ``findings``, without
        data of a batch.

    Raises:
        ConfigurationError: If an argument is not valid, or if the model returns no loss.
        ModelError: If the model cannot be loaded, or if its loss on the CPU is not finite.
        DeviceError: If the device is unavailable or runs out of memory.

    Example:
        >>> import torch
        >>> report = loss_parity(torch.nn.Linear(4, 1), [torch.ones(2, 4)], steps=3, device="cpu")
        >>> report.steps, report.divergence_step, report.findings[1].evidence
        (3, None, 'explained by rounding of float32')
    """
    check_options(loss_parity, arguments)
    steps = check_integer("steps", steps)
    dtype = "float32" if dtype is None else dtype
    check_choice("dtype", dtype, DTYPES)
    with SESSION.operation():
        module, batches, name = _training_target(model, batches, arguments)
        target_device = SESSION.device(device).device
        SESSION.device_manager.check_dtype(dtype, target_device)
        is_accelerator = get_device(target_device).is_accelerator
        with contextlib.ExitStack() as stack:
            stack.callback(empty_cache, target_device)
            stack.callback(gc.collect)
            stack.enter_context(preserve_rng_states())
            stack.enter_context(use_rng_states(get_rng_states(target_device)))
            stack.enter_context(explain_out_of_memory(f"A step of {name}", target_device, "Pass smaller batches."))
            initial_model = copy_model(module)
            _disable_dropout(initial_model)
            reference = _Replica(name, initial_model, "cpu", "float32")
            rounded = _Replica(name, initial_model, "cpu", _rounding_dtype(dtype))
            candidate = _Replica(name, initial_model, target_device, dtype)
            _train((reference, rounded, candidate), repeat_batches(batches), steps)
        return LossParity(
            model=name,
            device=format_device(target_device),
            dtype=dtype,
            reference=tuple(reference.losses),
            rounded=tuple(rounded.losses),
            candidate=tuple(candidate.losses),
            notes=() if is_accelerator else ("The CPU is compared with itself.",),
        )


def _rounding_dtype(dtype: str) -> str:
    """Return the dtype in which the CPU rounds differently than in float32, to determine the tolerance of a dtype."""
    return "float64" if dtype == "float32" else dtype


def _training_target(
    model: Any, batches: Iterable[Batch] | None, arguments: Mapping[str, object]
) -> tuple[Module, Iterable[Batch], str]:
    """Return the module to train, its batches and its name."""
    if is_model_name(model):
        spec = SESSION.load_spec(model, arguments)[0]
        name = spec.reference.name
        model = pipeline_from_files(spec)
    else:
        name = type(get_module(model)).__name__
        check_no_arguments(name, arguments)
    if batches is None:
        if not hasattr(model, "default_annotator"):
            raise ConfigurationError(
                f"Batches are required to train {name}.", "Pass a list of batches, or a DataLoader."
            )
        batches = _synthetic_batches(model)
    check_batches(name, batches)
    return get_module(model), batches, name


def _synthetic_batches(pipe: AnnotationPipeline) -> list[dict[str, torch.Tensor]]:
    """Return batches of random tokens without padding.

    The label of a token depends on its id, so that the model can learn it.
    """
    import torch

    rows = synthetic_labeled_batch(pipe, SYNTHETIC_LENGTH_TOKENS).kwargs
    config = pipe.model.config
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(NUM_SYNTHETIC_BATCHES):
        ids = torch.randint(config.vocab_size, rows["labels"].shape, generator=generator)
        batches.append({**rows, "input_ids": ids, "labels": ids % config.num_labels})
    return batches


class _Replica:
    """Copy of a model that is trained on a device."""

    def __init__(self, name: str, model: Module, device: str, dtype: str) -> None:
        import torch

        self.name = name
        self.device = device
        self.is_float64 = dtype == "float64"
        self.model = copy_model(model, device, torch.float64 if self.is_float64 else None)
        self.losses: list[float] = []
        parameters = [weight for weight in self.model.parameters() if weight.requires_grad]
        if not parameters:
            raise ConfigurationError(
                f"{name} has no trainable parameters.", "Call requires_grad_() on the parameters to train."
            )
        # The fused step hides errors of the operators that other optimizers call, such as pytorch#118115.
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=False, fused=False)
        self.autocast = contextlib.nullcontext if self.is_float64 else precision(dtype, device).autocast

    def step(self, batch: Batch) -> None:
        """Run a training step and record its loss. The batch stays unchanged even if the model modifies its inputs."""
        import torch

        def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.double() if self.is_float64 and tensor.is_floating_point() else tensor.clone()

        with TENSOR_LOCK, torch.enable_grad():
            inputs = to_device(map_tensors(batch, copy_tensor), self.device)
            try:
                with self.autocast():
                    loss = loss_or_mean(model_inputs(inputs)(self.model))
            except OpenMedError:
                raise
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise ConfigurationError(
                    f"{self.name} cannot be called with a batch of type {short_type_name(batch)}: {describe_error(error)}.",
                    "Pass batches in the form that the model is called with.",
                ) from error
            if loss is None or loss.numel() != 1:
                raise ConfigurationError(
                    f"{self.name} returns no loss that can be trained.", "Pass batches with labels."
                )
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))


def _train(replicas: Sequence[_Replica], batches: Iterator[Batch], steps: int) -> None:
    """Train replicas step by step, the reference first and the candidate last, up to its first non-finite loss."""
    reference = replicas[0]
    device = replicas[-1].device
    for step in range(steps):
        SESSION.notify(ProgressEvent("Training on both", reference.name, step, steps, "step"))
        batch = next(batches)
        states = get_rng_states(device)
        for replica in replicas:
            set_rng_states(states)
            replica.step(batch)
        if not math.isfinite(reference.losses[-1]):
            raise InvalidModelError(
                f"The loss of {reference.name} is not finite on the CPU in step {step + 1}.",
                "Use a lower learning rate, or check the batches for invalid data.",
            )
        if not math.isfinite(replicas[-1].losses[-1]):
            break


def _disable_dropout(model: Module) -> None:
    """Set a model to training mode without dropout, whose random numbers differ between devices."""
    from torch import nn

    model.eval()
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if isinstance(module, (nn.RNNBase, nn.modules.batchnorm._NormBase)):  # noqa: SLF001 - torch has no public base class of them
            # cuDNN computes gradients only in training mode, and batch norm uses the statistics of the batch only then.
            module.train()
