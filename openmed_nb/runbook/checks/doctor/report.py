"""``nb.doctor``: gather the facts about this computer, torch and the models, judge them, and report what is wrong first.

Whatever is wrong is a fact here and not an error: a torch that is missing, a device that fails, a model that cannot be loaded.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...._events.activity import ProgressEvent
from ...._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Finding,
    Report,
    Table,
    pluralize,
    worst_status,
)
from ...._utils.text import describe_error, model_label
from ....devices import backend
from ....devices.backend import TorchInfo
from ....devices.causes import torch_requirement
from ....devices.choice import DeviceChoice
from ....devices.moving import get_module, unwrap_model
from ....devices.registry import parse_device_argument
from ....errors import DeviceError, InvalidModelError, OpenMedError, TorchImportError
from ....models.config import OpenMedConfig
from ....models.records import get_dtype_validation
from ....models.registry import is_model_name
from ....session import SESSION, Session
from ...records.signals import read_signals
from .checks import ComputationCheck, SystemFacts, model_findings, package_findings, read_packages, run_checks
from .launching import accelerate_findings

DTYPES = ("float32", "float16", "bfloat16", "int64", "float64")


# What the worst of the findings means.
WORDS = {
    FAILED: "something does not work",
    WARNING: "it works, with something to know",
    OK: "nothing is wrong",
    NOT_APPLICABLE: "nothing was looked at",
}


@dataclass(frozen=True, repr=False)
class DoctorReport(Displayable):
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

    JSON_PROPERTIES = ("status", "exit_code", "headline")

    @property
    def status(self) -> str:
        """The worst of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst_status(self.findings)

    @property
    def exit_code(self) -> int:
        """What a command ends with: 1 if something failed, else 0."""
        return int(self.status == FAILED)

    @property
    def headline(self) -> str:
        """How many findings there are of each kind, in one sentence."""
        count = Counter(finding.status for finding in self.findings)
        return f"{count[OK]} ok, {pluralize(count[WARNING], 'warning')}, {count[FAILED]} failed."

    @property
    def problems(self) -> tuple[Finding, ...]:
        """What failed, and then what may go wrong."""
        return tuple(finding for status in (FAILED, WARNING) for finding in self.findings if finding.status == status)

    def to_report(self) -> Report:
        """Return what there is to show: the count, what to do, and everything that was looked at."""
        bad = self.problems
        rows = tuple(
            (finding.name, finding.status, (finding.details or "see above") if finding in bad else finding.evidence)
            for finding in self.findings
        )
        table = Table("Everything that was looked at", ("check", "result", "evidence"), rows, collapsed=bool(bad))
        spoken = (f"Doctor: {WORDS[self.status]}", self.headline)
        return Report("Doctor", (self.headline,), (table,), html_sentences=spoken, status=self.status, problems=bad)


def doctor(model: Any = None, *, progress: bool = True) -> DoctorReport:
    """Look at this computer, torch, the environment, the device in force and the models, and say what is wrong.

    Args:
        model: The name of a model, which is loaded if it is not yet; a torch module; or a pipeline. ``None`` looks at the
            models that the session has loaded.
        progress: Whether to show what is under way, where it takes longer than half a second.

    Returns:
        The report: one finding for each thing that was looked at, with ``status`` (``"ok"``, ``"warning"``, ``"failed"``
        or ``"not applicable"``), the evidence and one thing to do; ``status``, the worst of them; ``exit_code``, 1 if
        something failed. Its text is the same in every run, as long as nothing changes.

    Raises:
        ConfigurationError: For anything that is not a model.
        UnknownModelError, ModelDownloadError, UntrustedModelError: For a name under which no model can be had. Whatever else is wrong,
            also a torch that does not import and a model that cannot be loaded, is a finding.

    The doctor computes on the device in force, which loads torch: linear layers, each type of numbers, and on a GPU small
    probes of errors that are known to give wrong numbers in silence, each compared with the CPU and run twice, with an
    empty cache and with dirty memory (``runbook.doctor.silent_errors`` names the issues). They run on a GPU that is not in
    force too where it gave wrong numbers when it was tried. They take some megabytes and a few seconds, and random numbers
    go on as if they had not run. The device, the override and the models stay as they are. Where ``accelerate config`` has
    left a file, a row names each setting of it that does not fit this computer.

    Example:
        >>> report = doctor()
        >>> report.exit_code in (0, 1)
        True
        >>> [finding.name for finding in report.findings][:3]
        ['Python', 'macOS', 'torch']
    """
    with SESSION.operation(progress):
        return diagnose(collect_facts(SESSION, model))


