"""All runbook measurements of one computer, each step in a separate process, as one HTML page, one JSON and one text.

To add a step, add a row to ``STEPS`` and its function in ``steps.py``.
"""
