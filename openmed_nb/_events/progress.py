"""Progress display: one line with a bar, below the cell of a notebook or at the bottom of a terminal.

An operation only sends events, which costs almost no time. A thread that lives as long as the outermost operation draws the
line repeatedly, first within half a second, so that a step of several minutes also shows progress. The last line remains. It
is short and small if the operation finished, because the result is displayed below it.

No thread can draw while a library holds the interpreter lock, as torch does for a second during its import. The line is
therefore drawn before an import and a release.

The line is displayed only for interactive use: in a notebook whose cells a user runs, and in a terminal. Programs that execute
notebooks, such as nbval and nbconvert, do not answer ``input()`` and get no line, so that stored outputs are equal in every
run. ``OPENMED_NB_PROGRESS=0`` disables all lines.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeAlias

from .._render.values import format_duration
from .._utils.clock import current_time
from .activity import IMPORTING, RELEASING, ProgressEvent

if TYPE_CHECKING:
    from IPython.core.display_functions import DisplayHandle

# Disables all progress lines with one of the values "0", "false", "no" and "off".
PROGRESS_VARIABLE = "OPENMED_NB_PROGRESS"
DISABLED_VALUES = frozenset({"0", "false", "no", "off"})

# Seconds until the line is first drawn, and between updates. Users notice half a second without feedback.
DRAW_INTERVAL = 0.2
BAR_WIDTH = 10  # Number of characters of the bar in a text.
BLOCKING_OPERATIONS = (IMPORTING, RELEASING)  # Operations that hold the interpreter lock.
FINISHED = "finished"  # Outcome of an operation that did not fail.
MIN_STEPS_FOR_ETA = 3  # The first step is a warm-up, and two more steps are measured.
# An estimate from less of the work is wrong by a factor of ten.
MIN_FRACTION_FOR_ETA = 0.03
MIN_SECONDS_FOR_ETA = 5.0


@dataclass(frozen=True)
class ProgressLine:
    """Snapshot of the progress of an operation.

    Attributes:
        event: The current or last event.
        seconds: Duration of the operation so far.
        outcome: ``"finished"`` or ``"stopped"``; empty while the operation is in progress.
        eta_seconds: Estimated remaining time, or ``None`` if unknown.

    Example:
        >>> print(ProgressLine(ProgressEvent("Comparing", "bundled", 7, 20, "round"), 12.6, eta_seconds=18))
        Comparing: bundled ███░░░░░░░ 7 of 20 rounds, 12 s, about 18 s left
        >>> print(ProgressLine(ProgressEvent("Annotating", "bundled", 300, 300, "text"), 75.2, "finished"))
        Done in 1:15
        >>> print(ProgressLine(ProgressEvent("Annotating", "bundled", 40, 300, "text"), 9.5, "stopped"))
        Annotating: bundled █░░░░░░░░░ 40 of 300 texts, stopped after 9.5 s
    """

    event: ProgressEvent
    seconds: float
    outcome: str = ""
    eta_seconds: float | None = None

    @property
    def suffix(self) -> str:
        """Text after the bar."""
        time = format_duration(self.seconds)
        if self.outcome == FINISHED:
            return f"Done in {time}"
        parts = [self.event.counter] if self.event.counter else []
        parts.append(f"{self.outcome} after {time}" if self.outcome else time)
        if self.eta_seconds is not None and self.eta_seconds >= 1:
            parts.append(f"about {format_duration(self.eta_seconds)} left")
        return ", ".join(parts)

    def __str__(self) -> str:
        if self.outcome == FINISHED:
            return self.suffix
        fraction = self.event.fraction
        bar = ", " if fraction is None else f" {'█' * int(BAR_WIDTH * fraction):░<{BAR_WIDTH}} "
        return f"{self.event.heading}{bar}{self.suffix}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the line as HTML without a widget. The last line looks the same in an untrusted notebook."""
        from .._render.display import DETAILS, escape

        if self.outcome == FINISHED:
            return f'<div style="{DETAILS}">{escape(self.suffix)}</div>'
        fraction = self.event.fraction
        label = escape(self.event.heading)
        bar = ", "
        if fraction is not None:
            bar = f' <progress max="1" value="{fraction:.3f}" aria-label="{label}"></progress> '
        return f"<div>{label}{bar}{escape(self.suffix)}</div>"


class _Sample(NamedTuple):
    """An event and its time."""

    time: float
    event: ProgressEvent


@dataclass(frozen=True)
class _Series:
    """Events of the same operation and target.

    Attributes:
        event: The last event.
        samples: The first event, the event after the first step, and the event after the last step, each with its time.
        steps: Number of steps.
    """

    event: ProgressEvent
    samples: tuple[_Sample, ...] = ()
    steps: int = 0


class ProgressHistory:
    """Events of an operation and their times, from which the remaining time is estimated.

    The first step of a series is not representative: it includes the warm-up, and a first batch is small. The remaining time
    is therefore estimated from the following steps, once there are two of them, after 5 seconds and 3% of the work.

    Args:
        time: Start time of the operation.
    """

    def __init__(self, time: float) -> None:
        self.start_time = time
        # It is replaced in one assignment, because the drawing thread may read it at any time.
        self._series = _Series(ProgressEvent("", ""))

    def record(self, event: ProgressEvent, time: float) -> None:
        """Record an event with its time. An event of other work starts a new series."""
        series = self._series
        previous = series.event
        sample = _Sample(time, event)
        if (event.heading, event.unit) != (previous.heading, previous.unit):
            self._series = _Series(event, (sample,))
        elif (event.completed_size, event.completed) != (previous.completed_size, previous.completed):
            self._series = _Series(event, (*series.samples[:2], sample), series.steps + 1)
        else:
            self._series = replace(series, event=event)

    def snapshot(self, time: float, outcome: str = "") -> ProgressLine:
        """Return the line to display at a time."""
        series = self._series
        event = series.event
        eta_seconds = None
        if event.total_size and series.steps >= MIN_STEPS_FOR_ETA and not outcome:
            first, second, last = series.samples
            measured = last.event.completed_size - second.event.completed_size
            is_early = (
                time - first.time < MIN_SECONDS_FOR_ETA
                or last.event.completed_size < MIN_FRACTION_FOR_ETA * event.total_size
            )
            if measured > 0 and not is_early:
                remaining = event.total_size - last.event.completed_size
                remaining_seconds = remaining * (last.time - second.time) / measured
                eta_seconds = max(0.0, remaining_seconds - (time - last.time))
        return ProgressLine(event, time - self.start_time, outcome, eta_seconds)


