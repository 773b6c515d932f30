"""``nb.runbook.forecast``: which operators of a model would leave MPS for the CPU, predicted on any computer.

A copy of the model runs on the CPU, with example inputs as a person or a tokenizer gives them; ``recorders`` sees what it
calls, and ``table`` knows what becomes of that on MPS.
"""

from __future__ import annotations

from collections import Counter
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
    BACKWARD,
    COMPOSITE,
    FALLS_BACK,
    FLOAT64,
    FORWARD,
    INFERENCE,
    MAY_BE_WRONG,
    NATIVE,
    NOT_KNOWN,
    OPTIMIZER,
    PHASES,
    REFUSED,
    CallSite,
    ModuleLocation,
    ModuleRow,
    MpsLimitation,
    OperatorTable,
    operator_table,
)

if TYPE_CHECKING:
    import torch

    from .recorders import CallRecorder

# Synthetic texts of two lengths, so that the batch has padding.
EXAMPLE_SENTENCES = ("Patient with type 2 diabetes mellitus.", "No asthma.")


def synthetic_example(model: Any, tokenizer: Any) -> ModelInputs:
    """Return a batch of two synthetic sentences as a model of transformers takes them, with labels if it takes those."""
    import torch

    from ....annotation.forward import accepted_arguments, input_names

    batch = dict(tokenizer(list(EXAMPLE_SENTENCES), padding=True, return_tensors="pt"))
    names = input_names(model, tuple(batch))
    kwargs = {name: tensor for name, tensor in batch.items() if name in names}
    if "labels" in (accepted_arguments(type(model).forward) or ()):
        kwargs["labels"] = torch.zeros_like(batch["input_ids"])
    return ModelInputs(kwargs=kwargs)


def trace(
    model: torch.nn.Module, example: ModelInputs, table: OperatorTable, training: bool
) -> tuple[CallRecorder, tuple[str, ...]]:
    """Return what a copy of a model calls on the CPU, and what was not traced; the model and random numbers stay."""
    import torch

    from .recorders import CallRecorder

    with TENSOR_LOCK, preserve_rng_states(), torch.inference_mode(mode=False):
        record = CallRecorder(table)
        # Each run has a copy of its own: a step changes its numbers.
        _trace_inference(_verified_copy(model, example), example.copied(), record)
        if not training:
            return record, (NO_TRAINING_NOTICE,)
        return record, _trace_training(_verified_copy(model, example), example.copied(), record)


def _verified_copy(model: torch.nn.Module, example: ModelInputs) -> torch.nn.Module:
    """Return a copy that ran once while nobody watched: what fails then is the model's own error, and lazy weights have shapes."""
    import torch

    copied = copy_model(model).eval()
    try:
        with torch.no_grad():
            example.copied()(copied)
    except Exception as error:  # The code of any model can raise anything; the person reads it.
        remedy = "Check example_inputs: the model must run with them."
        raise _failed("The forward pass", copied, error, remedy) from error
    return copied


def _failed(what: str, model: torch.nn.Module, error: Exception, remedy: str) -> ConfigurationError:
    where = f"{what} of {short_type_name(model)} failed on the CPU"
    return ConfigurationError(f"{where}: {short_type_name(error)}: {describe_error(error)}.", remedy)


def _trace_inference(model: torch.nn.Module, example: ModelInputs, record: CallRecorder) -> None:
    """Trace a pass without gradients, below autograd if the model can run so: there, MPS's own choice is seen."""
    import torch

    from .recorders import record_calls

    record.phase = INFERENCE
    for name, place in _float64_tensors(model, example, record):
        record.record_limitation(name, [FLOAT64], place)
    calls = Counter(record.calls)
    refusals = Counter(record.refusals)
    try:
        with torch.inference_mode(), record_calls(record, model):
            example(model)
    except RuntimeError:  # The model computes gradients of its own, which inference mode forbids.
        record.calls = calls
        record.refusals = refusals
        with torch.no_grad(), record_calls(record, model):
            example(model)


