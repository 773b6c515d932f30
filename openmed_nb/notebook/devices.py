"""The Python face of devices: which one is in force, and why; each function calls one verb of the session."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..devices.choice import DeviceChoice
from ..devices.simulated import DEFAULT_MEMORY
from ..session import SESSION

if TYPE_CHECKING:
    from ..simulation.device import SimulatedMps


def device() -> DeviceChoice:
    """Return the device in force, and why.

    Returns:
        The choice. A GPU is confirmed by a tiny computation, which loads torch; a CPU is planned until torch is loaded.

    Raises:
        UnknownDevice: For a bad value in ``OPENMED_TORCH_DEVICE`` or ``OPENMED_DEVICE``.
        DeviceUnavailable: For a device that was asked for and cannot be used.

    Example:
        >>> device().device in ("mps", "cuda", "cpu")
        True
    """
    return SESSION.device()


def use(device: str) -> DeviceChoice:
    """Override the device for this session, and move the models that follow it.

    Args:
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"cuda:N"``, ``"mps"`` or ``"gpu"``.

    Returns:
        The choice; its ``moved`` names the models that moved.

    Raises:
        UnknownDevice: For any other spelling.
        DeviceUnavailable: For a device that cannot be used; the session then keeps its former one.

    Example:
        >>> use("cpu").reason
        "'cpu' was asked for by use()."
        >>> reset().requested_by == "use()"
        False
    """
    return SESSION.use(str(device))


def reset() -> DeviceChoice:
    """Drop the session's override, so that the environment variables and the machine decide again.

    Returns:
        The choice that is in force without the override.

    Raises:
        UnknownDevice, DeviceUnavailable: As for :func:`device`; the override then stays.
    """
    return SESSION.reset()


@contextlib.contextmanager
def simulated_mps(
    memory: str | int = DEFAULT_MEMORY, fallback: bool | None = None, defects: str | Iterable[str] = ()
) -> Iterator[SimulatedMps]:
    """Let this session run on a simulated Mac: torch, transformers and Accelerate find an MPS device that is not there.

    It computes on the CPU, and raises what MPS raises: for float64, for tensors of two devices, for operators that MPS
    does not have, for bad watermarks, and where the memory of the Mac would not suffice. It counts memory and caches
    like MPS. It has neither the speed nor the numbers of MPS: everything shown under it says SIMULATED.

    Args:
        memory: The RAM of the Mac, such as ``"8 GiB"``, or a number of bytes; two thirds of it are what Metal recommends.
        fallback: Whether operators that MPS does not have fall back to the CPU; ``None`` is as in the environment,
            where openmed_nb switches it on unless the person said otherwise.
        defects: The issues of silent errors of real MPS devices that this one shall have too, such as
            ``"pytorch#177116"``, for teaching and for testing that :func:`openmed_nb.doctor` finds them.

    Yields:
        The device: its memory, ``fallbacks`` (how often each operator fell back), ``copies``, ``called`` and ``emptied``.

    Raises:
        ConfigurationError: For a memory that is none, and for an issue of which no error can be simulated (the message
            lists those that can); nothing is changed then.
        DeviceUnavailable: Where a simulation is on already.

    It counts in the thread that enters it: tensors of other threads stay plain CPU tensors. When it ends, all tensors are.
    The rules and texts are those of torch 2.13 (``MPSAllocator.mm``, ``MPSFallback.mm``, ``EmptyTensor.cpp``).

    Example:
        >>> import torch
        >>> with simulated_mps(memory="8 GiB", fallback=False) as mps:
        ...     print(device().device, torch.ones(2, device="mps").device)
        ...     torch.ones(2, device="mps").double()
        Traceback (most recent call last):
        ...
        TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use \
float32 instead.
        >>> device().simulated
        False
    """
    device = SESSION.simulate(memory, fallback, defects=defects)
    try:
        yield device
    finally:
        SESSION.end_simulation()


def resolve_torch_device(prefer: str | None = "auto") -> str:
    """Return the name of the device, for code that takes the string of OpenMed's function of this name.

    Args:
        prefer: A device, or ``"auto"`` or ``None`` for the one in force.

    Returns:
        ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``. A device that is asked for, here, for the session or in a
        variable, comes back normalised, whether or not it is there; loading a model checks that. ``"gpu"`` is
        ``"mps"`` on a Mac, where OpenMed says ``"cuda"``.

    Raises:
        UnknownDevice: For a spelling that names no device.

    Example:
        >>> resolve_torch_device(" CUDA:1 ")
        'cuda:1'
    """
    return SESSION.resolve(prefer)


@dataclass(frozen=True)
class MpsTuning:
    """The MPS variables in the environment, and the recommended type, under OpenMed's names."""

    env: Mapping[str, str]
    recommended_dtype: str = "float32"


def apply_mps_tuning() -> MpsTuning:
    """Set the MPS variables that nobody has set, as a pair that torch accepts, whatever the device is.

    Returns:
        The variables as they now stand, and the recommended type. ``%openmed_device --explain`` tells which of them
        torch will read or has read; :func:`openmed_nb.device` applies them by itself where the device is mps.

    Example:
        >>> from openmed_nb.session import SESSION
        >>> apply_mps_tuning().recommended_dtype
        'float32'
        >>> SESSION.stop()
    """
    return MpsTuning(SESSION.apply_mps_variables())
