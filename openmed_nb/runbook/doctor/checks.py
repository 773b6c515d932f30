"""What the doctor looks at: a table of sections, each from the facts to its findings.

Most of what can be wrong with a device is a rule of ``devices.availability``; a row here names the rules that would fail
it, says when it does not apply, and what to say where all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...devices import availability as rules
from ...devices.availability import Rule
from ...devices.environment import CONFLICT, IDLE, SET_BY, EnvSetting
from ...devices.request import canonical, kind_of
from ...devices.simulation import shown_device
from ...errors import OpenMedError
from ..findings import FAILED, NOT_APPLICABLE, OK, WARNING, Finding
from .facts import Computation, DoctorFacts
from .probing import bug_findings

NECESSARY = ("float32", "int64")
"""Types without which nothing runs; a device without one of the others is only slower."""

ABSENT = {("mps", "float64"): "float64 is refused, as MPS has none"}
"""What a device refuses rightly."""


@dataclass(frozen=True)
class Row:
    """One thing about the computer that rules can fail.

    Attributes:
        name: What it is.
        device: The device that the rules are asked about.
        before: Rules that make it meaningless; the first that applies says why.
        fails: Rules that fail it.
        says: The evidence where nothing is wrong.
        warns: Rules of what a person may have wanted so, which are asked first.
    """

    name: str
    device: str
    before: tuple[Rule, ...]
    fails: tuple[Rule, ...]
    says: Callable[[DoctorFacts], str]
    warns: tuple[Rule, ...] = ()

    def finding(self, facts: DoctorFacts) -> Finding:
        """Return the finding."""
        for status, causes in ((NOT_APPLICABLE, self.before), (WARNING, self.warns), (FAILED, self.fails)):
            rejection = facts.rejection(self.device, causes)
            if rejection is not None:
                remedy = "" if status == NOT_APPLICABLE else rejection.remedy
                return Finding(self.name, status, rejection.reason, remedy)
        return Finding(self.name, OK, self.says(facts))


def _version(facts: DoctorFacts) -> str:
    return ".".join(str(part) for part in facts.machine.macos or ())


def _build(facts: DoctorFacts) -> str:
    build = facts.torch.gpu_build or ("" if facts.machine.system == "Darwin" else "for the CPU only")
    return ", ".join(part for part in (facts.torch.version, build) if part)


UNKNOWN_MACOS = Rule(lambda here: here.machine.macos is None, "its version could not be read", "")
NOT_LOADED = Rule(lambda here: not here.torch.loaded, "torch cannot be used", "")

NO_APPLE_GPU = (rules.NO_MAC, rules.ROSETTA, rules.INTEL)
NO_TORCH = (NOT_LOADED, *rules.TORCH_RULES)

COMPUTER_ROWS = (
    Row(
        "Python",
        "mps",
        (),
        (rules.ROSETTA,),
        lambda facts: f"{facts.python}, built for {facts.machine.architecture}",
    ),
    Row("macOS", "mps", (rules.NO_MAC, rules.INTEL, UNKNOWN_MACOS), (rules.OLD_MACOS,), _version),
)

TORCH_ROW = Row("torch", "cpu", (), rules.TORCH_RULES, _build)

DEVICE_ROWS = (
    Row(
        "MPS in torch",
        "mps",
        (*NO_APPLE_GPU, *NO_TORCH),
        (rules.NOT_BUILT,),
        lambda _facts: "torch was built with MPS",
    ),
    Row(
        "MPS",
        "mps",
        (*NO_APPLE_GPU, rules.OLD_MACOS, *NO_TORCH, rules.NOT_BUILT),
        (rules.NO_METAL, rules.BAD_WATERMARKS, rules.PROBE_RULE),
        lambda _facts: "torch finds the Metal device",
    ),
    Row(
        "CUDA",
        "cuda",
        (rules.MACOS, rules.NO_DRIVER, *NO_TORCH),
        (rules.NO_GPU, rules.PROBE_RULE),
        lambda facts: ", ".join(facts.torch.cuda_names or ()),
        warns=(rules.CPU_BUILD, rules.HIDDEN_GPUS),
    ),
)


def computer_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge Python and the system."""
    for row in COMPUTER_ROWS:
        yield row.finding(facts)


