"""What other programs take of the processors: how many are busy, and how much that is; names only for who asks."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...devices.machine import import_psutil
from ..signals.utilisation import GUESTS, NOT_BUSY, cpu_times
from .surroundings import Background
from .variables import without_secrets

SECONDS = 0.4
"""How long is looked."""

BUSY = 0.1
"""Of one processor; a program that takes less disturbs nobody."""

MOST_NAMES = 5
LONGEST_NAME = 40


@dataclass(frozen=True)
class Look:
    """Seconds that the processors have computed until now.

    Attributes:
        programs: For each program but this one and those that it started, by number and start: its name and its seconds.
        own: The seconds of this one and those that it started.
        busy: The seconds of all processors together that were not idle.
        whole: All their seconds.
    """

    programs: Mapping[Any, tuple[str, float]]
    own: float
    busy: float
    whole: float


def background(first: Look, second: Look, names: bool = False) -> Background:
    """Return what other programs did between two looks.

    Args:
        first: The first look.
        second: The second one.
        names: Whether the busiest are named.

    Example:
        >>> before = Look({1: ("game", 5.0), 2: ("mail", 1.0)}, 0.0, 10.0, 100.0)
        >>> after = Look({1: ("game", 6.0), 2: ("mail", 1.0)}, 0.5, 11.5, 104.0)
        >>> background(before, after, names=True)
        Background(busy=1, share=0.25, names=('game',))
    """
    whole = second.whole - first.whole
    if whole <= 0:
        return Background()
    processor = BUSY * whole / max(1, _processors())
    taken = {
        key: seconds - first.programs[key][1] for key, (_, seconds) in second.programs.items() if key in first.programs
    }
    busiest = sorted((key for key, seconds in taken.items() if seconds >= processor), key=lambda key: -taken[key])
    others = (second.busy - first.busy) - (second.own - first.own)
    told = tuple(without_secrets(second.programs[key][0])[:LONGEST_NAME] for key in busiest[:MOST_NAMES])
    return Background(len(busiest), round(min(1.0, max(0.0, others / whole)), 3), told if names else None)


def read_background(names: bool = False) -> Background:
    """Look at the programs of this computer for a moment.

    Example:
        >>> read_background().names is None
        True
    """
    first = look()
    time.sleep(SECONDS)
    return background(first, look(), names)


def look() -> Look:
    """Return what the processors have done until now; programs that may not be asked count in the whole alone."""
    psutil = import_psutil()
    ours = psutil.Process()
    family = {ours.pid, *(child.pid for child in ours.children(recursive=True))}
    times = {name: spent for name, spent in cpu_times().items() if name not in GUESTS}
    whole, idle = sum(times.values()), sum(times.get(name, 0.0) for name in NOT_BUSY)
    seconds = {}
    own = 0.0
    for program in psutil.process_iter(["pid", "name", "create_time", "cpu_times"], ad_value=None):
        spent = program.info["cpu_times"]
        if spent is None:
            continue
        if program.pid in family:
            own += spent.user + spent.system
        else:
            key = (program.pid, program.info["create_time"])
            seconds[key] = (program.info["name"] or "", spent.user + spent.system)
    return Look(seconds, own, whole - idle, whole)


def _processors() -> int:
    psutil = import_psutil()
    return int(psutil.cpu_count() or 1)
