from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import openmed_nb as nb
from openmed_nb.runbook.records.handoff.bundle import Handoff, write_checksums

Change = Callable[[Path, str, Callable[[Any], Any]], None]


@pytest.fixture(scope="session")
def change() -> Change:
    """Change a JSON file of a bundle, and give it the checksum of what it now holds."""

    def changed(bundle: Path, name: str, edit: Callable[[Any], Any]) -> None:
        content = json.loads((bundle / name).read_text("utf-8"))
        edited = edit(content)
        (bundle / name).write_text(json.dumps(content if edited is None else edited), "utf-8")
        write_checksums(bundle)

    return changed


@pytest.fixture(scope="session")
def handed_over(tmp_path_factory: pytest.TempPathFactory, keyword_model: Path, change: Change) -> Handoff:
    """A bundle of the keyword model; its logbook tells of so little throughput that a busy computer is no regression."""
    folder = tmp_path_factory.mktemp("handoff") / "bundle"
    trace = tmp_path_factory.mktemp("profile") / "mine.json.gz"
    trace.write_bytes(b"a trace")
    written = nb.handoff(
        folder,
        keyword_model,
        ["the patient has diabetes"],
        logbook=nb.logbook(),
        owner="The <b>team",
        trace=trace,
        device="cpu",
        batch_size=4,
        rounds=4,
        steps=1,
    )

    def slow(book: Any) -> None:
        values = next(figures["values"] for figures in book["figures"] if figures["report"] == "trial")
        values["texts_per_second"] *= 0.001

    change(folder, "logbook.json", slow)
    return written


@pytest.fixture
def bundle(handed_over: Handoff, tmp_path: Path) -> Path:
    """A copy of that bundle, elsewhere."""
    return Path(shutil.copytree(handed_over.folder, tmp_path / "copied"))
