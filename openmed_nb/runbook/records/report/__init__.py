"""Report of all runbook measurements of one computer, with each step in a separate process.

To add a step, add a row to ``STEPS`` and its function in ``steps.py``.
"""
