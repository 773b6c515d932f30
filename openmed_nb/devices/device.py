"""What the package asks of a device, and the answers for one that torch has and this package does not know.

Each type of device has a class of its own in the module of its name: ``cpu``, ``cuda``, ``mps``. ``registry`` lists them and
gives the object for a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from .backend import MINIMUM_TORCH, TorchInfo
from .causes import ARM_PYTHON, FAILED_PROBE, NO_TORCH, OLD_TORCH, DeviceContext, RejectionRule, torch_requirement
from .machine import MachineInfo, is_mps_simulated, processor_name
from .request import device_type


@dataclass(frozen=True)
class MemoryStats:
    """What an allocator says of its memory, in bytes; ``None`` where torch has no such figure for the device."""

    allocated: int | None = None  # What living tensors use.
    # What the process holds of the device: tensors and cached blocks; on MPS all of its Metal memory.
    reserved: int | None = None
    # What the device should not go beyond; on MPS ``recommendedMaxWorkingSetSize``, on CUDA all it has.
    recommended: int | None = None
    peak: int | None = None  # The most that living tensors used since the figure was last reset.


def _wait_for_nothing() -> None:
    """Return at once: reading a tensor waits for the work on it."""


@dataclass(frozen=True)
class Device:
    """A device by the name that torch takes, such as ``"cuda:1"``."""

    name: str

    # How it works.
    is_accelerator = True  # Whether it computes while the program goes on, and has memory of its own.
    is_numbered = False  # Whether there may be several, each with a number.
    queues_copies = False  # Whether a copy to it waits its turn there, while the program goes on.
    corrupts_unwaited_copies = False  # Whether ``non_blocking=True`` towards it corrupts data.
    can_be_simulated = False
    has_fallbacks = False  # Whether operators that it does not have may run on the CPU instead.
    joins_processes = True  # Whether several processes can train on it together.
    uses_cudnn = False
    profiler_times_kernels = False  # Whether torch's profiler sees what it computes, and for how long.
    attention_lacks_dropout = False  # Whether scaled_dot_product_attention raises for dropout.
    sensor = ""  # What tells how busy it is: "ioreg" or "nvidia-smi".

    # Memory.
    has_allocator = False  # Whether torch counts and limits its memory.
    max_fraction = 0.0  # The largest fraction that torch takes as a limit.
    takes_no_limit = False  # Whether a fraction of 0 lifts the limit.
    headroom = 0.7  # The share of its limit that a batch may be expected to take.
    capacity = "the memory of the GPU"  # What its limit is a share of.
    capacity_caption = "memory of the device"
    limit_caption = "limit"
    lack_of_memory = ""  # A pattern of the errors of torch that say it.
    alternative = "the CPU"  # What else can be used where a model fails on it.
    pins_memory = False
    pin_reason = ""

    # How much runs at once unless the person says: in tokens, filling included, and how many of them may be filling.
    # ``benchmarks/annotate.py --sweep`` measures the tokens.
    batch_tokens = 512
    batch_waste = 64
    few_shapes = False  # Whether each new shape of tensors costs time.

    # Types of numbers.
    float32_reason = "reduced precision has not been validated for this model"
    has_int8 = False
    narrower: ClassVar[Mapping[str, str]] = {}  # The types that it does not have, and what takes their place.
    fused_adamw_since = ""  # The first torch with a fused AdamW for it; empty where none is known.
    fused_adamw_types: ClassVar[tuple[str, ...]] = ()

    @property
    def type(self) -> str:
        """What torch calls this kind of device."""
        return device_type(self.name)

    @property
    def is_simulated(self) -> bool:
        """Whether it is a simulated one."""
        return self.can_be_simulated and is_mps_simulated()

    @property
    def unload_remedy(self) -> str:
        """What to do where a model does not fit."""
        return f"Unload other models first, or use {self.alternative}."

    def names(self, _torch: TorchInfo) -> list[str]:
        """Return the names of all devices of this type, as far as torch has told."""
        return [self.type]

    def causes(self, here: DeviceContext) -> Iterator[RejectionRule]:
        """Yield what speaks against the device, the first thing to mend first: here, that torch is missing or too old."""
        machine = here.machine
        torch = here.torch
        if torch.release >= MINIMUM_TORCH:
            return
        if machine.system == "Darwin" and machine.architecture == "x86_64":  # pip finds 2.2.2 at most (pytorch#114602).
            reason = "this package needs torch 2.6 or later, and PyPI has none for x86_64 Pythons on macOS"
            conda = "Take it from conda-forge: conda install -c conda-forge pytorch."
            yield RejectionRule(OLD_TORCH, reason, ARM_PYTHON if machine.apple_silicon else conda)
        elif torch.version is None:
            yield RejectionRule(
                NO_TORCH, "torch is not installed", f"Install it: python -m pip install {torch_requirement(machine)}."
            )
        else:
            reason = f"torch {torch.version} is older than 2.6, the first release that this package supports"
            yield RejectionRule(
                OLD_TORCH, reason, f"Upgrade it: python -m pip install --upgrade {torch_requirement(machine)}."
            )

    def causes_in_probe(self, torch: TorchInfo) -> Iterator[RejectionRule]:
        """Yield that computing on the device failed."""
        if failure := torch.probe_failure(self.name):
            remedy = "Restart the kernel; if it fails again, use 'cpu' and report it to the maker of the driver."
            yield RejectionRule(FAILED_PROBE, f"a tiny computation on it failed: {failure}", remedy)

    def hardware(self, _here: DeviceContext) -> str:
        """Return what a sentence says of its hardware, empty where nothing is known."""
        return ""

    def own_name(self, machine: MachineInfo, _torch: TorchInfo) -> str:
        """Return the name of the hardware, such as ``"NVIDIA A100"`` or ``"Apple M2 Pro"``."""
        return machine.chip or processor_name()

    def batch_waste_of(self, _hidden_size: int | None) -> int:
        """Return how many tokens of a batch may be filling, for a model of a hidden size."""
        return self.batch_waste

    def empty_cache(self) -> None:
        """Hand blocks that no tensor uses back to the system; this waits until the device is done."""

    def memory(self) -> MemoryStats:
        """Return what the allocator holds; on MPS the question starts the allocator, which then reads its watermarks."""
        return MemoryStats()

    def reset_peak(self) -> None:
        """Let the peak begin again at what is allocated now."""

    def limit(self, fraction: float) -> None:
        """Refuse to hold more than this fraction of what the device has, or on MPS (0 to 2) of what it recommends."""

    def finish(self) -> None:
        """Wait until the device has done everything that was started on it; needed before a clock is read."""

    def work_done(self) -> Callable[[], None]:
        """Return what waits for the work that was started so far, where reading a tensor does not wait for it."""
        return _wait_for_nothing

    def capability(self) -> tuple[int, int] | None:
        """Return the compute capability, such as (9, 0); ``None`` where there is no such thing."""
        return None

    def uuid(self) -> str | None:
        """Return the UUID by which other programs know the device; ``None`` where it is not known."""
        return None

    def half_precision_obstacle(
        self, _dtype: str, _torch_release: tuple[int, ...], _capability: tuple[int, int] | None
    ) -> RejectionRule | None:
        """Return why a 16-bit type cannot be used in training and what to do, ``None`` where it can."""
        return None

    def half_precision_notes(
        self, _dtype: str, _torch_release: tuple[int, ...], _machine: MachineInfo
    ) -> tuple[str, ...]:
        """Return what to know about training in a 16-bit type, where there is something."""
        return ()

    def ignores_scaler(self, _torch_release: tuple[int, ...]) -> bool:
        """Tell whether a fused optimizer steps where a ``GradScaler`` found infinite gradients."""
        return False
