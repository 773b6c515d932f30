"""What MPS has in the installed torch, what becomes of the other operators, and which calls MPS refuses.

torch's own list says what MPS has: ``native_functions.yaml``, from which its operators are generated, and which comes with
every build. An operator is native if its own ``dispatch`` names MPS, or that of the operator it delegates to. For torch
2.13 this gives the very registrations of its macOS binary (``scripts/read_mps_registrations.py`` reads them), all 890.

MPS also refuses some calls of operators that it has: types, shapes and options that its kernels do not take. Each rule is
one row of a table, with the words of MPS (torch 2.13). Some rules can be seen from an operator, the others only from the
function that Python calls: below autograd, a linear layer is already a product of matrices.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...._events.activity import IMPORTING, ProgressEvent
from ...._render.display import JsonMixin
from ....devices.backend import import_torch, parse_release, reinstall_remedy
from ....devices.machine import is_mps_simulated
from ....errors import TorchImportError
from ....session import SESSION

if TYPE_CHECKING:
    import torch

NATIVE = "native"
COMPOSITE = "composite"
FALLS_BACK = "falls back to the CPU"
ALWAYS_ON_CPU = "always on the CPU"
NOT_KNOWN = "not known"
REFUSED = "refused"
MAY_BE_WRONG = "may be wrong"

INFERENCE = "inference"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"

# What a model does, in the order of the report: a pass without gradients, and the three parts of a training step.
PHASES = (INFERENCE, FORWARD, BACKWARD, OPTIMIZER)


@dataclass(frozen=True, order=True)
class ModuleLocation:
    """A module of a model.

    Attributes:
        module: Its name in the model, such as ``"encoder.layer.0"``; empty for the model itself, and outside of it.
        kind: The name of its class; empty outside of every module.
    """

    module: str = ""
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.module} ({self.kind})".strip() if self.kind else ""


class ModuleRow(JsonMixin):
    """A row of a report about one module: its JSON has ``module`` and ``class`` in the place of ``place``."""

    JSON_FLATTEN: ClassVar[Mapping[str, Mapping[str, str]]] = {"module_location": {"module": "module", "class": "kind"}}


# An operator such as "aten::addmm", its phase, and the module that was running.
CallSite = tuple[str, str, ModuleLocation]

# The kernels that are made of other operators, in the order in which a device without its own takes them.
COMPOSITE_KEYS = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")

# What MPS computes on the CPU even if falling back is off, since which torch (the end of MPSFallback.mm).
RENORM = frozenset({"aten::embedding_renorm_"})
SINGULAR_VALUES = RENORM | {"aten::linalg_svd", "aten::linalg_svd.U"}
ALWAYS_CPU_SINCE = (
    ((2, 14), RENORM),
    ((2, 8), SINGULAR_VALUES),
    ((2, 6), SINGULAR_VALUES | {"aten::col2im", "aten::upsample_nearest3d.vec"}),
)

# What torch calls on the CPU and not on MPS, with the operator that it calls there instead; empty for none.
DEVICE_SWITCHES: Mapping[str, str] = {
    # Convolution.cpp chooses the kernel by the device.
    "aten::convolution": "aten::_mps_convolution",
    "aten::_convolution": "aten::_mps_convolution",
    "aten::convolution_backward": "aten::mps_convolution_backward",
    # RNN.cpp takes oneDNN on the CPU and its own kernel on MPS.
    "aten::mkldnn_rnn_layer": "aten::_lstm_mps",
    "aten::mkldnn_rnn_layer_backward": "aten::lstm_mps_backward",
    # attention.cpp asks the first on the CPU and on CUDA only, and chooses the kernel by the device; with gradients,
    # attention on MPS is made of matrix products and a softmax.
    "aten::_fused_sdp_choice": "",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "aten::_scaled_dot_product_attention_math_for_mps",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "",
}


@dataclass(frozen=True)
class OperatorTable:
    """What MPS has."""

    torch: str  # The version of torch.
    source: str  # Where this was read.
    native: frozenset[str]  # The operators with a kernel for MPS, such as "aten::acos.out".
    delegates: Mapping[str, str]  # What operators delegate to, such as "aten::acos" to "aten::acos.out".
    always_cpu: frozenset[str]  # The operators that MPS sends to the CPU even if falling back is off.

    def classify(self, operator: str) -> str:
        """Return what becomes of an operator, such as ``"aten::mode"``, that is called with a tensor of MPS.

        Returns:
            ``"native"``; ``"composite"``: made of other operators, which count; ``"falls back to the CPU"``: if that is
            switched on, and an error otherwise; ``"always on the CPU"``; or ``"not known"``: not one of torch's own.
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
        return FALLS_BACK if operator.startswith("aten::") else NOT_KNOWN

    def named_by_mps(self, operator: str) -> str:
        """Return the name of an operator in the messages of MPS: that of the one it delegates to."""
        return operator if operator in self.always_cpu else self.delegates.get(operator, operator)


