"""The one mutable object: which device is in force, what was done to the environment, which models are loaded.

Every face (functions, magics, panel) calls these verbs. A verb that fails changes nothing. They stand in three files, each
on the one before: ``devices``, ``models``, ``runbook``.
"""

from __future__ import annotations

from .runbook import RunbookVerbs


class Session(RunbookVerbs):
    """The state of one kernel, with all its verbs; its arguments are those of :class:`.devices.DeviceVerbs`."""


SESSION = Session()
"""The session of this process: the one place of what a person chose, did and loaded.

Beside it stands what is of the process and no choice of anybody: which models are watched by guards
(``training.guards.WATCHED``, weakly, so that the next training lets go what a failed one left), which conversions were
reported once (``devices.conversion.REPORTED``), whether the one simulated MPS device is on, which torch knows only once
(``devices.simulation._ACTIVE``), which panels are open (``interface.panel.opening.OPEN``, weakly), the lock of all tensor
work (``devices.backend.TENSOR_LOCK``), and what was learnt once of torch, of signatures and of files (``functools.cache``
in ``devices.linear``, ``annotation.forward``, ``models.content`` and ``runbook.operators.table``; in a worker of a cluster
also the model of the last run, in ``session.worker``), and which partitions of a column were read last
(``annotation.cluster.columns``), and what clusters change of the process while they live
(``annotation.cluster.settings``).
"""
