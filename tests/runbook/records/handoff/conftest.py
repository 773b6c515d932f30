from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import openmed_nb as nb
from openmed_nb.runbook.records.handoff.bundle import Handoff

Change = Callable[[Path, str, Callable[[Any], Any]], None]


@pytest.fixture(scope="session")
def change() -> Change:
    """Function that changes a JSON file of a bundle."""

    def change_file(bundle: Path, name: str, edit: Callable[[Any], Any]) -> None:
        content = json.loads((bundle / name).read_text("utf-8"))
        edited = edit(content)
        (bundle / name).write_text(json.dumps(content if edited is None else edited), "utf-8")

    return change_file


@pytest.fixture(scope="module")
def keyword_handoff(
    tmp_path_factory: pytest.TempPathFactory,
    keyword_model: Path,
    change: Change,
    quick_collection: None,  # noqa: ARG001 - the memory of each round is collected
) -> Handoff:
    """Bundle of the keyword model. The throughput in its logbook is so low that load on the machine is not a regression."""
    folder = tmp_path_factory.mktemp("handoff") / "bundle"
    trace = tmp_path_factory.mktemp("profile") / "mine.json.gz"
    trace.write_bytes(b"a trace")
    handoff = nb.handoff(
        folder, keyword_model, ["the patient has diabetes"], owner="The <b>team", trace=trace, device="cpu"
    )

    def reduce_throughput(book: Any) -> None:
        book["metrics"][-1]["values"]["texts_per_second"] *= 0.001

    change(folder, "logbook.json", reduce_throughput)
    return handoff


@pytest.fixture
def bundle(keyword_handoff: Handoff, tmp_path: Path) -> Path:
    """Copy of that bundle in another directory."""
    return Path(shutil.copytree(keyword_handoff.folder, tmp_path / "copied"))
