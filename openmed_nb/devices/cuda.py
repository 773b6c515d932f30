"""CUDA and ROCm GPUs, which torch both calls CUDA. They have an index, and their copies are queued with the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .._render.values import pluralize
from .backend import TENSOR_LOCK, TorchInfo, import_torch, is_torch_imported
from .device import Capability, Device, DeviceFacts, MemoryStats, RejectionRule
from .machine import MachineInfo, Version

MACOS = "macOS"
NO_DRIVER = "no driver"
CPU_BUILD = "CPU build"
HIDDEN_GPUS = "hidden GPUs"
NO_GPU = "no GPU"
UNKNOWN_GPU = "no such GPU"

BASE_HIDDEN_SIZE = 768  # Hidden size of the models for which ``max_batch_padding`` was chosen.
BFLOAT16_CAPABILITY = (8, 0)  # First compute capability with bfloat16 in hardware.


class Cuda(Device):
    """A CUDA or ROCm GPU."""

    supports_async_copies = True
    uses_cudnn = True
    profiler_times_kernels = True
    sensor = "nvidia-smi"
    has_allocator = True
    headroom_fraction = 0.9  # The allocator splits blocks, and later batches can be larger.
    max_fraction = 1.0  # torch/cuda/memory.py
    allocation_failure_pattern = r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    pins_memory = True
    pin_reason = "copies from pinned memory to the GPU are faster and can overlap with computation"
    batch_tokens = 32768
    max_batch_padding = 2048
    fused_adamw_types = ("float64", "float32", "float16", "bfloat16")

    @property
    def index(self) -> int:
        """Index of the GPU; 0 if the name has none, as in torch."""
        return int(self.name.partition(":")[2] or 0)

    def names(self, torch: TorchInfo) -> list[str]:
        return [f"cuda:{index}" for index in range(len(torch.cuda_names or ()))] or ["cuda"]

    def type_rejection_rules(self, facts: DeviceFacts) -> Iterator[RejectionRule]:
        machine = facts.machine
        torch = facts.torch
        names = torch.cuda_names or ()
        build = torch.gpu_build or ""
        is_rocm = build.startswith("ROCm")
        vendor = "AMD" if is_rocm else "NVIDIA"
        if machine.system == "Darwin":
            yield RejectionRule(MACOS, "this machine runs macOS, which does not support CUDA", is_absent=True)
        yield from super().type_rejection_rules(facts)
        if machine.gpu_driver is False and not names:
            remedy = f"If this computer has an {vendor} GPU, install its driver."
            yield RejectionRule(NO_DRIVER, f"no {vendor} driver is loaded", remedy, is_absent=True)
        if torch.gpu_build == "":
            remedy = "Install a CUDA build of torch; see https://pytorch.org/get-started/locally for the command."
            yield RejectionRule(CPU_BUILD, f"torch {torch.version} is a CPU-only build", remedy)
        visible = facts.environ.get("CUDA_VISIBLE_DEVICES", "0")
        if visible.strip() in ("", "-1") and not names:
            reason = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
            yield RejectionRule(HIDDEN_GPUS, reason, "Unset CUDA_VISIBLE_DEVICES and restart the kernel.")
        if torch.cuda_names == ():
            tool = "rocm-smi" if is_rocm else "nvidia-smi"
            remedy = f"Run {tool} to check that the driver supports {build}."
            yield RejectionRule(NO_GPU, f"torch {torch.version} ({build}) finds no GPU", remedy)
        if torch.cuda_names is not None and self.index >= len(names):
            choices = " or ".join(f"'cuda:{index}'" for index in range(len(names)))
            reason = f"only {pluralize(len(names), 'GPU')} available on this machine"
            yield RejectionRule(UNKNOWN_GPU, reason, f"Use {choices}.")

    def describe_hardware(self, facts: DeviceFacts) -> str:
        gpu = self._gpu(facts.torch)
        return f"the GPU is {gpu}" if gpu else ""

    def hardware_name(self, _machine: MachineInfo, torch: TorchInfo) -> str:
        return self._gpu(torch) or f"GPU {self.index}"

    def _gpu(self, torch: TorchInfo) -> str:
        """Return the name of the GPU, or an empty string if torch has not reported it."""
        return "".join((torch.cuda_names or ())[self.index : self.index + 1])

    def max_padding_tokens(self, hidden_size: int | None) -> int:
        # A narrow model needs less time per token, but the launch overhead of a batch is the same.
        return self.max_batch_padding * BASE_HIDDEN_SIZE // (hidden_size or BASE_HIDDEN_SIZE)

    def empty_cache(self) -> None:
        torch = import_torch()
        with TENSOR_LOCK, torch.cuda.device(self.name):
            torch.cuda.empty_cache()

    def memory_stats(self) -> MemoryStats:
        cuda = import_torch().cuda
        total = cuda.get_device_properties(self.name).total_memory
        # One query, because memory_allocated() and its siblings each read and sort all counters.
        counters = cuda.memory_stats_as_nested_dict(self.name)
        allocated = counters["allocated_bytes"]["all"]
        return MemoryStats(allocated["current"], counters["reserved_bytes"]["all"]["current"], total, allocated["peak"])

    def reset_peak_memory_stats(self) -> None:
        import_torch().cuda.reset_peak_memory_stats(self.name)

    def set_memory_fraction(self, fraction: float) -> None:
        torch = import_torch()
        torch.cuda.set_per_process_memory_fraction(float(fraction), torch.device(self.name).index)

    def synchronize(self) -> None:
        import_torch().cuda.synchronize(self.name)

    def record_event(self) -> Callable[[], None]:
        wait: Callable[[], None] = import_torch().cuda.current_stream(self.name).record_event().synchronize
        return wait

    def capability(self) -> Capability | None:
        capability: Capability = import_torch().cuda.get_device_capability(self.name)
        return capability

    def uuid(self) -> str | None:
        if not is_torch_imported() or not import_torch().cuda.is_initialized():
            return None
        uuid = getattr(import_torch().cuda.get_device_properties(self.name), "uuid", None)
        return None if uuid is None else str(uuid)

    def half_precision_rejection(
        self, dtype: str, _torch_release: Version, capability: Capability | None
    ) -> RejectionRule | None:
        if dtype != "bfloat16" or (capability is not None and capability >= BFLOAT16_CAPABILITY):
            return None
        required = "bfloat16 in hardware requires compute capability 8.0"
        if capability is None:
            reason = f"the compute capability of the GPU is unknown, and {required}"
        else:
            reason = f"{required}; this GPU has {capability[0]}.{capability[1]}"
        return RejectionRule("bfloat16", reason, "Use 'float16', which is combined with a GradScaler.")