class CellOutput:
    """Output of a notebook cell, in which each line replaces the previous one."""

    def __init__(self) -> None:
        self._display_handle: DisplayHandle | None = None

    def draw(self, line: ProgressLine) -> None:
        """Display a line."""
        from IPython.display import display

        if self._display_handle is None:
            self._display_handle = display(line, display_id=True)
        else:
            self._display_handle.update(line)
        with contextlib.suppress(ValueError):  # The user may have replaced the stream by one that is closed.
            sys.stdout.flush()  # The following work may block the thread that sends the output.


class TerminalOutput:
    """The current line of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def draw(self, line: ProgressLine) -> None:
        """Display a line, truncated to the width of the terminal."""
        max_characters = shutil.get_terminal_size().columns - 1
        end = "\n" if line.outcome else ""
        with contextlib.suppress(OSError, ValueError):  # The terminal may have been closed.
            self._stream.write(f"\r{str(line)[:max_characters]}\x1b[K{end}")
            self._stream.flush()


OutputTarget: TypeAlias = CellOutput | TerminalOutput


def is_disabled(variable: str, environ: Mapping[str, str]) -> bool:
    """Return whether an environment variable has one of the values that disable a feature."""
    return environ.get(variable, "").strip().lower() in DISABLED_VALUES


def current_shell() -> Any:
    """Return the IPython shell of this process, or ``None`` if there is none."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def detect_output(environ: Mapping[str, str]) -> OutputTarget | None:
    """Return the output for progress lines, or ``None`` if the use is not interactive or lines are disabled."""
    if is_disabled(PROGRESS_VARIABLE, environ):
        return None
    shell = current_shell()
    if shell is not None and hasattr(shell, "kernel"):
        from IPython.core.displaypub import CapturingDisplayPublisher

        captured = isinstance(shell.display_pub, CapturingDisplayPublisher)  # %%capture
        return CellOutput() if is_interactive(shell.get_parent()) and not captured else None
    return TerminalOutput(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None


def is_interactive(parent: Mapping[str, Any]) -> bool:
    """Return whether a user runs this cell.

    Programs that execute notebooks declare that they do not answer ``input()``. A widget event is not the execution of a cell.

    Args:
        parent: Parent message of the kernel.
    """
    return bool(parent.get("content", {}).get("allow_stdin")) and parent["header"]["msg_type"] == "execute_request"


class ProgressBar:
    """Progress display for the operation in the main thread. Operations in other threads are not displayed.

    Args:
        environ: Environment variables.
        find_output: Function that returns the output for the environment variables, or ``None``.
        draw_interval: Time in seconds until the line is first drawn, and between updates.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        find_output: Callable[[Mapping[str, str]], OutputTarget | None] = detect_output,
        draw_interval: float = DRAW_INTERVAL,
    ) -> None:
        self._environ = environ
        self._find_output = find_output
        self._draw_interval = draw_interval
        self._drawing: _DrawingThread | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Forget the thread, which a forked child does not have, and its locks."""
        self._drawing = None

    def show(self, event: ProgressEvent) -> None:
        """Display an event."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._drawing is not None:
            self._drawing.history.record(event, current_time())
        elif (output := self._find_output(self._environ)) is not None:
            self._drawing = _DrawingThread(output, event, self._draw_interval)
            self._drawing.start()
        if self._drawing is not None and event.operation in BLOCKING_OPERATIONS:
            self._drawing.draw()

    def finish(self, failed: bool) -> None:
        """Display the end of the operation if a line was displayed before."""
        drawing = self._drawing
        if drawing is not None and threading.current_thread() is threading.main_thread():
            self._drawing = None  # Before the last line, which may be interrupted.
            drawing.finish("stopped" if failed else FINISHED)


class _DrawingThread(threading.Thread):
    """Draws the line of an operation until the operation ends."""

    def __init__(self, output: OutputTarget, event: ProgressEvent, draw_interval: float) -> None:
        super().__init__(name="openmed_nb progress", daemon=True)
        self.history = ProgressHistory(current_time())
        self.history.record(event, self.history.start_time)
        self._output = output
        self._draw_interval = draw_interval
        self._finished = threading.Event()
        self._is_drawn = False
        self._draw_lock = threading.Lock()
        self._cell_context = contextvars.copy_context()  # The context of the cell determines where its output appears.

    def finish(self, outcome: str) -> None:
        """Stop the thread, and draw the last line if a line was drawn before."""
        self._finished.set()
        self.join()
        if self._is_drawn:
            self.draw(outcome)

    def draw(self, outcome: str = "") -> None:
        """Draw the current line."""
        with self._draw_lock:
            self._output.draw(self.history.snapshot(current_time(), outcome))
            self._is_drawn = True

    def run(self) -> None:
        while not self._finished.wait(self._draw_interval):
            self._cell_context.run(self.draw)
