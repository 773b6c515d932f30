"""Running the probes of the known silent errors: on the CPU, on the device with an empty cache, and with dirty memory."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...devices.allocators import empty_cache
from ...devices.backend import TENSOR_LOCK, import_torch
from ...devices.random_state import random_numbers_from, random_states
from ...devices.request import kind_of
from ...devices.simulation import shown_device
from ...errors import cause
from ..findings import NOT_APPLICABLE, OK, Finding
from .silent_bugs import BUGS, SilentBug, bugs_of

if TYPE_CHECKING:
    import torch

UNDERSTOOD = (RuntimeError, TypeError, IndexError)
"""What torch raises for what a device cannot do, and for wrong input; ``NotImplementedError`` is a ``RuntimeError``."""

DIRT = 1e4
DIRTY_BLOCKS = (1 << 10, 1 << 16, 1 << 20, 1 << 20, 1 << 21)
"""The lengths of the tensors that leave large numbers behind: 16 MiB in all, the middle ones as long as the long inputs."""


@dataclass(frozen=True)
class ProbeOutcome:
    """What came of one probe.

    Attributes:
        issue: The issue of the error.
        clean: What was wrong with the cache emptied before, empty where nothing was.
        dirty: What was wrong after large numbers were left in freed memory.
    """

    issue: str
    clean: str = ""
    dirty: str = ""

    @property
    def wrong(self) -> str:
        """What was wrong, empty where nothing was."""
        if self.clean and self.dirty:
            return self.clean
        when = "after other work on the device" if self.dirty else "with an empty cache"
        return f"{self.clean or self.dirty}, only {when}" if self.clean or self.dirty else ""


def run_probes(device: str, bugs: Iterable[SilentBug] | None = None) -> tuple[ProbeOutcome, ...]:
    """Run the probes of the known silent errors on a device, each twice, and compare them with the CPU.

    Random numbers go on afterwards as if nothing had been, and autocast and inference mode of the caller do not count.

    Args:
        device: ``"mps"``, ``"cuda"``, ``"cuda:N"`` or ``"cpu"``, on which there is nothing to compare.
        bugs: The errors to look for; those of the device where nobody says.

    Example:
        >>> run_probes("cpu")
        ()
    """
    looked_for = bugs_of(device) if bugs is None else tuple(bugs)
    if not looked_for:
        return ()
    with TENSOR_LOCK, undisturbed(device):
        return tuple(outcome_of(bug, device) for bug in looked_for)


def outcome_of(bug: SilentBug, device: str) -> ProbeOutcome:
    """Return what came of a probe with an empty cache and with dirty memory."""
    right = result_of(bug.probe, "cpu")
    empty_cache(device)
    clean = fault(right, result_of(bug.probe, device), bug.tolerance)
    leave_dirt(device)
    return ProbeOutcome(bug.issue, clean, fault(right, result_of(bug.probe, device), bug.tolerance))


def result_of(probe: Callable[[str], torch.Tensor], device: str) -> torch.Tensor | BaseException:
    """Return what a probe computes, in the memory of the host, or the error that it raises."""
    try:
        return probe(device).detach().cpu()
    except UNDERSTOOD as error:
        return error


def fault(right: torch.Tensor | BaseException, found: torch.Tensor | BaseException, tolerance: float) -> str:
    """Return what is wrong with the result of a device, empty where nothing is.

    Args:
        right: What the CPU computes or raises.
        found: What the device computes or raises.
        tolerance: How far two numbers may be apart, absolutely and relatively.

    Example:
        >>> import torch
        >>> fault(torch.tensor(1.0), torch.tensor(1e4), 1e-3), fault(IndexError(), torch.tensor(0.0), 1e-3)
        ('gives other numbers than the CPU', 'gives numbers where the CPU raises IndexError')
    """
    import torch

    if isinstance(right, BaseException):
        return "" if isinstance(found, BaseException) else f"gives numbers where the CPU raises {type(right).__name__}"
    if isinstance(found, BaseException):
        return f"raises {type(found).__name__} ({cause(found)})"
    if right.shape != found.shape:
        return "gives another shape than the CPU"
    near = torch.allclose(found.double(), right.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
    return "" if near else "gives other numbers than the CPU"


def leave_dirt(device: str) -> None:
    """Leave large numbers in freed memory, as the work of a notebook does.

    A result that takes in what stands behind its operands is right by chance where that memory is new and zero
    (pytorch#177116).
    """
    import torch

    blocks = [torch.full((length,), DIRT, device=device, dtype=torch.float32) for length in DIRTY_BLOCKS]
    del blocks


@contextlib.contextmanager
def undisturbed(device: str) -> Iterator[None]:
    """Compute as if the caller had set nothing: without autocast and inference mode, and with random numbers given back.

    Warnings of torch are left out; they are about the probes, such as cuBLAS's of a thread without a context.
    """
    torch = import_torch()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(random_numbers_from(random_states(device)))
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for kind in dict.fromkeys(("cpu", kind_of(device))):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def bug_findings(outcomes: Iterable[ProbeOutcome], device: str) -> tuple[Finding, ...]:
    """Return one finding for each probe that went wrong, and one for those that did not.

    Example:
        >>> for finding in bug_findings([ProbeOutcome("pytorch#92311")], "mps"):
        ...     print(finding.evidence)
        1 probe agrees with the CPU, run twice: with an empty cache and with dirty memory
    """
    outcomes = tuple(outcomes)
    if not outcomes:
        return (Finding("known silent errors", NOT_APPLICABLE, "the CPU is what devices are compared with"),)
    by_issue = {bug.issue: bug for bug in BUGS}
    wrong = tuple(_finding(by_issue[one.issue], one.wrong, device) for one in outcomes if one.wrong)
    right = len(outcomes) - len(wrong)
    if not right:
        return wrong
    agree = "1 probe agrees" if right == 1 else f"{right} probes agree"
    evidence = f"{agree} with the CPU, run twice: with an empty cache and with dirty memory"
    return (*wrong, Finding("known silent errors", OK, evidence))


def _finding(bug: SilentBug, wrong: str, device: str) -> Finding:
    evidence = f"{shown_device(device)} {wrong} ({bug.issue}: {bug.what}; seen with {bug.known})"
    return Finding(bug.name, bug.status, evidence, bug.remedy)
