"""The CPU, which computes synchronously and whose memory torch does not count."""

from __future__ import annotations

from .backend import TorchInfo
from .device import Device
from .machine import MachineInfo, Version, processor_name


class Cpu(Device):
    """The CPU, which computes synchronously."""

    is_accelerator = False
    headroom_fraction = 0.7  # The system swaps if a batch uses more.
    allocation_failure_pattern = (
        r"DefaultCPUAllocator: (can't allocate|not enough) memory"  # c10/core/impl/alloc_cpu.cpp
        r"|could not (create|execute) a (primitive|memory)"  # oneDNN
    )
    alternative_devices = "another model"
    pin_reason = "no data is copied to a GPU; on a Mac the loader would still pin memory for MPS, and warn"
    float32_reason = "16-bit types are slower than float32 on most CPUs"
    has_int8 = True
    fused_adamw_types = ("float64", "float32", "float16", "bfloat16")

    def hardware_name(self, machine: MachineInfo, torch: TorchInfo) -> str:
        return processor_name() if machine.simulated else super().hardware_name(machine, torch)

    def half_precision_notes(self, dtype: str, _release: Version, _machine: MachineInfo) -> tuple[str, ...]:
        return (f"Most CPUs compute more slowly in {dtype} than in float32; measure it.",)
