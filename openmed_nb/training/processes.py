"""One training in several processes, as ``accelerate launch`` and ``torchrun`` start it: which one this is, and where it computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..devices.request import kind_of
from ..errors import DeviceUnavailable


@dataclass(frozen=True)
class TrainingProcess:
    """A process of a training.

    Attributes:
        rank: Its number among all; the first shows what there is to show.
        count: How many there are.
        local_rank: Its number on this computer, by which it has its GPU.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this is the process that shows what there is to show; one that is alone does, whatever a variable says."""
        return self.rank == 0 or self.count == 1

    @property
    def sentence(self) -> str:
        """Which process this is, empty where there is one alone."""
        others = "each keeps the curve of its own device"
        return f"This is process {self.rank} of {self.count}; {others}." if self.count > 1 else ""


ALONE = TrainingProcess()
"""The one process of most trainings."""


def this_process(environ: Mapping[str, str] | None = None) -> TrainingProcess:
    """Return which process of a training this is, from torch where it knows, else from what the launcher has set.

    Args:
        environ: The environment variables; ``None`` are those of this process.

    Example:
        >>> this_process({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
        TrainingProcess(rank=1, count=2, local_rank=1)
        >>> this_process({"RANK": "x"})
        TrainingProcess(rank=0, count=1, local_rank=0)
    """
    environ = os.environ if environ is None else environ
    told = [number(environ.get(name)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    known = known_to_torch()
    rank, count = known or (told[0] or 0, told[1] or 1)
    return TrainingProcess(rank, count, told[2] or 0)


def number(value: str | None) -> int | None:
    """Return a variable as a whole number, ``None`` where it is none."""
    return int(value) if value is not None and value.isdecimal() else None


def known_to_torch() -> tuple[int, int] | None:
    """Return rank and count of torch's process group, ``None`` where there is none; torch is not loaded for that."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def check_processes(device: str, process: TrainingProcess) -> None:
    """Check that a device can be trained on by as many processes as there are.

    Raises:
        DeviceUnavailable: For several on MPS, where no backend of ``torch.distributed`` works (pytorch#160732).

    Example:
        >>> check_processes("mps", TrainingProcess(count=1))
        >>> check_processes("mps", TrainingProcess(count=2))
        Traceback (most recent call last):
        ...
        openmed_nb.errors.DeviceUnavailable: MPS cannot train in 2 processes: gloo and nccl, over which they would talk, do not work with it (pytorch#160732). Start one process, or train on the CPU.
    """
    if kind_of(device) == "mps" and process.count > 1:
        what = f"MPS cannot train in {process.count} processes: gloo and nccl, over which they would talk, do not work with it"
        raise DeviceUnavailable(f"{what} (pytorch#160732).", "Start one process, or train on the CPU.")


def own_device(device: str, process: TrainingProcess) -> str:
    """Return the device of a process where nobody named one: each has a GPU of CUDA of its own.

    Example:
        >>> own_device("cuda", TrainingProcess(1, 2, 1)), own_device("cuda", TrainingProcess())
        ('cuda:1', 'cuda')
    """
    return f"cuda:{process.local_rank}" if device == "cuda" and process.count > 1 else device
