"""What the doctor judges: the facts of a computer, its torch, its environment and its models, as one value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...devices.availability import Rejection, Rule, Surroundings, first_applying
from ...devices.backend import TorchFacts
from ...devices.choice import DeviceChoice
from ...devices.environment import EnvPlan
from ...devices.machine import Machine
from ...errors import OpenMedError
from ..findings import Finding
from ..signals.values import Signals
from .probing import ProbeOutcome


@dataclass(frozen=True)
class Computation:
    """A real computation.

    Attributes:
        device: Where it was to be done.
        place: Where torch says that its result is, empty where there is none.
        failure: Why it failed, empty where it gave what the CPU gives.
    """

    device: str
    place: str = ""
    failure: str = ""


@dataclass(frozen=True)
class DoctorFacts:
    """All that the doctor judges.

    Attributes:
        python: The version of this Python.
        machine: The facts of this computer.
        torch: What is known of torch.
        torch_error: Why torch cannot be imported, ``None`` where it can.
        choice: The device in force, or the error of the wishes.
        environ: The environment variables that the rules read.
        environment: What became of the MPS variables.
        computation: A real computation on the device in force; ``None`` where there is none.
        dtypes: For each type that was tried, why it failed, empty where it did not.
        probes: What came of the probes of known silent errors.
        packages: What was found about packages.
        signals: The state of the computer.
        models: What was found about each model.
    """

    python: str
    machine: Machine
    torch: TorchFacts
    choice: DeviceChoice | OpenMedError
    environment: EnvPlan
    torch_error: OpenMedError | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    computation: Computation | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    probes: tuple[ProbeOutcome, ...] = ()
    packages: tuple[Finding, ...] = ()
    signals: Signals = field(default_factory=Signals)
    models: tuple[Finding, ...] = ()

    def rejection(self, device: str, causes: Iterable[Rule]) -> Rejection | None:
        """Return what the first of some rules has to say about a device."""
        return first_applying(causes, Surroundings(device, self.machine, self.torch, self.environ))
