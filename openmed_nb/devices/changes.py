"""What was done to the environment variables, and how it is taken back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace

from .environment import FALLBACK, IN_TIME, EnvPlan, Moment, apply, plan, undo
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
        self._in_time: dict[str, str] = {}
        self._published: Published | None = None

    @property
    def applied(self) -> Mapping[str, str]:
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

    def plan(self, device: str, moment: Moment) -> EnvPlan:
        """Return the plan for a device, knowing which values stood there in time."""
        return plan(self.shell, device, replace(moment, read=self._in_time))

    def enter_mps(self, moment: Moment) -> None:
        """Apply the MPS variables, and remember which of them torch will read."""
        planned = self.plan("mps", moment)
        self._applied.update(apply(planned, self._environ))
        in_time = [one for one in planned.settings if one.effect == IN_TIME and one.value is not None]
        self._in_time.update({one.name: str(one.value) for one in in_time})

    def leave_mps(self, moment: Moment) -> None:
        """Take the MPS variables back, and forget those that torch cannot have read yet."""
        if not moment.torch_loaded:
            self._in_time = {}
        elif not moment.allocator_started:
            self._in_time = {name: value for name, value in self._in_time.items() if name == FALLBACK}
        self.back_to({})

    def back_to(self, applied: Mapping[str, str]) -> None:
        """Take back all MPS variables that were applied since then."""
        undo({name: value for name, value in self._applied.items() if name not in applied}, self._environ)
        self._applied = dict(applied)

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
