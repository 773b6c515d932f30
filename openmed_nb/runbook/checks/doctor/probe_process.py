"""A probe in a process of its own: an error that ends the process costs a line of the report, and not the kernel.

The process has the import path and the environment of this one. If the MPS device is simulated, so is that of the process.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...._render.display import JsonMixin
from ...._utils.text import describe_error
from ....devices.machine import ACTIVE_SIMULATIONS

# Time limit, which includes the import of torch on a busy computer.
PROBE_SECONDS = 120.0

# Time that a killed process may take to exit. A process that waits for a GPU may never exit.
EXIT_GRACE_SECONDS = 10.0

# Signals of a failed assertion or an invalid memory access. Other signals come from the user or the operating system.
CRASH_SIGNALS = ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGTRAP")


class ProbeResult(NamedTuple):
    """Result of a probe.

    Attributes:
        mismatch: Difference from the CPU, or an empty string.
        not_run: Reason why there is no result, or an empty string.
    """

    mismatch: str = ""
    not_run: str = ""


def _simulation() -> dict[str, Any] | None:
    """Return the state of the simulated device, or ``None`` if the device is real."""
    for simulation in ACTIVE_SIMULATIONS:
        if isinstance(simulation, JsonMixin):
            return simulation.to_dict()
    return None


def can_abort(issue: str) -> bool:
    """Return whether the probe of an issue can end the process: on a simulated device only if the error is simulated."""
    simulation = _simulation()
    return simulation is None or issue in simulation["defects"]


@contextlib.contextmanager
def start_probe(function: str, issue: str, device: str) -> Iterator[Callable[[], ProbeResult]]:
    """Start the process of a probe, and kill it at the end of the block.

    Args:
        function: Name of the function that the process calls, such as ``"module:function"``.
        issue: Issue of the error.
        device: Device to probe.

    Yields:
        Function that waits for the result.
    """
    simulation = _simulation()
    arguments = (issue, device, None if simulation is None else simulation["installed"])
    code = f"import sys, pkgutil; sys.path[:] = {sys.path!r}; pkgutil.resolve_name({function!r})(*{arguments!r})"
    try:
        process = subprocess.Popen(  # noqa: S603 - the command is a constant of this module
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        failure = ProbeResult(not_run=f"its process cannot be started ({describe_error(error)})")
        yield lambda: failure
        return

    def wait() -> ProbeResult:
        try:
            output, errors = process.communicate(timeout=PROBE_SECONDS)
        except subprocess.TimeoutExpired:
            return ProbeResult(not_run=f"its process did not finish within {PROBE_SECONDS:g} s")
        return read_result(process.returncode, output, errors)

    try:
        yield wait
    finally:
        process.kill()  # It does nothing if the process has ended.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(EXIT_GRACE_SECONDS)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def read_result(code: int, output: str, errors: str) -> ProbeResult:
    """Return the result of a probe from the exit code and the output of its process.

    Example:
        >>> read_result(-6, "", "failed assertion").mismatch, read_result(0, '{"mismatch": ""}', "").mismatch
        ('aborts the process (SIGABRT)', '')
        >>> read_result(1, "", "ModuleNotFoundError: torch").not_run
        'its process failed (ModuleNotFoundError: torch)'
    """
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if name in CRASH_SIGNALS:
            return ProbeResult(f"aborts the process ({name})")
        return ProbeResult(not_run=f"its process was ended by {name}")
    lines = output.splitlines()
    if code or not lines:
        last = errors.strip().rpartition("\n")[2] or f"exit code {code}"
        return ProbeResult(not_run=f"its process failed ({last})")
    return ProbeResult(json.loads(lines[-1])["mismatch"])
