"""Classification of operators on MPS in the installed torch.

``mps_operators.json`` has the operators that the macOS binaries of torch register for MPS, read by
``scripts/read_mps_registrations.py``. A torch that was built with MPS reports its own registrations.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ....devices.backend import import_torch, parse_release
from ....devices.machine import is_mps_simulated

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
        if composite_key(operator):
            return COMPOSITE
        return FALLS_BACK if operator.startswith("aten::") else UNKNOWN


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


def composite_key(operator: str) -> str:
    """Return the dispatch key of the composite kernel of an operator, or an empty string if there is none."""
    return next((key for key in COMPOSITE_KEYS if has_kernel(operator, key)), "")


def has_kernel(operator: str, key: str) -> bool:
    """Return whether the installed torch has a kernel of an operator for a dispatch key."""
    library = import_torch()._C  # noqa: SLF001 - torch has no public API for it
    if not library._dispatch_has_kernel(operator):  # noqa: SLF001
        return False
    return bool(library._dispatch_has_kernel_for_dispatch_key(operator, key))  # noqa: SLF001