def torch_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge torch: whether it is there, imports, and is new enough."""
    if facts.torch_error is not None:
        yield Finding("torch", FAILED, facts.torch_error.what, facts.torch_error.remedy)
    else:
        yield TORCH_ROW.finding(facts)


def device_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge whether torch can use the GPUs of this computer."""
    for row in DEVICE_ROWS:
        yield row.finding(facts)


def choice_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge the device in force, and a real computation on it."""
    choice, done = facts.choice, facts.computation
    if facts.torch_error is not None:
        yield idle("device in force", facts)
    elif isinstance(choice, OpenMedError):
        yield Finding("device in force", FAILED, choice.what, choice.remedy)
    else:
        yield Finding("device in force", OK, f"{shown_device(choice.device)}: {choice.reason}")
    yield idle("computation", facts) if done is None else _computation(done)


def environment_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge each MPS variable: in force, too late, in conflict with another, or not for this device."""
    for setting in facts.environment.settings:
        yield Finding(setting.name, _environment_status(setting), _environment_evidence(setting), setting.remedy)


def dtype_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge which types of numbers the device computes with."""
    if facts.computation is None or not facts.dtypes:
        yield idle("types of numbers", facts)
        return
    device = facts.computation.device
    failures = {name: failure for name, failure in facts.dtypes.items() if failure}
    refused = [ABSENT[kind_of(device), name] for name in failures if (kind_of(device), name) in ABSENT]
    for name, failure in failures.items():
        if (kind_of(device), name) not in ABSENT:
            status = FAILED if name in NECESSARY else WARNING
            yield Finding(name, status, f"{shown_device(device)} fails: {failure}", _other_type(name))
    computed = ", ".join(name for name in facts.dtypes if name not in failures)
    if computed:
        yield Finding("types of numbers", OK, "; ".join((f"{shown_device(device)} computes with {computed}", *refused)))


def silent_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge the probes of known silent errors."""
    if facts.computation is None:
        yield idle("known silent errors", facts)
    else:
        yield from bug_findings(facts.probes, facts.computation.device)


def state_findings(facts: DoctorFacts) -> Iterator[Finding]:
    """Judge power and heat."""
    yield from facts.signals.findings()


def model_section(facts: DoctorFacts) -> Iterator[Finding]:
    """Return what was found about the models."""
    yield from facts.models or (Finding("models", NOT_APPLICABLE, "no model is loaded"),)


def idle(name: str, facts: DoctorFacts) -> Finding:
    """Return that something was not looked at, because nothing can be computed."""
    why = "torch cannot be used" if facts.torch_error or facts.torch.version is None else "no device is in force"
    return Finding(name, NOT_APPLICABLE, why)


def _computation(done: Computation) -> Finding:
    device = shown_device(done.device)
    restart = "Restart the kernel; if it fails again, use 'cpu'."
    if done.failure:
        return Finding("computation", FAILED, f"{device} fails: {done.failure}", restart)
    if canonical(done.place) != canonical(done.device):
        return Finding(
            "computation", FAILED, f"asked of {device}, the result is on {shown_device(done.place)}", restart
        )
    return Finding("computation", OK, f"right, and its result is on {shown_device(done.place)}")


def _environment_status(setting: EnvSetting) -> str:
    if setting.effect == IDLE:
        return NOT_APPLICABLE
    return FAILED if setting.effect == CONFLICT else WARNING if setting.remedy else OK


def _environment_evidence(setting: EnvSetting) -> str:
    whose = f"{setting.shown}, set by {SET_BY[setting.origin]}" if setting.value is not None else "not set"
    return "; ".join(part for part in (f"{whose}: {setting.effect}", setting.note) if part)


def _other_type(name: str) -> str:
    return "Use 'cpu', and update torch and the system." if name in NECESSARY else "Use float32."


SECTIONS: tuple[Callable[[DoctorFacts], Iterator[Finding]], ...] = (
    computer_findings,
    torch_findings,
    device_findings,
    choice_findings,
    environment_findings,
    dtype_findings,
    silent_findings,
    lambda facts: iter(facts.packages),
    state_findings,
    model_section,
)
"""What is looked at, in this order."""
