"""Whether two logbooks may be compared, and what they say otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openmed_nb.runbook.logbook.comparability import LISTED, REFUSING

OTHERS = [
    ("simulation", "", {"simulated": True}),
    ("device", "hardware", {"device": "cpu"}),
    ("name of the device", "hardware", {"name": "Apple M1"}),
    ("chip", "hardware", {"chip": "Apple M1"}),
    ("threads", "hardware", {"threads": 1}),
    ("torch", "software", {"torch": "2.12.0"}),
    ("transformers", "software", {"transformers": "5.0.0"}),
    ("model", "model", {"weights": "00" * 16}),
    ("model", "model", {"tokenizer": "00" * 16}),
    ("model", "model", {"source": "memory"}),
    ("type of the weights", "run", {"dtype": "float16"}),
    ("dataset", "dataset", {"checksum": "00" * 32}),
    ("task", "run", {"task": "training step"}),
    ("batch", "run", {"batch_size": 8}),
    ("length", "run", {"length": 64}),
    ("loader workers", "loader", {"workers": 0}),
    ("power source", "conditions", {"power_source": "battery"}),
    ("power mode", "conditions", {"power_mode": "low"}),
    ("heat", "conditions", {"heat": "limited"}),
    ("memory pressure", "conditions", {"memory_pressure": "critical"}),
    ("deterministic algorithms", "randomness", {"deterministic_algorithms": True}),
    ("cuDNN benchmark", "randomness", {"cudnn_benchmark": True}),
    ("precision of products", "randomness", {"matmul_precision": "high"}),
    ("dataset", "", {"dataset": None}),
    ("power source", "conditions", {"power_source": None}),
    ("torch", "software", {"torch": None}),
]


@pytest.mark.parametrize(("name", "section", "changes"), OTHERS)
def test_what_makes_figures_incomparable(logbooks, name, section, changes):
    """Where one of these differs, or only one logbook knows it, both ways are refused, and no figures stand beside each other."""
    other = logbooks.but(section, **changes)

    for diff in (logbooks.WHOLE.diff(other), other.diff(logbooks.WHOLE)):
        assert name in [one.name for one in diff.reasons]
        assert all(one.why for one in diff.reasons)
        assert not diff.comparable
        assert diff.figures == ()
        assert str(diff).startswith("Must not be compared: ")
        assert name in str(diff)


def test_every_reason_is_tried():
    """The table above has every reason there is."""
    assert {one.name for one in REFUSING} == {name for name, _, _ in OTHERS}


MERELY_LISTED = [
    ("openmed_nb", "software", {"openmed_nb": "0.2.0"}),
    ("Python", "software", {"python": "3.12.0"}),
    ("system", "software", {"system": "macOS 15.0"}),
    ("commit", "code", {"commit": "00" * 20}),
    ("changed since the commit", "code", {"changed": 0}),
    ("seeds", "randomness", {"seeds": {"torch": 2}}),
    ("package numpy", "software", {"packages": {"numpy": "2.0.0"}}),
    ("variable OMP_NUM_THREADS", "", {"environment": {}}),
    ("MPS variable PYTORCH_ENABLE_MPS_FALLBACK", "", {"mps_variables": ()}),
    ("memory limit", "hardware", {"memory_limit": 0.8}),
    ("heat as reported", "conditions", {"heat": "nothing reported"}),
    ("seeding of workers", "loader", {"worker_seeding": "torch"}),
]


@pytest.mark.parametrize(("name", "section", "changes"), MERELY_LISTED)
def test_what_is_said_and_refuses_nothing(logbooks, name, section, changes):
    """Where one of these differs, it is said, and figures stand beside each other all the same."""
    diff = logbooks.WHOLE.diff(logbooks.but(section, **changes))

    assert diff.comparable
    assert name in [one.name for one in diff.differences]
    assert name in str(diff)
    assert diff.figures


def test_the_same_logbook_has_no_difference(logbooks):
    """A logbook may be compared with itself, and nothing differs."""
    diff = logbooks.WHOLE.diff(logbooks.WHOLE)

    assert (diff.comparable, diff.reasons, diff.differences, diff.unknown) == (True, (), (), ())
    assert str(diff) == "May be compared"


def test_figures_stand_beside_each_other(logbooks):
    """Figures of the same report of the same thing stand beside each other with their ratio; others are left out."""
    figures = logbooks.WHOLE.figures[0]
    faster = replace(figures, values={"rows_per_second": 150.0, "other": 1.0})
    elsewhere = replace(figures, subject="mine")
    diff = logbooks.WHOLE.diff(logbooks.but("", figures=(elsewhere, faster)))

    assert [(one.name, one.first, one.second, one.ratio) for one in diff.figures] == [
        ("rows_per_second", 100.0, 150.0, 1.5)
    ]
    assert "1.500" in diff._repr_html_()
    assert "1.500" not in str(diff)
    assert diff.to_dict()["figures"][0]["ratio"] == 1.5


def test_what_neither_says_is_named(logbooks):
    """What would change figures and neither logbook says is named, so that nobody takes it for the same."""
    silent = logbooks.but("", dataset=None)
    diff = silent.diff(silent)

    assert diff.comparable
    assert diff.unknown == ("dataset",)
    assert "Neither says: dataset." in str(diff)


def test_moments_stand_among_the_figures(logbooks):
    """What differs from moment to moment stands in the HTML alone."""
    diff = logbooks.WHOLE.diff(logbooks.but("background", share=0.9))

    assert "0.9" in diff._repr_html_()
    assert "0.9" not in str(diff)


def test_names_are_used_once():
    """No two things that are compared have one name."""
    names = [one.name for one in (*REFUSING, *LISTED)]

    assert sorted(set(names)) == sorted(names)
