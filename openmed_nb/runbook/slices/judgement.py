"""What the figures of a profile mean: one finding for each bottleneck that it looks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...devices.request import kind_of
from ...quantities import counted
from ..findings import NOT_APPLICABLE, OK, WARNING, Finding
from ..workloads.split import DATA_SHARE, data_remedy
from ..workloads.workload import DATA

if TYPE_CHECKING:
    from .profile import Profile

DATA_FINDING, SYNCHRONISATION, TINY_BATCH, FALLBACK = "data", "synchronisation", "tiny batch", "fallback"
"""What is looked for, by the names of the findings."""

KERNEL_SHARE = 0.5
"""A batch is tiny where kernels run on the GPU for less than half of a step: it mostly waits for the next to be started.

Measured on an H200: a BERT of base size with rows of 128 tokens crosses it at 1 or 2 rows in forward passes and at about 8
in training steps; below it, twice the rows took no more time.
"""

STARTING_SHARE = 0.5
"""Where torch's profiler sees no kernels, a batch is tiny if more than this share of a step goes into starting operators.

What starting one takes is measured in turn with the steps, with operators that have nothing to compute, because it differs:
25 to 110 microseconds on MPS (pytorch#82707), 3 to 7 on one CPU within minutes. Measured in forward passes and training steps
of linear layers, convolutions, elementwise functions and transformers, with 1 to 4096 rows: on the CPU (67 cases), twice the
rows take 1.1 times as long in the median where the share is above a half, and 1.8 times where it is not. On an H200, counted
as on MPS, the share is above a half in all 77 cases in which kernels run for less than half of a step, and in 8 of 12 others.
"""

SHOWN = 3
"""How many places a finding names."""


def findings_of(profile: Profile) -> tuple[Finding, ...]:
    """Return what was looked for and how it is."""
    return (data(profile), synchronisation(profile), tiny_batch(profile), fallback(profile))


def data(profile: Profile) -> Finding:
    """Return whether steps wait for their data."""
    if profile.shares.get(DATA, 0.0) > DATA_SHARE:
        return Finding(DATA_FINDING, WARNING, "steps wait for their data", data_remedy(profile.workers))
    return Finding(DATA_FINDING, OK, "data come in time")


def synchronisation(profile: Profile) -> Finding:
    """Return whether steps wait for the device before their end, and where."""
    own = [one for one in profile.synchronisations if one.place.is_own]
    if not own:
        return Finding(SYNCHRONISATION, OK, "no line of the step waits for the device")
    more = f", and {counted(len(own) - SHOWN, 'other')}" if len(own) > SHOWN else ""
    places = f"{', '.join(str(one) for one in own[:SHOWN])}{more}"
    if kind_of(profile.device) == "cpu":
        return Finding(
            SYNCHRONISATION, NOT_APPLICABLE, f"nothing waits on the CPU; a GPU would be waited for: {places}"
        )
    remedy = "Gather the numbers on the device and read them once in a while, not at each step."
    return Finding(SYNCHRONISATION, WARNING, f"the device is waited for: {places}", remedy)


def tiny_batch(profile: Profile) -> Finding:
    """Return whether a step does little but start operators."""
    tiny = is_tiny(profile)
    if tiny is None:
        simulated = profile.simulated and kind_of(profile.device) == "mps"
        why = "a simulated device starts no operators" if simulated else "not known"
        return Finding(TINY_BATCH, NOT_APPLICABLE, why)
    if tiny:
        remedy = "Use a larger batch: nb.sweep() finds the best."
        return Finding(TINY_BATCH, WARNING, "most of a step goes into starting operators", remedy)
    return Finding(TINY_BATCH, OK, "operators have enough to do")


def is_tiny(profile: Profile) -> bool | None:
    """Tell whether the batch is too small for its device, ``None`` where that is not known."""
    if profile.simulated and kind_of(profile.device) == "mps":
        return None
    if profile.kernel_share is not None:
        return profile.kernel_share < KERNEL_SHARE
    share = profile.starting_share
    if share is None or (share <= STARTING_SHARE and profile.hides_python):
        return None
    return share > STARTING_SHARE


def fallback(profile: Profile) -> Finding:
    """Return whether operators leave MPS for the CPU."""
    if kind_of(profile.device) != "mps":
        return Finding(FALLBACK, NOT_APPLICABLE, "only MPS has operators that fall back to the CPU")
    names = sorted({one.operator for one in profile.fallbacks})
    if names:
        remedy = "See where with nb.fallbacks(), and write it with other operators, or do this part on the CPU."
        return Finding(FALLBACK, WARNING, f"{', '.join(names)} fell back to the CPU", remedy)
    return Finding(FALLBACK, OK, "nothing fell back to the CPU")
