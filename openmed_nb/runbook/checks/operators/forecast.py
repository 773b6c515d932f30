"""``nb.runbook.forecast``: prediction of the operators of a model that fall back to the CPU on MPS.

A copy of the model runs on the CPU with example inputs from the user or a tokenizer. ``recorders`` records its operators, and
``table`` classifies them on MPS.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...._events.activity import ProgressEvent
from ...._render.display import OK, WARNING, Displayable, Report, Table, pluralize
from ...._utils.text import describe_error, model_label, short_type_name
from ...._utils.validation import check_bool
from ....annotation.loading import create_pipeline
from ....devices.backend import TENSOR_LOCK, parse_release, preserve_rng_states
from ....devices.machine import is_mps_simulated
from ....devices.moving import copy_model, get_module, named_tensors
from ....errors import ConfigurationError
from ....models.config import OpenMedConfig
from ....models.registry import is_model_name
from ....session import SESSION
from ...bench.workloads import ModelInputs, loss_or_mean, parse_example_inputs
from .table import (
    ALWAYS_ON_CPU,
    COMPOSITE,
    FALLS_BACK,
    FLOAT64,
    MAY_BE_INCORRECT,
    NATIVE,
    PHASES,
    UNKNOWN,
    UNSUPPORTED,
    CallSite,
    Classification,
    ModuleLocation,
    ModuleRow,
    MpsLimitation,
    OperatorTable,
    Phase,
    operator_table,
)

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .recorders import CallRecorder

# Synthetic texts of different lengths, so that the batch contains padding.
EXAMPLE_SENTENCES = ("Patient with type 2 diabetes mellitus.", "No asthma.")


def _synthetic_example(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelInputs:
    """Return a batch of two synthetic sentences for a transformers model, with labels if the model accepts them."""
    import torch

    from ....annotation.forward import accepted_arguments, input_names

    batch = dict(tokenizer(list(EXAMPLE_SENTENCES), padding=True, return_tensors="pt"))
    names = input_names(model, tuple(batch))
    kwargs = {name: tensor for name, tensor in batch.items() if name in names}
    if "labels" in (accepted_arguments(type(model).forward) or ()):
        kwargs["labels"] = torch.zeros_like(batch["input_ids"])
    return ModelInputs(kwargs=kwargs)


def _verified_copy(model: Module, example: ModelInputs) -> Module:
    """Return a copy of the model after one untraced forward pass.

    The pass initializes lazy parameters and separates errors in the model from errors in the tracer.
    """
    import torch

    copied = copy_model(model).eval()
    try:
        with torch.no_grad():
            example.copy()(copied)
    except Exception as error:  # Custom model code can raise any exception.
        remedy = "Check example_inputs. The model must run with them."
        raise _model_error("The forward pass", copied, error, remedy) from error
    return copied


def _model_error(operation: str, model: Module, error: Exception, remedy: str) -> ConfigurationError:
    problem = f"{operation} of {short_type_name(model)} failed on the CPU"
    return ConfigurationError(f"{problem}: {short_type_name(error)}: {describe_error(error)}.", remedy)


def _trace_inference(model: Module, example: ModelInputs, recorder: CallRecorder) -> None:
    """Trace a forward pass without gradients.

    The pass runs in inference mode if the model supports it, because the kernels of MPS are selected below autograd.
    """
    import torch

    from .recorders import record_calls

    recorder.phase = "inference"
    wide_tensors = _mark_float64(model, example, recorder)
    try:
        with torch.inference_mode(), record_calls(recorder, model):
            example(model)
    except RuntimeError:  # The model computes gradients itself, which inference mode does not support.
        recorder.calls.clear()
        recorder.limitations.clear()
        with torch.no_grad(), record_calls(recorder, model):
            example(model)
    for name, location in wide_tensors:
        recorder.record_limitation(name, [FLOAT64], location)


def _trace_training(model: Module, example: ModelInputs, recorder: CallRecorder) -> tuple[str, ...]:
    """Trace a training step and return notes on what was not traced.

    Attention is decomposed, as on MPS if gradients are required.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from .recorders import record_calls

    _mark_float64(model, example, recorder)
    if not any(parameter.requires_grad for parameter in model.train().parameters()):
        return ("No training step was traced: no parameter of the model requires gradients.",)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            with record_calls(recorder, model):
                return _step(model, example, recorder)
        except Exception:
            try:
                _step(model, example, recorder)
            except Exception as error:  # The error is in the model.
                remedy = "Check example_inputs, or pass training=False."
                raise _model_error("A training step", model, error, remedy) from error
            raise


