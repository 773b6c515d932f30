"""Summarize what the doctor of a Mac says about MPS, as Markdown: correct, incorrect, or refused, with the reason.

    python -m openmed_nb doctor --json > doctor.json
    python scripts/summarize_doctor.py doctor.json

The CI runs this on macOS 26. Each answer can be the truth there, so the exit status is 1 only if the doctor gives none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openmed_nb._render.display import FAILED, OK, WARNING

MARK = "Paravirtual: correctness, no speed."


def summarize(findings: Sequence[dict[str, Any]]) -> tuple[str, int]:
    """Return the answer of the doctor as Markdown, and the exit status."""
    active = next((finding for finding in findings if finding["name"] == "active device"), None)
    problems = [finding for finding in findings if finding["status"] in {FAILED, WARNING}]
    has_failed = any(finding["status"] == FAILED for finding in problems)
    if active is None or active["status"] != OK:
        answer = "MPS: no answer. The doctor could not check a device."
    elif active["evidence"].startswith("mps") and has_failed:
        answer = f"MPS: incorrect. Checks failed. Active device: {active['evidence']}"
    elif active["evidence"].startswith("mps"):
        answer = "MPS: correct. No check failed."
    else:
        answer = f"MPS: refused. Active device: {active['evidence']}"
    rows = [
        f"- {finding['status']}: {finding['name']}: {finding['evidence']} {finding['details']}".rstrip()
        for finding in problems
    ]
    text = "\n".join([f"## {answer}", "", MARK, "", *rows])
    return text, int("no answer" in answer)


if __name__ == "__main__":
    markdown, status = summarize(json.loads(Path(sys.argv[1]).read_text("utf-8"))["findings"])
    print(markdown)
    sys.exit(status)
