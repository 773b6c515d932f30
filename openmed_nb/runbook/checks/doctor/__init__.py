"""Diagnosis of this machine: devices, torch, packages, environment variables and models.

Where to add a check:

- The machine, torch or packages: a ``yield`` in ``run_checks`` (``checks.py``). A fact that it needs is a field of
  ``SystemFacts``, filled by ``collect_facts`` (``report.py``). An environment variable that it reads goes into
  ``CHECKED_VARIABLES`` (``checks.py``).
- A device that is unavailable: a row of ``SYSTEM_CHECKS``, and its evidence if it passes in ``_check_system``.
- Packages: ``package_findings`` (``checks.py``).
- Power, thermal state and background load: a row of ``CONDITIONS`` (``devices/system_status.py``).
- A model: a function in ``MODEL_CHECKS`` (``checks.py``).
- Incorrect results without an error: a row of ``silent_errors.json``, the function that it names in ``silent_errors.py``, and its
  simulation in ``simulation/operators.py``. A row with ``may_abort`` runs in a process of its own.
"""
