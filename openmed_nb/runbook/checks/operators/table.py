"""Classification of operators on MPS in the installed torch, and limitations of MPS.

torch generates its operators from ``native_functions.yaml``, which every build contains. An operator is native if its
``dispatch`` entry names MPS, or that of the operator it delegates to. For torch 2.13 the result equals the 890 registrations in
the macOS binary (read by ``scripts/read_mps_registrations.py``).

MPS also does not support some dtypes, shapes and options of operators that it has. Each such limitation is one row of a table,
with the error message of MPS (torch 2.13). Some limitations can be detected from the operator, others only from the Python
function: below autograd, a linear layer is already a matrix product.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypedDict

from ...._events.activity import IMPORTING, ProgressEvent
from ...._render.display import JsonMixin
from ....devices.backend import import_torch, parse_release, reinstall_remedy
from ....devices.machine import is_mps_simulated
from ....errors import TorchImportError
from ....session import SESSION

if TYPE_CHECKING:
    import torch

Classification = Literal[
    "native",
    "composite",
    "falls back to the CPU",
    "always on the CPU",
    "unknown",
    "unsupported",
    "may be incorrect",
]
Phase = Literal["inference", "forward", "backward", "optimizer", "elsewhere"]

NATIVE: Final = "native"
COMPOSITE: Final = "composite"
FALLS_BACK: Final = "falls back to the CPU"
ALWAYS_ON_CPU: Final = "always on the CPU"
UNKNOWN: Final = "unknown"
UNSUPPORTED: Final = "unsupported"
MAY_BE_INCORRECT: Final = "may be incorrect"

# Phases in the order of the report: a forward pass without gradients, and the three phases of a training step.
PHASES: tuple[Phase, ...] = ("inference", "forward", "backward", "optimizer")


@dataclass(frozen=True, order=True)
class ModuleLocation:
    """Location in a model.

    Attributes:
        module: Name of the module, such as ``"encoder.layer.0"``, or an empty string for the model itself and outside it.
        kind: Class name of the module, or an empty string outside modules.
    """

    module: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.module} ({self.kind})".strip() if self.kind else ""


class ModuleRow(JsonMixin):
    """A row of a report about one module. Its JSON has ``module`` and ``class`` instead of ``module_location``."""

    JSON_FLATTEN: ClassVar[Mapping[str, Mapping[str, str]]] = {"module_location": {"module": "module", "class": "kind"}}


class CallSite(NamedTuple):
    """Operator such as ``"aten::addmm"``, phase, and module that was running."""

    operator: str
    phase: Phase
    module_location: ModuleLocation


# Dispatch keys of composite kernels, in the order in which a device without a native kernel tries them.
COMPOSITE_KEYS = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")

# Operators that MPS runs on the CPU even if fallback is disabled, by first torch version (end of MPSFallback.mm).
_RENORM = frozenset({"aten::embedding_renorm_"})
_SINGULAR_VALUES = _RENORM | {"aten::linalg_svd", "aten::linalg_svd.U"}
ALWAYS_CPU_SINCE = (
    ((2, 14), _RENORM),
    ((2, 8), _SINGULAR_VALUES),
    ((2, 6), _SINGULAR_VALUES | {"aten::col2im", "aten::upsample_nearest3d.vec"}),
)

# Operators that torch calls on the CPU but not on MPS, and the MPS operator, or an empty string if there is none.
DEVICE_SWITCHES: Mapping[str, str] = {
    # Convolution.cpp selects the kernel by device.
    "aten::convolution": "aten::_mps_convolution",
    "aten::_convolution": "aten::_mps_convolution",
    "aten::convolution_backward": "aten::mps_convolution_backward",
    # RNN.cpp uses oneDNN on the CPU and a separate kernel on MPS.
    "aten::mkldnn_rnn_layer": "aten::_lstm_mps",
    "aten::mkldnn_rnn_layer_backward": "aten::lstm_mps_backward",
    # attention.cpp calls the first operator on the CPU and on CUDA only, and selects the kernel by device. With gradients,
    # attention on MPS consists of matrix products and a softmax.
    "aten::_fused_sdp_choice": "",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "",
}


@dataclass(frozen=True)
class OperatorTable:
    """Operators that MPS supports.

    Attributes:
        torch: Version of torch.
        source: Source of the table.
        native: Operators with an MPS kernel, such as ``"aten::acos.out"``.
        delegates: Operators that others delegate to, such as ``"aten::acos"`` to ``"aten::acos.out"``.
        always_cpu: Operators that MPS runs on the CPU even if fallback is disabled.
    """

    torch: str
    source: str
    native: frozenset[str]
    delegates: Mapping[str, str]
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
        if operator in DEVICE_SWITCHES:
            return NATIVE
        if operator in self.always_cpu:
            return ALWAYS_ON_CPU
        delegate = self.delegates.get(operator, operator)
        if any(name in self.native or has_kernel(name, "MPS") for name in (operator, delegate)):
            return NATIVE
        if composite_key(delegate):
            return COMPOSITE
        return FALLS_BACK if operator.startswith("aten::") else UNKNOWN

    def named_by_mps(self, operator: str) -> str:
        """Return the name of an operator in messages of MPS, which is that of the operator it delegates to."""
        return operator if operator in self.always_cpu else self.delegates.get(operator, operator)


def operator_table() -> OperatorTable:
    """Return the cached table of MPS operators in the installed torch.

    If torch was built with MPS, the table contains the registered kernels, and ``native_functions.yaml`` provides the names only.
    """
    torch = import_torch()
    return _read_table(torch.__version__, torch.backends.mps.is_built() and not is_mps_simulated())


@functools.cache
def _read_table(version: str, built: bool) -> OperatorTable:
    # Reading YAML holds the GIL, so the progress must be shown before it starts.
    SESSION.notify(ProgressEvent(IMPORTING, "torch's list of operators"))
    functions = read_functions(functions_file(version))
    source = "native_functions.yaml of the installed torch"
    native = native_operators(functions, "MPS")
    if built:
        source = "registered operators of the installed torch"
        native = frozenset(name for name in functions if has_kernel(name, "MPS"))
    return OperatorTable(version, source, native, _parse_delegates(functions), always_cpu_operators(version))


def functions_file(version: str) -> Path:
    """Return the path of torch's list of operators."""
    spec = importlib.util.find_spec("torchgen")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder) / "packaged" / "ATen" / "native" / "native_functions.yaml"
        if file.is_file():
            return file
    message = (
        f"torch {version} does not include its list of operators, torchgen/packaged/ATen/native/native_functions.yaml."
    )
    raise TorchImportError(message, reinstall_remedy(version))


