"""``verdict.lanes``: comparison of four execution targets, measured on this machine and reported by others."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..._render.display import SIMULATED_SUFFIX, Displayable, Report, Table
from ..bench.comparison import SECONDS_PER_HOUR
from .gates import Gates, to_narrow_text
from .metrics import COUNT, HOURS, METRICS, RATE, Evidence, format_with_unit
from .rules import Recommendation

DEFAULT_NUM_TEXTS = 100_000  # Number of texts for the time estimate, if the evidence has none.

CPU = "CPU"
MPS = "MPS"
MLX = "MLX"
REMOTE = "remote pool"
LANES = (CPU, MPS, MLX, REMOTE)
# Lane of the metrics measured on a device type; a CUDA GPU represents a worker of a remote pool.
LANE_BY_DEVICE_TYPE = {"cpu": CPU, "mps": MPS, "cuda": REMOTE}

REVIEW_AFTER_TWO_WEEKS = "If the same operators still dominate Profile.diff(...) after two weeks, move this work to another lane or accept it."

# Metrics of a lane, in display order.
DISPLAYED_METRICS = (
    "texts_per_second",
    "utilization",
    "headroom",
    "memory_growth",
    "entity_agreement",
    "logits",
    "divergence_source",
    "fallback_operators",
    "refused_operators",
    "fallback_time",
    "fallback_calls",
)


class ReportedMeasurement(NamedTuple):
    """Measurement that another user published.

    Attributes:
        target: Lane or library.
        result: Speed or memory.
        setup: Hardware and workload.
        source: Issue or pull request.
        date: Date of the publication, as in ISO 8601.
    """

    target: str
    result: str
    setup: str
    source: str
    date: str


REPORTED_MEASUREMENTS = tuple(
    ReportedMeasurement(*row)
    for row in json.loads(Path(__file__).with_name("reported_measurements.json").read_text("utf-8"))
)


@dataclass(frozen=True, repr=False)
class Lanes(Displayable):
    """Comparison of the lanes CPU, MPS, MLX and remote pool. A lane is an execution target of a workload.

    Attributes:
        evidence: Measured metrics.
        gates: Thresholds.
        recommendation: Recommendation of the verdict.
        lane: Lane that corresponds to the recommendation; empty if something must be fixed or measured first.

    Example:
        >>> from openmed_nb.runbook.verdict.verdict import evaluate
        >>> lanes = evaluate(Evidence(device="mps", texts_per_second=50.0, speedup=5.0, num_texts=360_000)).lanes
        >>> lanes.measured["throughput (texts or rows)"]
        {'MPS': '50 per second', 'CPU': '10 per second', 'MLX': 'to beat: 50 per second'}
        >>> lanes.measured["time for 360,000 notes"]
        {'MPS': '2 hours', 'CPU': '10 hours', 'remote pool': '1 hour at best, on 2 computers like this one'}
    """

    evidence: Evidence
    gates: Gates
    recommendation: Recommendation
    lane: str = ""

    SCHEMA = "openmed_nb/lanes/1"
    JSON_EXCLUDE = ("evidence", "gates")
    JSON_PROPERTIES = ("about", "measured", "reported_by_others", "simulated")

    @property
    def simulated(self) -> bool:
        """Whether any of the evidence comes from a simulated device."""
        return self.evidence.simulated

    @property
    def reported_by_others(self) -> tuple[dict[str, str], ...]:
        """Measurements that other users published. They are never mixed with ``measured``, and no rule reads them."""
        return tuple(measurement._asdict() for measurement in REPORTED_MEASUREMENTS)

    @property
    def about(self) -> dict[str, dict[str, str]]:
        """Description of each lane: strengths, risks, typical workloads, and how to measure its metrics."""
        return {
            "strengths": {
                CPU: "supports every PyTorch operator; the reference for all comparisons",
                MPS: "runs the same PyTorch code on the GPU of a Mac; notes stay on the machine",
                MLX: "built for Apple GPUs, with fast text generation",
                REMOTE: "throughput scales with the number of computers; continues while the laptop sleeps",
            },
            "risks": {
                CPU: "slow for large models and long texts",
                MPS: "operators that fall back or have silent errors; memory shared with all programs",
                MLX: "different code and weights, which require full validation",
                REMOTE: "notes leave this computer; different drivers and versions; queueing",
            },
            "best for": {
                CPU: "small models, short texts, checks, and work that another lane computes incorrectly",
                MPS: "annotation in full batches, and fine-tuning of models that fit in memory",
                MLX: "language models that generate text on a Mac",
                REMOTE: f"work of more than {self._max_hours}, services, and models that do not fit on this computer",
            },
            "how to measure": {
                CPU: "nb.compare(model, texts)",
                MPS: "nb.compare(model, texts), nb.sweep(model), nb.runbook.parity(model, texts), nb.runbook.fallbacks()",
                MLX: "time MLX and MPS with the same shape, using the best batch size of nb.sweep(model, length=128), and exclude the first pass",
                REMOTE: "verify on one of its computers with nb.handoff(folder); then nb.cluster(hosts=...) shows texts per second",
            },
        }

    @property
    def _max_hours(self) -> str:
        return self.gates.format_values()["hours"]

    @property
    def measured(self) -> dict[str, dict[str, str]]:
        """Formatted metrics by label and lane, measured or derived from measurements."""
        evidence = self.evidence
        measured_lane = LANE_BY_DEVICE_TYPE.get(evidence.device_type or "")
        if measured_lane is None:
            return {}
        measured = {
            METRICS[name].label: {measured_lane: format_with_unit(METRICS[name].unit, value)}
            for name in DISPLAYED_METRICS
            if (value := getattr(evidence, name)) is not None
        }
        if evidence.texts_per_second:
            num_texts = DEFAULT_NUM_TEXTS if evidence.num_texts is None else evidence.num_texts
            rates = {measured_lane: evidence.texts_per_second}
            if measured_lane != CPU and evidence.speedup:
                rates[CPU] = evidence.texts_per_second / evidence.speedup
            hours = {lane: num_texts / rate / SECONDS_PER_HOUR for lane, rate in rates.items() if rate}
            finite_hours = {lane: time for lane, time in hours.items() if math.isfinite(time)}
            rate_row = {lane: format_with_unit(RATE, rate) for lane, rate in rates.items()}
            time_row = {lane: format_with_unit(HOURS, time) for lane, time in finite_hours.items()}
            if measured_lane == MPS:
                rate_row[MLX] = f"to beat: {rate_row[MPS]}"
            if measured_lane != REMOTE and measured_lane in finite_hours:
                workers = max(2, math.ceil(finite_hours[measured_lane] / max(self.gates.hours, 1)))
                hours_per_worker = format_with_unit(HOURS, finite_hours[measured_lane] / workers)
                time_row[REMOTE] = f"{hours_per_worker} at best, on {workers:,} computers like this one"
            measured[METRICS["texts_per_second"].label] = rate_row
            measured[f"time for {format_with_unit(COUNT, num_texts)} notes"] = time_row
        return measured

    def to_report(self) -> Report:
        """Return a report with the lanes as columns, and measurements in a table of metrics."""
        columns = ("", *(f"{lane}{SIMULATED_SUFFIX}" if self.simulated and lane == MPS else lane for lane in LANES))

        def make_table(caption: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
            cells = ((name, *(row.get(lane, "") for lane in LANES)) for name, row in rows.items())
            return Table(caption, columns, tuple(cells))

        about = self.about
        if self.lane:
            about["verdict"] = {self.lane: self.recommendation}
        workloads = (
            ("interactive experiments", "CPU or MPS on this computer", "cells respond in seconds, and no data is sent"),
            (
                "one-time processing of many notes",
                f"MPS up to {self._max_hours}, then a remote pool",
                "one computer can be reserved for that time",
            ),
            ("responses within a guaranteed time", REMOTE, "a laptop sleeps, throttles and runs on battery"),
        )
        workload_table = Table("Workloads", ("workload", "lane", "reason"), workloads)
        reported_table = Table(
            "Reported by others, not measured here", ReportedMeasurement._fields, REPORTED_MEASUREMENTS
        )
        measured = make_table("Measured on this machine", self.measured)
        metrics = (measured,) if measured.rows else ()
        return Report(
            f"Lanes: {self.recommendation}",
            (REVIEW_AFTER_TWO_WEEKS,),
            (make_table("", about), workload_table, reported_table),
            metrics=metrics,
        )

    def __str__(self) -> str:
        return to_narrow_text(self.final_report())
