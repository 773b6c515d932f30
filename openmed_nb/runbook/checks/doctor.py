"""``nb.doctor``: collect facts about this machine, torch and the models, and report problems first.

A missing torch, a failing device or a model that cannot be loaded is a finding, not an error.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..._events.activity import ProgressEvent
from ..._render.display import (
    FAILED,
    NOT_APPLICABLE,
    OK,
    WARNING,
    Displayable,
    Finding,
    Report,
    findings_table,
    pluralize,
    worst_status,
)
from ..._utils.text import describe_error, model_label
from ...devices import backend
from ...devices.backend import TorchInfo
from ...devices.choice import DeviceChoice
from ...devices.computer import DeviceManager
from ...devices.device import torch_requirement
from ...devices.moving import get_module
from ...devices.system_status import SystemStatus, read_system_status
from ...errors import DeviceError, InvalidModelError, OpenMedError, TorchImportError
from ...models.config import OpenMedConfig
from ...models.registry import is_model_name
from ...session import SESSION, Session
from ..bench.timing import describe_load
from .doctor_checks import (
    CHECKED_VARIABLES,
    ComputationCheck,
    SystemFacts,
    accelerate_findings,
    model_findings,
    package_findings,
    run_checks,
)

if TYPE_CHECKING:
    import torch

    from ...annotation.pipeline import AnnotationPipeline
    from ...models.loading import LoadedModel

    CheckedModel = torch.nn.Module | AnnotationPipeline | LoadedModel | OpenMedError

DTYPES = ("float32", "float16", "bfloat16", "int64", "float64")

# Summary of a report by the status of its worst finding.
SUMMARY_BY_STATUS = {
    FAILED: "problems found",
    WARNING: "works, with warnings",
    OK: "no problems found",
    NOT_APPLICABLE: "nothing was checked",
}


@dataclass(frozen=True, repr=False)
class DoctorReport(Displayable):
    """Result of the doctor.

    Attributes:
        findings: One finding for each check, in the order of the checks.
        simulated: Whether the machine is a simulated Mac.

    Example:
        >>> print(DoctorReport((Finding("torch", OK, "2.13.0"), Finding("MPS", FAILED, "no Metal device", "Use 'cpu'."))))
        Doctor: problems found
          1 ok, 0 warnings, 1 failed.
          check  result  evidence         suggested action
          MPS    failed  no Metal device  Use 'cpu'.
          torch  ok      2.13.0
    """

    findings: tuple[Finding, ...]
    simulated: bool = False

    JSON_PROPERTIES = ("status", "exit_code", "headline")

    @property
    def status(self) -> str:
        """Worst status of the findings: ``"ok"``, ``"warning"`` or ``"failed"``."""
        return worst_status(self.findings)

    @property
    def exit_code(self) -> int:
        """Exit code of a command: 1 if a check failed, else 0."""
        return int(self.status == FAILED)

    @property
    def headline(self) -> str:
        """Number of findings of each status, as a sentence."""
        count = Counter(finding.status for finding in self.findings)
        inapplicable = f", {count[NOT_APPLICABLE]} not applicable" if count[NOT_APPLICABLE] else ""
        return f"{count[OK]} ok, {pluralize(count[WARNING], 'warning')}, {count[FAILED]} failed{inapplicable}."

    @property
    def problems(self) -> tuple[Finding, ...]:
        """Findings that failed, followed by the warnings."""
        return tuple(finding for status in (FAILED, WARNING) for finding in self.findings if finding.status == status)

    def to_report(self) -> Report:
        """Return the report: counts, and a table of the checks that apply, problems first."""
        problems = self.problems
        table = findings_table("", (*problems, *(finding for finding in self.findings if finding.status == OK)))
        return Report(f"Doctor: {SUMMARY_BY_STATUS[self.status]}", (self.headline,), (table,), status=self.status)


def doctor(model: Any = None) -> DoctorReport:
    """Diagnose this machine, torch, the environment variables, the active device and the models.

    The doctor imports torch and runs linear layers, and an operation in each dtype, on the active device. On a GPU it also
    runs probes of known silent errors (``runbook.checks.silent_errors`` names the issues). Each probe runs twice, with
    an empty allocator cache and with reused memory, and both results are compared with that of the CPU. A GPU that was
    rejected because of incorrect results is probed as well. The probes need a few megabytes and a few seconds. On MPS, two of
    them run in processes of their own, because their errors end the process: the kernel continues. The states of the random
    number generators, the selected device, a device that was set with ``use()``, and the models stay unchanged. If
    there is a file of ``accelerate config``, a finding names each setting that does not fit this machine.

    Args:
        model: Name of a model, which is loaded if necessary, a torch module or a pipeline. If ``None``, check the models
            that the session has loaded.

    Returns:
        The report. Each of its ``findings`` has a ``status`` (``"ok"``, ``"warning"``, ``"failed"`` or
        ``"not applicable"``), the evidence and a remedy. ``status`` is the worst of them. ``exit_code`` is 1 if a check
        failed. The text of the report is the same in every run, as long as nothing changes.

    Raises:
        ConfigurationError: If ``model`` is not a model.
        UnknownModelError, ModelDownloadError, UntrustedModelError: If the named model is not available. Every other
            problem is a finding, including a failed import of torch and a model that cannot be loaded.

    Example:
        >>> report = doctor()
        >>> report.exit_code in (0, 1)
        True
        >>> [finding.name for finding in report.findings][:3]
        ['Python', 'macOS', 'torch']
    """
    with SESSION.operation():
        return diagnose(collect_facts(SESSION, model))


def system_status() -> SystemStatus:
    """Read the GPU, memory, swap, power, load and thermal state of this machine, without administrator rights.

    The values come from system commands on macOS (``ioreg``, ``sysctl``, ``pmset``, ``notifyutil``), from ``nvidia-smi`` once
    CUDA is in use, and from psutil. Each command may take up to two seconds, and torch is not imported. GPU values cover all
    processes. The load of other programs is sampled for 0.4 seconds. On a simulated MPS device, no value is read.

    Returns:
        The current status. A value that cannot be read is ``None`` and displayed as "not known", never a guess. ``gpu``
        is the GPU of the active device.

    Example:
        >>> system_status().memory_available > 0
        True
    """
    with SESSION.lock:
        choice = SESSION.choice_or_error(confirm=False)
        device = "cpu" if isinstance(choice, OpenMedError) else choice.device
    return _read_status_with_load(SESSION.device_manager, device)


def _read_status_with_load(manager: DeviceManager, device: str) -> SystemStatus:
    """Return the status of a machine, with the load of other programs unless the machine is simulated."""
    status = read_system_status(manager.machine, device, manager.run)
    return status if status.simulated else replace(status, background_load=describe_load())


def diagnose(facts: SystemFacts) -> DoctorReport:
    """Return the report of the given facts. The same facts always give the same report."""
    return DoctorReport(tuple(run_checks(facts)), facts.machine.simulated)


def check_computation(device: str) -> ComputationCheck:
    """Run linear layers, each dtype and the probes of known silent errors on a device."""
    failure = backend.probe_device(device)
    if failure and not failure.startswith(backend.NUMERICAL_MISMATCH):
        return ComputationCheck(device, failure=failure)
    import torch

    from .silent_errors import run_probes

    with backend.TENSOR_LOCK:
        result_device = str((torch.ones(2, device="cpu").to(device) * 2).device)
    dtypes = {dtype: _dtype_failure(device, dtype) for dtype in DTYPES}
    return ComputationCheck(device, result_device, failure, dtypes, run_probes(device))


def _dtype_failure(device: str, dtype: str) -> str:
    """Return the reason why a device cannot compute with a dtype, or an empty string if it can."""
    import torch

    integers = torch.arange(8, device="cpu").reshape(2, 4)

    def compute(values: torch.Tensor) -> torch.Tensor:
        return values * 2 + values if dtype.startswith("int") else values @ values.T

    try:
        with backend.TENSOR_LOCK:
            result = compute(integers.to(device, getattr(torch, dtype))).cpu()
    except (RuntimeError, TypeError) as error:
        return describe_error(error)
    return "" if torch.equal(result.long(), compute(integers)) else backend.NUMERICAL_MISMATCH


def collect_facts(
    session: Session, model: Any = None, check_device: Callable[[str], ComputationCheck] = check_computation
) -> SystemFacts:
    """Collect the facts about the machine of a session. Tests pass another ``check_device`` to replace a missing device."""
    with session.transaction():
        models = _find_models(session, model)
        manager = session.device_manager
        machine = manager.machine
        choice = session.choice_or_error(confirm=True)
        torch_error = None
        try:
            manager.load_torch()
        except TorchImportError as error:
            torch_error = error
        session.notify(ProgressEvent("Examining", "this computer"))
        if torch_error is None and not (isinstance(choice, DeviceChoice) and choice.confirmed):
            choice = session.choice_or_error(confirm=True)  # With torch imported, the choice can be verified.
        active_device = choice.device if isinstance(choice, DeviceChoice) and torch_error is None else None
        device = active_device or "cpu"
        # If invalid MPS variables are the reason why mps was rejected, report their effect on mps, not on the active device.
        mps_rejected_by_variables = active_device and "watermark" in (manager.torch.probe_failure("mps") or "")
        rejected = None
        for gpu, failure in manager.torch.probes:
            if failure.startswith(backend.NUMERICAL_MISMATCH):
                rejected = check_device(gpu)
                break
        environ = manager.user_environ
        return SystemFacts(
            python=".".join(platform.python_version_tuple()[:2]),
            machine=machine,
            torch=manager.torch if torch_error is None else TorchInfo(None),
            choice=choice,
            environment=manager.mps_environment("mps" if mps_rejected_by_variables else device),
            torch_error=torch_error,
            environ={name: environ[name] for name in CHECKED_VARIABLES if name in environ},
            computation=check_device(device) if active_device else None,
            rejected_computation=rejected,
            packages=package_findings(torch_requirement(machine)),
            launch_settings=() if torch_error else accelerate_findings(environ, manager.torch),
            system_status=_read_status_with_load(manager, device),
            models=tuple(
                finding
                for name, checked_model in models
                for finding in _check_loaded_model(name, checked_model, device)
            ),
        )


def _find_models(session: Session, model: Any) -> list[tuple[str, CheckedModel]]:
    """Return the models to check with their names. A model that cannot be loaded is replaced by its error."""
    if not is_model_name(model):
        return [(type(get_module(model)).__name__, model)]
    name = None if model is None else str(model)
    loaded = session.models.find(name)
    if name is None or loaded:
        return [(loaded_model.name, loaded_model) for loaded_model in loaded]
    try:
        return [(name, session.load_model(name, OpenMedConfig()))]
    except (InvalidModelError, DeviceError) as error:
        return [(name, error)]


def _check_loaded_model(name: str, model: CheckedModel, device: str) -> tuple[Finding, ...]:
    if isinstance(model, OpenMedError):
        return (Finding(model_label(name), FAILED, model.message.rstrip("."), model.remedy),)
    return model_findings(name, model, device=device)
