import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._render.display import SIMULATION_NOTICE
from openmed_nb.runbook.verdict.gates import Gates, gates
from openmed_nb.runbook.verdict.lanes import CPU, LANE_BY_DEVICE_TYPE, MLX, MPS, REMOTE
from openmed_nb.runbook.verdict.metrics import METRICS, Evidence
from openmed_nb.runbook.verdict.verdict import evaluate

THROUGHPUT = METRICS["texts_per_second"].label


@pytest.mark.parametrize(
    ("evidence", "limits", "rates", "times"),
    [
        ({}, {}, None, None),
        ({"device": "mps"}, {}, None, None),
        ({"texts_per_second": 50.0}, {}, None, None),
        (
            {"device": "mps", "texts_per_second": 50.0},
            {},
            {MPS: "50 per second", MLX: "to beat: 50 per second"},
            {MPS: "33.3 minutes", REMOTE: "16.7 minutes at best, on 2 computers like this one"},
        ),
        (
            {"device": "mps", "texts_per_second": 50.0, "speedup": 5.0},
            {},
            {MPS: "50 per second", CPU: "10 per second", MLX: "to beat: 50 per second"},
            {MPS: "33.3 minutes", CPU: "2.78 hours", REMOTE: "16.7 minutes at best, on 2 computers like this one"},
        ),
        (
            {"device": "cpu", "texts_per_second": 1.0, "num_texts": 360_000},
            {"hours": 20.0},
            {CPU: "1 per second"},
            {CPU: "100 hours", REMOTE: "20 hours at best, on 5 computers like this one"},
        ),
        (
            {"device": "cuda:1", "texts_per_second": 100.0, "speedup": 4.0, "num_texts": 360_000},
            {},
            {REMOTE: "100 per second", CPU: "25 per second"},
            {REMOTE: "1 hour", CPU: "4 hours"},
        ),
    ],
)
def test_rates_and_times_are_derived_from_measurements(evidence, limits, rates, times):
    measured = evaluate(Evidence(**evidence), gates(**limits)).lanes.measured

    assert measured.get(THROUGHPUT) == rates
    assert next((row for name, row in measured.items() if name.startswith("time for")), None) == times


def test_metrics_belong_to_the_lane_of_the_device():
    evidence = Evidence(
        device="mps", entity_agreement=1.0, headroom=0.5, memory_growth=0.0, fallback_operators=(), knee=8
    )

    assert evaluate(evidence).lanes.measured == {
        METRICS["headroom"].label: {MPS: "50%"},
        METRICS["memory_growth"].label: {MPS: "0%"},
        METRICS["entity_agreement"].label: {MPS: "100%"},
        METRICS["fallback_operators"].label: {MPS: "none"},
    }


@pytest.mark.parametrize(
    ("evidence", "lane"),
    [
        ({}, ""),
        ({"device": "mps", "task": "annotation", "entity_agreement": 0.5}, CPU),
        ({"device": "mps", "task": "generation", "entity_agreement": 0.5}, MLX),
        ({"device": "mps", "out_of_memory_at": 1}, REMOTE),
        ({"device": "mps", "phase_fractions": {"data": 0.9}}, ""),
    ],
)
def test_lane_matches_the_recommendation(evidence, lane):
    verdict = evaluate(Evidence(**evidence))

    assert (verdict.lanes.lane, verdict.lanes.recommendation) == (lane, verdict.recommendation)


def test_descriptions_contain_the_hours_gate():
    lanes = evaluate(Evidence(), gates(hours=8.0)).lanes

    assert "more than 8 hours" in lanes.about["best for"][REMOTE]
    assert "MPS up to 8 hours" in lanes._repr_html_()


def test_text_has_no_measured_values():
    lanes = evaluate(Evidence(device="mps", texts_per_second=51.25)).lanes

    assert "51.2" not in str(lanes)
    assert "51.2 per second" in lanes._repr_html_()
    assert "51.2 per second" in json.dumps(lanes.to_dict())
    assert max(map(len, str(lanes).splitlines())) <= 130


def test_reported_measurements_name_source_and_date_and_stay_apart():
    lanes = evaluate(Evidence(device="mps", texts_per_second=51.25)).lanes
    results = [measurement["result"] for measurement in lanes.reported_by_others]

    assert {measurement["target"] for measurement in lanes.reported_by_others} == {MPS, MLX, "Core ML"}
    for measurement in lanes.reported_by_others:
        assert re.fullmatch(r"[\w-]+/[\w-]+#\d+", measurement["source"])
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", measurement["date"])
        assert measurement["setup"]
    assert "Reported by others, not measured here" in str(lanes)
    assert not [result for result in results if result in json.dumps(lanes.measured)]
    assert evaluate(Evidence()).lanes.measured == {}


def test_simulated_lanes_are_labeled():
    lanes = evaluate(Evidence(device="mps", texts_per_second=51.25, simulated=True)).lanes

    for form in (str(lanes), lanes._repr_html_()):
        assert SIMULATION_NOTICE in form
        assert "MPS (SIMULATED)" in form
    assert lanes.to_dict()["simulated"]


NUMBER = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(
    st.sampled_from([None, *LANE_BY_DEVICE_TYPE, "cuda:1"]),
    NUMBER,
    NUMBER,
    st.none() | st.integers(0, 2**63 - 1),
    st.floats(0, 1e5),
)
def test_lanes_render_for_any_evidence(device, rate, speedup, num_texts, hours):
    evidence = Evidence(device=device, texts_per_second=rate, speedup=speedup, num_texts=num_texts)
    lanes = evaluate(evidence, Gates(hours=hours)).lanes

    assert str(lanes)
    assert lanes._repr_html_()
    json.dumps(lanes.to_dict(), allow_nan=False)
