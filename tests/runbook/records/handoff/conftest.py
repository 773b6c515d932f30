from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import openmed_nb as nb
from openmed_nb.runbook.records.handoff.bundle import Handoff


@pytest.fixture(scope="session")
def bundles(helper: Callable[[Path], ModuleType]) -> ModuleType:
    """The module that plants things in bundles."""
    return helper(Path(__file__).parent / "bundles.py")


@pytest.fixture(scope="session")
def handed_over(tmp_path_factory: pytest.TempPathFactory, keyword_model: Path, bundles: ModuleType) -> Handoff:
    """A bundle of the keyword model; its logbook tells of so little throughput that a busy computer is no regression."""
    folder = tmp_path_factory.mktemp("handoff") / "bundle"
    note = "the patient has diabetes"
    trace = tmp_path_factory.mktemp("profile") / "mine.json.gz"
    trace.write_bytes(b"a trace")
    written = nb.handoff(
        folder,
        keyword_model,
        [note],
        logbook=nb.logbook(),
        owner="The <b>team",
        trace=trace,
        device="cpu",
        batch_size=4,
        rounds=4,
        steps=1,
    )
    bundles.with_throughput(folder, 0.001)
    return written


@pytest.fixture
def bundle(handed_over: Handoff, tmp_path: Path) -> Path:
    """A copy of that bundle, elsewhere."""
    return Path(shutil.copytree(handed_over.folder, tmp_path / "copied"))
