"""Listener of a session that records its events."""

from __future__ import annotations

from typing import Any

from helpers.threads import run_in_thread


def is_idle_for_others(session: Any) -> bool:
    """Return whether another thread could run an operation now."""
    found: list[bool] = []
    run_in_thread(lambda: found.append(session.is_idle()))
    return found[0]


class RecordingListener:
    """Records the events of a session as text, and ``None`` at the end of an operation if another one could run then."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.events: list[str | None] = []
        self.remove = session.subscribe(self)

    def __call__(self, event: object) -> None:
        """Record an event."""
        if event is not None:
            self.events.append(str(event))
        else:
            self.events.append(None if is_idle_for_others(self.session) else "busy")
