"""What was done to the environment variables, and how it is taken back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from .environment import HIGH, UNSEEN, VARIABLES, EnvPlan, Moment, apply, plan, undo
from .request import TORCH_DEVICE_VARIABLE


@dataclass(frozen=True)
class Published:
    """What we wrote into ``OPENMED_TORCH_DEVICE``, so that the openmed package follows, and what stood there before."""

    before: str | None
    ours: str


class EnvironmentChanges:
    """The part of a session that writes to the environment, and remembers every value that it wrote.

    Args:
        environ: The environment variables, read and written.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._environ = environ
        self._applied: dict[str, str] = {}
        self._seen: dict[str, frozenset[str | None]] = dict.fromkeys(VARIABLES, frozenset((UNSEEN,)))
        self._settled: set[str] = set()
        self._published: Published | None = None

    @property
    def applied(self) -> dict[str, str]:
        """The MPS variables that we set, with our values."""
        return dict(self._applied)

    @property
    def environ(self) -> dict[str, str]:
        """A copy of the environment variables as they stand now."""
        return dict(self._environ)

    @property
    def shell(self) -> dict[str, str]:
        """The environment variables as the person set them, without what we wrote."""
        variables = {name: value for name, value in self._environ.items() if self._applied.get(name) != value}
        published = self._published
        if published and variables.get(TORCH_DEVICE_VARIABLE) == published.ours:
            del variables[TORCH_DEVICE_VARIABLE]
            if published.before is not None:
                variables[TORCH_DEVICE_VARIABLE] = published.before
        return variables

    def observe(self, moment: Moment) -> None:
        """Keep watch over the values that torch may have read; call it around every change and every use of torch."""
        for name in VARIABLES:
            has_read, value = moment.has_read(name), frozenset((self._environ.get(name),))
            if name not in self._settled:
                self._seen[name] = value if has_read is False else self._seen[name] | value
            if has_read:
                self._settled.add(name)

    def plan(self, device: str, moment: Moment | None = None) -> EnvPlan:
        """Return the plan for a device, knowing which values torch may have read; for others than mps that is no matter."""
        standing = {name: value for name, value in self._applied.items() if self._environ.get(name) == value}
        if moment is None:
            return plan(self.shell, device, applied=standing)
        self.observe(moment)
        started = True if HIGH in self._settled else moment.allocator_started
        return plan(self.shell, device, replace(moment, allocator_started=started, seen=dict(self._seen)), standing)

    def enter_mps(self, moment: Moment) -> None:
        """Apply the MPS variables, in place of those that were applied before."""
        planned = self.plan("mps", moment)
        undo(self._applied, self._environ, planned.additions)
        self._applied = apply(planned, self._environ)
        self.observe(moment)

    def back_to(self, applied: Mapping[str, str], moment: Moment) -> None:
        """Take back what was done to the MPS variables since then.

        Args:
            applied: What had been applied; empty to take everything back.
            moment: What torch has done by now.
        """
        self.observe(moment)
        undo(self._applied, self._environ, applied)
        self._applied = dict(applied)
        self.observe(moment)

    def publish(self, device: str) -> None:
        """Write the device where the openmed package looks for it."""
        self._published = Published(self.shell.get(TORCH_DEVICE_VARIABLE), device)
        self._environ[TORCH_DEVICE_VARIABLE] = device

    def unpublish(self) -> None:
        """Give ``OPENMED_TORCH_DEVICE`` its former value back, unless someone else changed it since."""
        published, self._published = self._published, None
        if published is None or self._environ.get(TORCH_DEVICE_VARIABLE) != published.ours:
            return
        if published.before is None:
            del self._environ[TORCH_DEVICE_VARIABLE]
        else:
            self._environ[TORCH_DEVICE_VARIABLE] = published.before
