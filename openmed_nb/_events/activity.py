"""Progress events of a session and the listeners that receive them.

Magics, the panel and long-running functions report progress to an :class:`EventDispatcher`. The dispatcher forwards
each event to the progress display and to all subscribed listeners.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Protocol, TypeVar

from .._render.values import pluralize
from .._utils.text import short_type_name
from .._utils.validation import check_bool
from .._utils.warning import warn

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class ProgressEvent:
    """Progress of a long-running operation.

    Attributes:
        operation: Name of the operation, for example ``"Moving to mps"``.
        target: Name of the object being processed, for example a model name.
        completed: Number of completed items.
        total: Total number of items, or ``None`` if unknown.
        unit: Singular noun for an item, for example ``"text"``.
        size_done: Size of the completed items if items differ in size, for example the number of characters of texts.
        size: Total size of the items, or ``None`` if unknown.

    Example:
        >>> str(ProgressEvent("Moving to mps", "bundled", 1, 3))
        'Moving to mps: bundled (2 of 3)'
        >>> str(ProgressEvent("Comparing", "bundled", 2, 20, "round"))
        'Comparing: bundled (2 of 20 rounds)'
        >>> str(ProgressEvent("Annotating", "bundled", 7, None, "text"))
        'Annotating: bundled (7 texts)'
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
        """Operation and target."""
        return f"{self.operation}: {self.target}"

    @property
    def completed_size(self) -> int:
        """Completed part of :attr:`total_size`."""
        return self.completed if self.size is None else self.size_done

    @property
    def total_size(self) -> int | None:
        """Total size or number of items; ``None`` if unknown."""
        return self.total if self.size is None else self.size

    @property
    def counter(self) -> str:
        """Number of completed items; position of the current item if they have no unit; empty for a single item."""
        if self.total is None or (self.total > 1 and self.completed >= self.total):
            return pluralize(self.completed, self.unit) if self.unit else f"{self.completed:,}"
        if self.total == 1:
            return ""
        if self.unit:
            return f"{self.completed:,} of {pluralize(self.total, self.unit)}"
        return f"{self.completed + 1:,} of {self.total:,}"

    @property
    def fraction(self) -> float | None:
        """Completed fraction in [0, 1]; ``None`` if the total is unknown or there is a single item."""
        whole = self.total_size
        if whole is None or whole <= 1 or self.total == 1:
            return None
        return min(1.0, self.completed_size / whole)

    def __str__(self) -> str:
        return f"{self.heading} ({self.counter})" if self.counter else self.heading


# Operations that hold the interpreter lock, so that the line of progress is drawn before.
LOADING = "Loading"
IMPORTING = "Importing"
RELEASING = "Releasing"

# Called with an event during an operation, and with ``None`` when the session state may have changed.
Listener = Callable[[ProgressEvent | None], None]


class _ThreadState(threading.local):
    operation_depth = 0  # Number of nested operations in this thread.
    silenced_depth = 0  # Number of nested operations that hide their progress.


class ProgressDisplay(Protocol):
    """Displays the progress of the current operation."""

    def show(self, event: ProgressEvent) -> None:
        """Display an event."""

    def finish(self, failed: bool) -> None:
        """Display the end of the operation."""