def _trace_training(model: torch.nn.Module, example: ModelInputs, record: CallRecorder) -> tuple[str, ...]:
    """Trace a training step with attention taken apart, as on MPS when gradients are needed; return what was not traced."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from .recorders import record_calls

    _float64_tensors(model, example, record)
    if not any(parameter.requires_grad for parameter in model.train().parameters()):
        return ("No training step: no parameter of the model needs gradients.",)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            with record_calls(record, model):
                return _step(model, example, record)
        except Exception:
            try:
                _step(model, example, record)
            except Exception as error:  # It is the model's own.
                remedy = "Check example_inputs, or pass training=False."
                raise _failed("A training step", model, error, remedy) from error
            raise


def _step(model: torch.nn.Module, example: ModelInputs, record: CallRecorder) -> tuple[str, ...]:
    """Take a training step; MPS is not in ``torch.utils._foreach_utils``, so that parameters are clipped and changed one by one."""
    import torch

    record.phase = FORWARD
    output = example(model)
    loss = loss_or_mean(output)
    if loss is None:
        nothing = "no tensor was found that depends on the parameters in what the model returns"
        return (f"No training step: {nothing}, a {short_type_name(output)}.",)
    record.phase = BACKWARD
    loss.backward()
    record.phase = OPTIMIZER
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
    torch.optim.AdamW(parameters, foreach=False, fused=False).step()
    return ()


def _float64_tensors(
    model: torch.nn.Module, example: ModelInputs, record: CallRecorder
) -> list[tuple[str, ModuleLocation]]:
    """Return the tensors of a model, and of its inputs, of a type that MPS does not have, and let the record know them."""
    from .recorders import UNSUPPORTED_DTYPES

    wide: list[tuple[str, ModuleLocation]] = []

    def look_at(kind: str, tensors: Iterable[tuple[str, torch.Tensor]], place: ModuleLocation) -> None:
        for name, tensor in tensors:
            if tensor.dtype in UNSUPPORTED_DTYPES:
                record.wide[tensor] = True
                wide.append((f"{kind} {name}", place))

    for path, module in model.named_modules():
        place = ModuleLocation(path, type(module).__name__)
        look_at("parameter", module.named_parameters(recurse=False), place)
        look_at("buffer", module.named_buffers(recurse=False), place)
    look_at("example input", named_tensors(example.tensors), ModuleLocation())
    return wide


# What can become of an operator, the worst first.
VERDICTS = (REFUSED, FALLS_BACK, ALWAYS_ON_CPU, MAY_BE_WRONG, NOT_KNOWN, COMPOSITE, NATIVE)

# What to do about a verdict, and about one operator for which more is known.
REMEDIES: Mapping[str, str] = {
    FALLS_BACK: "Compute it another way; without PYTORCH_ENABLE_MPS_FALLBACK=1 it is an error.",
    ALWAYS_ON_CPU: "Compute it another way; each call waits for the GPU.",
    NOT_KNOWN: "It is not one of torch's own: try it on a Mac.",
    "aten::embedding_renorm_": "Leave max_norm out of the Embedding: each call waits for the GPU.",
}

# What no run on the CPU can show.
LIMITATIONS = (
    "Not seen: branches of the model's own code on the type of the device, the inside of operators that others wrote "
    "in C++, and what torch.compile makes."
)

# What is said of a forecast without training.
NO_TRAINING_NOTICE = "A training step was not looked at: training=True looks at one too."

SHOWN_ROWS = 20
SHOWN_NAMES = 6


@dataclass(frozen=True)
class OperatorForecast(ModuleRow):
    """What becomes of an operator, in one module and one phase.

    Attributes:
        operator: As it is called, such as ``"aten::special_ndtri"``; of what is refused also a function of torch, such as
            ``"linear"``, or a tensor, such as ``"buffer scale"``.
        verdict: One of ``VERDICTS``.
        phase: ``"inference"``, ``"forward"``, ``"backward"`` or ``"optimizer"``.
        place: The module that calls it; empty in the backward pass and in the optimizer.
        count: How often it is called.
        refusal: What MPS refuses, such as ``"float64"``; empty if it is the operator that counts.
        reason: In the words of MPS, or how MPS names the operator in its messages if that is another name.
        remedy: One thing to do; empty if nothing needs to be done.
    """

    operator: str
    verdict: str
    phase: str
    module_location: ModuleLocation
    count: int
    limitation: str = ""
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class Forecast(Displayable):
    """What becomes of every operator of a model on MPS, in the installed torch.

    It stands on a run on the CPU. Not seen are branches of the model's own code on ``device.type``, the inside of
    operators that others wrote in C++, and what ``torch.compile`` makes.

    Attributes:
        model: The name of the model's class.
        torch: The version of torch.
        source: Where it was read what MPS has.
        rows: The operators, and what is refused, the worst first.
        notes: What was not traced, as sentences.
        simulated: Whether a simulated MPS device was on.
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
        """The different operators that are called, in alphabetical order."""
        return _unique(row.operator for row in self.rows if not row.limitation)

    @property
    def cpu_operators(self) -> tuple[str, ...]:
        """The different operators that fall back to the CPU, or are always computed there."""
        return self.operators_with(FALLS_BACK, ALWAYS_ON_CPU)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """What MPS refuses, such as ``"float64"``."""
        return _unique(row.limitation for row in self.rows if row.verdict == REFUSED)

    @property
    def problems(self) -> tuple[OperatorForecast, ...]:
        """The rows of all that does not simply run on MPS."""
        return tuple(row for row in self.rows if row.verdict not in {NATIVE, COMPOSITE})

    @property
    def limits(self) -> str:
        """What no run on the CPU can show, in a sentence."""
        return LIMITATIONS

    @property
    def exit_code(self) -> int:
        """The status that a command ends with: 1 if an operator leaves MPS, or MPS refuses something."""
        return int(bool(self.cpu_operators or self.unsupported))

    @property
    def verdict(self) -> str:
        """The forecast in a sentence or a few."""
        more = {
            "MPS refuses": self.unsupported,
            "MPS may be wrong with": _unique(row.limitation for row in self.rows if row.verdict == MAY_BE_WRONG),
            "It is not known whether MPS has": self.operators_with(NOT_KNOWN),
        }
        others = [f"{words} {_join_names(names)}." for words, names in more.items() if names]
        count = len(self.operators)
        leaving = self.cpu_operators
        if leaving:
            leave = "leaves" if len(leaving) == 1 else "leave"
            first = f"{len(leaving)} of {pluralize(count, 'operator')} {leave} MPS: {_join_names(leaving)}."
        elif count <= 1:
            first = "No operator leaves MPS."
        elif others:
            first = f"None of {count} operators leaves MPS."
        else:
            first = f"Every one of {count} operators runs on MPS."
        return " ".join([first, *others])

    def operators_with(self, *verdicts: str) -> tuple[str, ...]:
        """Return the different operators of some verdicts, in alphabetical order."""
        return _unique(row.operator for row in self.rows if row.verdict in verdicts)

    def to_report(self) -> Report:
        """Return what there is to show: the verdict, what leaves MPS and where, and the counts of each phase."""
        # Rows of one operator in one module stand together, whatever the phase.
        groups: dict[tuple[str, ...], list[OperatorForecast]] = {}
        for row in self.problems:
            groups.setdefault((row.operator, row.verdict, str(row.module_location), row.reason, row.remedy), []).append(row)
        troubles = [
            (*key[:3], ", ".join(row.phase for row in group), ", ".join(str(row.count) for row in group), *key[3:])
            for key, group in groups.items()
        ]
        hidden = len(troubles) - SHOWN_ROWS
        more = (f"{hidden} more rows are in to_dict().",) if hidden > 0 else ()
        release = ".".join(
            map(str, parse_release(self.torch))
        )  # Not the build, so that texts of two builds are the same.
        about = f"Read in {self.source}, for torch {release}."
        columns = ("operator", "on MPS", "module", "phase", "times", "why", "what to do")
        phases = []
        for phase in PHASES:
            calls = [row for row in self.rows if row.phase == phase and not row.limitation]
            called = {row.operator for row in calls}
            if called:
                times = sum(row.count for row in calls)
                phases.append((phase, str(times), str(len(called)), str(len(called.intersection(self.cpu_operators)))))
        tables = (
            Table("What does not simply run on MPS", columns, tuple(troubles[:SHOWN_ROWS])),
            Table("What the model calls", ("phase", "calls", "operators", "leave MPS"), tuple(phases)),
        )
        sentences = (self.verdict, *self.notes, *more, about, LIMITATIONS)
        return Report(f"Forecast of {self.model} on MPS", sentences, tables, status=WARNING if self.exit_code else OK)

    # Nothing in a forecast is measured on the simulated device.
    SIMULATION_MARKERS = ("SIMULATED MPS is on; the forecast does not depend on it.", "")


