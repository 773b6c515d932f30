"""All that the runbook measures on one computer, each step in a process of its own, as one page, one JSON and one text.

A new step is a row of ``STEPS`` and the function that it names (``steps.py``).
"""
