"""Logbooks as values, for the tests: one that is whole, and others that differ from it in one place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from openmed_nb.runbook.records.logbook.logbook import Logbook
from openmed_nb.runbook.records.logbook.sections import (
    SCHEMA,
    BackgroundLoad,
    Code,
    Dataset,
    Hardware,
    Hypothesis,
    Loader,
    Model,
    MpsVariable,
    NetworkLatency,
    Randomness,
    ReportMetrics,
    Run,
    Software,
    StorageLocation,
    SystemConditions,
)

WHOLE = Logbook(
    schema=SCHEMA,
    written="2026-03-01T12:00:00Z",
    simulated=False,
    software=Software("0.1.0", "3.11.7", "2.13.0", "5.23.0", {"numpy": "2.4.6"}, "macOS 14.5", "arm64"),
    code=Code("5c" * 20, 1, 0),
    hardware=Hardware("mps", "Apple M2 Pro", "Apple M2 Pro", 16 << 30, 8, 1.0, 1 << 30, 2 << 30),
    model=Model("bundled", "files", "ab" * 16, "cd" * 16, "ef" * 16, "float32", "counts"),
    dataset=Dataset("folder", "12" * 32, 2, 2048, ("34" * 32, "56" * 32)),
    run=Run("annotation", 32, 128, 0, 1 << 28, "float32", None, "encoder.layer.0", 4, "bfloat16"),
    loader=Loader(2, 32, False, True, 2, "fork", True, "worker_init_fn"),
    randomness=Randomness({"torch": 1}, 1, False, False, False, False, "highest"),
    environment={"OMP_NUM_THREADS": "8"},
    mps_variables=(MpsVariable("PYTORCH_ENABLE_MPS_FALLBACK", "1", "openmed_nb", "in force"),),
    conditions=SystemConditions("before", "adapter", "automatic", "nominal", "normal", 100, 80, 8 << 30, 0),
    background=BackgroundLoad(1, 0.1, ("mail",)),
    storage=(StorageLocation("Hugging Face cache", "~/.cache/huggingface/hub", "apfs", "local"),),
    network=NetworkLatency("store.example", 443, 5, 0, 0.01, 0.02),
    hypotheses=(Hypothesis("slow loader", "data takes 3 % of a step"),),
    metrics=(ReportMetrics("sweep", "bundled", "mps", None, False, {"rows_per_second": 100.0, "knee_rows": 32}),),
)
"""A logbook in which everything is known."""


def but(section: str, **changes: Any) -> Logbook:
    """Return the whole logbook with other values in one section; an empty section name changes the logbook itself."""
    if not section:
        return replace(WHOLE, **changes)
    return replace(WHOLE, **{section: replace(getattr(WHOLE, section), **changes)})


def changed(place: str, value: Any) -> Logbook:
    """Return the whole logbook with another value at a place, such as ``"hardware.device"``."""
    section, _, name = place.rpartition(".")
    return but(section, **{name: value})