class FunctionEntry(TypedDict, total=False):
    """Entry of torch's list of operators, without the keys that are not read."""

    func: str
    structured_delegate: str
    dispatch: dict[str, str]


def read_functions(file: Path) -> dict[str, FunctionEntry]:
    """Return the entries of torch's list by operator name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The C implementation is sixty times as fast.
    entries = yaml.load(file.read_text("utf-8"), Loader=loader)  # noqa: S506 - both loaders are safe
    return {f"aten::{entry['func'].partition('(')[0]}": entry for entry in entries}


def _parse_delegates(functions: Mapping[str, FunctionEntry]) -> dict[str, str]:
    delegates = ((name, entry.get("structured_delegate")) for name, entry in functions.items())
    return {name: f"aten::{delegate}" for name, delegate in delegates if delegate}


def native_operators(functions: Mapping[str, FunctionEntry], key: str) -> frozenset[str]:
    """Return the operators that have a kernel for a dispatch key, such as ``"MPS"``, according to torch's list."""
    registered = {
        name
        for name, entry in functions.items()
        for keys in entry.get("dispatch", {})  # Several keys may share a kernel: "CPU, MPS".
        if key in keys.replace(" ", "").split(",")
    }
    delegating = {name for name, delegate in _parse_delegates(functions).items() if delegate in registered}
    return frozenset(registered | delegating)


def composite_key(operator: str) -> str:
    """Return the dispatch key of the composite kernel of an operator, or an empty string if there is none."""
    return next((key for key in COMPOSITE_KEYS if has_kernel(operator, key)), "")


def has_kernel(operator: str, key: str) -> bool:
    """Return whether torch has a kernel of an operator for a dispatch key."""
    library = import_torch()._C  # noqa: SLF001 - torch has no public API for it
    if not library._dispatch_has_kernel(operator):  # noqa: SLF001
        return False
    return bool(library._dispatch_has_kernel_for_dispatch_key(operator, key))  # noqa: SLF001


def always_cpu_operators(version: str) -> frozenset[str]:
    """Return the operators that MPS always runs on the CPU, in a version of torch."""
    release = parse_release(version)[:2]
    return next((names for since, names in ALWAYS_CPU_SINCE if release >= since), ALWAYS_CPU_SINCE[-1][1])


@dataclass(frozen=True)
class MpsLimitation:
    """Limitation of MPS that affects a call.

    Attributes:
        name: Short name, such as ``"float64"``.
        reason: Error message or behavior of MPS, with its source.
        remedy: Suggested action, as a sentence.
        verdict: ``"unsupported"``, ``"may be incorrect"`` or ``"unknown"``.
    """

    name: str
    reason: str
    remedy: str
    verdict: Classification = UNSUPPORTED