def _join_names(names: tuple[str, ...]) -> str:
    """Return names with commas between them, only the first few of many."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names)))


def build_rows(
    calls: Mapping[CallSite, int], refusals: Mapping[tuple[MpsLimitation, CallSite], int], table: OperatorTable
) -> tuple[OperatorForecast, ...]:
    """Return what becomes of everything that a model called, given how often it called it; the worst first."""
    rows = []
    for (operator, phase, place), count in calls.items():
        verdict = table.classify(operator)
        name = table.named_by_mps(operator)
        reason = f"MPS names it {name}." if verdict == FALLS_BACK and name != operator else ""
        remedy = REMEDIES.get(operator, REMEDIES.get(verdict, ""))
        rows.append(OperatorForecast(operator, verdict, phase, place, count, "", reason, remedy))
    for (why, (operator, phase, place)), count in refusals.items():
        rows.append(OperatorForecast(operator, why.verdict, phase, place, count, why.name, why.reason, why.remedy))

    def order(row: OperatorForecast) -> tuple[Any, ...]:
        return VERDICTS.index(row.verdict), row.limitation, row.operator, PHASES.index(row.phase), row.module_location

    return tuple(sorted(rows, key=order))


def forecast(
    model: Any = None, example_inputs: Any = None, training: bool = False, *, progress: bool = True
) -> Forecast:
    """Predict, on any computer, which operators of a model would leave MPS for the CPU in the installed torch.

    A copy of the model runs on the CPU: one pass without gradients and, with ``training``, one training step (loss, backward
    pass, clipped gradients, AdamW). What it calls is compared with torch's own list of what MPS has,
    ``native_functions.yaml``, or with the registrations of a torch that was built with MPS. The model, its mode, its
    gradients and random numbers stay as they are, wherever it is. In the training step, the CPU's memory holds about four
    times the model.

    Args:
        model: A torch module; a pipeline; or the name of a model, as for :func:`openmed_nb.load_pipeline`, ``None`` for the
            bundled one.
        example_inputs: What the model is called with: a tensor, a tuple of tensors, or a mapping of tensors or lists of
            numbers. With ``labels``, the model's own loss is traced, and otherwise the sum of the means of its outputs.
            ``None`` takes two synthetic sentences for a name and for a pipeline.
        training: Whether to look at a training step too.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        The forecast: ``verdict``, a sentence; ``leaving``, the operators that leave MPS; ``refused``, what MPS refuses,
        such as float64; and ``rows``, for each operator, module and phase: ``verdict`` (``"native"``, ``"composite"``,
        ``"falls back to the CPU"``, ``"always on the CPU"``, ``"refused"``, ``"may be wrong"`` or ``"not known"``), the
        count, and what to do. Its text is the same in every run.

    Raises:
        ConfigurationError: For anything that is not a model, without example inputs that are needed, for a model that
            cannot be copied, and if the model itself fails with its example inputs on the CPU.
        TorchImportError: If torch came without its list of operators.

    It cannot see branches of the model's own code on ``device.type``, the inside of operators that others wrote in C++, nor
    what ``torch.compile`` makes. For torch 2.13.0 and 2.14.1 the list is exactly what their macOS binaries register
    (``scripts/check_forecast.py`` also counts how often torch's own list of what fails on MPS is met).

    Example:
        >>> import torch
        >>> class Scores(torch.nn.Module):
        ...     def forward(self, shares):
        ...         return torch.special.ndtri(shares)
        >>> forecast(Scores(), torch.rand(3)).cpu_operators
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
            what = f"{short_type_name(model)} needs example inputs: only a pipeline has a tokenizer to make them with."
            raise ConfigurationError(what, "Pass example_inputs: a tensor, a tuple of tensors, or a mapping of them.")
        else:
            example = synthetic_example(module, tokenizer)
        inner = getattr(module, "_orig_mod", module)  # What torch.compile was given.
        record, notes = trace(module, example, table, training)
        rows = build_rows(record.calls, record.refusals, table)
        return Forecast(type(inner).__name__, table.torch, table.source, rows, notes, is_mps_simulated())
