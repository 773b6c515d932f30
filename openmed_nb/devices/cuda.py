"""CUDA and ROCm, which torch calls CUDA too: GPUs with numbers, whose copies wait in a queue with the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .._render.display import pluralize
from .backend import TENSOR_LOCK, TorchInfo, import_torch, is_torch_imported
from .causes import DeviceContext, RejectionRule
from .device import Device, MemoryStats
from .machine import MachineInfo

MACOS = "macOS"
NO_DRIVER = "no driver"
CPU_BUILD = "CPU build"
HIDDEN_GPUS = "hidden GPUs"
NO_GPU = "no GPU"

HIDDEN_SIZE = 768  # Of the models that ``batch_waste`` is for.
BFLOAT16_CAPABILITY = (8, 0)  # The first compute capability whose hardware has bfloat16.


class Cuda(Device):
    """One GPU of CUDA or ROCm."""

    is_numbered = True
    queues_copies = True
    uses_cudnn = True
    profiler_times_kernels = True
    sensor = "nvidia-smi"
    has_allocator = True
    headroom = 0.9  # The allocator splits blocks, and other batches are larger.
    max_fraction = 1.0  # torch/cuda/memory.py
    lack_of_memory = r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    pins_memory = True
    pin_reason = "copies from pinned memory to the GPU are faster, and can go on while it computes"
    batch_tokens = 32768
    batch_waste = 2048
    fused_adamw_since = "2.0"
    fused_adamw_types = ("float64", "float32", "float16", "bfloat16")

    @property
    def index(self) -> int:
        """The number of the GPU; torch takes the first where the name has none."""
        return int(self.name.partition(":")[2] or 0)

    def names(self, torch: TorchInfo) -> list[str]:
        return [f"cuda:{index}" for index in range(len(torch.cuda_names or ()))] or ["cuda"]

    def causes(self, here: DeviceContext) -> Iterator[RejectionRule]:
        machine = here.machine
        torch = here.torch
        names = torch.cuda_names or ()
        build = torch.gpu_build or ""
        is_rocm = build.startswith("ROCm")
        maker = "AMD" if is_rocm else "NVIDIA"
        if machine.system == "Darwin":
            yield RejectionRule(MACOS, "this computer runs macOS, which has no CUDA")
        yield from super().causes(here)
        if machine.gpu_driver is False and not names:
            yield RejectionRule(
                NO_DRIVER, f"no {maker} driver is loaded", f"Install the driver if there is an {maker} GPU."
            )
        if torch.gpu_build == "":
            remedy = "Install a CUDA build of torch: https://pytorch.org/get-started/locally shows the command."
            yield RejectionRule(CPU_BUILD, f"torch {torch.version} is a build for the CPU only", remedy)
        visible = here.environ.get("CUDA_VISIBLE_DEVICES", "0")
        if visible.strip() in ("", "-1") and not names:
            reason = f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU"
            yield RejectionRule(HIDDEN_GPUS, reason, "Unset CUDA_VISIBLE_DEVICES and restart the kernel.")
        if torch.cuda_names == ():
            tool = "rocm-smi" if is_rocm else "nvidia-smi"
            remedy = f"Check with {tool} that the driver is new enough for {build}."
            yield RejectionRule(NO_GPU, f"torch {torch.version} ({build}) finds no GPU", remedy)
        if torch.cuda_names is not None and self.index >= len(names):
            choices = " or ".join(f"'cuda:{index}'" for index in range(len(names)))
            yield RejectionRule("no such GPU", f"this computer has {pluralize(len(names), 'GPU')}", f"Use {choices}.")
        yield from self.causes_in_probe(torch)

    def hardware(self, here: DeviceContext) -> str:
        gpu = self._gpu(here.torch)
        return f"the GPU is {gpu}" if gpu else ""

    def own_name(self, _machine: MachineInfo, torch: TorchInfo) -> str:
        return self._gpu(torch) or f"GPU {self.index}"

    def _gpu(self, torch: TorchInfo) -> str:
        """Return the name of the GPU, empty where torch has told none."""
        return "".join((torch.cuda_names or ())[self.index : self.index + 1])

    def batch_waste_of(self, hidden_size: int | None) -> int:
        # A narrow model computes a token sooner, and to start a batch of it takes as long.
        return self.batch_waste * HIDDEN_SIZE // (hidden_size or HIDDEN_SIZE)

    def empty_cache(self) -> None:
        torch = import_torch()
        with TENSOR_LOCK, torch.cuda.device(self.name):
            torch.cuda.empty_cache()

    def memory(self) -> MemoryStats:
        cuda = import_torch().cuda
        return MemoryStats(
            cuda.memory_allocated(self.name),
            cuda.memory_reserved(self.name),
            cuda.get_device_properties(self.name).total_memory,
            cuda.max_memory_allocated(self.name),
        )

    def reset_peak(self) -> None:
        import_torch().cuda.reset_peak_memory_stats(self.name)

    def limit(self, fraction: float) -> None:
        torch = import_torch()
        torch.cuda.set_per_process_memory_fraction(float(fraction), torch.device(self.name).index)

    def finish(self) -> None:
        import_torch().cuda.synchronize(self.name)

    def work_done(self) -> Callable[[], None]:
        wait: Callable[[], None] = import_torch().cuda.current_stream(self.name).record_event().synchronize
        return wait

    def capability(self) -> tuple[int, int] | None:
        capability: tuple[int, int] = import_torch().cuda.get_device_capability(self.name)
        return capability

    def uuid(self) -> str | None:
        if not is_torch_imported() or not import_torch().cuda.is_initialized():
            return None
        uuid = getattr(import_torch().cuda.get_device_properties(self.name), "uuid", None)
        return None if uuid is None else str(uuid)

    def half_precision_obstacle(
        self, dtype: str, _torch_release: tuple[int, ...], capability: tuple[int, int] | None
    ) -> RejectionRule | None:
        if dtype != "bfloat16" or (capability is not None and capability >= BFLOAT16_CAPABILITY):
            return None
        gpu = "the GPU, as far as is known,"
        if capability is not None:
            gpu = "a GPU of compute capability {}.{}".format(*capability)
        reason = f"{gpu} has no bfloat16 of its own; that begins with compute capability 8.0"
        return RejectionRule("bfloat16", reason, "Use 'float16', which comes with a GradScaler.")
