import json

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
    ("evidence", "rates"),
    [
        ({}, None),
        ({"device": "mps"}, None),
        ({"texts_per_second": 50.0}, None),
        ({"device": "mps", "texts_per_second": 50.0}, {MPS: "50 per second", MLX: "to beat: 50 per second"}),
        (
            {"device": "mps", "texts_per_second": 50.0, "speedup": 5.0},
            {MPS: "50 per second", CPU: "10 per second", MLX: "to beat: 50 per second"},
        ),
        ({"device": "cpu", "texts_per_second": 1.0}, {CPU: "1 per second"}),
        (
            {"device": "cuda:1", "texts_per_second": 100.0, "speedup": 4.0},
            {REMOTE: "100 per second", CPU: "25 per second"},
        ),
    ],
)
def test_rates_are_derived_from_measurements(evidence, rates):
    assert evaluate(Evidence(**evidence)).lanes.measured.get(THROUGHPUT) == rates


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


def test_text_has_no_measured_values():
    lanes = evaluate(Evidence(device="mps", texts_per_second=51.25)).lanes

    assert "51.2" not in str(lanes)
    assert "51.2 per second" in lanes._repr_html_()
    assert "51.2 per second" in json.dumps(lanes.to_dict())
    assert max(map(len, str(lanes).splitlines())) <= 130


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
    st.floats(0, 1e5),
)
def test_lanes_render_for_any_evidence(device, rate, speedup, hours):
    evidence = Evidence(device=device, texts_per_second=rate, speedup=speedup)
    lanes = evaluate(evidence, Gates(hours=hours)).lanes

    assert str(lanes)
    assert lanes._repr_html_()
    json.dumps(lanes.to_dict(), allow_nan=False)