def _step(model: Module, example: ModelInputs, recorder: CallRecorder) -> tuple[str, ...]:
    """Run a training step.

    ``torch.utils._foreach_utils`` does not support MPS, so gradient clipping and AdamW process each parameter separately.
    """
    import torch

    recorder.phase = "forward"
    output = example(model)
    loss = loss_or_mean(output)
    if loss is None:
        problem = f"the model output, a {short_type_name(output)}, has no tensor that depends on the parameters"
        return (f"No training step was traced: {problem}.",)
    recorder.phase = "backward"
    loss.backward()
    recorder.phase = "optimizer"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
    torch.optim.AdamW(parameters, foreach=False, fused=False).step()
    return ()


def _mark_float64(model: Module, example: ModelInputs, recorder: CallRecorder) -> list[tuple[str, ModuleLocation]]:
    """Mark the tensors of a model and its inputs whose dtype MPS does not support as recorded, and return their names."""
    from .recorders import UNSUPPORTED_DTYPES

    tensors = [(f"example input {name}", tensor, ModuleLocation()) for name, tensor in named_tensors(example.tensors)]
    for path, module in model.named_modules():
        location = ModuleLocation(path, type(module).__name__)
        for kind, list_tensors in (("parameter", module.named_parameters), ("buffer", module.named_buffers)):
            tensors += ((f"{kind} {name}", tensor, location) for name, tensor in list_tensors(recurse=False))
    wide = [(name, tensor, location) for name, tensor, location in tensors if tensor.dtype in UNSUPPORTED_DTYPES]
    recorder.wide.update((tensor, True) for _, tensor, _ in wide)
    return [(name, location) for name, _, location in wide]


# Classifications of an operator, worst first.
VERDICTS: tuple[Classification, ...] = (
    UNSUPPORTED,
    FALLS_BACK,
    ALWAYS_ON_CPU,
    MAY_BE_INCORRECT,
    UNKNOWN,
    COMPOSITE,
    NATIVE,
)

# Remedies by classification, or by operator if there is a specific one.
REMEDIES: Mapping[str, str] = {
    FALLS_BACK: "Use a different operator; without PYTORCH_ENABLE_MPS_FALLBACK=1 it raises an error.",
    ALWAYS_ON_CPU: "Use a different operator; each call waits for the GPU.",
    UNKNOWN: "This operator is not part of torch. Test it on a Mac.",
    "aten::embedding_renorm_": "Remove max_norm from the Embedding; each call waits for the GPU.",
}

# Limits of a run on the CPU.
LIMITATIONS = (
    "Not covered: device-dependent branches in the model's code, the inside of custom C++ operators, "
    "and code generated by torch.compile."
)

NO_TRAINING_NOTICE = "Training was not analyzed; pass training=True to include a training step."

MAX_ROWS = 20
MAX_NAMES = 6


