"""What is under way, as one line with a bar: below the cell of a notebook, and at the bottom of a terminal.

A verb only says what it does (``SESSION.tell``), which costs it nothing: a thread of its own, which lives as long as the
outermost verb, draws the line within half a second and then again and again, so that also a step that takes minutes is seen
to go on. At the end the line says so, and stays.

No thread draws while a library keeps the interpreter to itself, as torch does for a second while it is imported and the
garbage collector while it collects. So an import, a release and any collection of everything are drawn before they begin, and
in a notebook a dot pulses before the line, which the browser does alone.

Only a person gets a line: in a notebook of which somebody runs the cells, and in a terminal. What runs notebooks by itself, such
as nbval and nbconvert, gives no answers to ``input()``, and gets none, so that stored outputs are the same in every run.
``OPENMED_NB_PROGRESS=0`` switches all lines off.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._render.display import escape
from .._utils.clock import current_time
from .activity import IMPORTING, LOADING, RELEASING, ProgressEvent

PROGRESS_VARIABLE = "OPENMED_NB_PROGRESS"  # The setting, and the values that switch lines off.
DISABLED_VALUES = frozenset({"0", "false", "no", "off"})

# Seconds until the line is drawn, and between two drawings; half a second without a sign of life is long.
DRAW_INTERVAL = 0.2
MAX_GC_DELAY = 0.5  # Seconds that a collection waits at most for the line to be drawn.
FULL_GC_GENERATION = (
    2  # The generation of a collection of everything, which takes some tenths of a second where torch is loaded.
)
BAR_WIDTH = 10  # How many characters the bar of a text has.
LOADING_OPERATIONS = (IMPORTING, LOADING)  # What comes before the work.
BLOCKING_OPERATIONS = (IMPORTING, RELEASING)  # What lets no other thread run.
PULSE_SECONDS = 1.2  # Seconds in which the dot pulses once.
FINISHED = "finished"  # How a line ends whose verb did not fail.
MIN_COUNT_FOR_RATE = 100  # Of so many things, or of an unknown number, the speed is shown too.


# The dot rests where a person has asked their system for less motion, and in a notebook that is not trusted, where JupyterLab
# drops the style.
PULSE = (
    "<style>@keyframes openmed-pulse{50%%{opacity:0.15}}"
    f".openmed-pulse{{animation:openmed-pulse {PULSE_SECONDS:g}s ease-in-out infinite}}"
    "@media (prefers-reduced-motion:reduce){.openmed-pulse{animation:none}}</style>"
    '<span class="openmed-pulse" aria-hidden="true" style="animation-delay:-%.2fs">●</span> '
)


@dataclass(frozen=True)
class ProgressLine:
    """What is shown at a moment.

    Attributes:
        activity: What is under way, or was last.
        seconds: For how long the verb is under way.
        end: ``"finished"`` or ``"stopped"``; empty while it goes on.
        left: About how many seconds are left, ``None`` if nobody knows.
        speed: How many things are done in a second, ``None`` if that says nothing.
        loading: How many of the seconds went into loading a model, and the libraries that it needs.

    Example:
        >>> print(ProgressLine(ProgressEvent("Comparing", "bundled", 7, 20, "turn"), 12.6, eta_seconds=18))
        Comparing: bundled ███░░░░░░░ turn 8 of 20, 12 s, about 18 s left
        >>> print(ProgressLine(ProgressEvent("Annotating", "bundled", 300, 300, "text"), 75.2, "finished", rate=4.2, loading_seconds=3))
        Annotating: bundled ██████████ 300 texts, finished after 1:15 (loading took 3.0 s), 4.2 texts/s
    """

    activity: ProgressEvent
    seconds: float
    outcome: str = ""
    eta_seconds: float | None = None
    rate: float | None = None
    loading_seconds: float = 0.0

    @property
    def fraction(self) -> float | None:
        """How long the bar is, from 0 to 1; once all is finished, the last step that was under way is done too."""
        activity = self.activity
        return 1.0 if self.outcome == FINISHED and activity.total == activity.completed + 1 > 1 else activity.fraction

    @property
    def suffix(self) -> str:
        """What stands behind the bar."""
        words = [self.activity.counter] if self.activity.counter else []
        time = format_duration(self.seconds)
        if not self.outcome:
            words.append(time)
            if self.eta_seconds is not None and self.eta_seconds >= 1:
                words.append(f"about {format_duration(self.eta_seconds)} left")
        elif self.loading_seconds >= 1 and self.activity.operation not in LOADING_OPERATIONS:
            words.append(f"{self.outcome} after {time} (loading took {format_duration(self.loading_seconds)})")
        else:
            words.append(f"{self.outcome} after {time}")
        if self.rate is not None:
            words.append(f"{self.rate:.3g} {self.activity.unit}s/s")
        return ", ".join(words)

    def __str__(self) -> str:
        share = self.fraction
        bar = ", " if share is None else f" {'█' * int(BAR_WIDTH * share):░<{BAR_WIDTH}} "
        return f"{self.activity.heading}{bar}{self.suffix}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the line as HTML that needs no widget; at the end, it is the same in a notebook that is not trusted."""
        share = self.fraction
        label = escape(self.activity.heading)
        bar = ", " if share is None else f' <progress max="1" value="{share:.3f}" aria-label="{label}"></progress> '
        # Each drawing replaces the one before, and its dot goes on where that one's was.
        pulse = "" if self.outcome else PULSE % (self.seconds % PULSE_SECONDS)
        return f"<div>{pulse}{label}{bar}{escape(self.suffix)}</div>"


