"""What a session is doing just now, and its listeners: how magics, panels and functions stay in step with one session."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from .._render.display import pluralize
from .._utils.text import short_type_name
from .._utils.validation import check_bool
from .._utils.warning import warn

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class ProgressEvent:
    """Something that takes a while.

    Attributes:
        doing: What is done, such as ``"Moving to mps"``.
        name: With what.
        done: How many are done.
        total: How many there are, ``None`` if nobody knows.
        unit: What there are so many of, such as ``"text"``.
        size_done: How much of the work is done, where things differ in size, such as texts in characters.
        size: How much work there is, ``None`` if nobody knows.

    Example:
        >>> str(ProgressEvent("Moving to mps", "bundled", 1, 3))
        'Moving to mps: bundled (2 of 3)'
        >>> str(ProgressEvent("Comparing", "bundled", 2, 20, "turn")), str(ProgressEvent("Annotating", "bundled", 7, None, "text"))
        ('Comparing: bundled (turn 3 of 20)', 'Annotating: bundled (7 texts)')
        >>> str(ProgressEvent(LOADING, "bundled"))
        'Loading: bundled'
    """

    operation: str
    target: str
    completed: int = 0
    total: int | None = 1
    unit: str = ""
    size_done: int = 0
    size: int | None = None

    @property
    def heading(self) -> str:
        return f"{self.operation}: {self.target}"

    @property
    def amount(self) -> int:
        """How much is done, to be compared with :attr:`whole`."""
        return self.completed if self.size is None else self.size_done

    @property
    def whole(self) -> int | None:
        """How much there is to do; ``None`` if nobody knows."""
        return self.total if self.size is None else self.size

    @property
    def counter(self) -> str:
        """Which one is under way, of how many, or how many are done; empty where there is only one."""
        if self.total is None or (self.total > 1 and self.completed >= self.total):
            return pluralize(self.completed, self.unit) if self.unit else f"{self.completed:,}"
        return f"{self.unit} {self.completed + 1:,} of {self.total:,}".lstrip() if self.total > 1 else ""

    @property
    def fraction(self) -> float | None:
        """How much is done, from 0 to 1; ``None`` if nobody knows, or if there is only one."""
        whole = self.whole
        return min(1.0, self.amount / whole) if whole is not None and whole > 1 and self.total != 1 else None

    def __str__(self) -> str:
        return f"{self.heading} ({self.counter})" if self.counter else self.heading


# What is done when a model is loaded, which is no part of the work with it, and when a library is.
LOADING = "Loading"
IMPORTING = "Importing"
RELEASING = "Releasing"

# Gets an activity while it is under way, and ``None`` when it is time to look again.
Listener = Callable[[ProgressEvent | None], None]


class _ThreadState(threading.local):
    operation_depth = 0  # How many of this thread are inside one another.
    silenced_depth = 0  # How many of them, the outermost first, are not to be shown.


class EventDispatcher:
    """Functions that want to know what a session does, and a :class:`~.progress.Progress` that shows it to a person.

    While a listener handles an activity, it must not call a verb that changes something: the change is half done then.
    What it does while it looks again causes no further calls, because those would never end.

    Example:
        >>> listeners, heard = EventDispatcher(), []
        >>> stop = listeners.subscribe(heard.append)
        >>> with listeners.operation(), listeners.operation():
        ...     listeners.notify(ProgressEvent("Loading", "bundled"))
        >>> stop()
        >>> listeners.notify(None)
        >>> [str(one) for one in heard]
        ['Loading: bundled', 'None']
    """

    def __init__(self, indicator: Any = None) -> None:
        self._indicator = indicator
        self._listeners: dict[object, Listener] = {}
        self.depth = _ThreadState()

    def __len__(self) -> int:
        return len(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Add a listener, and return what removes it; removing it twice does no harm.

        It is called in the thread of the verb.
        """
        key = object()
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def notify(self, activity: ProgressEvent | None) -> None:
        """Tell all listeners; one that fails becomes a warning, because the verb that tells did not fail."""
        if (
            self._indicator is not None
            and activity is not None
            and self.depth.operation_depth
            and not self.depth.silenced_depth
        ):
            self._indicator.show(activity)
        for key, listener in self._listeners.copy().items():
            if key in self._listeners:  # Another one may have removed it meanwhile.
                try:
                    listener(activity)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is the listener's fault and not the verb's
                    what = f"A panel or another listener of the session failed: {short_type_name(error)}."
                    warn(f"{what} %openmed_panel opens a new panel.")

    def end(self, stopped: bool) -> None:
        """Show that the outermost verb has ended, and tell all listeners to look again."""
        try:
            if self._indicator is not None:
                self._indicator.end(stopped)
        finally:
            self.notify(None)

    def track(self, doing: str, name: str, items: Collection[ItemT], unit: str) -> Iterator[ItemT]:
        """Yield things, and tell of each before it, and of the end, that so many are done.

        Example:
            >>> listeners, heard = EventDispatcher(), []
            >>> _ = listeners.subscribe(lambda activity: heard.append(str(activity)))
            >>> list(listeners.track("Reading", "notes", "ab", "note"))
            ['a', 'b']
            >>> heard
            ['Reading: notes (note 1 of 2)', 'Reading: notes (note 2 of 2)', 'Reading: notes (2 notes)']
        """
        for done, thing in enumerate(items):
            self.notify(ProgressEvent(doing, name, done, len(items), unit))
            yield thing
        self.notify(ProgressEvent(doing, name, len(items), len(items), unit))

    def operation(self, progress: bool = True) -> contextlib.AbstractContextManager[object]:
        """Tell the listeners to look again when the outermost of the verbs inside one another is done, or has failed.

        Without ``progress``, no line is shown of what is told within.

        It is not a generator: ``contextlib`` would set the ``__traceback__`` of each error that passes, which an error of
        a person's own, such as a frozen dataclass, may refuse.
        """
        check_bool("progress", progress)
        return _Verb(self, quiet=0 if progress else 1)


@dataclass(frozen=True)
class _Verb:
    """What goes on between the beginning and the end of a verb."""

    listeners: EventDispatcher
    quiet: int

    def __enter__(self) -> None:
        self.listeners.depth.operation_depth += 1
        self.listeners.depth.silenced_depth += self.quiet

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        depth = self.listeners.depth
        depth.silenced_depth -= self.quiet
        # IPython would show how torch and transformers were called, frame by frame, which takes it seconds.
        if type(error) is KeyboardInterrupt and not hasattr(error, "_render_traceback_"):
            line = f"KeyboardInterrupt: Stopped{_user_code_location(trace)}."
            error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
        try:
            if depth.operation_depth == 1:
                self.listeners.end(stopped=error is not None)
        finally:
            depth.operation_depth -= 1


def _user_code_location(trace: TracebackType | None) -> str:
    """Return the innermost line of a notebook's or script's own functions in a traceback, empty if none was running."""
    own = [
        f" in line {line} of {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    return own[-1] if own else ""


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let an interrupt wait until a short block is over, because half of the block would leave something switched on or off."""
    waiting: list[Any] = []
    before = signal.getsignal(signal.SIGINT)
    # An interrupt comes to the main thread alone.
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *arguments: waiting.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])
