"""Logbooks for the tests: a complete logbook, and variants with one different value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from openmed_nb.devices.system_status import GpuStatus, SystemStatus
from openmed_nb.runbook.records.logbook import (
    SCHEMA,
    BackgroundLoad,
    Code,
    Dataset,
    Hardware,
    Logbook,
    Model,
    NetworkLatency,
    Randomness,
    ReportMetrics,
    Run,
    Software,
    StorageLocation,
)

COMPLETE = Logbook(
    schema=SCHEMA,
    created_at="2026-03-01T12:00:00Z",
    simulated=False,
    software=Software("0.1.0", "3.11.7", "2.13.0", "5.23.0", {"numpy": "2.4.6"}, "macOS 14.5", "arm64"),
    code=Code("5c" * 20, 1),
    hardware=Hardware("mps", "Apple M2 Pro", "Apple M2 Pro", 16 << 30, 8, 1.0, 1 << 30, 2 << 30),
    model=Model("bundled", "ab" * 16, "cd" * 16, "ef" * 16, "float32"),
    dataset=Dataset("folder", "12" * 32, 2, 2048, ("34" * 32, "56" * 32)),
    run=Run("annotation", 32, 128, 0, 1 << 28, "float32", None, "encoder.layer.0", 4, "bfloat16"),
    randomness=Randomness({"torch": 1}, 1, False, False, "highest"),
    environment={"OMP_NUM_THREADS": "8"},
    conditions=SystemStatus(
        GpuStatus("Apple M2 Pro", 30, 1 << 30),
        *("normal", 8 << 30, 0, "adapter", "automatic", "nominal", "Apple M2 Pro"),
    ),
    background=BackgroundLoad(1, 0.1, ("mail",)),
    storage={"Hugging Face cache": StorageLocation("apfs", "local")},
    network=NetworkLatency("store.example", 443, 0, 0.01),
    hypotheses={"slow loader": "data takes 3% of a step"},
    metrics=(ReportMetrics("sweep", "bundled", "mps", False, {"rows_per_second": 100.0, "knee_rows": 32}),),
)
"""Logbook without unknown values."""


def change(path: str, **changes: Any) -> Logbook:
    """Return the complete logbook with changes in a section, or in the logbook itself if the path is empty."""
    if not path:
        return replace(COMPLETE, **changes)
    return replace(COMPLETE, **{path: replace(getattr(COMPLETE, path), **changes)})


def change_value(path: str, value: Any) -> Logbook:
    """Return the complete logbook with another value at a path, such as ``"hardware.device"``."""
    section, _, name = path.rpartition(".")
    return change(section, **{name: value})
