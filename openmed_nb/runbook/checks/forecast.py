"""``nb.runbook.forecast``: prediction of the operators of a model that fall back to the CPU on MPS.

A copy of the model runs on the CPU with example inputs from the user or a tokenizer. ``recorders`` counts its operators.
``mps_operators.json`` has the operators that the macOS binaries of torch register for MPS, read by
``scripts/read_mps_registrations.py``. A torch that was built with MPS reports its own registrations.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..._events.activity import ProgressEvent
from ..._render.display import OK, WARNING, Displayable, Report, Table, pluralize
from ..._utils.text import describe_error, model_label, short_type_name
from ...annotation.loading import create_pipeline
from ...devices.backend import TENSOR_LOCK, import_torch, parse_release, preserve_rng_states
from ...devices.machine import is_mps_simulated
from ...devices.moving import copy_model, get_module
from ...errors import ConfigurationError
from ...models.config import OpenMedConfig
from ...models.registry import is_model_name
from ...session import SESSION
from ..bench.workloads import ModelInputs, parse_example_inputs

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Classification = Literal["native", "composite", "falls back to the CPU", "always on the CPU", "unknown"]

NATIVE: Final = "native"
COMPOSITE: Final = "composite"
FALLS_BACK: Final = "falls back to the CPU"
ALWAYS_ON_CPU: Final = "always on the CPU"
UNKNOWN: Final = "unknown"

TABLE_FILE = Path(__file__).with_name("mps_operators.json")

# Dispatch keys of composite kernels, in the order in which a device without a native kernel tries them.
COMPOSITE_KEYS = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")

# Operators that torch calls on the CPU, and for which MPS has a different kernel.
CPU_VARIANTS = frozenset(
    {
        "aten::convolution",  # Convolution.cpp selects the kernel by device.
        "aten::_convolution",
        "aten::mkldnn_rnn_layer",  # RNN.cpp uses oneDNN on the CPU and a separate kernel on MPS.
        "aten::_fused_sdp_choice",  # attention.cpp calls this on the CPU and on CUDA only.
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    }
)


@dataclass(frozen=True)
class OperatorTable:
    """Operators that MPS supports.

    Attributes:
        torch: Version of the installed torch.
        source: Source of the table.
        native: Operators with an MPS kernel, such as ``"aten::acos.out"``. Empty if torch itself reports them.
        always_cpu: Operators that MPS runs on the CPU even if fallback is disabled.
    """

    torch: str
    source: str
    native: frozenset[str]
    always_cpu: frozenset[str]

    def classify(self, operator: str) -> Classification:
        """Classify an operator, such as ``"aten::mode"``, that is called with an MPS tensor.

        Returns:
            One of these classifications:

            - ``"native"``: MPS has a kernel.
            - ``"composite"``: The operator consists of other operators, which are classified separately.
            - ``"falls back to the CPU"``: The operator falls back, or raises an error if fallback is disabled.
            - ``"always on the CPU"``: The operator runs on the CPU even if fallback is disabled.
            - ``"unknown"``: The operator is not part of torch.
        """
        if operator in self.always_cpu:
            return ALWAYS_ON_CPU
        if operator in self.native or operator in CPU_VARIANTS or has_kernel(operator, "MPS"):
            return NATIVE
        if any(has_kernel(operator, key) for key in COMPOSITE_KEYS):
            return COMPOSITE
        return FALLS_BACK if operator.startswith("aten::") else UNKNOWN

    def find_composite_key(self, operator: str) -> str:
        """Return the dispatch key of the kernel of a composite operator, or an empty string for another operator."""
        if self.classify(operator) != COMPOSITE:
            return ""
        return next(key for key in COMPOSITE_KEYS if has_kernel(operator, key))


def operator_table() -> OperatorTable:
    """Return the cached table of MPS operators, of the installed torch or of the nearest release in the file."""
    torch = import_torch()
    return _read_table(torch.__version__, torch.backends.mps.is_built() and not is_mps_simulated())


@functools.cache
def _read_table(version: str, built: bool) -> OperatorTable:
    tables = json.loads(TABLE_FILE.read_text("utf-8"))
    installed = parse_release(version)[:2]
    release = min(tables)
    for name in tables:  # In ascending order.
        if parse_release(name)[:2] <= installed:
            release = name
    always_cpu = frozenset(tables[release]["always_cpu"])
    if built:
        return OperatorTable(version, "registered operators of the installed torch", frozenset(), always_cpu)
    source = f"registered operators of torch {release} for macOS"
    return OperatorTable(version, source, frozenset(tables[release]["native"]), always_cpu)


def has_kernel(operator: str, key: str) -> bool:
    """Return whether the installed torch has a kernel of an operator for a dispatch key."""
    library = import_torch()._C  # noqa: SLF001 - torch has no public API for it
    if not library._dispatch_has_kernel(operator):  # noqa: SLF001
        return False
    return bool(library._dispatch_has_kernel_for_dispatch_key(operator, key))  # noqa: SLF001


# Synthetic texts of different lengths, so that the batch contains padding.
EXAMPLE_SENTENCES = ["Patient with type 2 diabetes mellitus.", "No asthma."]


def _synthetic_example(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ModelInputs:
    """Return a batch of two synthetic sentences for a transformers model."""
    from ...annotation.forward import input_names

    batch = tokenizer(EXAMPLE_SENTENCES, padding=True, return_tensors="pt")
    names = input_names(model, tuple(batch))
    return ModelInputs(kwargs={name: tensor for name, tensor in batch.items() if name in names})


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
        problem = f"The forward pass of {short_type_name(copied)} failed on the CPU"
        raise ConfigurationError(
            f"{problem}: {short_type_name(error)}: {describe_error(error)}.",
            "Check example_inputs. The model must run with them.",
        ) from error
    return copied


def _trace(model: Module, example: ModelInputs, table: OperatorTable) -> Mapping[tuple[str, str], int]:
    """Return the number of calls by operator and module in a forward pass without gradients.

    The pass runs in inference mode if the model supports it, because the kernels of MPS are selected below autograd.
    """
    import torch

    from .operator_tracer import OperatorTracer, trace_operators

    tracer = OperatorTracer(table.find_composite_key, model)
    try:
        with torch.inference_mode(), trace_operators(tracer):
            example(model)
    except RuntimeError:  # The model computes gradients itself, which inference mode does not support.
        tracer.calls.clear()
        with torch.no_grad(), trace_operators(tracer):
            example(model)
    return tracer.calls


# Classifications of an operator, worst first.
VERDICTS: tuple[Classification, ...] = (FALLS_BACK, ALWAYS_ON_CPU, UNKNOWN, COMPOSITE, NATIVE)

# Remedies by classification, or by operator if there is a specific one.
REMEDIES: Mapping[str, str] = {
    FALLS_BACK: "Use a different operator; without PYTORCH_ENABLE_MPS_FALLBACK=1 it raises an error.",
    ALWAYS_ON_CPU: "Use a different operator; each call waits for the GPU.",
    UNKNOWN: "This operator is not part of torch. Test it on a Mac.",
    "aten::embedding_renorm_": "Remove max_norm from the Embedding; each call waits for the GPU.",
}

# Limits of a run on the CPU.
LIMITATIONS = (
    "Not covered: training, limits of data types and shapes, device-dependent branches in the model's code, the inside of "
    "custom C++ operators, and code generated by torch.compile."
)


@dataclass(frozen=True)
class OperatorForecast:
    """Prediction for one operator in one module.

    Attributes:
        operator: Name of the operator, such as ``"aten::special_ndtri"``.
        verdict: Classification, one of ``VERDICTS``.
        module: Name and class of the module that calls the operator, such as ``"encoder.layer.0 (Layer)"``.
        count: Number of calls.
        remedy: Suggested action, or an empty string if none is necessary.
    """

    operator: str
    verdict: Classification
    module: str
    count: int
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
        rows: Operators, worst first.
        simulated: Whether a simulated MPS device was active.
    """

    model: str
    torch: str
    source: str
    rows: tuple[OperatorForecast, ...]
    simulated: bool = False

    JSON_PROPERTIES = ("verdict", "operators", "cpu_operators")

    @property
    def operators(self) -> tuple[str, ...]:
        """Operators that are called, in alphabetical order."""
        return self.operators_with(*VERDICTS)

    @property
    def cpu_operators(self) -> tuple[str, ...]:
        """Operators that fall back to the CPU or always run there, in alphabetical order."""
        return self.operators_with(FALLS_BACK, ALWAYS_ON_CPU)

    @property
    def problems(self) -> tuple[OperatorForecast, ...]:
        """Rows of operators that do not run natively on MPS."""
        return tuple(row for row in self.rows if row.verdict not in {NATIVE, COMPOSITE})

    @property
    def exit_code(self) -> int:
        """Exit code of a command: 1 if an operator falls back to the CPU, else 0."""
        return int(bool(self.cpu_operators))

    @property
    def verdict(self) -> str:
        """Prediction as one or more sentences."""
        unknown = self.operators_with(UNKNOWN)
        details = [f"Unknown support on MPS: {', '.join(unknown)}."] if unknown else []
        count = len(self.operators)
        cpu_operators = self.cpu_operators
        if cpu_operators:
            fall = "falls" if len(cpu_operators) == 1 else "fall"
            operators = pluralize(count, "operator")
            summary = f"{len(cpu_operators)} of {operators} {fall} back to the CPU: {', '.join(cpu_operators)}."
        elif count <= 1 or unknown:
            summary = "No operator falls back to the CPU."
        else:
            summary = f"All {count} operators run on MPS."
        return " ".join([summary, *details])

    def operators_with(self, *verdicts: Classification) -> tuple[str, ...]:
        """Return the operators with one of the given classifications, in alphabetical order."""
        return tuple(sorted({row.operator for row in self.rows if row.verdict in verdicts}))

    def to_report(self) -> Report:
        """Return the report: verdict, and operators with problems by module."""
        problem_rows = [(row.operator, row.verdict, row.module, str(row.count), row.remedy) for row in self.problems]
        # The release and not the build, so that the texts of two builds are the same.
        release = ".".join(map(str, parse_release(self.torch)))
        source = f"Source: {self.source}; torch {release} is installed."
        columns = ("operator", "on MPS", "module", "count", "suggested action")
        table = Table("Operators with problems on MPS", columns, tuple(problem_rows))
        sentences = (self.verdict, source, LIMITATIONS)
        return Report(f"Forecast of {self.model} on MPS", sentences, (table,), status=WARNING if self.exit_code else OK)

    # A forecast contains no measurements of the simulated device.
    SIMULATION_MARKERS = ("MPS is simulated; the forecast is not affected.", "")


