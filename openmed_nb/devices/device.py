"""Base class of the device types, whose defaults apply to torch devices without a class in this package, and their facts and rules.

Each device type has a class in the module of its name: ``cpu``, ``cuda``, ``mps``. ``registry`` lists the classes and
returns the object for a device name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from .backend import MIN_TORCH, TorchInfo
from .machine import MachineInfo, Version, is_mps_simulated, processor_name
from .request import INDEXED_TYPES, device_type

Capability: TypeAlias = tuple[int, int]  # Compute capability of a CUDA GPU, such as (9, 0).

# Pairs of a torch release and the oldest macOS on which it supports MPS, according to its error messages (EmptyTensor.cpp in
# the binaries for macOS). pip does not check this: it installs 2.9 to 2.11 on macOS 11, and 2.15.0 on macOS 14. No release has a
# newest macOS: that MPS computes correctly on macOS 26 and 27 is up to the device check and the probes of the doctor.
MIN_MACOS_BY_TORCH = (((2, 6), (13,)), ((2, 9), (14,)), ((2, 15), (15,)))

# Release to install on a Mac. From macOS 14 on it is the version in binder/constraints.txt: 2.13 and older have silent errors
# on M1 and M2 that are fixed in it (pytorch#177116, #183535). 2.15.0 also fixes copies in float64 (pytorch#197715), but needs
# macOS 15 and Python 3.11. Before macOS 14 it is the last release that supports MPS on macOS 13, which also runs on macOS 11;
# it has no wheel for Python 3.14. 2.14.1 has wheels for Python 3.10 to 3.14.
MAC_TORCH = "torch==2.14.1"
MACOS_13_TORCH = "torch==2.8.0"

ARM_PYTHON_REMEDY = "Install an arm64 build of Python and recreate the environment with it."


def min_macos_for(release: Version) -> Version:
    """Return the oldest macOS on which a torch release supports MPS; for releases before 2.6, that of 2.6."""
    return max((macos for first, macos in MIN_MACOS_BY_TORCH if first <= release), default=MIN_MACOS_BY_TORCH[0][1])


def torch_requirement(machine: MachineInfo) -> str:
    """Return the pip requirement for torch: on a Mac, a release that supports MPS on its macOS.

    Example:
        >>> torch_requirement(MachineInfo("Darwin", "arm64", macos_version=(14, 5)))
        'torch==2.14.1'
    """
    if machine.system != "Darwin":
        return "torch"
    return (
        MACOS_13_TORCH
        if machine.macos_version is not None and machine.macos_version < min_macos_for((2, 14))
        else MAC_TORCH
    )


@dataclass(frozen=True)
class DeviceFacts:
    """Facts that determine the availability of devices."""

    machine: MachineInfo
    torch: TorchInfo
    environ: Mapping[str, str]


class RejectionRule(NamedTuple):
    """Reason why a device cannot be used.

    Attributes:
        name: Identifier for the checks of the doctor.
        reason: Reason as a clause.
        remedy: Suggested action. It is empty if nothing can be done on this machine; no remedy suggests another machine.
        is_absent: Whether this machine does not have the hardware, as far as this is known.
    """

    name: str
    reason: str
    remedy: str = ""
    is_absent: bool = False


NO_TORCH = "no torch"
OLD_TORCH = "old torch"
FAILED_PROBE = "failed probe"


@dataclass(frozen=True)
class MemoryStats:
    """Memory statistics of an allocator in bytes; ``None`` if torch does not report a value for the device.

    Attributes:
        allocated: Memory of live tensors.
        reserved: Device memory of the process: tensors and cached blocks, on MPS all of its Metal memory.
        recommended: Recommended maximum: ``recommendedMaxWorkingSetSize`` on MPS, the total memory on CUDA.
        peak: Maximum memory of live tensors since the last reset.
    """

    allocated: int | None = None
    reserved: int | None = None
    recommended: int | None = None
    peak: int | None = None


def _do_nothing() -> None:
    """Do nothing, because reading a tensor already waits for the pending work on it."""


@dataclass(frozen=True)
class Device:
    """A device with the name that torch uses, such as ``"cuda:1"``."""

    name: str

    # Behavior.
    is_accelerator = True  # Whether the device computes asynchronously and has its own memory.
    supports_async_copies = False  # Whether copies to the device are queued while the program continues.
    can_be_simulated = False
    has_fallbacks = False  # Whether unsupported operators may fall back to the CPU.
    supports_process_groups = True  # Whether several processes can train together on devices of this type.
    uses_cudnn = False
    profiler_times_kernels = False  # Whether torch's profiler records the kernels of the device and their duration.
    checkpoints_restore_rng = True  # Whether torch restores the random number state for a recomputed activation.
    sensor = ""  # Source of the utilization: "ioreg" or "nvidia-smi".

    # Memory.
    has_allocator = False  # Whether torch counts and limits the memory of the device.
    max_fraction = 0.0  # Largest fraction that torch accepts as a memory limit.
    accepts_zero_limit = False  # Whether a fraction of 0 removes the limit.
    headroom_fraction = 0.7  # Fraction of the limit that a batch is expected to be able to use.
    memory_limit_base = "the memory of the GPU"  # Description of the total that a memory limit is a fraction of.
    memory_limit_base_caption = "memory of the device"
    limit_caption = "limit"
    # Regular expression for messages of torch about failed allocations that do not contain "out of memory"; empty if not needed.
    allocation_failure_pattern = ""
    alternative_devices = "the CPU"  # Suggestion for a model that fails on the device.
    pins_memory = False
    pin_reason = ""

    # Default number of tokens per batch, including padding, and maximum number of padding tokens among them.
    # ``benchmarks/annotate.py --sweep`` measures the number of tokens.
    batch_tokens = 512
    max_batch_padding = 64
    recompiles_for_new_shapes = False  # Whether each new tensor shape costs time, for example to compile a graph.

    # Data types.
    float32_reason = "reduced precision has not been validated for this model"
    has_int8 = False
    dtype_fallbacks: ClassVar[Mapping[str, str]] = {}  # Replacements of the dtypes that the device does not support.
    fused_adamw_types: ClassVar[tuple[str, ...]] = ()  # Types for which torch has a fused AdamW.

    @property
    def type(self) -> str:
        """Device type of torch, without an index."""
        return device_type(self.name)

    @property
    def supports_index(self) -> bool:
        """Whether there can be several devices of this type, each with an index."""
        return self.type in INDEXED_TYPES

    @property
    def is_simulated(self) -> bool:
        """Whether the device is simulated."""
        return self.can_be_simulated and is_mps_simulated()

    @property
    def unload_remedy(self) -> str:
        """Suggested action if a model does not fit into the memory of the device."""
        return f"Unload other models first, or use {self.alternative_devices}."

    def names(self, _torch: TorchInfo) -> list[str]:
        """Return the names of all devices of this type that torch has reported."""
        return [self.type]

    def rejection_rules(self, facts: DeviceFacts) -> Iterator[RejectionRule]:
        """Yield the reasons why the device cannot be used, in the order in which to fix them: a failed check is the last."""
        yield from self.type_rejection_rules(facts)
        if failure := facts.torch.probe_failure(self.name):
            remedy = "Restart the kernel; if it fails again, use 'cpu' and report it to the driver vendor."
            yield RejectionRule(FAILED_PROBE, f"the device check failed: {failure}", remedy)

    def type_rejection_rules(self, facts: DeviceFacts) -> Iterator[RejectionRule]:
        """Yield the reasons that are known without the device check. The base class checks for a torch that is missing or too old."""
        machine = facts.machine
        torch = facts.torch
        if torch.release >= MIN_TORCH:
            return
        if machine.system == "Darwin" and machine.architecture == "x86_64":  # pip finds 2.2.2 at most (pytorch#114602).
            reason = "this package requires torch 2.6 or later, which PyPI does not provide for x86_64 Python on macOS"
            conda = "Install it from conda-forge: conda install -c conda-forge pytorch."
            yield RejectionRule(OLD_TORCH, reason, ARM_PYTHON_REMEDY if machine.apple_silicon else conda)
        elif torch.version is None:
            install = f"python -m pip install {torch_requirement(machine)}"
            yield RejectionRule(NO_TORCH, "torch is not installed", f"Install it: {install}.")
        else:
            reason = f"torch {torch.version} is older than 2.6, the first release that this package supports"
            upgrade = f"python -m pip install --upgrade {torch_requirement(machine)}"
            yield RejectionRule(OLD_TORCH, reason, f"Upgrade it: {upgrade}.")

    def describe_hardware(self, _facts: DeviceFacts) -> str:
        """Return a clause that names the hardware, or an empty string if it is unknown."""
        return ""

    def hardware_name(self, machine: MachineInfo, _torch: TorchInfo) -> str:
        """Return the name of the hardware, such as ``"NVIDIA A100"`` or ``"Apple M2 Pro"``."""
        return machine.chip or processor_name()

    def max_padding_tokens(self, _hidden_size: int | None) -> int:
        """Return the maximum number of padding tokens per batch for a model with the given hidden size."""
        return self.max_batch_padding

    def empty_cache(self) -> None:
        """Release unused blocks to the system, after waiting for the device."""

    def memory_stats(self) -> MemoryStats:
        """Return the memory statistics. On MPS the query initializes the allocator, which then reads its watermarks."""
        return MemoryStats()

    def reset_peak_memory_stats(self) -> None:
        """Reset the peak to the memory that is allocated now."""

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the memory to a fraction of the total memory, or on MPS (0 to 2) of the recommended memory."""

    def synchronize(self) -> None:
        """Wait for all work that was submitted to the device. Call it before reading a clock."""

    def record_event(self) -> Callable[[], None]:
        """Return a function that waits for the work submitted so far, if reading a tensor does not wait for it."""
        return _do_nothing

    def capability(self) -> Capability | None:
        """Return the compute capability, such as (9, 0), or ``None`` if the device type has none."""
        return None

    def uuid(self) -> str | None:
        """Return the UUID that other programs use for the device, or ``None`` if it is unknown."""
        return None

    def dtype_rejection(self, _dtype: str, _torch_release: Version, _machine: MachineInfo) -> RejectionRule | None:
        """Return the reason why a dtype is neither validated nor recommended on the device, or ``None`` if it can be used."""
        return None

    def half_precision_rejection(
        self, _dtype: str, _torch_release: Version, _capability: Capability | None
    ) -> RejectionRule | None:
        """Return the reason why a 16-bit dtype cannot be used in training, or ``None`` if it can."""
        return None

    def half_precision_notes(self, _dtype: str, _torch_release: Version, _machine: MachineInfo) -> tuple[str, ...]:
        """Return notes about training in a 16-bit dtype."""
        return ()

    def fused_step_ignores_found_inf(self, _torch_release: Version) -> bool:
        """Return whether a fused optimizer steps although a ``GradScaler`` found infinite gradients."""
        return False
