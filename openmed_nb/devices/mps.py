"""MPS, the GPU of a Mac with an Apple chip: ``environment`` has its variables, ``simulation`` an MPS that is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from .backend import MINIMUM_TORCH, TENSOR_LOCK, import_torch, parse_release
from .causes import ARM_PYTHON, DeviceContext, RejectionRule, min_macos_for, torch_requirement
from .device import Device, MemoryStats
from .environment import UNSET_BOTH
from .machine import MachineInfo, apple_chip_generation

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

# The first torch that counts peaks (pytorch#186748); only ``torch.accelerator`` tells them.
COUNTS_PEAKS = (2, 13)
# The first torch whose GradScaler works on MPS (pytorch#142397).
SCALER = (2, 8)
# The first torch whose fused optimizers obey a GradScaler (pytorch#186360), and whose GradScaler leaves 16-bit gradients
# alone (pytorch#184286); both are in the notes of that release.
FUSED_SCALER_SINCE = (2, 13)
IGNORES_SCALER = "On MPS before torch 2.13 a fused optimizer ignores the GradScaler (pytorch#186360)"
LAST_EMULATED_CHIP = 2  # The last generation of Apple's chips without bfloat16 of its own (transformers#40458).


class Mps(Device):
    """MPS. Every copy towards it waits, and for all that was started before."""

    corrupts_unwaited_copies = True  # pytorch#189690
    can_be_simulated = True
    has_fallbacks = True
    joins_processes = False  # Neither gloo nor nccl works with it (pytorch#160732).
    attention_lacks_dropout = True
    sensor = "ioreg"
    has_allocator = True
    headroom = 0.9  # The allocator splits blocks, and other batches are larger.
    max_fraction = 2.0  # torch/mps/__init__.py:105
    takes_no_limit = True
    capacity = "what Metal recommends"
    capacity_caption = "recommended by Metal"
    limit_caption = "high watermark"
    lack_of_memory = r"invalid buffer size"  # One buffer larger than Metal allows (MPSAllocator.mm:236).
    pin_reason = (
        "MPS does not use pinned memory; the loader would warn and go on without (torch/utils/data/dataloader.py)"
    )
    # A guess between the CPU and CUDA, which AnnotationPipeline.calibrate can better.
    batch_tokens = 8192
    batch_waste = 256
    few_shapes = True  # Each new shape is compiled.
    float32_reason = "float64 does not exist on MPS, and reduced precision has not been validated for this model"
    narrower: ClassVar[Mapping[str, str]] = {"float64": "float32", "complex128": "complex64"}
    fused_adamw_since = "2.5"  # pytorch#127242
    fused_adamw_types = ("float32", "float16", "bfloat16")

    def causes(self, here: DeviceContext) -> Iterator[RejectionRule]:
        machine = here.machine
        torch = here.torch
        shown_macos = ".".join(str(part) for part in machine.macos or ())
        if machine.system == "Linux" and machine.apple_silicon:
            reason = "this is Linux on an Apple chip, as in a container on a Mac, and only macOS has MPS"
            yield RejectionRule(LINUX_ON_APPLE, reason, RUN_NATIVELY_REMEDY)
        if machine.system != "Darwin":
            yield RejectionRule(NO_MAC, f"this computer runs {machine.system}, and MPS is the GPU backend of macOS")
        if machine.apple_silicon and not machine.native_apple_silicon:
            reason = f"this Python is built for {machine.architecture} and runs under Rosetta, which has no MPS"
            yield RejectionRule(ROSETTA, reason, ARM_PYTHON)
        if not machine.apple_silicon:
            yield RejectionRule(INTEL, "this Mac has an Intel processor")
        if machine.macos is not None and machine.macos < min_macos_for(MINIMUM_TORCH):
            reason = f"macOS {shown_macos} is older than 13, the oldest on which torch 2.6 has MPS"
            yield RejectionRule(OLD_MACOS, reason, "Update macOS to 14 or later.")
        needed = min_macos_for(torch.release)
        if machine.macos is not None and machine.macos < needed:
            first = ".".join(str(part) for part in needed)
            reason = f"torch {torch.version} supports MPS from macOS {first} on, and this is macOS {shown_macos}"
            install = f"python -m pip install {torch_requirement(machine)}"
            yield RejectionRule(NEW_TORCH, reason, f"Update macOS, or install a torch for this one: {install}.")
        yield from super().causes(here)
        if torch.mps_built is False:
            install = f"python -m pip install --force-reinstall {torch_requirement(machine)}"
            reason = f"torch {torch.version} was built without MPS"
            yield RejectionRule(NOT_BUILT, reason, f"Install the official build for arm64: {install}.")
        if torch.mps_available is False:
            reason = "torch finds no Metal device, as in a virtual machine or a sandbox"
            yield RejectionRule(NO_METAL, reason, RUN_NATIVELY_REMEDY)
        failure = torch.probe_failure(self.name) or ""
        if "watermark ratio" in failure:
            yield RejectionRule(
                BAD_WATERMARKS, f"torch refuses the watermark ratios that it read: {failure}", UNSET_BOTH
            )
        yield from self.causes_in_probe(torch)

    def hardware(self, here: DeviceContext) -> str:
        return f"the chip is {here.machine.chip or 'Apple Silicon'}"

    def empty_cache(self) -> None:
        mps = import_torch().mps
        with TENSOR_LOCK:
            mps.empty_cache()

    def memory(self) -> MemoryStats:
        torch = import_torch()
        with TENSOR_LOCK:
            return MemoryStats(
                torch.mps.current_allocated_memory(),
                torch.mps.driver_allocated_memory(),
                torch.mps.recommended_max_memory(),
                torch.accelerator.max_memory_allocated() if parse_release(torch.__version__) >= COUNTS_PEAKS else None,
            )

    def reset_peak(self) -> None:
        torch = import_torch()
        if parse_release(torch.__version__) >= COUNTS_PEAKS:
            torch.accelerator.reset_peak_memory_stats()

    def limit(self, fraction: float) -> None:
        import_torch().mps.set_per_process_memory_fraction(float(fraction))

    def finish(self) -> None:
        with TENSOR_LOCK:
            import_torch().mps.synchronize()

    def half_precision_obstacle(
        self, dtype: str, torch_release: tuple[int, ...], _capability: tuple[int, int] | None
    ) -> RejectionRule | None:
        if dtype != "float16" or torch_release >= SCALER:
            return None
        torch = ".".join(map(str, torch_release))
        reason = f"float16 needs a GradScaler, which does not work on MPS with torch {torch} (pytorch#142397)"
        return RejectionRule("float16", reason, "Use 'bfloat16', which needs none, or torch 2.8 or later.")

    def half_precision_notes(self, dtype: str, torch_release: tuple[int, ...], machine: MachineInfo) -> tuple[str, ...]:
        if dtype == "float16":
            if not self.ignores_scaler(torch_release):
                return ()
            what = "Keep weights in float32, as autocast does: GradScaler can set 16-bit gradients to 0 on MPS"
            fused = f"Use AdamW without fused=True. {IGNORES_SCALER}."
            return f"{what} before torch 2.13 (pytorch#184286).", fused
        generation = apple_chip_generation(machine)
        if generation is None:
            what = "The chip is not known; M1 and M2 compute bfloat16 in software and gain no speed"
        elif generation <= LAST_EMULATED_CHIP:
            what = f"M{generation} computes bfloat16 in software: less memory for activations, but no speed gained"
        else:
            return ()
        return (f"{what} (transformers#40458).",)

    def ignores_scaler(self, torch_release: tuple[int, ...]) -> bool:
        return tuple(torch_release) < FUSED_SCALER_SINCE
