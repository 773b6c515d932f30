"""How to log in to the hosts of a cluster: what a person may say of that, and of their names."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigurationError, shorten

CONNECT_TIMEOUT = 15.0
"""How long a host may take to answer, in seconds."""

KEEP_ALIVE = 30.0
"""After how many silent seconds a host is asked whether it is there: a connection that somebody on the way forgot would end
the processes that it started. Three times in vain, and it has ended."""

HIGHEST_PORT = 65535

HOST = re.compile(r"[\w:][\w.:%-]*")
"""What can be the name of a computer or its address; whether there is one is seen when it is connected to."""

REMEDIES = {
    "@": "Name the user in user=, and hosts without it.",
    r":\d+$": "Name the port in port=, and hosts without it.",
}
"""What to do where a name has more than a host."""


@dataclass(frozen=True)
class Login:
    """How to log in to hosts; what is ``None`` is as in the settings of SSH.

    Attributes:
        user: The name there.
        key: The file of a private key.
        port: The port of SSH.
        known_hosts: The file of the keys of known hosts; there is no way around the check.
        python: The Python there that has openmed_nb.
    """

    user: str | None = None
    key: str | None = None
    port: int | None = None
    known_hosts: str | None = None
    python: str = sys.executable

    @classmethod
    def of(
        cls, user: Any = None, key: Any = None, port: Any = None, known_hosts: Any = None, python: Any = None
    ) -> Login:
        """Return a login with what a person gave.

        Raises:
            ConfigurationError: For what is no text, no file that is here, or no port.

        Example:
            >>> Login.of(user="me", port=2222).options["port"]
            2222
        """
        return cls(
            checked_text("user", user),
            checked_key(key),
            checked_port(port),
            checked_file("known_hosts", known_hosts, "Name the file of the keys of known hosts."),
            checked_text("remote_python", python) or sys.executable,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``asyncssh.connect``."""
        keys = None if self.key is None else [self.key]
        named = {"username": self.user, "client_keys": keys, "port": self.port, "known_hosts": self.known_hosts}
        times = {"connect_timeout": CONNECT_TIMEOUT, "keepalive_interval": KEEP_ALIVE}
        return {**times, **{name: value for name, value in named.items() if value is not None}}

    def command(self, host: str) -> str:
        """Return the command with which a person logs in to a host in the same way.

        Example:
            >>> Login(user="me", port=2222).command("mac1")
            'ssh -p 2222 me@mac1'
        """
        key = () if self.key is None else ("-i", self.key)
        port = () if self.port is None else ("-p", str(self.port))
        known = () if self.known_hosts is None else ("-o", f"UserKnownHostsFile={self.known_hosts}")
        return shlex.join(("ssh", *key, *port, *known, host if self.user is None else f"{self.user}@{host}"))


def checked_text(name: str, value: Any) -> str | None:
    """Return a text or a path as text.

    Raises:
        ConfigurationError: For anything else, and for characters that nothing is named with.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is None or (isinstance(text, str) and text.strip() and text.isprintable()):
        return text
    raise ConfigurationError(f"{name} cannot be {shorten(repr(value))}.", "Pass a string, or leave it out.")


def checked_file(name: str, value: Any, remedy: str) -> str | None:
    """Return the path of a file on this computer as text; ``~`` is the home of a user.

    Raises:
        ConfigurationError: Where there is no such file.
    """
    text = checked_text(name, value)
    path = None if text is None else os.path.expanduser(text)  # noqa: PTH111 - pathlib's fails for an unknown user
    if path is None or os.path.isfile(path):  # noqa: PTH113 - as above
        return path
    raise ConfigurationError(f"{name}={shorten(repr(path))} is no file on this computer.", remedy)


def checked_key(value: Any) -> str | None:
    """Return the path of a private key.

    Raises:
        ConfigurationError: Where there is no such file, and for a public key, which opens nothing.
    """
    remedy = "Name the file of a private key, without .pub."
    path = checked_file("key", value, remedy)
    if path is None or not path.endswith(".pub"):
        return path
    raise ConfigurationError(f"key={shorten(repr(path))} is a public key.", remedy)


def checked_port(port: Any) -> int | None:
    """Return a port.

    Raises:
        ConfigurationError: For anything but a whole number from 1 to 65535; asyncssh would take a larger one modulo 65536.
    """
    if port is None or (isinstance(port, int) and not isinstance(port, bool) and 1 <= port <= HIGHEST_PORT):
        return port
    what = f"port cannot be {shorten(repr(port))}."
    raise ConfigurationError(what, f"Use a whole number from 1 to {HIGHEST_PORT}, or leave it out.")


def checked_hosts(hosts: Any) -> tuple[str, ...]:
    """Return the names of hosts.

    Raises:
        ConfigurationError: For anything but names in a list.

    Example:
        >>> checked_hosts(["mac1", "mac2"])
        ('mac1', 'mac2')
    """
    names = tuple(hosts) if isinstance(hosts, Iterable) and not isinstance(hosts, str) else ()
    wrong = [name for name in names if not is_host(name)]
    if names and not wrong:
        return names
    what = f"hosts cannot be {shorten(repr(hosts))}."
    for pattern, remedy in REMEDIES.items():
        if any(isinstance(name, str) and re.search(pattern, name) for name in wrong):
            raise ConfigurationError(what, remedy)
    raise ConfigurationError(what, "Pass names of hosts in a list, such as ['mac1', 'mac2'].")


def is_host(name: Any) -> bool:
    """Tell whether something can be the name of a host; a label of it has 63 characters at most (RFC 1035, 2.3.4).

    Example:
        >>> is_host("mac1.local"), is_host("fe80::1%en0"), is_host("me@mac1"), is_host("mac1:22"), is_host("a" * 64)
        (True, True, False, False, False)
    """
    if not isinstance(name, str) or not HOST.fullmatch(name) or name.count(":") == 1:
        return False
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return True
