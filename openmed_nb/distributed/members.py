"""Who takes part: what every worker says of itself before the work starts, and whether all would give the same answers."""

from __future__ import annotations

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..annotation.fingerprints import differences
from ..devices.request import kind_of
from ..display import Report, Shown, Table, counted
from ..errors import WorkersDiffer

PACKAGES = ("openmed_nb", "torch", "transformers", "tokenizers")
"""The packages that change answers."""


@dataclass(frozen=True)
class Member:
    """A worker, as it says of itself.

    Attributes:
        host: The name of its computer.
        system: Its operating system and architecture, such as ``"Darwin arm64"``.
        device: The device that models run on there.
        reason: Why that device.
        versions: The version of each of ``PACKAGES`` there, those of torch's builds for one device or another left out.
    """

    host: str
    system: str
    device: str
    reason: str
    versions: Mapping[str, str]


@dataclass(frozen=True, repr=False)
class Members(Shown):
    """The workers that take part.

    Attributes:
        members: What each says of itself, in the order of their addresses.
    """

    members: tuple[Member, ...]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def label(self) -> str:
        """How many workers on which kinds of devices.

        Example:
            >>> mac = Member("mac1", "Darwin arm64", "mps", "", {})
            >>> Members((mac, mac)).label
            '2 workers (mps)'
        """
        kinds = sorted({kind_of(member.device) for member in self.members})
        return f"{counted(len(self.members), 'worker', 'workers')} ({', '.join(kinds)})"

    def to_dict(self) -> dict[str, Any]:
        """Return what all workers say of themselves, as plain mappings, lists and strings."""
        return {"workers": [asdict(member) for member in self.members]}

    def report(self) -> Report:
        """Return how many they are and why they use their devices; their names and versions are figures."""
        hosts = counted(len({member.host for member in self.members}), "computer", "computers")
        reasons = Counter(f"{member.device}: {member.reason}" for member in self.members)
        rows = tuple(
            (member.host, member.device, member.reason, member.system, *member.versions.values())
            for member in self.members
        )
        columns = ("computer", "device", "why", "system", *PACKAGES)
        return Report(f"{self.label} on {hosts}", tuple(sorted(reasons)), figures=(Table("Workers", columns, rows),))


@dataclass(frozen=True)
class Ready:
    """A worker that has loaded the model of a run.

    Attributes:
        member: The worker.
        settings: What tells the run from another there: the model and everything that changes its answers.
        characters: About how many characters suit it at a time.
        warnings: What was warned of while the model was loaded.
    """

    member: Member
    settings: Mapping[str, Any]
    characters: int
    warnings: tuple[str, ...] = field(default=())

    @property
    def terms(self) -> dict[str, Any]:
        """What must be the same everywhere."""
        return {**self.member.versions, **self.settings}


def versions_here() -> dict[str, str]:
    """Return the version of each of ``PACKAGES`` in this process; ``+cpu`` and the like are builds of one version.

    Example:
        >>> list(versions_here())
        ['openmed_nb', 'torch', 'transformers', 'tokenizers']
    """
    this, *others = PACKAGES
    # The package itself stands on the top floor, so it is looked up and not imported.
    own = str(vars(sys.modules[this])["__version__"])
    return {this: own, **{name: importlib.metadata.version(name).partition("+")[0] for name in others}}


def check_alike(ready: Sequence[Ready]) -> None:
    """Check that workers give the same answers, and speak the same language as this process.

    Args:
        ready: The workers.

    Raises:
        WorkersDiffer: For the first that does not; it names its computer.
    """
    for one in ready:
        check_version(one.member)
    usual = most_common(one.terms for one in ready)
    for one in ready:
        check_terms(one, usual)


def check_version(member: Member) -> None:
    """Check that a worker has the openmed_nb of this process.

    Raises:
        WorkersDiffer: Where it has not.
    """
    this = PACKAGES[0]
    there, here = member.versions[this], versions_here()[this]
    if there != here:
        what = f"The worker on {member.host} has {this} {there}, and this process has {here}."
        raise WorkersDiffer(what, "Install the same version on every computer.")


def check_terms(one: Ready, usual: Mapping[str, Any]) -> None:
    """Check that a worker has what the others have.

    Raises:
        WorkersDiffer: Where it has not; it names the computer and the difference.
    """
    host, terms = one.member.host, one.terms
    for name in PACKAGES:
        if terms[name] != usual[name]:
            what = f"The worker on {host} has {name} {terms[name]}, and others have {usual[name]}."
            raise WorkersDiffer(what, "Install the same version on every computer.")
    if other := differences(usual, terms):
        what = f"The worker on {host} has another model by that name, or settings of its own ({other})."
        raise WorkersDiffer(what, "Copy the same files to every computer.")


def most_common(values: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the value that most have, the first of those that as many have.

    Example:
        >>> most_common([{"torch": "2.12"}, {"torch": "2.13"}, {"torch": "2.13"}])
        {'torch': '2.13'}
    """
    known = list(values)
    return max(known, key=known.count)
