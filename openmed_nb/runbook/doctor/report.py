"""Examine this computer and its models, and report what is wrong first.

Gathering what the doctor judges: asking the computer, computing on the device, looking at the models.

Whatever is wrong is a fact here and no error: torch that is missing, a device that fails, a model that cannot be loaded.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...devices import backend
from ...devices.backend import TorchFacts
from ...devices.choice import DeviceChoice
from ...devices.computer import Computer
from ...devices.environment import EnvPlan
from ...devices.machine import Machine
from ...devices.moving import module_in, unwrapped
from ...display import FAILED, MARK, NOTE, OK, SEVERITY, WARNING, Finding, Report, Shown, Table, worst
from ...errors import DeviceError, ModelUnusable, OpenMedError, TorchUnusable, cause
from ..signals.reading import read_signals
from ..signals.values import Signals
from .checks import SECTIONS, Computation, DoctorFacts, model_findings
from .packages import package_findings, read_packages
from .silent_errors import ProbeOutcome, run_probes

if TYPE_CHECKING:
    from ...models.dtypes import Validation
    from ...models.loading import LoadedModel


SEE_ABOVE = "see above"


@dataclass(frozen=True, repr=False)
class DoctorReport(Shown):
    """What the doctor found, in the order in which it looked.

    Attributes:
        findings: One for each thing that was looked at.
        simulated: Whether the computer is a simulated Mac.

    Example:
        >>> print(DoctorReport((Finding("torch", OK, "2.13.0"), Finding("MPS", FAILED, "no Metal device", "Ask a Mac."))))
        Doctor
          1 ok, 0 warnings, 1 failed.
          MPS, failed: no Metal device. Ask a Mac.
        Everything that was looked at
          check  result  evidence
          torch  ok      2.13.0
          MPS    failed  see above
    """

    findings: tuple[Finding, ...]
    simulated: bool = False

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst(self.findings)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 1 where something failed, else 0."""
        return int(self.status == FAILED)

    @property
    def headline(self) -> str:
        """How many findings there are of each kind, in one sentence."""
        count = Counter(one.status for one in self.findings)
        warnings = f"{count[WARNING]} warning{'' if count[WARNING] == 1 else 's'}"
        return f"{count[OK]} ok, {warnings}, {count[FAILED]} failed."

    @property
    def bad(self) -> tuple[Finding, ...]:
        """What failed, and then what may go wrong."""
        wrong = (one for one in self.findings if one.status in (WARNING, FAILED))
        return tuple(sorted(wrong, key=lambda one: -SEVERITY.index(one.status)))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain mappings, lists and strings, ready for JSON."""
        findings = [one.to_dict() for one in self.findings]
        summary = {"status": self.status, "exit_code": self.exit_code, "headline": self.headline}
        return {**summary, "simulated": self.simulated, "findings": findings}

    def report(self) -> Report:
        """Return what there is to show: the count, what to do, and everything that was looked at."""
        rows = tuple((one.name, one.status, SEE_ABOVE if one in self.bad else one.evidence) for one in self.findings)
        sentences = (self.headline, *((NOTE,) if self.simulated else ()), *map(sentence_of, self.bad))
        table = Table("Everything that was looked at", ("check", "result", "evidence"), rows)
        return Report(f"Doctor{MARK if self.simulated else ''}", sentences, (table,))


def sentence_of(finding: Finding) -> str:
    """Return a finding as a line that can be read alone.

    Example:
        >>> sentence_of(Finding("Python", FAILED, "it runs under Rosetta", "Install an arm64 Python."))
        'Python, failed: it runs under Rosetta. Install an arm64 Python.'
    """
    return f"{finding.name}, {finding.status}: {finding.evidence.rstrip('.')}. {finding.remedy}".rstrip()


def diagnose(facts: DoctorFacts) -> DoctorReport:
    """Return what is to be said of a computer; the same facts always give the same report.

    Args:
        facts: What ``examination.examine`` gathered.
    """
    findings = tuple(finding for section in SECTIONS for finding in section(facts))
    return DoctorReport(findings, facts.machine.simulated)


DTYPES = ("float32", "float16", "bfloat16", "int64", "float64")
"""The types of numbers that are tried."""

READ_BY_RULES = ("CUDA_VISIBLE_DEVICES",)
"""The only environment variables that are kept."""

Choose = Callable[[], "DeviceChoice | OpenMedError"]


def compute_on(device: str) -> Computation:
    """Compute a little on a device, and return where torch says that the result is.

    Example:
        >>> compute_on("cpu")
        Computation(device='cpu', place='cpu', failure='')
    """
    failure = backend.probe(device)
    if failure:
        return Computation(device, failure=failure)
    torch = backend.import_torch()
    with backend.TENSOR_LOCK:
        return Computation(device, str((torch.ones(2, device="cpu").to(device) * 2).device))


def try_dtypes(device: str) -> dict[str, str]:
    """Compute with each type of numbers on a device; return why each failed, empty where it did not.

    Example:
        >>> try_dtypes("cpu")["float64"]
        ''
    """
    return {dtype: _try(device, dtype) for dtype in DTYPES}


def signals_of(machine: Machine, device: str) -> Signals:
    """Return the signals of this computer, with those of the GPU that torch uses."""
    return read_signals(machine, device, uuid=backend.gpu_uuid(device))


@dataclass(frozen=True)
class Experiments:
    """What is tried on this computer; a stand-in can answer for a computer that is not here.

    Attributes:
        compute: Computes a little on a device.
        try_dtypes: Tries the types of numbers.
        run_probes: Looks for known silent errors.
        read_signals: Reads power and heat.
        read_packages: Returns what is installed, what that requires, and what is loaded.
    """

    compute: Callable[[str], Computation] = compute_on
    try_dtypes: Callable[[str], Mapping[str, str]] = try_dtypes
    run_probes: Callable[[str], tuple[ProbeOutcome, ...]] = run_probes
    read_signals: Callable[[Machine, str], Signals] = signals_of
    read_packages: Callable[[], Any] = read_packages


def examine(
    computer: Computer,
    choose: Choose,
    models: Iterable[tuple[str, Any]] = (),
    validation: Callable[[Any], Validation | None] = lambda _model: None,
    experiments: Experiments | None = None,
) -> DoctorFacts:
    """Gather the facts about a computer; torch is imported, and something is computed on the device in force.

    Args:
        computer: The computer.
        choose: Returns the device in force, or the error of the wishes; it may be asked twice.
        models: The names and the models to look at; an error in the place of a model says why it cannot be loaded.
        validation: Returns what is known of a model in a reduced type.
        experiments: What is tried.

    Returns:
        The facts; what is wrong is one of them.
    """
    tried = experiments or Experiments()
    choice = choose()
    torch_error = load_torch(computer)
    if torch_error is None and not (isinstance(choice, DeviceChoice) and choice.certain):
        choice = choose()  # torch has spoken for itself now.
    device = choice.device if isinstance(choice, DeviceChoice) and torch_error is None else None
    done = tried.compute(device) if device else None
    works = device if done is not None and not done.failure else None
    return DoctorFacts(
        python=".".join(platform.python_version_tuple()[:2]),
        machine=computer.machine,
        torch=computer.torch if torch_error is None else TorchFacts(None),
        choice=choice,
        environment=environment_of(computer, device),
        torch_error=torch_error,
        environ={name: value for name, value in computer.shell.items() if name in READ_BY_RULES},
        computation=done,
        dtypes=tried.try_dtypes(works) if works else {},
        probes=tried.run_probes(works) if works else (),
        packages=package_findings(*tried.read_packages()),
        signals=tried.read_signals(computer.machine, device or "cpu"),
        models=tuple(finding for one in models for finding in look_at(*one, device or "cpu", validation)),
    )


def models_to_look_at(
    model: Any, named: Callable[[str | None], tuple[LoadedModel, ...]], load: Callable[[str], LoadedModel]
) -> tuple[tuple[str, Any], ...]:
    """Return names and models to look at, with an error in the place of a model that cannot be loaded.

    Args:
        model: The name of a model, a torch module, a pipeline, or ``None`` for those that are loaded.
        named: Returns the loaded models of a name, or all.
        load: Loads a model by its name.

    Raises:
        ConfigurationError: For anything else.
        ModelError: For a name that is none, and a model that cannot be had.
    """
    if model is not None and not isinstance(model, (str, os.PathLike)):
        return ((type(module_in(model)).__name__, model),)
    loaded = named(None if model is None else str(model))
    if model is None or loaded:
        return tuple((one.name, one) for one in loaded)
    try:
        return ((str(model), load(str(model))),)
    except (ModelUnusable, DeviceError) as error:
        return ((str(model), error),)


def load_torch(computer: Computer) -> TorchUnusable | None:
    """Import torch, and return the error where it does not import."""
    try:
        computer.load_torch()
    except TorchUnusable as error:
        return error
    return None


def environment_of(computer: Computer, device: str | None) -> EnvPlan:
    """Return what became of the MPS variables: for mps too where they are why it is not in force."""
    refused = device != "mps" and device is not None and "watermark" in (computer.torch.failure("mps") or "")
    return computer.environment("mps" if refused else device or "cpu")


def look_at(name: str, model: Any, device: str, validation: Callable[[Any], Validation | None]) -> tuple[Finding, ...]:
    """Return what was found about a model, or why it could not be loaded."""
    if isinstance(model, OpenMedError):
        return (Finding(name, FAILED, model.what, model.remedy),)
    return model_findings(name, model, device=device, validation=validation(unwrapped(module_in(model))))


def _try(device: str, dtype: str) -> str:
    torch = backend.import_torch()
    numbers = torch.arange(8, device="cpu").reshape(2, 4)
    try:
        with backend.TENSOR_LOCK:
            moved = numbers.to(device, getattr(torch, dtype))
            made = moved * 2 + moved if dtype.startswith("int") else moved @ moved.T
            found = made.cpu()
    except (RuntimeError, TypeError) as error:
        return cause(error)
    expected = numbers * 2 + numbers if dtype.startswith("int") else numbers @ numbers.T
    return "" if torch.equal(found.long(), expected) else "it gave other numbers than the CPU"
