"""Which type a model is loaded in: a reduced one needs a certificate, and "auto" takes the fastest that has one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..devices.computer import Computer
from ..devices.moving import level_of_caller
from ..devices.simulated import shows_simulated
from ..display import Report, Shown, Table
from ..errors import OpenMedWarning, one_line
from .certificates import Certificate, CertificateStore, Identity, certificate_store, identity_of
from .config import OpenMedConfig
from .loading import LoadSpec, files_in, model_folder
from .quantization import INT8
from .store import ModelKey

# From so much on a reduced type counts as faster than float32.
WORTH = 1.05

REDUCED = ("bfloat16", "float16", "int8")
"""The types that need a certificate, in the order in which equally fast ones are taken."""

SETTINGS = ("revision", "cache_dir", "allow_pickle")
"""Settings of a load that say which files are loaded, and so belong to the command that validates them."""


@dataclass(frozen=True)
class Validation:
    """What is known of a model that is loaded in a reduced type.

    Attributes:
        dtype: The type.
        device: The device, marked where it is simulated.
        reason: Why it is not validated there; empty where it is.
        command: The command that validates it.
    """

    dtype: str
    device: str
    reason: str
    command: str


@dataclass(frozen=True)
class Candidate:
    """A reduced type that could be taken.

    Attributes:
        dtype: The type.
        certificate: The certificate that counts here; ``None`` where none does.
        reason: Why none does, empty where one does.
    """

    dtype: str
    certificate: Certificate | None
    reason: str

    @property
    def faster(self) -> bool | None:
        """Whether it was measured to be worth it; ``None`` where the device is simulated, and no speed is measured."""
        if self.certificate is None:
            return False
        gain = self.certificate.evidence.speed_up
        return None if gain is None else gain > WORTH

    def said(self) -> str:
        """Return what is known of the type, without a figure of time."""
        if self.certificate is None:
            return f"{self.reason[0].upper()}{self.reason[1:]}."
        return f"{self.certificate.summary}{' It is not clearly faster than float32.' if self.faster is False else ''}"


@dataclass(frozen=True, repr=False)
class DtypeChoice(Shown):
    """The type that a model is loaded in, and why.

    Attributes:
        dtype: The type that was taken.
        requested: What was asked for: a type, or ``"auto"``.
        device: The device, marked where it is simulated.
        candidates: The reduced types that were looked at.
    """

    dtype: str
    requested: str
    device: str
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the choice as plain mappings and strings, ready for JSON."""
        return {
            "dtype": self.dtype,
            "requested": self.requested,
            "device": self.device,
            "candidates": [{"dtype": one.dtype, "faster": one.faster, "said": one.said()} for one in self.candidates],
        }

    def report(self) -> Report:
        """Return the type, who asked, and what is known of the reduced types."""
        rows = tuple((one.dtype, one.said()) for one in self.candidates)
        reason = "It was asked for." if self.requested == self.dtype else self._reason_of_auto()
        return Report(f"Type: {self.dtype} on {self.device}", (reason,), (Table("", ("type", "certificate"), rows),))

    def _reason_of_auto(self) -> str:
        if self.dtype in REDUCED and shows_simulated(self.device):
            return "'auto' took it: it is the first that is validated here; under the simulation no speed is measured."
        if self.dtype in REDUCED:
            return "'auto' took it: it is validated here for this model, and the fastest of those that are."
        return "'auto' took it: no reduced type is validated here for this model and faster."


def in_chosen_dtype(
    spec: LoadSpec, device: str, computer: Computer, environ: Mapping[str, str]
) -> tuple[LoadSpec, DtypeChoice]:
    """Return a model in the type that it is loaded in on a device, and why that one; its files are here by then.

    Args:
        spec: The model in the type that was asked for.
        device: The device.
        computer: What knows the names of devices, and torch.
        environ: The environment variables, of which one may name the folder of the certificates.
    """
    here = replace(spec, folder=model_folder(spec))
    identity = partial(identity_of, here, device=device, computer=computer)
    chosen = choose_dtype(certificate_store(environ), identity, spec.dtype)
    return here.in_dtype(chosen.dtype), chosen


def choose_dtype(store: CertificateStore, identity: Callable[[str], Identity], requested: str) -> DtypeChoice:
    """Return the type to load a model in.

    Args:
        store: The certificates.
        identity: Returns the identity of the model in a type, on the device that it goes to.
        requested: A reduced type, which is taken in any case, or ``"auto"``.
    """
    wanted = [identity(dtype) for dtype in (REDUCED if requested == "auto" else (requested,))]
    wanted = [one for one in wanted if one.dtype != INT8 or one.device == "cpu"]
    candidates = tuple(Candidate(one.dtype, store.find(one), store.explain(one)) for one in wanted)
    taken = fastest(candidates) if requested == "auto" else requested
    return DtypeChoice(taken, requested, wanted[0].shown_device, candidates)


def fastest(candidates: tuple[Candidate, ...]) -> str:
    """Return the fastest validated type that is worth it, the first where no speed is known, float32 where there is none."""
    worth_it = {one.dtype: one.certificate for one in candidates if one.certificate and one.faster is not False}
    speeds = {dtype: certificate.evidence.speed_up or 1.0 for dtype, certificate in worth_it.items()}
    return max(speeds, key=speeds.__getitem__, default="float32")


def warn_unless_validated(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> None:
    """Warn of a model that comes to a device in a reduced type that was not validated there, with the command that does.

    Args:
        key: The model, and the device that it was loaded for by name.
        device: The device that it comes to.
        computer: What knows the names of devices, and torch.
        environ: The environment variables.
    """
    known = validation_of(key, device, computer, environ)
    if known and known.reason:
        what = f"{key.spec.reference.name!r} is used in {known.dtype} on {known.device}, and {known.reason}."
        text = one_line(f"{what} Its answers may differ from those in float32. To validate it: {known.command}")
        warnings.warn(text, OpenMedWarning, stacklevel=level_of_caller())


def validation_of(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> Validation | None:
    """Return what is known of a loaded model in a reduced type; ``None`` in float32. The arguments are those above."""
    if key.spec.dtype not in REDUCED:
        return None
    identity = identity_of(key.spec, key.spec.dtype, device, computer)
    changed = "its files changed since it was loaded" if files_changed(key.spec) else ""
    reason = changed or certificate_store(environ).explain(identity)
    return Validation(identity.dtype, identity.shown_device, reason, validating_command(key.spec, key.device))


def files_changed(spec: LoadSpec) -> bool:
    """Tell whether a folder holds other files than when a model was asked for; what is loaded of it is then not known."""
    folder = spec.reference.location
    return bool(spec.files) and (not Path(folder).is_dir() or files_in(folder) != spec.files)


def validating_command(spec: LoadSpec, device: str | None) -> str:
    """Return the command that validates a model in its type.

    Args:
        spec: The model.
        device: The device, where it was loaded for a named one.

    Example:
        >>> validating_command(LoadSpec.of("bundled", OpenMedConfig(dtype="bfloat16")), None)
        "nb.validate_precision('bundled', texts, dtype='bfloat16')"
    """
    usual = OpenMedConfig()
    options = {name: getattr(spec.config, name) for name in SETTINGS}
    options = {name: value for name, value in options.items() if value != getattr(usual, name)}
    if "cache_dir" in options:
        options["cache_dir"] = os.fspath(options["cache_dir"])
    named = {"dtype": spec.dtype, **({"device": device} if device else {}), **options}
    words = ", ".join(f"{name}={value!r}" for name, value in named.items())
    return f"nb.validate_precision({spec.reference.name!r}, texts, {words})"
