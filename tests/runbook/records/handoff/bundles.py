"""Bundles for the tests: what makes one quick to judge, and what is planted in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openmed_nb.runbook.records.handoff.bundle import write_checksums


def change(bundle: Path, name: str, edit: Callable[[Any], None]) -> None:
    """Change a JSON file of a bundle, and give it the checksum of what it now holds."""
    content = json.loads((bundle / name).read_text("utf-8"))
    edit(content)
    (bundle / name).write_text(json.dumps(content), "utf-8")
    write_checksums(bundle)


def with_throughput(bundle: Path, factor: float) -> None:
    """Let the logbook of a bundle tell of another throughput."""

    def edit(book: Any) -> None:
        values = next(one["values"] for one in book["figures"] if one["report"] == "trial")
        values["texts_per_second"] *= factor

    change(bundle, "logbook.json", edit)
