# ruff: noqa: D417 - these functions are on their way to their rooms
"""What the faces ask of the rooms that stand above the session: each of these goes to its room."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..session import Session

if TYPE_CHECKING:
    from ..runbook.handoff.bundle import Handoff, Order


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