def operator_table() -> OperatorTable:
    """Return what MPS has in the installed torch; read once.

    If this torch was built with MPS, its own registrations count, and its list gives the names only.
    """
    torch = import_torch()
    return _table(torch.__version__, torch.backends.mps.is_built() and not is_mps_simulated())


@functools.cache
def _table(version: str, built: bool) -> OperatorTable:
    SESSION.notify(
        ProgressEvent(IMPORTING, "torch's list of operators")
    )  # The reader of YAML lets no other thread run.
    functions = read_functions(functions_file(version))
    source = "native_functions.yaml of this torch"
    native = native_operators(functions, "MPS")
    if built:
        source = "the registrations of this torch"
        native = frozenset(name for name in functions if has_kernel(name, "MPS"))
    return OperatorTable(version, source, native, _parse_delegates(functions), always_cpu_operators(version))


def functions_file(version: str) -> Path:
    """Return where torch's list of operators is."""
    spec = importlib.util.find_spec("torchgen")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        file = Path(folder) / "packaged" / "ATen" / "native" / "native_functions.yaml"
        if file.is_file():
            return file
    what = f"torch {version} came without torchgen/packaged/ATen/native/native_functions.yaml, its list of operators."
    raise TorchImportError(what, reinstall_remedy(version))


def read_functions(file: Path) -> dict[str, dict[str, Any]]:
    """Return the entries of torch's list by the names of the operators."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # The one in C is sixty times as fast.
    entries = yaml.load(file.read_text("utf-8"), Loader=loader)  # noqa: S506 - both loaders are safe ones
    return {f"aten::{entry['func'].partition('(')[0]}": entry for entry in entries}


def _parse_delegates(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    delegates = ((name, entry.get("structured_delegate")) for name, entry in functions.items())
    return {name: f"aten::{delegate}" for name, delegate in delegates if delegate}


def native_operators(functions: Mapping[str, Mapping[str, Any]], key: str) -> frozenset[str]:
    """Return the operators that have a kernel for a dispatch key, such as ``"MPS"``, by torch's list."""
    own = {
        name
        for name, entry in functions.items()
        for keys in entry.get("dispatch", {})  # Several keys may share a kernel: "CPU, MPS".
        if key in keys.replace(" ", "").split(",")
    }
    delegating = {name for name, delegate in _parse_delegates(functions).items() if delegate in own}
    return frozenset(own | delegating)


def composite_key(operator: str) -> str:
    """Return the dispatch key of an operator's kernel that is made of other operators; empty if it has none."""
    return next((key for key in COMPOSITE_KEYS if has_kernel(operator, key)), "")


def has_kernel(operator: str, key: str) -> bool:
    library = import_torch()._C  # noqa: SLF001 - torch has no other name for it
    if not library._dispatch_has_kernel(operator):  # noqa: SLF001
        return False
    return bool(library._dispatch_has_kernel_for_dispatch_key(operator, key))  # noqa: SLF001


def always_cpu_operators(version: str) -> frozenset[str]:
    """Return what MPS always computes on the CPU, in a version of torch."""
    release = parse_release(version)[:2]
    return next((names for since, names in ALWAYS_CPU_SINCE if release >= since), ALWAYS_CPU_SINCE[-1][1])


@dataclass(frozen=True)
class MpsLimitation:
    """Why MPS refuses a call, or computes it wrongly."""

    name: str  # What it is about, in a few words.
    reason: str  # What MPS says or does, and where that is written.
    remedy: str  # One thing to do, as a sentence.
    verdict: str = REFUSED  # "refused", "may be wrong", or "not known".


