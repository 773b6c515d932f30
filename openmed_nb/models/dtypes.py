"""Which type a model is loaded in: a reduced one needs a certificate, and "auto" takes the fastest that has one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ..devices.computer import Computer
from ..devices.machine import shows_simulated
from ..devices.moving import level_of_caller
from ..display import Plain, Report, Shown, Table
from ..errors import OpenMedWarning, one_line
from .certificates import Certificate, certificate_store, identity_of
from .config import OpenMedConfig
from .loading import INT8, LoadSpec, files_in, model_folder
from .store import ModelKey

# The types that need a certificate, in the order in which equally fast ones are taken.
REDUCED = ("bfloat16", "float16", "int8")

# A reduced type counts as faster than float32 when it is more than this many times as fast.
WORTH = 1.05

# Settings that choose the files that are loaded, and so belong to the command that validates them.
SETTINGS = ("revision", "cache_dir", "allow_pickle")


@dataclass(frozen=True)
class ReducedType(Plain):
    """A reduced type, and its certificate that counts here, or the reason why none does."""

    dtype: str
    certificate: Certificate | None
    reason: str

    ALSO, HIDDEN = ("faster", "said"), ("certificate", "reason")

    @property
    def faster(self) -> bool | None:
        """Whether it was measured to be worth it; ``None`` where the device is simulated, and no speed is measured."""
        if self.certificate is None:
            return False
        gain = self.certificate.evidence.speed_up
        return None if gain is None else gain > WORTH

    @property
    def said(self) -> str:
        """What is known of the type, without a figure of time."""
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
        candidates: What is known of each reduced type that was considered.
    """

    dtype: str
    requested: str
    device: str
    candidates: tuple[ReducedType, ...]

    def report(self) -> Report:
        """Return the type, who asked, and what is known of the reduced types."""
        if self.requested == self.dtype:
            reason = "It was asked for."
        elif self.dtype not in REDUCED:
            reason = "'auto' took it: no reduced type is validated here for this model and faster."
        elif shows_simulated(self.device):
            reason = (
                "'auto' took it: it is the first that is validated here; under the simulation no speed is measured."
            )
        else:
            reason = "'auto' took it: it is validated here for this model, and the fastest of those that are."
        rows = tuple((one.dtype, one.said) for one in self.candidates)
        return Report(f"Type: {self.dtype} on {self.device}", (reason,), (Table("", ("type", "certificate"), rows),))


def in_chosen_dtype(
    spec: LoadSpec, device: str, computer: Computer, environ: Mapping[str, str]
) -> tuple[LoadSpec, DtypeChoice]:
    """Return a model in the type that it is loaded in on a device, and why that one; its files are fetched."""
    here, store = replace(spec, folder=model_folder(spec)), certificate_store(environ)
    identity = identity_of(here, spec.dtype, device, computer)
    wanted = REDUCED if spec.dtype == "auto" else (spec.dtype,)
    identities = [replace(identity, dtype=one) for one in wanted if one != INT8 or identity.device == "cpu"]
    known = tuple(ReducedType(one.dtype, store.find(one), store.explain(one)) for one in identities)
    taken = spec.dtype
    if taken == "auto":
        worth_it = [(one.dtype, one.certificate) for one in known if one.certificate and one.faster is not False]
        taken, _ = max(worth_it, key=lambda one: one[1].evidence.speed_up or 1.0, default=("float32", None))
    return here.in_dtype(taken), DtypeChoice(taken, spec.dtype, identity.shown_device, known)


@dataclass(frozen=True)
class Validation:
    """What is known of a model that is loaded in a reduced type."""

    dtype: str
    device: str  # Marked where it is simulated.
    reason: str  # Why it is not validated there; empty where it is.
    command: str  # The command that validates it.


def validation_of(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> Validation | None:
    """Return what is known on a device of a model that was loaded in a reduced type; ``None`` in float32."""
    spec = key.spec
    if spec.dtype not in REDUCED:
        return None
    identity = identity_of(spec, spec.dtype, device, computer)
    reason, folder = certificate_store(environ).explain(identity), spec.reference.location
    if spec.files and (not Path(folder).is_dir() or files_in(folder) != spec.files):
        reason = "its files changed since it was loaded"  # What is in memory is then not known.
    return Validation(identity.dtype, identity.shown_device, reason, validating_command(spec, key.device))


def warn_unless_validated(key: ModelKey, device: str, computer: Computer, environ: Mapping[str, str]) -> None:
    """Warn of a model that comes to a device in a reduced type that was not validated there, with the command that does."""
    known = validation_of(key, device, computer, environ)
    if known and known.reason:
        what = f"{key.spec.reference.name!r} is used in {known.dtype} on {known.device}, and {known.reason}."
        text = one_line(f"{what} Its answers may differ from those in float32. To validate it: {known.command}")
        warnings.warn(text, OpenMedWarning, stacklevel=level_of_caller())


def validating_command(spec: LoadSpec, device: str | None) -> str:
    """Return the command that validates a model in its type; ``device`` is ``None`` where it was not loaded for one."""
    usual = OpenMedConfig()
    options = {name: getattr(spec.config, name) for name in SETTINGS}
    options = {name: value for name, value in options.items() if value != getattr(usual, name)}
    if "cache_dir" in options:
        options["cache_dir"] = os.fspath(options["cache_dir"])
    named = {"dtype": spec.dtype, **({"device": device} if device else {}), **options}
    words = ", ".join(f"{name}={value!r}" for name, value in named.items())
    return f"nb.runbook.validate_precision({spec.reference.name!r}, texts, {words})"