def diagnose(facts: SystemFacts) -> DoctorReport:
    """Judge the facts of a computer; the same facts always give the same report."""
    return DoctorReport(tuple(run_checks(facts)), facts.machine.simulated)


def check_computation(device: str) -> ComputationCheck:
    """Compute on a device: linear layers, each type of numbers, and the probes of known silent errors."""
    from .silent_errors import run_probes

    failure = backend.probe_device(device)
    if failure and not failure.startswith(backend.NUMERICAL_MISMATCH):
        return ComputationCheck(device, failure=failure)
    torch = backend.import_torch()
    with backend.TENSOR_LOCK:
        place = str((torch.ones(2, device="cpu").to(device) * 2).device)
    dtypes = {dtype: _failure_in(device, dtype) for dtype in DTYPES}
    return ComputationCheck(device, place, failure, dtypes, run_probes(device))


def _failure_in(device: str, dtype: str) -> str:
    """Return why a device does not compute with a type of numbers; empty if it does."""
    torch = backend.import_torch()
    numbers = torch.arange(8, device="cpu").reshape(2, 4)

    def compute(values: Any) -> Any:
        return values * 2 + values if dtype.startswith("int") else values @ values.T

    try:
        with backend.TENSOR_LOCK:
            found = compute(numbers.to(device, getattr(torch, dtype))).cpu()
    except (RuntimeError, TypeError) as error:
        return describe_error(error)
    return "" if torch.equal(found.long(), compute(numbers)) else backend.NUMERICAL_MISMATCH


def collect_facts(
    session: Session, model: Any = None, compute: Callable[[str], ComputationCheck] = check_computation
) -> SystemFacts:
    """Gather the facts about a session's computer; another ``compute`` stands in for a device that is not here."""
    with session.transaction():
        models = _models(session, model)
        computer = session.device_manager
        choice = session.choice_or_error(confirm=True)
        torch_error = None
        try:
            computer.load_torch()
        except TorchImportError as error:
            torch_error = error
        session.notify(ProgressEvent("Examining", "this computer"))
        if torch_error is None and not (isinstance(choice, DeviceChoice) and choice.confirmed):
            choice = session.choice_or_error(confirm=True)  # Now torch can answer for itself.
        device = choice.device if isinstance(choice, DeviceChoice) and torch_error is None else None
        # The MPS variables count for mps, also if they are why it is not in force.
        refused = device not in (None, "mps") and "watermark" in (computer.torch.probe_failure("mps") or "")
        wrong = next((gpu for gpu, why in computer.torch.probes if why.startswith(backend.NUMERICAL_MISMATCH)), None)
        shell = computer.user_environ
        return SystemFacts(
            python=".".join(platform.python_version_tuple()[:2]),
            machine=computer.machine,
            torch=computer.torch if torch_error is None else TorchInfo(None),
            choice=choice,
            environment=computer.mps_environment("mps" if refused else device or "cpu"),
            torch_error=torch_error,
            environ={name: shell[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in shell},
            computed=compute(device) if device else None,
            ruled_out=compute(wrong) if wrong else None,
            packages=package_findings(*read_packages(), torch_requirement(computer.machine)),
            launching=() if torch_error else accelerate_findings(shell, computer.machine, computer.torch),
            signals=read_signals(computer.machine, device or "cpu", uuid=parse_device_argument(device or "cpu").uuid()),
            models=tuple(
                finding for name, found in models for finding in _check_model(name, found, device or "cpu", session)
            ),
        )


def _models(session: Session, model: Any) -> tuple[tuple[str, Any], ...]:
    """Return names and models to look at, with an error in the place of a model that cannot be loaded."""
    if not is_model_name(model):
        return ((type(get_module(model)).__name__, model),)
    loaded = session.models.find(None if model is None else str(model))
    if model is None or loaded:
        return tuple((loaded_model.name, loaded_model) for loaded_model in loaded)
    try:
        return ((str(model), session.load_model(str(model), OpenMedConfig())),)
    except (InvalidModelError, DeviceError) as error:
        return ((str(model), error),)


def _check_model(name: str, model: Any, device: str, session: Session) -> tuple[Finding, ...]:
    if isinstance(model, OpenMedError):
        return (Finding(model_label(name), FAILED, model.message, model.remedy),)
    inner = unwrap_model(get_module(model))
    key = session.models.key_of(inner)
    known = get_dtype_validation(key, str(inner.device), session.device_manager, session.environ) if key else None
    return model_findings(name, model, device=device, validation=known)