FLOAT64 = MpsLimitation(
    "float64",
    "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64 (EmptyTensor.cpp).",
    "Use float32: say dtype=torch.float32, or call .float().",
)
DIMENSIONS = MpsLimitation(
    "more than 16 dimensions",
    "MPS supports tensors with dimensions <= 16.",
    "Reshape the tensor to fewer dimensions.",
)
ELEMENTS = MpsLimitation(
    "more than 2**31 elements",
    "Some kernels of MPS count in 32 bits and give wrong numbers without an error (pytorch#188756, #189960).",
    "Use a smaller batch or shorter texts.",
    MAY_BE_WRONG,
)
ADAPTIVE_POOL = MpsLimitation(
    "adaptive pooling to sizes that do not divide",
    "Adaptive pool MPS: input sizes must be divisible by output sizes (pytorch#96056).",
    "Choose an output size that divides the input's, or pool on the CPU.",
)
INTEGER_CONVOLUTION = MpsLimitation(
    "convolution of integers",
    "MPS has no convolution of integers (torch/testing/_internal/common_mps.py).",
    "Convert the input with .float() first.",
)
INTEGER_LINEAR = MpsLimitation(
    "linear layer of integers",
    "MPS device does not support linear for non-float inputs.",
    "Convert the input with .float() first.",
)
LSTM_PROJECTION = MpsLimitation(
    "LSTM with a projection",
    "LSTM with projections is not currently supported with MPS.",
    "Leave proj_size out, and put a Linear behind the LSTM.",
)
ATTENTION_DROPOUT = MpsLimitation(
    "attention with dropout and without gradients",
    "scaled_dot_product_attention for MPS does not support dropout (Attention.mm).",
    "Set its dropout to 0 where no gradients are needed (model.eval()), or load the model with "
    "attn_implementation='eager'.",
)
NO_PLAIN_TENSOR = MpsLimitation(
    "sparse and nested tensors",
    "MPS has other kernels for them than for plain tensors, and only a few (SparseMPS in native_functions.yaml).",
    "Use plain tensors, as .to_dense() and .to_padded_tensor() make them, or try it on a Mac.",
    NOT_KNOWN,
)


def _of_integers(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _unevenly(tensor: torch.Tensor, sizes: Iterable[int], *_args: Any, **_kwargs: Any) -> bool:
    """Tell whether the average cannot be taken in equal windows, or one side grows while the other shrinks."""
    pairs = [(given, wanted) for given, wanted in zip(tensor.shape[-2:], sizes, strict=True) if given and wanted]
    return _in_two_directions(tensor, sizes) or any(max(pair) % min(pair) for pair in pairs)


def _in_two_directions(tensor: torch.Tensor, sizes: Iterable[int], *_args: Any, **_kwargs: Any) -> bool:
    signs = [given - wanted for given, wanted in zip(tensor.shape[-2:], sizes, strict=True)]
    return bool(min(signs) < 0 < max(signs))


def _with_projection(*args: Any, **_kwargs: Any) -> bool:
    """Tell whether an LSTM's last state is shorter than its cells, in torch's two signatures: plain and packed."""
    states = next((value for value in args if isinstance(value, (tuple, list)) and len(value) == 2), None)  # noqa: PLR2004
    return states is not None and bool(states[0].shape[-1] != states[1].shape[-1])


def _drops_without_gradient(*args: Any, **kwargs: Any) -> bool:
    import torch

    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
    learns = torch.is_grad_enabled() and any(named[name].requires_grad for name in ("query", "key", "value"))
    return bool(named.get("dropout_p", 0.0)) and not learns


Rules = Mapping[str, tuple[MpsLimitation, Callable[..., bool]]]

# What can be seen from an operator and its arguments.
OPERATOR_RULES: Rules = {
    "aten::convolution": (INTEGER_CONVOLUTION, _of_integers),
    "aten::_adaptive_avg_pool2d": (ADAPTIVE_POOL, _unevenly),
    "aten::adaptive_max_pool2d": (ADAPTIVE_POOL, _in_two_directions),
}

# What can be seen from a function of torch that Python calls.
FUNCTION_RULES: Rules = {
    "linear": (INTEGER_LINEAR, _of_integers),
    "lstm": (LSTM_PROJECTION, _with_projection),
    "scaled_dot_product_attention": (ATTENTION_DROPOUT, _drops_without_gradient),
}


def find_limitation(rules: Rules, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[MpsLimitation]:
    """Return why MPS refuses a call with these arguments; the types and shapes of all tensors are another question."""
    refusal, applies = rules.get(name, (None, None))
    return [refusal] if refusal and applies and applies(*args, **kwargs) else []


def find_shape_limitation(tensors: Iterable[torch.Tensor]) -> list[MpsLimitation]:
    """Return what MPS refuses in the shapes of tensors; those of nested tensors are another question."""
    shapes = [tensor.shape for tensor in tensors if not tensor.is_nested]
    refusals = []
    if any(len(shape) > 16 for shape in shapes):  # noqa: PLR2004 - the words of MPS
        refusals.append(DIMENSIONS)
    if any(shape.numel() > 2**31 for shape in shapes):
        refusals.append(ELEMENTS)
    return refusals
