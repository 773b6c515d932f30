# ruff: noqa: D417 - these functions are on their way to their rooms
"""What the faces ask of the rooms that stand above the session: each of these goes to its room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..devices import backend
from ..devices.request import device_of
from ..errors import DeviceUnavailable, OpenMedError
from ..session import Session

if TYPE_CHECKING:
    from ..runbook.comparison import Comparison
    from ..runbook.handoff.bundle import Handoff, Order
    from ..runbook.measure.benches import Asked
    from ..runbook.measure.workloads import Subject
    from ..runbook.profile import Profile
    from ..runbook.signals.values import Signals
    from ..runbook.sweep import SweepReport
    from ..runbook.sweep_search import SweepRules


def subject_of(session: Session, asked: Asked) -> tuple[Subject, str]:
    """Return what a person wants measured, and the device for it.

    Args:
        asked: The model, its data, and how they are used.
    """
    with session.told_after():
        asked.check()
        name, given = "bundled" if asked.model is None else str(asked.model), dict(asked.arguments)
        given |= {} if asked.device is None else {"device": asked.device}
        subject = asked.subject(lambda: session.files(name, given)[0])
        return subject, session.device(given.get("device")).device


def sweep(session: Session, asked: Asked, rules: SweepRules) -> SweepReport:
    """Return throughput and memory over batch sizes, with the knee; what a person passed stays as it is.

    Args:
        asked: What is measured.
        rules: How.
    """
    from ..runbook.sweep import sweep_of

    with session.told_after():
        subject, device = subject_of(session, asked.in_one_shape())
        session.tell(Activity("Sweeping", subject.name))
        return sweep_of(subject, device, rules, session.computer.limit(device))


def compare(session: Session, asked: Asked, devices: Any, /, **measuring: Any) -> Comparison:
    """Return how fast the same work is on each device, and where its time goes.

    Args:
        asked: The model, its data, and how they are used.
        devices: The devices beside the CPU; ``None`` for all that can be used.
        measuring: The fields of ``runbook.comparison.Plan``.
    """
    from ..runbook.comparison import Plan, check_comparable, comparison_of, devices_to_compare, reader_of

    with session.told_after():
        plan = Plan(**measuring)
        check_comparable(asked)
        subject, device = subject_of(session, asked)
        others = (device, *usable_devices(session)) if devices is None else confirmed(session, devices)
        names, machine = devices_to_compare(*others), session.computer.machine
        return comparison_of(
            subject,
            names,
            plan,
            lambda name: reader_of(name, machine, environ=session.environ, uuid=backend.gpu_uuid(name)),
            lambda name: session.tell(Activity(f"Comparing on {name}", subject.name, names.index(name), len(names))),
        )


def profile(session: Session, asked: Asked, /, **measuring: Any) -> Profile:
    """Return where the time of some steps goes, and what holds them up.

    Args:
        asked: The model, its data, and how they are used.
        measuring: The fields of ``runbook.profile.Plan``.
    """
    from ..runbook.profile import Plan, profile_of

    with session.told_after():
        plan = Plan(**measuring)
        subject, device = subject_of(session, asked)
        session.tell(Activity("Profiling", subject.name))
        return profile_of(subject, device, plan)


def confirmed(session: Session, devices: Any) -> tuple[str, ...]:
    """Return the devices that a person names, as torch spells them."""
    named = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
    return tuple(session.device(device_of(one)).device for one in named)


def usable_devices(session: Session) -> tuple[str, ...]:
    """Return the devices that compute, the best first."""
    usable = []
    for one in session.devices().candidates:
        if one.usable is not False:
            with contextlib.suppress(DeviceUnavailable):  # A GPU that nobody has tried yet, and that fails.
                usable.append(session.device(one.device).device)
    return tuple(usable)


def handoff(session: Session, model: Any, order: Order, arguments: Mapping[str, Any]) -> Handoff:
    """Write a folder that another computer can run, and return what was written.

    Args:
        model: The name of a model, ``None`` for the bundled one.
        order: What a person wants handed over.
        arguments: Those of :meth:`load_model`.
    """
    from ..runbook.handoff.bundle import handed_over

    with session.told_after():
        order.check(model)
        spec, device = session.files(model, arguments)
        session.tell(Activity("Handing over", spec.reference.name))
        return handed_over(order, spec, device, session.computer)


def signals(session: Session) -> Signals:
    """Return load, memory, power and heat of this computer at this moment; nothing is loaded for that."""
    from ..runbook.doctor.report import signals_of

    with session.lock:
        choice = session.choice_or_error(confirm=False)
        return signals_of(session.computer.machine, "cpu" if isinstance(choice, OpenMedError) else choice.device)