def format_duration(seconds: float) -> str:
    """Return a time as a person says it.

    Example:
        >>> format_duration(0.4), format_duration(12.6), format_duration(75), format_duration(3700)
        ('0.4 s', '12 s', '1:15', '1:01:40')
    """
    if seconds < 10:  # noqa: PLR2004 - what a person would count in tenths
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"


@dataclass(frozen=True)
class _Series:
    """The same work, step by step: what was told last, and how much was done when: at first, after a step, and last."""

    activity: ProgressEvent
    marks: tuple[tuple[float, ProgressEvent], ...] = ()
    steps: int = 0

    def then(self, activity: ProgressEvent, time: float) -> _Series:
        """Return the series that goes on with an activity, or begins with it."""
        before = self.activity
        mark = (time, activity)
        if (activity.heading, activity.unit) != (before.heading, before.unit):
            return _Series(activity, (mark,))
        if (activity.amount, activity.completed) != (before.amount, before.completed):
            return _Series(activity, (*self.marks[:2], mark), self.steps + 1)
        return _Series(activity, self.marks, self.steps)


class ProgressHistory:
    """What was told since a verb began, and when: enough to say how long it will take.

    The first step of a series is no measure: it also warms up, and a first batch is small. So what is left is estimated from
    the steps after it, and nothing is said before there are two of them.
    """

    def __init__(self, time: float) -> None:
        self.began = time
        self.loading = 0.0
        self._told = time
        # One value each, because the thread that draws may ask at any moment.
        self._heard = _Series(ProgressEvent("", ""))
        self._work = self._heard  # What was no load: once all is finished, the line is of that.

    def record(self, activity: ProgressEvent, time: float) -> None:
        """Note what begins, or goes on, at a time."""
        if self._heard.activity.operation in LOADING_OPERATIONS:
            self.loading += time - self._told
        self._told = time
        self._heard = self._heard.then(activity, time)
        if activity.operation not in LOADING_OPERATIONS:
            self._work = self._heard

    def snapshot(self, time: float, end: str = "") -> ProgressLine:
        """Return what is shown at a time."""
        series = self._work if end == FINISHED and self._work.marks else self._heard
        activity = series.activity
        begin, first = series.marks[0]
        latest, last = series.marks[-1]
        left = None
        if activity.whole and series.steps > 2:  # noqa: PLR2004 - the first, and two after it
            since, second = series.marks[1]
            later = last.amount - second.amount
            remaining = activity.whole - last.amount
            left = max(0.0, remaining * (latest - since) / later - (time - latest)) if later > 0 else None
        done = last.completed - first.completed
        speed = None
        if (activity.total is None or activity.total >= MIN_COUNT_FOR_RATE) and done > 0 and latest > begin:
            speed = done / (latest - begin)
        return ProgressLine(activity, time - self.began, end, left, speed, self.loading)


class CellOutput:
    """The output of a cell: each line is drawn in the place of the one before."""

    def __init__(self) -> None:
        self._shown: Any = None

    def draw(self, line: ProgressLine) -> None:
        from IPython.display import display

        if self._shown is None:
            self._shown = display(line, display_id=True)
        else:
            self._shown.update(line)
        with contextlib.suppress(ValueError):  # A stream of a person's own that is closed.
            sys.stdout.flush()  # What comes next may keep the thread that sends it waiting.


