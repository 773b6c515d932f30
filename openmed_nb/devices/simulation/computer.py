"""A simulated Mac, as a session sees a computer: its facts, and a torch that has the simulated device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, MutableMapping

from ...errors import check_flag
from .. import backend
from ..backend import TorchFacts
from ..computer import Computer
from ..environment import FALLBACK
from ..machine import Machine
from .device import SimulatedMps, kept, parse_memory, simulated_device
from .patches import CHIP, MACOS


class SimulatedTorch:
    """Answers for torch on the simulated Mac; it counts as loaded from the moment in which its device begins."""

    def __init__(self) -> None:
        self.device: SimulatedMps | None = None

    def torch_is_loaded(self) -> bool:
        """Tell whether the device has begun, with the variables that stood there then."""
        return self.device is not None

    def installed_torch(self) -> TorchFacts:
        """Return what the files of torch say."""
        return backend.installed_torch()

    def loaded_torch(self) -> TorchFacts:
        """Return what torch says of itself; it finds the simulated device."""
        return backend.loaded_torch()

    def probe(self, device: str) -> str:
        """Compute a little on the device."""
        return backend.probe(device)

    def mps_allocator_started(self) -> bool | None:
        """Tell whether the allocator has read its watermarks; of this one it is known."""
        return self.device is not None and self.device.allocator.started


def simulated_mac(memory_bytes: int) -> Machine:
    """Return the facts of a simulated Mac.

    Example:
        >>> simulated_mac(2**33).native_apple_silicon
        True
    """
    return Machine(
        "Darwin",
        "arm64",
        apple_silicon=True,
        chip=CHIP,
        macos=MACOS,
        memory_bytes=memory_bytes,
        cores=os.cpu_count(),
        gpu_driver=False,
        simulated=True,
    )


@contextlib.contextmanager
def simulated_computer(
    memory: str | int,
    fallback: bool | None,
    environ: MutableMapping[str, str],
    defects: str | Iterable[str] = (),
) -> Iterator[tuple[Computer, SimulatedMps]]:
    """Begin a simulated Mac with its device, and end it.

    The MPS variables are applied before the device begins, as in a kernel whose first line is ``%load_ext openmed_nb``,
    and are taken back at the end.

    Args:
        memory: The RAM of the Mac.
        fallback: What ``PYTORCH_ENABLE_MPS_FALLBACK`` says meanwhile; ``None`` leaves it as it is.
        environ: The environment variables, read and written.
        defects: The issues of silent errors that the device shall have.

    Raises:
        ConfigurationError, DeviceUnavailable: As for :func:`.device.simulated_device`; nothing is changed then.
    """
    if fallback is not None:
        check_flag("fallback", fallback)
    torch, installed = SimulatedTorch(), parse_memory(memory)
    computer = Computer(environ, lambda: simulated_mac(installed), torch)
    with kept(FALLBACK, environ):
        if fallback is not None:
            environ[FALLBACK] = str(int(fallback))
        try:
            computer.prepare("mps")
            with simulated_device(installed, None, environ, defects) as torch.device:
                yield computer, torch.device
        finally:
            computer.changes.unpublish()
            computer.leave_mps()
