"""Steps of reports that end in every way in which a step can end; each runs in a process of its own."""

from __future__ import annotations

import getpass
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from openmed_nb._render.display import FAILED, Displayable, Finding, Report
from openmed_nb._render.drawing import Bar, Chart
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.report.steps import StepResult


@dataclass(frozen=True, repr=False)
class Found(Displayable):
    """What a planted step finds."""

    device: str
    findings: tuple[Finding, ...] = ()

    def to_report(self):
        """Return what there is to show."""
        bars = (Bar("<i>one</i>", 1.0, "1 ms"), Bar("two", 2.0, "2 ms"))
        return Report(f"Found on {self.device}", ("All is <b>well</b>.",), charts=(Chart("Bars & more", bars),))


def well(asked):
    """Answer at once."""
    return StepResult(Found(asked.device))


def device(_asked):
    """Answer as the step that says where the others measure."""
    return StepResult(Found("cpu"))


def blocks_the_page(asked):
    """Put a folder where the page belongs, as a full disk would refuse it."""
    Path(os.environ["PLANTED"], "blocked", "report.html").unlink()
    Path(os.environ["PLANTED"], "blocked", "report.html", "x").mkdir(parents=True)
    return well(asked)


def wrong(asked):
    """Answer that the device is wrong, with a number that no JSON has."""
    found = Finding("long products", FAILED, "other numbers than the CPU", "Use 'cpu'.")
    return StepResult(Found(float("nan"), (found,)), summary=f"Seen on {asked.device}.")


def aborts(_asked):
    """End as an assertion of MPSGraph ends a process."""
    sys.stderr.write("MPSGraph.mm:99: failed assertion `a shape that nobody expected'\n")
    os.abort()


def hangs(_asked):
    """Wait for a GPU that never answers, with a process of its own beside."""
    beside = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["PLANTED"], "pids").write_text(f"{os.getpid()} {beside.pid}", "utf-8")
    time.sleep(600)


def interrupts(asked):
    """Send the report what Ctrl-C sends it, and hang."""
    os.kill(os.getppid(), signal.SIGINT)
    hangs(asked)


def kills_the_report(asked):
    """End the report as no program can see it coming, and hang."""
    os.kill(os.getppid(), signal.SIGKILL)
    hangs(asked)


def is_killed(_asked):
    """End as the system ends a process that takes too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def takes_all_memory(_asked):
    """Ask for more memory than there is."""
    if sys.platform == "darwin":  # It takes the limit and does not keep it.
        raise MemoryError
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    return bytearray(1 << 31)


def fills_the_disk(_asked):
    """Write more than there is room for."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    Path(tempfile.gettempdir(), "large").write_bytes(bytes(1 << 20))


def fails(_asked):
    """Fail with an error that nobody expected."""
    raise KeyError(f"a name of {getpass.getuser()}")


def refuses(_asked):
    """Fail with an error of ours."""
    raise ConfigurationError("There is no such thing.", "Use another one.")


def tells_names(_asked):
    """Print what a report must not hold, and fail."""
    person = getpass.getuser()
    sys.stderr.write(f"File {Path.home()}/secret.py of {person} on {platform.node()}, token hf_{'a1' * 20}\n")
    raise ConfigurationError(f"{Path.home()}/secret.py cannot be read by {person}.", "Ask them.")
