"""``verdict.lanes``: comparison of four execution targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..._render.display import SIMULATED_SUFFIX, Displayable, Report, Table
from .gates import Gates, to_narrow_text
from .metrics import METRICS, RATE, Evidence, format_with_unit
from .rules import Recommendation

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
        >>> lanes = evaluate(Evidence(device="mps", texts_per_second=50.0, speedup=5.0)).lanes
        >>> lanes.measured["throughput (texts or rows)"]
        {'MPS': '50 per second', 'CPU': '10 per second', 'MLX': 'to beat: 50 per second'}
    """

    evidence: Evidence
    gates: Gates
    recommendation: Recommendation
    lane: str = ""

    SCHEMA = "openmed_nb/lanes/1"
    JSON_EXCLUDE = ("evidence", "gates")
    JSON_PROPERTIES = ("about", "measured", "simulated")

    @property
    def simulated(self) -> bool:
        """Whether any of the evidence comes from a simulated device."""
        return self.evidence.simulated

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
                REMOTE: f"work of more than {self.gates.format_values()['hours']}, services, and models that do not fit on this computer",
            },
            "how to measure": {
                CPU: "nb.compare(model, texts)",
                MPS: "nb.compare(model, texts), nb.sweep(model), nb.runbook.parity(model, texts), nb.runbook.fallbacks()",
                MLX: "time MLX and MPS with the same shape, using the best batch size of nb.sweep(model, length=128), and exclude the first pass",
                REMOTE: "verify on one of its computers with nb.handoff(folder); then nb.cluster(hosts=...) shows texts per second",
            },
        }

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
            rates = {measured_lane: evidence.texts_per_second}
            if measured_lane != CPU and evidence.speedup:
                rates[CPU] = evidence.texts_per_second / evidence.speedup
            rate_row = {lane: format_with_unit(RATE, rate) for lane, rate in rates.items()}
            if measured_lane == MPS:
                rate_row[MLX] = f"to beat: {rate_row[MPS]}"
            measured[METRICS["texts_per_second"].label] = rate_row
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
        measured = make_table("Measured on this machine", self.measured)
        metrics = (measured,) if measured.rows else ()
        return Report(
            f"Lanes: {self.recommendation}",
            (REVIEW_AFTER_TWO_WEEKS,),
            (make_table("", about),),
            metrics=metrics,
        )

    def __str__(self) -> str:
        return to_narrow_text(self.final_report())