FLOAT64 = MpsLimitation(
    "float64",
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64 (EmptyTensor.cpp).",
    "Use float32: pass dtype=torch.float32, or call .float().",
)
DIMENSIONS = MpsLimitation(
    "more than 16 dimensions",
    "MPS supports tensors with dimensions <= 16 (binary of torch 2.13.0).",
    "Reshape the tensor to fewer dimensions.",
)
ELEMENTS = MpsLimitation(
    "more than 2**31 elements",
    "Some MPS kernels use 32-bit indices and silently return incorrect results (pytorch#188756, #189960).",
    "Use a smaller batch or shorter texts.",
    MAY_BE_INCORRECT,
)
ADAPTIVE_POOL = MpsLimitation(
    "adaptive pooling to sizes that do not divide the input",
    "Adaptive pool MPS: input sizes must be divisible by output sizes (pytorch#96056).",
    "Use an output size that divides the input size, or pool on the CPU.",
)
INTEGER_CONVOLUTION = MpsLimitation(
    "integer convolution",
    "MPS does not support integer convolution (torch/testing/_internal/common_mps.py).",
    "Convert the input with .float() first.",
)
INTEGER_LINEAR = MpsLimitation(
    "integer linear layer",
    "MPS device does not support linear for non-float inputs (binary of torch 2.13.0).",
    "Convert the input with .float() first.",
)
LSTM_PROJECTION = MpsLimitation(
    "LSTM with a projection",
    "LSTM with projections is not currently supported with MPS (binary of torch 2.13.0).",
    "Remove proj_size, and add a Linear after the LSTM.",
)
ATTENTION_DROPOUT = MpsLimitation(
    "attention with dropout but without gradients",
    "scaled_dot_product_attention for MPS does not support dropout (Attention.mm).",
    "Disable dropout if no gradients are required (model.eval()), or load the model with attn_implementation='eager'.",
)
NOT_DENSE = MpsLimitation(
    "sparse and nested tensors",
    "MPS has only a few kernels for these tensors (SparseMPS in native_functions.yaml).",
    "Convert with .to_dense() or .to_padded_tensor(), or test it on a Mac.",
    UNKNOWN,
)


# Arguments of an operator or a torch function by the names in its rule.
Arguments = Mapping[str, Any]


def _is_integer(arguments: Arguments) -> bool:
    tensor = arguments["input"]
    return not (tensor.is_floating_point() or tensor.is_complex())


def _has_uneven_windows(arguments: Arguments) -> bool:
    """Return whether pooling windows differ in size, or one dimension grows while the other shrinks."""
    sizes = zip(arguments["input"].shape[-2:], arguments["output_size"], strict=True)
    return _scales_in_both_directions(arguments) or any(max(pair) % min(pair) for pair in sizes if all(pair))


def _scales_in_both_directions(arguments: Arguments) -> bool:
    sizes = zip(arguments["input"].shape[-2:], arguments["output_size"], strict=True)
    changes = [input_size - output_size for input_size, output_size in sizes]
    return bool(min(changes) < 0 < max(changes))


def _has_projection(arguments: Arguments) -> bool:
    """Return whether an LSTM has a projection, so that its hidden state is smaller than its cell state."""
    # The position of the states differs for packed sequences.
    pairs = (value for value in arguments.values() if isinstance(value, (tuple, list)) and len(value) == 2)  # noqa: PLR2004
    states = next(pairs, None)
    return states is not None and bool(states[0].shape[-1] != states[1].shape[-1])


def _has_dropout_without_gradients(arguments: Arguments) -> bool:
    import torch

    inputs = (arguments[name] for name in ("query", "key", "value"))
    needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return bool(arguments.get("dropout_p", 0.0)) and not needs_gradients


# Limitation, names of the first parameters, and a function that returns whether the limitation applies.
Rules = Mapping[str, tuple[MpsLimitation, tuple[str, ...], Callable[[Arguments], bool]]]

# Limitations that can be detected from an operator and its arguments.
OPERATOR_RULES: Rules = {
    "aten::convolution": (INTEGER_CONVOLUTION, ("input",), _is_integer),
    "aten::_adaptive_avg_pool2d": (ADAPTIVE_POOL, ("input", "output_size"), _has_uneven_windows),
    "aten::adaptive_max_pool2d": (ADAPTIVE_POOL, ("input", "output_size"), _scales_in_both_directions),
}

# Limitations that can be detected from a torch function and its arguments.
FUNCTION_RULES: Rules = {
    "linear": (INTEGER_LINEAR, ("input",), _is_integer),
    "lstm": (LSTM_PROJECTION, ("input", "batch_sizes", "hx"), _has_projection),
    "scaled_dot_product_attention": (
        ATTENTION_DROPOUT,
        ("query", "key", "value", "attn_mask", "dropout_p"),
        _has_dropout_without_gradients,
    ),
}


def find_limitation(
    rules: Rules, name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[MpsLimitation]:
    """Return the limitation of a call according to ``rules``, apart from general dtypes and shapes."""
    if name not in rules:
        return []
    limitation, parameters, applies = rules[name]
    return [limitation] if applies({**dict(zip(parameters, args, strict=False)), **kwargs}) else []


def find_shape_limitation(tensors: Iterable[torch.Tensor]) -> list[MpsLimitation]:
    """Return the limitations of MPS for the shapes of dense tensors."""
    shapes = [tensor.shape for tensor in tensors if not tensor.is_nested]
    limitations = []
    if any(len(shape) > 16 for shape in shapes):  # noqa: PLR2004 - the limit of MPS
        limitations.append(DIMENSIONS)
    if any(shape.numel() > 2**31 for shape in shapes):
        limitations.append(ELEMENTS)
    return limitations