@dataclass(frozen=True)
class OperatorForecast(ModuleRow):
    """Prediction for one operator in one module and one phase.

    Attributes:
        operator: Name of the operator, such as ``"aten::special_ndtri"``. If there is a limitation, also a torch function,
            such as ``"linear"``, or a tensor, such as ``"buffer scale"``.
        verdict: Classification, one of ``VERDICTS``.
        phase: ``"inference"``, ``"forward"``, ``"backward"`` or ``"optimizer"``.
        module_location: Module that calls the operator, or empty in the backward pass and in the optimizer.
        count: Number of calls.
        limitation: Limitation of MPS, such as ``"float64"``, or an empty string if the row is about the operator itself.
        reason: Error message of MPS, or the name of the operator in messages of MPS if it differs.
        remedy: Suggested action, or an empty string if none is necessary.
    """

    operator: str
    verdict: Classification
    phase: Phase
    module_location: ModuleLocation
    count: int
    limitation: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class Forecast(Displayable):
    """Prediction for every operator of a model on MPS, in the installed torch.

    The prediction is based on a run on the CPU. It does not cover branches of the model's code on ``device.type``, the inside of
    custom C++ operators, and code generated by ``torch.compile``.

    Attributes:
        model: Class name of the model.
        torch: Version of torch.
        source: Source of the list of MPS operators.
        rows: Operators and limitations, worst first.
        notes: Notes on what was not traced, as sentences.
        simulated: Whether a simulated MPS device was active.
    """

    model: str
    torch: str
    source: str
    rows: tuple[OperatorForecast, ...]
    notes: tuple[str, ...] = ()
    simulated: bool = False

    JSON_PROPERTIES = ("verdict", "operators", "cpu_operators", "unsupported", "limits")

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that are called, in alphabetical order."""
        return _unique(row.operator for row in self.rows if not row.limitation)

    @property
    def cpu_operators(self) -> tuple[str, ...]:
        """Operators that fall back to the CPU or always run there, in alphabetical order."""
        return self.operators_with(FALLS_BACK, ALWAYS_ON_CPU)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Limitations of MPS that raise an error, such as ``"float64"``."""
        return _unique(row.limitation for row in self.rows if row.verdict == UNSUPPORTED)

    @property
    def problems(self) -> tuple[OperatorForecast, ...]:
        """Rows of operators that do not run natively on MPS, and of limitations."""
        return tuple(row for row in self.rows if row.verdict not in {NATIVE, COMPOSITE})

    @property
    def limits(self) -> str:
        """Limits of the prediction, as a sentence."""
        return LIMITATIONS

    @property
    def exit_code(self) -> int:
        """Exit code of a command: 1 if an operator falls back to the CPU or is not supported, else 0."""
        return int(bool(self.cpu_operators or self.unsupported))

    @property
    def verdict(self) -> str:
        """Prediction as one or more sentences."""
        problems = {
            "Not supported by MPS": self.unsupported,
            "Possibly incorrect on MPS": _unique(
                row.limitation for row in self.rows if row.verdict == MAY_BE_INCORRECT
            ),
            "Unknown support on MPS": self.operators_with(UNKNOWN),
        }
        details = [f"{problem}: {_join_names(names)}." for problem, names in problems.items() if names]
        count = len(self.operators)
        cpu_operators = self.cpu_operators
        if cpu_operators:
            fall = "falls" if len(cpu_operators) == 1 else "fall"
            operators = pluralize(count, "operator")
            summary = f"{len(cpu_operators)} of {operators} {fall} back to the CPU: {_join_names(cpu_operators)}."
        elif count <= 1:
            summary = "No operator falls back to the CPU."
        elif details:
            summary = f"None of {count} operators falls back to the CPU."
        else:
            summary = f"All {count} operators run on MPS."
        return " ".join([summary, *details])

    def operators_with(self, *verdicts: Classification) -> tuple[str, ...]:
        """Return the operators with one of the given classifications, in alphabetical order."""
        return _unique(row.operator for row in self.rows if row.verdict in verdicts)

    def to_report(self) -> Report:
        """Return the report: verdict, operators with problems by module, and counts by phase."""
        # The phases of one operator in one module are combined into one row.
        groups: dict[tuple[str, ...], list[OperatorForecast]] = {}
        for row in self.problems:
            key = (row.operator, row.verdict, str(row.module_location), row.reason, row.remedy)
            groups.setdefault(key, []).append(row)
        problem_rows = [
            (*key[:3], ", ".join(row.phase for row in group), ", ".join(str(row.count) for row in group), *key[3:])
            for key, group in groups.items()
        ]
        hidden = len(problem_rows) - MAX_ROWS
        omitted = (f"{hidden} more rows are in to_dict().",) if hidden > 0 else ()
        # The release and not the build, so that the texts of two builds are the same.
        release = ".".join(map(str, parse_release(self.torch)))
        source = f"Source: {self.source}, torch {release}."
        columns = ("operator", "on MPS", "module", "phase", "count", "reason", "suggested action")
        phases = []
        for phase in PHASES:
            calls = [row for row in self.rows if row.phase == phase and not row.limitation]
            called = {row.operator for row in calls}
            if called:
                num_calls = sum(row.count for row in calls)
                on_cpu = called.intersection(self.cpu_operators)
                phases.append((phase, str(num_calls), str(len(called)), str(len(on_cpu))))
        tables = (
            Table("Operators with problems on MPS", columns, tuple(problem_rows[:MAX_ROWS])),
            Table("Calls by phase", ("phase", "calls", "operators", "fall back to the CPU"), tuple(phases)),
        )
        sentences = (self.verdict, *self.notes, *omitted, source, LIMITATIONS)
        return Report(f"Forecast of {self.model} on MPS", sentences, tables, status=WARNING if self.exit_code else OK)

    # A forecast contains no measurements of the simulated device.
    SIMULATION_MARKERS = ("MPS is simulated; the forecast is not affected.", "")


def _join_names(names: tuple[str, ...]) -> str:
    """Join names with commas, at most ``MAX_NAMES`` of them."""
    num_omitted = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {num_omitted} more" if num_omitted > 0 else "")


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def build_rows(
    calls: Mapping[CallSite, int], limitations: Mapping[tuple[MpsLimitation, CallSite], int], table: OperatorTable
) -> tuple[OperatorForecast, ...]:
    """Classify recorded calls on MPS, worst first."""
    rows = []
    for (operator, phase, location), count in calls.items():
        verdict = table.classify(operator)
        name = table.named_by_mps(operator)
        reason = f"MPS names it {name}." if verdict == FALLS_BACK and name != operator else ""
        remedy = REMEDIES.get(operator, REMEDIES.get(verdict, ""))
        rows.append(OperatorForecast(operator, verdict, phase, location, count, "", reason, remedy))
    for (limitation, (operator, phase, location)), count in limitations.items():
        texts = (limitation.name, limitation.reason, limitation.remedy)
        rows.append(OperatorForecast(operator, limitation.verdict, phase, location, count, *texts))
    return tuple(sorted(rows, key=_order_row))