class EventDispatcher:
    """Distributes progress events of a session to its listeners.

    A listener must not start an operation that changes the session while it handles an event, because the current change is
    incomplete. Operations that a listener starts while it handles ``None`` do not trigger another refresh.

    Args:
        indicator: Progress display for operations in this process, or ``None`` to disable it.

    Example:
        >>> dispatcher, events = EventDispatcher(), []
        >>> unsubscribe = dispatcher.subscribe(events.append)
        >>> with dispatcher.operation(), dispatcher.operation():
        ...     dispatcher.notify(ProgressEvent("Loading", "bundled"))
        >>> unsubscribe()
        >>> dispatcher.notify(None)
        >>> [str(event) for event in events]
        ['Loading: bundled', 'None']
    """

    def __init__(self, indicator: ProgressDisplay | None = None) -> None:
        self._indicator = indicator
        self._listeners: dict[object, Listener] = {}
        self._state = _ThreadState()

    def __len__(self) -> int:
        return len(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Register a listener.

        Args:
            listener: Callback that is called in the thread of the operation.

        Returns:
            A function that removes the listener. Calling it more than once has no effect.
        """
        key = object()
        self._listeners[key] = listener

        def unsubscribe() -> None:
            self._listeners.pop(key, None)

        return unsubscribe

    def notify(self, event: ProgressEvent | None) -> None:
        """Send an event to the progress display and to all listeners.

        An exception in a listener is reported as a warning, so that it does not abort the operation.

        Args:
            event: Event to send, or ``None`` to ask the listeners to refresh.
        """
        is_displayed = self._state.operation_depth > 0 and self._state.silenced_depth == 0
        if self._indicator is not None and event is not None and is_displayed:
            self._indicator.show(event)
        for key, listener in self._listeners.copy().items():
            if key not in self._listeners:  # Removed by another listener during this loop.
                continue
            try:
                listener(event)
            except Exception as error:  # noqa: BLE001 - a listener must not break the operation
                message = f"A session listener raised {short_type_name(error)}."
                warn(f"{message} Run %openmed_panel to open a new panel.")

    def track(self, operation: str, target: str, items: Collection[ItemT], unit: str) -> Iterator[ItemT]:
        """Yield items and send an event before each item and after the last one.

        Args:
            operation: Name of the operation.
            target: Name of the object being processed.
            items: Items to iterate over.
            unit: Singular noun for an item.

        Yields:
            The items, in order.

        Example:
            >>> dispatcher, events = EventDispatcher(), []
            >>> _ = dispatcher.subscribe(lambda event: events.append(str(event)))
            >>> list(dispatcher.track("Reading", "notes", "ab", "note"))
            ['a', 'b']
            >>> events
            ['Reading: notes (0 of 2 notes)', 'Reading: notes (1 of 2 notes)', 'Reading: notes (2 notes)']
        """
        total = len(items)
        for completed, item in enumerate(items):
            self.notify(ProgressEvent(operation, target, completed, total, unit))
            yield item
        self.notify(ProgressEvent(operation, target, total, total, unit))

    def operation(self, progress: bool = True) -> contextlib.AbstractContextManager[object]:
        """Return a context manager for an operation, which can be nested.

        When the outermost operation finishes or fails, the progress display is closed and the listeners are asked to
        refresh.

        Args:
            progress: Whether to display the progress of this operation.

        Returns:
            The context manager.

        Raises:
            ConfigurationError: If ``progress`` is not a bool.
        """
        check_bool("progress", progress)
        return self if progress else _SilentOperation(self, self._state)

    # ``contextlib.contextmanager`` is not used here: it sets ``__traceback__`` on every exception that passes through,
    # which fails for exceptions that reject attribute assignment, such as frozen dataclasses.
    def __enter__(self) -> None:
        self._state.operation_depth += 1

    def __exit__(self, _exc_type: object, exc_value: BaseException | None, exc_traceback: TracebackType | None) -> None:
        # Formatting the full torch and transformers traceback of an interrupt takes IPython several seconds.
        if type(exc_value) is KeyboardInterrupt and not hasattr(exc_value, "_render_traceback_"):
            location = ""  # The innermost location in the notebook or script of the user.
            for frame, number in traceback.walk_tb(exc_traceback):
                if frame.f_globals.get("__name__") == "__main__":
                    location = f" in line {number} of {frame.f_code.co_name}"
            line = f"KeyboardInterrupt: interrupted{location}."
            exc_value._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
        try:
            if self._state.operation_depth == 1:
                try:
                    if self._indicator is not None:
                        self._indicator.finish(failed=exc_value is not None)
                finally:
                    self.notify(None)
        finally:
            self._state.operation_depth -= 1


class _SilentOperation:
    """An operation whose progress is not displayed."""

    def __init__(self, dispatcher: EventDispatcher, state: _ThreadState) -> None:
        self._dispatcher = dispatcher
        self._state = state

    def __enter__(self) -> None:
        self._state.silenced_depth += 1
        self._dispatcher.__enter__()

    def __exit__(self, exc_type: object, exc_value: BaseException | None, exc_traceback: TracebackType | None) -> None:
        self._state.silenced_depth -= 1
        self._dispatcher.__exit__(exc_type, exc_value, exc_traceback)


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defer ``KeyboardInterrupt`` until a short block has finished.

    Use it for blocks that would leave global state inconsistent if they were interrupted. Python delivers signals to the
    main thread only, so the context manager has no effect in other threads.
    """
    pending: list[tuple[int, FrameType | None]] = []
    previous_handler = signal.getsignal(signal.SIGINT)
    if not callable(previous_handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        if pending:
            previous_handler(*pending[0])