def build_rows(calls: Mapping[tuple[str, str], int], table: OperatorTable) -> tuple[OperatorForecast, ...]:
    """Classify the calls of operators in modules on MPS, worst first."""
    rows = []
    for (operator, module), count in calls.items():
        verdict = table.classify(operator)
        remedy = REMEDIES.get(operator, REMEDIES.get(verdict, ""))
        rows.append(OperatorForecast(operator, verdict, module, count, remedy))
    return tuple(sorted(rows, key=lambda row: (VERDICTS.index(row.verdict), row.operator, row.module)))


def forecast(model: Any = None, example_inputs: Any = None) -> Forecast:
    """Predict, on any machine, which operators of a model fall back from MPS to the CPU in the installed torch.

    A copy of the model runs one forward pass without gradients on the CPU. Its operators are compared with those that the
    macOS binaries of torch 2.13 and 2.14 register, or with the registered operators if torch was built with MPS. For another
    release, the forecast uses the nearest one and names it. The model and the random number generators stay unchanged.

    The forecast does not cover training, limits of data types and shapes, branches of the model's code on ``device.type``,
    the inside of custom C++ operators, and code generated by ``torch.compile``.

    Args:
        model: A torch module, a pipeline, or the name of a model as for :func:`openmed_nb.load_pipeline`. If ``None``, use the
            bundled model.
        example_inputs: Inputs of the model: a tensor, a tuple of tensors, or a mapping of tensors. If ``None``, use two
            synthetic sentences, which requires a name or a pipeline.

    Returns:
        The forecast. ``verdict`` is a sentence, and ``cpu_operators`` are the operators that fall back to the CPU. There is a
        row for each operator and module, with a count and a remedy. The ``verdict`` of a row is ``"native"``,
        ``"composite"``, ``"falls back to the CPU"``, ``"always on the CPU"`` or ``"unknown"``. The text is the same in every
        run.

    Raises:
        ConfigurationError: If ``model`` is not a model or cannot be copied, if example inputs are missing, or if the model
            fails with its example inputs on the CPU.

    Example:
        >>> import torch
        >>> class Quantile(torch.nn.Module):
        ...     def forward(self, fractions):
        ...         return torch.special.ndtri(fractions)
        >>> forecast(Quantile(), torch.rand(3)).cpu_operators
        ('aten::special_ndtri.out',)
    """
    with SESSION.operation():
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
            raise ConfigurationError(
                f"{short_type_name(model)} requires example inputs, because only a pipeline has a tokenizer to create them.",
                "Pass example_inputs: a tensor, a tuple of tensors, or a mapping of them.",
            )
        else:
            example = _synthetic_example(module, tokenizer)
        import torch

        with TENSOR_LOCK, preserve_rng_states(), torch.inference_mode(mode=False):
            calls = _trace(_verified_copy(module, example), example.copy(), table)
        inner = getattr(module, "_orig_mod", module)  # The module without torch.compile.
        rows = build_rows(calls, table)
        return Forecast(type(inner).__name__, table.torch, table.source, rows, is_mps_simulated())
