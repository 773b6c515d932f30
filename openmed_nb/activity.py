"""What a session is doing just now, and its listeners: how magics, panels and functions stay in step with one session."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from .errors import OpenMedWarning


@dataclass(frozen=True)
class Activity:
    """Something that takes a while.

    Attributes:
        doing: What is done, such as ``"Moving to mps"``.
        name: With what.
        done: How many are done.
        total: How many there are.

    Example:
        >>> str(Activity("Moving to mps", "bundled", 1, 3))
        'Moving to mps: bundled (2 of 3)'
        >>> str(Activity("Loading", "bundled"))
        'Loading: bundled'
    """

    doing: str
    name: str
    done: int = 0
    total: int = 1

    def __str__(self) -> str:
        count = f" ({self.done + 1} of {self.total})" if self.total > 1 else ""
        return f"{self.doing}: {self.name}{count}"


# Gets an activity while it is under way, and ``None`` when it is time to look again.
Listener = Callable[[Activity | None], None]


class _Depth(threading.local):
    verbs = 0  # How many of this thread are inside one another.


class Listeners:
    """Functions that want to know what a session does.

    While a listener handles an activity, it must not call a verb that changes something: the change is half done then.
    What it does while it looks again causes no further calls, because those would never end.

    Example:
        >>> listeners, heard = Listeners(), []
        >>> stop = listeners.add(heard.append)
        >>> with listeners.told_after(), listeners.told_after():
        ...     listeners.tell(Activity("Loading", "bundled"))
        >>> stop()
        >>> listeners.tell(None)
        >>> [str(one) for one in heard]
        ['Loading: bundled', 'None']
    """

    def __init__(self) -> None:
        self._listeners: dict[object, Listener] = {}
        self._depth = _Depth()

    def __len__(self) -> int:
        return len(self._listeners)

    def add(self, listener: Listener) -> Callable[[], None]:
        """Add a listener, and return what removes it; removing it twice does no harm."""
        key = object()
        self._listeners[key] = listener

        def remove() -> None:
            self._listeners.pop(key, None)

        return remove

    def tell(self, activity: Activity | None) -> None:
        """Tell all listeners; one that fails becomes a warning, because the verb that tells did not fail."""
        for key, listener in self._listeners.copy().items():
            if key in self._listeners:  # Another one may have removed it meanwhile.
                try:
                    listener(activity)
                except Exception as error:  # noqa: BLE001 - whatever it is, it is the listener's fault and not the verb's
                    what = f"A panel or another listener of the session failed: {type(error).__name__}."
                    warnings.warn(f"{what} %openmed_panel opens a new panel.", OpenMedWarning, stacklevel=3)

    def told_after(self) -> Listeners:
        """Tell the listeners to look again when the outermost of the verbs inside one another is done, or has failed.

        It is not a generator: ``contextlib`` would set the ``__traceback__`` of each error that passes, which an error of
        a person's own, such as a frozen dataclass, may refuse.
        """
        return self

    def __enter__(self) -> None:
        self._depth.verbs += 1

    def __exit__(self, _kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        # IPython would show how torch and transformers were called, frame by frame, which takes it seconds.
        if type(error) is KeyboardInterrupt and not hasattr(error, "_render_traceback_"):
            line = f"KeyboardInterrupt: Stopped{in_own_line(trace)}."
            error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]
        try:
            if self._depth.verbs == 1:
                self.tell(None)
        finally:
            self._depth.verbs -= 1


def in_own_line(trace: TracebackType | None) -> str:
    """Return the innermost line of a notebook's or script's own functions in a traceback, empty if none was running."""
    own = [
        f" in line {line} of {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    return own[-1] if own else ""


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
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
