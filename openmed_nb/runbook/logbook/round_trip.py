"""How long it takes to reach an artifact store: the time of a connection over TCP, with nothing sent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from statistics import median
from urllib.parse import urlsplit

from ...errors import ConfigurationError
from .surroundings import RoundTrip
from .variables import without_secrets

SAMPLES = 5
TIMEOUT = 2.0

PORTS = {"https": 443, "http": 80, "ssh": 22, "sftp": 22, "ftp": 21}
"""Where a scheme is answered when nobody names a port."""

HOST_AND_PORT = "Pass a host and a port, such as 'store.example:443', or an https address."


def target(store: str) -> tuple[str, int]:
    """Return the host and the port of an artifact store; user, password, path and query are not read.

    Raises:
        ConfigurationError: Where there is none; what was passed is not shown, because it may hold a password.

    Example:
        >>> target("https://me:word@store.example/models"), target("store.example:9000")
        (('store.example', 443), ('store.example', 9000))
    """
    text = str(store)
    try:
        parts = urlsplit(text if "://" in text else f"//{text}")
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        port = None
        parts = urlsplit("")
    if not parts.hostname or not port or any(one.isspace() for one in parts.hostname):
        raise ConfigurationError("The artifact store has no host with a port.", HOST_AND_PORT)
    return parts.hostname, port


def measure_round_trip(store: str, samples: int = SAMPLES, timeout: float = TIMEOUT) -> RoundTrip:
    """Connect to an artifact store some times.

    Args:
        store: As for :func:`target`.
        samples: How often.
        timeout: How long each may take, in seconds.

    Raises:
        ConfigurationError: As :func:`target`.
    """
    host, port = target(store)
    return round_trip(host, port, [connect(host, port, timeout) for _ in range(samples)])


def round_trip(host: str, port: int, seconds: list[float | None]) -> RoundTrip:
    """Return what some connections took; ``None`` is one that failed.

    Example:
        >>> round_trip("store.example", 443, [0.02, None, 0.01]).failures
        1
    """
    took = [one for one in seconds if one is not None]
    middle, longest = (round(median(took), 6), round(max(took), 6)) if took else (None, None)
    return RoundTrip(without_secrets(host), port, len(seconds), len(seconds) - len(took), middle, longest)


def connect(host: str, port: int, timeout: float, clock: Callable[[], float] = time.perf_counter) -> float | None:
    """Return how long one connection takes in seconds, ``None`` where it fails."""
    begin = clock()
    try:
        with socket.create_connection((host, port), timeout=timeout):
            return clock() - begin
    except (OSError, UnicodeError):  # UnicodeError for a name that no network can have.
        return None
