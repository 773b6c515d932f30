"""Calls in another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable


def run_in_thread(function: Callable[..., object], *arguments: object) -> int:
    """Call a function in another thread, wait for its end, and return the identifier of the thread."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()
    return int(thread.ident or 0)