class TerminalOutput:
    """The line of a terminal where the cursor is."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def draw(self, line: ProgressLine) -> None:
        room = shutil.get_terminal_size().columns - 1
        end = "\n" if line.outcome else ""
        with contextlib.suppress(OSError, ValueError):  # Nobody looks at a terminal that was closed meanwhile.
            self._stream.write(f"\r{str(line)[:room]}\x1b[K{end}")
            self._stream.flush()


def detect_output(environ: Mapping[str, str]) -> CellOutput | TerminalOutput | None:
    """Return where a person would look for a line, ``None`` if there is no person, or none who wants it."""
    if environ.get(PROGRESS_VARIABLE, "").strip().lower() in DISABLED_VALUES:
        return None
    ipython = sys.modules.get("IPython")
    shell: Any = None if ipython is None else ipython.get_ipython()
    if hasattr(shell, "kernel"):
        from IPython.core.displaypub import CapturingDisplayPublisher

        captured = isinstance(shell.display_pub, CapturingDisplayPublisher)  # %%capture
        return CellOutput() if is_interactive(shell.get_parent()) and not captured else None
    return TerminalOutput(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else None


def is_interactive(parent: Mapping[str, Any]) -> bool:
    """Tell whether a person runs this cell: who runs notebooks without one says that nobody answers ``input()``.

    What comes of a click on a widget has no cell.
    """
    return bool(parent.get("content", {}).get("allow_stdin")) and parent["header"]["msg_type"] == "execute_request"


class ProgressBar:
    """The line of the verb that is under way in the main thread; other threads have none."""

    def __init__(
        self,
        environ: Mapping[str, str],
        surface: Callable[[Mapping[str, str]], CellOutput | TerminalOutput | None] = detect_output,
        patience: float = DRAW_INTERVAL,
    ) -> None:
        self._environ = environ
        self._surface = surface
        self._patience = patience
        self._drawing: _DrawingThread | None = None

    def show(self, activity: ProgressEvent) -> None:
        """Note what is under way."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._drawing is not None:
            self._drawing.course.record(activity, current_time())
        elif (surface := self._surface(self._environ)) is not None:
            self._drawing = _DrawingThread(surface, activity, self._patience)
            self._drawing.start()
        if self._drawing is not None and activity.operation in BLOCKING_OPERATIONS:
            self._drawing.draw()

    def end(self, stopped: bool) -> None:
        """Say that the verb is done, or has failed, if anything was shown of it."""
        drawing = self._drawing
        if drawing is not None and threading.current_thread() is threading.main_thread():
            self._drawing = None  # Also if the end is interrupted.
            drawing.end("stopped" if stopped else FINISHED)


class _DrawingThread(threading.Thread):
    """Draws the line of a verb while the verb works; it ends with the verb."""

    def __init__(self, surface: CellOutput | TerminalOutput, activity: ProgressEvent, patience: float) -> None:
        super().__init__(name="openmed_nb progress", daemon=True)
        self.course = ProgressHistory(current_time())
        self.course.record(activity, self.course.began)
        self._surface = surface
        self._patience = patience
        self._ended = False
        self._woken = threading.Event()
        self._drawn = threading.Event()
        self._turn = threading.Lock()
        self._cell_context = contextvars.copy_context()  # That of the cell, which says where an output belongs.
        gc.callbacks.append(self._before_collection)

    def end(self, end: str) -> None:
        """End the thread, and draw the last line if there was one before."""
        self._ended = True
        self._woken.set()
        self.join()
        if self._drawn.is_set():
            self.draw(end)

    def draw(self, end: str = "") -> None:
        """Draw the line as it is now."""
        with self._turn:
            self._surface.draw(self.course.snapshot(current_time(), end))
            self._drawn.set()

    def run(self) -> None:
        try:
            while True:
                self._woken.wait(self._patience)
                self._woken.clear()  # Before the look at the end, which wakes only once.
                if self._ended:
                    break
                self._cell_context.run(self.draw)
        finally:
            gc.callbacks.remove(self._before_collection)

    def _before_collection(self, phase: str, about: Mapping[str, int]) -> None:
        """Let the line be drawn now; by its thread, because a collection begins anywhere, also where a lock is held."""
        if (
            phase == "start"
            and about["generation"] == FULL_GC_GENERATION
            and not (self._drawn.is_set() or self._turn.locked())
        ):
            self._woken.set()
            self._drawn.wait(MAX_GC_DELAY)
