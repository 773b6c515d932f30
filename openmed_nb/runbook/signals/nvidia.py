"""What an NVIDIA GPU says, asked of ``nvidia-smi``: NVML's own command line, which comes with every driver."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .values import Gpu, number_in, whole_number_in

PATHS = (
    "/usr/bin/nvidia-smi",
    "/usr/local/nvidia/bin/nvidia-smi",
    "/usr/lib/wsl/lib/nvidia-smi",
    r"C:\Windows\System32\nvidia-smi.exe",
)
"""Where the driver puts it: on Linux, in containers, under WSL 2 and on Windows."""

FIELDS = (
    *("uuid", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw"),
    *("clocks_throttle_reasons.sw_thermal_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown"),
)
"""What is asked; newer drivers call the last two ``clocks_event_reasons`` and still know them by these names."""

QUERY = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]

MEBIBYTE = 1 << 20
MOST_MEMORY = 1 << 24
"""In mebibytes."""

HOTTEST = 150
MOST_POWER = 10_000

ACTIVE = {"Active": True, "Not Active": False}


def parse_nvidia_smi(output: str | None) -> tuple[Gpu, ...]:
    """Return what each GPU says, in the order of ``nvidia-smi``; what it does not support is ``None``.

    Example:
        >>> gpus = parse_nvidia_smi("GPU-1, NVIDIA T4, 35, [N/A], 15360, 41, 27.50, Not Active, Not Active")
        >>> gpus[0].utilisation, gpus[0].memory_used, gpus[0].slowed_by_heat
        (35, None, False)
        >>> parse_nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
        ()
    """
    rows = ([cell.strip() for cell in line.split(",")] for line in (output or "").splitlines())
    return tuple(_gpu(dict(zip(FIELDS, row, strict=True))) for row in rows if len(row) == len(FIELDS))


def chosen_gpu(gpus: Sequence[Gpu], device: str, environ: Mapping[str, str], uuid: str | None = None) -> Gpu | None:
    """Return the GPU that torch calls by this name.

    torch numbers the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, the fastest first unless ``CUDA_DEVICE_ORDER`` is
    ``PCI_BUS_ID``, and ``nvidia-smi`` all of them by their place on the bus (CUDA C++ programming guide, "CUDA
    environment variables"). Where the two can differ, only a UUID tells.

    Args:
        gpus: What ``nvidia-smi`` said.
        device: ``"cuda"`` or ``"cuda:N"``.
        environ: The environment variables.
        uuid: What torch says of the GPU, where it was asked.

    Returns:
        The GPU, ``None`` where it cannot be told.

    Example:
        >>> a, b = Gpu("T4", uuid="GPU-aa"), Gpu("T4", uuid="GPU-bb")
        >>> chosen_gpu((a, b), "cuda:0", {"CUDA_VISIBLE_DEVICES": "1"}) is b
        True
        >>> chosen_gpu((a, b), "cuda:0", {}, uuid="bb") is b
        True
    """
    name = uuid or visible_name(device, environ)
    if name is None:
        return None
    if not name.isdecimal():
        named = [gpu for gpu in gpus if (gpu.uuid or "").removeprefix("GPU-").startswith(name.removeprefix("GPU-"))]
        return named[0] if len(named) == 1 else None
    place = whole_number_in(name)
    same_order = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.name for gpu in gpus}) == 1
    return gpus[place] if same_order and place is not None and place < len(gpus) else None


def visible_name(device: str, environ: Mapping[str, str]) -> str | None:
    """Return the number or the UUID by which ``CUDA_VISIBLE_DEVICES`` names a device; its own number where it is unset.

    Example:
        >>> visible_name("cuda:1", {}), visible_name("cuda:1", {"CUDA_VISIBLE_DEVICES": "3, GPU-8f6c"})
        ('1', 'GPU-8f6c')
        >>> visible_name("cuda:1", {"CUDA_VISIBLE_DEVICES": "3"})
    """
    number = device.partition(":")[2] or "0"
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return number
    names = [name.strip() for name in visible.split(",")]
    valid = [name for name in names if re.fullmatch(r"\d+|GPU-[0-9a-fA-F-]+", name, re.ASCII)]
    place = whole_number_in(number)
    return valid[place] if valid == names and place is not None and place < len(names) else None


def _gpu(said: Mapping[str, str]) -> Gpu:
    used, total = (whole_number_in(said[name], most=MOST_MEMORY) for name in ("memory.used", "memory.total"))
    return Gpu(
        name=_word(said["name"]),
        utilisation=whole_number_in(said["utilization.gpu"], most=100),
        memory_used=None if used is None else used * MEBIBYTE,
        memory_total=None if not total else total * MEBIBYTE,
        temperature=whole_number_in(said["temperature.gpu"], most=HOTTEST),
        power=number_in(said["power.draw"], most=MOST_POWER),
        slowed_by_heat=_slowed([said[name] for name in FIELDS[-2:]]),
        uuid=_word(said["uuid"]),
    )


def _slowed(answers: list[str]) -> bool | None:
    known = [ACTIVE[answer] for answer in answers if answer in ACTIVE]
    return any(known) if known else None


def _word(text: str) -> str | None:
    return None if not text or text.startswith("[") else text
