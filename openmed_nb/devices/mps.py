"""MPS, the GPU of a Mac with Apple silicon. ``environment`` plans its variables, and ``simulation`` simulates it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import ClassVar

from .backend import MIN_TORCH, TENSOR_LOCK, import_torch, parse_release
from .device import (
    ARM_PYTHON_REMEDY,
    Capability,
    Device,
    DeviceFacts,
    MemoryStats,
    RejectionRule,
    min_macos_for,
    torch_requirement,
)
from .environment import UNSET_BOTH_REMEDY
from .machine import MachineInfo, Version, apple_chip_generation

LINUX_ON_APPLE = "Linux on an Apple chip"
NO_MAC = "no Mac"
ROSETTA = "Rosetta"
INTEL = "Intel"
OLD_MACOS = "old macOS"
NEW_TORCH = "new torch"
NOT_BUILT = "built without MPS"
NO_METAL = "no Metal device"
BAD_WATERMARKS = "bad watermarks"

RUN_NATIVELY_REMEDY = "Run on the Mac itself, outside of containers, virtual machines and sandboxes."

# First torch release that counts peaks (pytorch#186748). Only ``torch.accelerator`` reports them.
PEAK_MEMORY_SINCE = (2, 13)
# First torch release whose GradScaler works on MPS (pytorch#142397).
GRAD_SCALER_SINCE = (2, 8)
# First torch release whose fused optimizers respect a GradScaler (pytorch#186360), and whose GradScaler leaves 16-bit
# gradients unchanged (pytorch#184286). Both are in its release notes.
FUSED_SCALER_SINCE = (2, 13)
# In bfloat16, a linear layer with a transposed weight ends the process on this macOS and later before this torch release
# (pytorch#197796). Users reported macOS 27.0 with torch 2.13.0 and 2.14.0.
BFLOAT16_ABORTS_SINCE_MACOS = (27,)
BFLOAT16_WORKS_SINCE = (2, 14)
LAST_EMULATED_CHIP = 2  # Last generation of Apple chips without bfloat16 in hardware (transformers#40458).


class Mps(Device):
    """The MPS device. Every copy to it waits for all work that was submitted before."""

    can_be_simulated = True
    has_fallbacks = True
    supports_process_groups = False  # Neither gloo nor nccl supports MPS (pytorch#160732).
    checkpoints_restore_rng = False
    sensor = "ioreg"
    has_allocator = True
    headroom_fraction = 0.9  # The allocator splits blocks, and later batches can be larger.
    max_fraction = 2.0  # torch/mps/__init__.py:105
    accepts_zero_limit = True
    memory_limit_base = "the memory recommended by Metal"
    memory_limit_base_caption = "recommended by Metal"
    limit_caption = "high watermark"
    allocation_failure_pattern = r"invalid buffer size"  # A buffer larger than Metal allows (MPSAllocator.mm:236).
    pin_reason = (
        "MPS does not use pinned memory; the loader would warn and continue without it (torch/utils/data/dataloader.py)"
    )
    # An estimate between the values of the CPU and CUDA. nb.sweep measures a better one.
    batch_tokens = 8192
    max_batch_padding = 256
    recompiles_for_new_shapes = True  # MPS compiles a graph for each new shape (pytorch#132596).
    float32_reason = "MPS does not support float64, and reduced precision has not been validated for this model"
    dtype_fallbacks: ClassVar[Mapping[str, str]] = {"float64": "float32", "complex128": "complex64"}
    fused_adamw_types = ("float32", "float16", "bfloat16")  # pytorch#127242

    def type_rejection_rules(self, facts: DeviceFacts) -> Iterator[RejectionRule]:
        machine = facts.machine
        torch = facts.torch
        installed_macos = ".".join(map(str, machine.macos_version or ()))
        if machine.system == "Linux" and machine.apple_silicon:
            reason = "MPS requires macOS; this machine runs Linux on an Apple chip, as in a container on a Mac"
            # MPS is a framework of macOS: https://developer.apple.com/documentation/metalperformanceshaders
            yield RejectionRule(LINUX_ON_APPLE, reason, RUN_NATIVELY_REMEDY)
        if machine.system != "Darwin":
            yield RejectionRule(NO_MAC, f"MPS requires macOS; this machine runs {machine.system}", is_absent=True)
        if machine.apple_silicon and not machine.native_apple_silicon:
            reason = (
                f"this Python is built for {machine.architecture} and runs under Rosetta, which does not support MPS"
            )
            yield RejectionRule(ROSETTA, reason, ARM_PYTHON_REMEDY)  # pytorch#146236
        if not machine.apple_silicon:
            yield RejectionRule(INTEL, "this Mac has an Intel processor", is_absent=True)
        if machine.macos_version is not None and machine.macos_version < min_macos_for(MIN_TORCH):
            reason = f"macOS {installed_macos} is older than 13, the oldest version on which torch 2.6 supports MPS"
            yield RejectionRule(OLD_MACOS, reason, "Update macOS to 14 or later.")  # EmptyTensor.cpp in the binaries
        needed = min_macos_for(torch.release)
        if machine.macos_version is not None and machine.macos_version < needed:
            first = ".".join(map(str, needed))  # EmptyTensor.cpp in the binaries
            reason = (
                f"torch {torch.version} supports MPS from macOS {first} on; this machine has macOS {installed_macos}"
            )
            install = f"python -m pip install {torch_requirement(machine)}"
            yield RejectionRule(NEW_TORCH, reason, f"Update macOS, or install a torch that supports it: {install}.")
        yield from super().type_rejection_rules(facts)
        if torch.mps_built is False:
            install = f"python -m pip install --force-reinstall {torch_requirement(machine)}"
            reason = f"torch {torch.version} was built without MPS"
            yield RejectionRule(NOT_BUILT, reason, f"Install the official build for arm64: {install}.")
        if torch.mps_available is False:
            reason = "torch finds no Metal device, as in a virtual machine or a sandbox"
            yield RejectionRule(NO_METAL, reason, RUN_NATIVELY_REMEDY)
        failure = torch.probe_failure(self.name) or ""
        if "watermark ratio" in failure:
            yield RejectionRule(BAD_WATERMARKS, f"PyTorch rejected the watermark ratios: {failure}", UNSET_BOTH_REMEDY)

    def describe_hardware(self, facts: DeviceFacts) -> str:
        return f"the chip is {facts.machine.chip or 'Apple Silicon'}"

    def empty_cache(self) -> None:
        mps = import_torch().mps
        with TENSOR_LOCK:
            mps.empty_cache()

    def memory_stats(self) -> MemoryStats:
        torch = import_torch()
        with TENSOR_LOCK:
            return MemoryStats(
                torch.mps.current_allocated_memory(),
                torch.mps.driver_allocated_memory(),
                torch.mps.recommended_max_memory(),
                torch.accelerator.max_memory_allocated() if _counts_peaks(torch) else None,
            )

    def reset_peak_memory_stats(self) -> None:
        torch = import_torch()
        if _counts_peaks(torch):
            torch.accelerator.reset_peak_memory_stats()

    def set_memory_fraction(self, fraction: float) -> None:
        import_torch().mps.set_per_process_memory_fraction(float(fraction))

    def synchronize(self) -> None:
        with TENSOR_LOCK:
            import_torch().mps.synchronize()

    def dtype_rejection(self, dtype: str, torch_release: Version, machine: MachineInfo) -> RejectionRule | None:
        macos = machine.macos_version
        is_affected = macos is not None and macos >= BFLOAT16_ABORTS_SINCE_MACOS
        if dtype != "bfloat16" or not is_affected or torch_release >= BFLOAT16_WORKS_SINCE:
            return None
        reason = (
            "linear layers in bfloat16 can end the process on macOS 27 and later before torch 2.14 (pytorch#197796)"
        )
        remedy = f"Install torch 2.14, then restart the kernel: python -m pip install {torch_requirement(machine)}."
        return RejectionRule("bfloat16", reason, remedy)

    def half_precision_rejection(
        self, dtype: str, torch_release: Version, _capability: Capability | None
    ) -> RejectionRule | None:
        if dtype != "float16" or torch_release >= GRAD_SCALER_SINCE:
            return None
        torch = ".".join(map(str, torch_release))
        reason = f"float16 needs a GradScaler, which does not work on MPS with torch {torch} (pytorch#142397)"
        return RejectionRule(
            "float16", reason, "Use 'bfloat16', which does not need a GradScaler, or torch 2.8 or later."
        )

    def half_precision_notes(self, dtype: str, torch_release: Version, machine: MachineInfo) -> tuple[str, ...]:
        if dtype == "float16":
            if not self.fused_step_ignores_found_inf(torch_release):
                return ()
            weights = "Keep weights in float32, as autocast does: GradScaler can set 16-bit gradients to 0 on MPS"
            fused = "On MPS before torch 2.13 a fused optimizer ignores the GradScaler (pytorch#186360)"
            return f"{weights} before torch 2.13 (pytorch#184286).", f"Use AdamW without fused=True. {fused}."
        generation = apple_chip_generation(machine)
        if generation is None:
            note = "The chip is unknown; M1 and M2 compute bfloat16 in software, without a speedup"
        elif generation <= LAST_EMULATED_CHIP:
            note = f"M{generation} computes bfloat16 in software: it saves memory for activations, without a speedup"
        else:
            return ()
        return (f"{note} (transformers#40458).",)

    def fused_step_ignores_found_inf(self, torch_release: Version) -> bool:
        return tuple(torch_release) < FUSED_SCALER_SINCE


def _counts_peaks(torch: ModuleType) -> bool:
    """Return whether torch counts the peak memory of MPS."""
    return parse_release(torch.__version__) >= PEAK_MEMORY_SINCE