def _order_row(row: OperatorForecast) -> tuple[int, str, str, int, ModuleLocation]:
    return VERDICTS.index(row.verdict), row.limitation, row.operator, PHASES.index(row.phase), row.module_location


def forecast(
    model: Any = None, example_inputs: Any = None, training: bool = False, *, progress: bool = True
) -> Forecast:
    """Predict, on any machine, which operators of a model fall back from MPS to the CPU in the installed torch.

    A copy of the model runs on the CPU: one forward pass without gradients and, with ``training``, one training step (loss,
    backward pass, gradient clipping, AdamW). Its operators are compared with the list of MPS operators in torch
    (``native_functions.yaml``), or with the registered operators if torch was built with MPS. The model, its mode, its
    gradients and the random number generators stay unchanged. A training step needs about four times the memory of the model
    on the CPU.

    The forecast does not cover branches of the model's code on ``device.type``, the inside of custom C++ operators, and code
    generated by ``torch.compile``. For torch 2.13.0 and 2.14.1 the list equals the registrations in the macOS binaries.
    ``scripts/check_forecast.py`` also compares the forecast with torch's list of tests that fail on MPS.

    Args:
        model: A torch module, a pipeline, or the name of a model as for :func:`openmed_nb.load_pipeline`. If ``None``, use the
            bundled model.
        example_inputs: Inputs of the model: a tensor, a tuple of tensors, or a mapping of tensors or lists of numbers. With
            ``labels``, the loss of the model is traced, otherwise the sum of the means of its outputs. If ``None``, use two
            synthetic sentences, which requires a name or a pipeline.
        training: Whether to analyze a training step as well.
        progress: Whether to show the progress if the forecast takes longer than half a second.

    Returns:
        The forecast. ``verdict`` is a sentence, ``cpu_operators`` are the operators that fall back to the CPU, and
        ``unsupported`` are limitations of MPS, such as float64. There is a row for each operator, module and phase, with a
        count and a remedy. The ``verdict`` of a row is ``"native"``, ``"composite"``, ``"falls back to the CPU"``,
        ``"always on the CPU"``, ``"unsupported"``, ``"may be incorrect"`` or ``"unknown"``. The text is the same in every run.

    Raises:
        ConfigurationError: If ``model`` is not a model or cannot be copied, if example inputs are missing, or if the model
            fails with its example inputs on the CPU.
        TorchImportError: If the torch installation does not include the list of operators.

    Example:
        >>> import torch
        >>> class Quantile(torch.nn.Module):
        ...     def forward(self, fractions):
        ...         return torch.special.ndtri(fractions)
        >>> forecast(Quantile(), torch.rand(3)).cpu_operators
        ('aten::special_ndtri',)
    """
    check_bool("training", training)
    with SESSION.operation(progress):
        name = type(model).__name__
        if is_model_name(model):
            name = "bundled" if model is None else str(model)
            model = create_pipeline(SESSION, name, OpenMedConfig())
        table = operator_table()
        SESSION.notify(ProgressEvent("Forecasting", model_label(name)))
        module = get_module(model, "Pass a torch module, a pipeline, or the name of a model.")
        tokenizer = getattr(model, "tokenizer", None)
        if example_inputs is not None:
            example = parse_example_inputs(example_inputs)
        elif tokenizer is None or module is model:
            message = f"{short_type_name(model)} requires example inputs, because only a pipeline has a tokenizer to create them."
            remedy = "Pass example_inputs: a tensor, a tuple of tensors, or a mapping of them."
            raise ConfigurationError(message, remedy)
        else:
            example = _synthetic_example(module, tokenizer)
        import torch

        from .recorders import CallRecorder

        with TENSOR_LOCK, preserve_rng_states(), torch.inference_mode(mode=False):
            recorder = CallRecorder(table)
            # Each run uses a separate copy, because a step changes the weights.
            _trace_inference(_verified_copy(module, example), example.copy(), recorder)
            notes: tuple[str, ...] = (NO_TRAINING_NOTICE,)
            if training:
                notes = _trace_training(_verified_copy(module, example), example.copy(), recorder)
        inner = getattr(module, "_orig_mod", module)  # The module without torch.compile.
        rows = build_rows(recorder.calls, recorder.limitations, table)
        return Forecast(type(inner).__name__, table.torch, table.source, rows, notes, is_mps_simulated())
