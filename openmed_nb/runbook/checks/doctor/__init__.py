"""Is this computer right for models?

Where a new line of the doctor goes:

- About the computer, torch or packages: a ``yield`` in ``run_checks`` (``checks.py``). A fact that it needs is a field of
  ``SystemFacts`` there, which ``examine`` (``report.py``) fills.
- About a device that cannot be used: a row of ``COMPUTER``, with what it shows where nothing is wrong in ``_computer``; about
  packages: ``package_findings`` (``checks.py``).
- About power, heat and what else runs: a row of ``CONDITIONS`` (``runbook/records/signals.py``).
- About a model: a function in ``MODEL_CHECKS`` (``checks.py``).
- Wrong numbers that a device gives in silence: a function under ``@silent`` (``silent_errors.py``) and its row (``silent_errors.json``).
"""
