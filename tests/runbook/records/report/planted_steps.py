"""Steps that end in every possible way, each in a separate process."""

from __future__ import annotations

import getpass
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from openmed_nb._render.display import FAILED, Displayable, Finding, Report
from openmed_nb._render.drawing import Bar, Chart
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.runbook.bench.timing import Disturbance
from openmed_nb.runbook.records.steps import StepResult


@dataclass(frozen=True, repr=False)
class PlantedReport(Displayable):
    """Report of a planted step."""

    device: str
    findings: tuple[Finding, ...] = ()

    def to_report(self):
        bars = (Bar("<i>one</i>", 1.0, "1 ms"), Bar("two", 2.0, "2 ms"))
        return Report(f"Found on {self.device}", ("All is <b>well</b>.",), charts=(Chart("Bars & more", bars),))


def succeed(options):
    return StepResult(PlantedReport(options.device))


def sweep(_options):
    """Return a sweep whose knee is the batch size of the next steps."""
    report = SweepReport("mine", "annotation", "cpu", (Point(8, 10.0), Point(16, 20.0), Point(32, 20.0)), knee=16)
    return StepResult(report, (report,), batch=16)


def measure_busy(_options):
    """Return a sweep that a busy computer has not measured."""
    report = SweepReport("mine", "annotation", "cpu", (Point(8, 10.0),), disturbance=Disturbance("busy"))
    return StepResult(report, (report,))


def describe_batch(options):
    """Return the batch size of a step."""
    return StepResult(PlantedReport(options.device), summary=f"{options.batch_size}")


def report_failure(options):
    """Return a failed finding, and a number that JSON does not support."""
    finding = Finding("long products", FAILED, "results differ from the CPU", "Use 'cpu'.")
    return StepResult(PlantedReport(float("nan"), (finding,)), summary=f"Seen on {options.device}.")


def abort(_options):
    """Abort the process like an assertion of MPSGraph."""
    sys.stderr.write("MPSGraph.mm:99: failed assertion `unexpected shape'\n")
    os.abort()


def hang(_options):
    """Wait like a process with a stuck GPU, with a child process."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["PLANTED"], "pids").write_text(f"{os.getpid()} {child.pid}", "utf-8")
    time.sleep(600)


def interrupt(options):
    """Send the report the signal of Ctrl-C, and hang."""
    os.kill(os.getppid(), signal.SIGINT)
    hang(options)


def kill_report(options):
    """Kill the report, and hang."""
    os.kill(os.getppid(), signal.SIGKILL)
    hang(options)


def kill_itself(_options):
    """End like a process that the operating system kills for using too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def exhaust_memory(_options):
    if sys.platform == "darwin":  # macOS accepts the limit but does not enforce it.
        raise MemoryError
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return bytearray(1 << 31)


def fail(_options):
    """Raise an unexpected error."""
    raise KeyError(f"a name of {getpass.getuser()}")


def print_names(_options):
    """Print private names, and raise an ``OpenMedError`` that contains them."""
    user = getpass.getuser()
    sys.stderr.write(f"File {Path.home()}/secret.py of {user} on {platform.node()}, token hf_{'a1' * 20}\n")
    raise ConfigurationError(f"{Path.home()}/secret.py cannot be read by {user}.", "Ask them.")
