"""``verdict.lanes``: the four lanes that work can take beside each other, filled in with what was measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ..._render.display import SIMULATED_SUFFIX, Displayable, Report, Table
from .gates import Gates, narrow_text
from .metrics import COUNT, HOURS, METRICS, RATE, SECONDS_OF_AN_HOUR, Evidence, format_with_unit

NOTES = 100_000  # How many notes the time is for where nobody said how many there are.

CPU = "CPU"
MPS = "MPS"
MLX = "MLX"
REMOTE = "remote pool"
# What is measured on a device is a figure of one lane; a GPU of CUDA is what a worker of a pool has.
LANE_OF = {"cpu": CPU, "mps": MPS, "cuda": REMOTE}

TWO_WEEKS = "After two weeks with the same operators on top, which Profile.diff(...) shows, move this work to another lane, or accept it."

# The metrics of a lane.
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
    """CPU, MPS, MLX and a remote pool side by side.

    Attributes:
        evidence: What was measured.
        gates: The thresholds.
        recommendation: What the verdict recommends.
        lane: The lane that this means; empty where something is to be mended or measured first.

    Example:
        >>> from openmed_nb.runbook.verdict.verdict import evaluate
        >>> lanes = evaluate(Evidence(device="mps", texts_per_second=50.0, speedup=5.0, num_texts=360_000)).lanes
        >>> lanes.measured["texts, or rows"]
        {'MPS': '50 a second', 'CPU': '10 a second', 'MLX': 'to beat: 50 a second'}
        >>> lanes.measured["time for 360,000 notes"]
        {'MPS': '2 hours', 'CPU': '10 hours', 'remote pool': '1 hour at best, on 2 computers like this one'}
    """

    evidence: Evidence
    gates: Gates
    recommendation: str
    lane: str = ""

    SCHEMA = "openmed_nb/lanes/1"
    JSON_EXCLUDE = ("evidence", "gates")
    JSON_PROPERTIES = ("about", "measured", "simulated")

    @property
    def simulated(self) -> bool:
        """Whether any of the evidence is from a simulated device."""
        return self.evidence.simulated

    @property
    def about(self) -> dict[str, dict[str, str]]:
        """What to know of each lane: its strength, its risk, what it is best for, and how its figures are had."""
        return {
            "strength": {
                CPU: "every operator of PyTorch, and the numbers that others are compared with",
                MPS: "the same PyTorch code on the GPU of a Mac, which no note leaves",
                MLX: "made for Apple's GPUs, and quick at writing text",
                REMOTE: "as fast as there are computers, and it goes on while the laptop sleeps",
            },
            "risk": {
                CPU: "slow with large models and long texts",
                MPS: "operators that fall back, or are wrong without an error; memory that all programs share",
                MLX: "other code and other weights: all is validated anew",
                REMOTE: "notes leave this computer; other drivers and versions; waiting for a place",
            },
            "best for": {
                CPU: "small models, short texts, checks, and what another lane computes wrongly",
                MPS: "annotation in full batches, and fine-tuning of models that fit",
                MLX: "language models that write text on a Mac",
                REMOTE: f"work of more than {self.gates.shown()['hours']}, services, and models that do not fit here",
            },
            "how its figures are had": {
                CPU: "nb.compare(model, texts)",
                MPS: "nb.compare(model, texts), nb.sweep(model), nb.runbook.parity(model, texts), nb.runbook.fallbacks()",
                MLX: "by timing MLX and MPS in one shape: the rows that nb.sweep(model, length=128) finds best, the first pass left out",
                REMOTE: "nb.handoff(folder) proves on one of its computers that it does the same; nb.cluster(hosts=...) then shows texts a second",
            },
        }

    @property
    def measured(self) -> dict[str, dict[str, str]]:
        """What was measured of each lane, or follows from that, as people read it, by the name of the figure."""
        evidence = self.evidence
        here = LANE_OF.get(evidence.kind or "")
        if here is None:
            return {}
        measured = {
            METRICS[name].label: {here: format_with_unit(METRICS[name].unit, value)}
            for name in DISPLAYED_METRICS
            if (value := getattr(evidence, name)) is not None
        }
        if evidence.texts_per_second:
            notes = NOTES if evidence.num_texts is None else evidence.num_texts
            rates = {here: evidence.texts_per_second}
            if here != CPU and evidence.speedup:
                rates[CPU] = evidence.texts_per_second / evidence.speedup
            times = {lane: notes / rate / SECONDS_OF_AN_HOUR for lane, rate in rates.items() if rate}
            hours = {lane: time for lane, time in times.items() if math.isfinite(time)}
            rate_row = {lane: format_with_unit(RATE, rate) for lane, rate in rates.items()}
            time_row = {lane: format_with_unit(HOURS, time) for lane, time in hours.items()}
            if here == MPS:
                rate_row[MLX] = f"to beat: {rate_row[MPS]}"
            if here != REMOTE and here in hours:
                workers = max(2, math.ceil(hours[here] / max(self.gates.hours, 1)))
                spread = format_with_unit(HOURS, hours[here] / workers)
                time_row[REMOTE] = f"{spread} at best, on {workers:,} computers like this one"
            measured[METRICS["texts_per_second"].label] = rate_row
            measured[f"time for {format_with_unit(COUNT, notes)} notes"] = time_row
        return measured

    def to_report(self) -> Report:
        """Return the lanes as columns, and which kind of work takes which; what was measured stands in the HTML."""
        lanes = (CPU, MPS, MLX, REMOTE)
        columns = ("", *(f"{lane}{SIMULATED_SUFFIX}" if self.simulated and lane == MPS else lane for lane in lanes))

        def table(caption: str, rows: Mapping[str, Mapping[str, str]]) -> Table:
            cells = ((name, *(row.get(lane, "") for lane in lanes)) for name, row in rows.items())
            return Table(caption, columns, tuple(cells))

        about = self.about
        if self.lane:
            about["verdict"] = {self.lane: self.recommendation}
        up_to = f"MPS up to {self.gates.shown()['hours']}, then a remote pool"
        work = (
            ("try things out", "CPU or MPS, here", "cells answer in seconds, and nothing is sent away"),
            ("read many notes once", up_to, "one computer can be spared so long"),
            ("answer within an agreed time", REMOTE, "a laptop sleeps, heats up and runs on battery"),
        )
        kinds = Table("Kinds of work", ("work", "lane", "because"), work)
        measured = table("Measured here", self.measured)
        figures = (measured,) if measured.rows else ()
        return Report(f"Lanes: {self.recommendation}", (TWO_WEEKS,), (table("", about), kinds), metrics=figures)

    def __str__(self) -> str:
        return narrow_text(self.final_report())
