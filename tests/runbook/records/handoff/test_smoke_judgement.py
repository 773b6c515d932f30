"""What the smoke test concludes: a table of what was seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, SEVERITY, WARNING
from openmed_nb.models.files import Content
from openmed_nb.runbook.records.handoff.smoke import SCHEMA, FoundEntity, Golden, Observed, SmokeReport, Trial
from openmed_nb.runbook.records.logbook.sections import Background
from openmed_nb.training.curve import MemoryCurve, MemorySample

LOGBOOKS = Path(__file__).parents[1] / "records" / "logbook" / "logbooks.py"
ENTITIES = ((FoundEntity(0, 6, "DISEASE"),), ())
GOLDEN = Golden(SCHEMA, "model", True, Content("a", "b", "c"), "float32", "cpu", 4, 6, 1, {}, None, False, ENTITIES)


def curve(*mebibytes):
    """Return the memory after some rounds."""
    samples = (MemorySample(n, n, 1.0, allocated=size << 20) for n, size in enumerate(mebibytes, 1))
    return MemoryCurve("cpu", tuple(samples))


LEVEL = curve(*[100] * 7)
TRIAL = Trial("mine", "cpu", 4, (90.0, 100.0), LEVEL)


@pytest.fixture
def seen(helper):
    """A smoke test in which all is well."""
    whole = helper(LOGBOOKS).WHOLE
    cpu = replace(whole.hardware, device="cpu")
    quiet = replace(whole, hardware=cpu, figures=(), background=Background(0, 0.0))
    return Observed(
        GOLDEN, former=quiet.with_reports(TRIAL), logbook=quiet.with_reports(TRIAL), trial=TRIAL, entities=ENTITIES
    )


def statuses(seen):
    """Return the findings that are not ok."""
    return {one.name: one.status for one in SmokeReport(seen).findings if one.status != OK}


def test_all_is_well(seen):
    """Where everything is as it was, every finding is ok, and the exit status is 0."""
    report = SmokeReport(seen)

    assert statuses(seen) == {}
    assert (report.passed, report.exit_code, report.report().title) == (True, 0, "Smoke test passed")


SEEN = {
    "a changed file": ({"changed": {"model/model.safetensors": "changed"}}, {"files": FAILED}),
    "another package": ({"unmet": {"torch": ("2.13.0", "2.12.0")}}, {"packages": FAILED}),
    "another device": ({"other_device": "mps cannot be used here, so it ran on cpu"}, {"device": WARNING}),
    "a missing entity": ({"entities": ((), ())}, {"entities": FAILED}),
    "another label": ({"entities": ((FoundEntity(0, 6, "DRUG"),), ())}, {"entities": FAILED}),
    "another border": ({"entities": ((FoundEntity(0, 5, "DISEASE"),), ())}, {"entities": FAILED}),
    "an entity too much": ({"entities": (*ENTITIES[:1], (FoundEntity(0, 1, "DISEASE"),))}, {"entities": FAILED}),
    "slower steps": ({"trial": replace(TRIAL, texts_per_second=(50.0, 60.0))}, {"throughput": FAILED}),
    "a little slower": ({"trial": replace(TRIAL, texts_per_second=(50.0, 80.0))}, {}),
    "faster": ({"trial": replace(TRIAL, texts_per_second=(500.0,))}, {}),
    "a leak": ({"trial": replace(TRIAL, curve=curve(*range(100, 170, 10)))}, {"memory": FAILED}),
    "up and down": ({"trial": replace(TRIAL, curve=curve(100, 100, 180, 100, 180, 100, 100))}, {"memory": WARNING}),
    "no logbook": ({"former": None}, {"Python": NOT_APPLICABLE, "throughput": NOT_APPLICABLE}),
}


@pytest.mark.parametrize(("changes", "expected"), SEEN.values(), ids=SEEN)
def test_what_is_wrong_is_named(seen, changes, expected):
    """Each thing that is wrong is the one finding that is not ok, and fails the test where it must."""
    other = replace(seen, **changes)

    assert statuses(other) == expected
    assert SmokeReport(other).exit_code == int(FAILED in expected.values())
    assert SmokeReport(other).report().status == max([OK, *expected.values()], key=SEVERITY.index)
    for name, status in expected.items():
        assert status != FAILED or name in SmokeReport(other).report().title


def test_speed_is_not_judged_where_it_cannot_be_compared(seen):
    """On battery, or with another torch, speed is not judged, however slow it was; the rest is."""
    slow = replace(seen, trial=replace(TRIAL, texts_per_second=(1.0,)))
    battery = replace(slow.logbook, conditions=replace(slow.logbook.conditions, power_source="battery"))
    finding = next(one for one in SmokeReport(replace(slow, logbook=battery)).findings if one.name == "throughput")

    assert (finding.status, "power source" in finding.evidence) == (NOT_APPLICABLE, True)
    assert SmokeReport(replace(slow, logbook=battery)).passed
    assert not SmokeReport(slow).passed


LOADS = [
    (0.0, 0.0, 80.0, OK),
    (0.0, 0.0, 70.0, FAILED),
    (0.0, None, 70.0, FAILED),
    (0.0, 0.2, 70.0, FAILED),
    (0.0, 0.21, 70.0, WARNING),
    (0.0, 0.9, 8.0, WARNING),
    (0.9, 0.0, 80.0, WARNING),
    (0.9, 0.9, 500.0, WARNING),
]


@pytest.mark.parametrize(("former", "here", "rate", "status"), LOADS)
def test_speed_is_not_judged_on_a_busy_computer(seen, former, here, rate, status):
    """Where other programs took too much in the golden run or here, speed is not judged, and that is said; else it is."""
    books = (
        replace(book, background=Background(1, share)) for book, share in ((seen.former, former), (seen.logbook, here))
    )
    first, second = books
    trial = replace(TRIAL, texts_per_second=(rate,))
    finding = next(
        one
        for one in SmokeReport(replace(seen, former=first, logbook=second, trial=trial)).findings
        if one.name == "throughput"
    )

    assert (finding.status, "not judged" in finding.evidence) == (status, status == WARNING)


def test_entities_are_counted(seen):
    """The same entities in another order are the same; one that is there twice is one too much."""
    first, second = FoundEntity(0, 6, "DISEASE"), FoundEntity(8, 9, "DISEASE")
    golden = replace(GOLDEN, entities=((first, second),))
    swapped = replace(seen, golden=golden, entities=((second, first),))
    twice = replace(seen, golden=golden, entities=((first, second, second),))

    assert statuses(swapped) == {}
    assert statuses(twice) == {"entities": FAILED}
    assert "0 missing, 1 that were not there" in str(SmokeReport(twice))


def test_nothing_is_run_with_other_files(seen):
    """Where files of the model are others, nothing is run, and that is said once as a failure."""
    stopped = Observed(GOLDEN, {"model/config.json": "missing"}, former=seen.former, stopped="its files are others")
    report = SmokeReport(stopped)

    assert [one.name for one in report.findings if one.status == FAILED] == ["files"]
    assert {one.status for one in report.findings if one.name in {"entities", "memory", "throughput"}} == {
        NOT_APPLICABLE
    }
    assert "model/config.json missing" in str(report)


def test_an_error_fails(seen):
    """A model that cannot be loaded fails the test, with what was said."""
    report = SmokeReport(Observed(GOLDEN, former=seen.former, stopped="The model is damaged."))

    assert report.exit_code == 1
    assert "The model is damaged." in str(report)


def test_the_text_has_no_times(seen):
    """Texts a second stand in the HTML and in the dictionary, and not in the text of a test that passes."""
    report = SmokeReport(seen)

    assert "100.0" not in str(report)
    assert "100.0" in report._repr_html_()
    assert report.to_dict()["trial"]["fastest"] == 100.0
    assert report.to_dict()["comparison"]["comparable"] is True
