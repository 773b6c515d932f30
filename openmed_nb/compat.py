"""What OpenMed has, under the same names: code that was written for it finds its functions here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .annotation.loading import ModelLoader
from .models.config import OpenMedConfig
from .session import SESSION

__all__ = ["ModelLoader", "MpsTuning", "OpenMedConfig", "apply_mps_tuning", "resolve_torch_device"]


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
