"""``%openmed_doctor`` in a real kernel: the report, the forecast, and the mistakes."""

from __future__ import annotations

import json
import re

import pytest


@pytest.fixture
def loaded(kernel):
    """A kernel with the extension, on a computer without another wish than the CPU."""
    kernel.run("%reset -f")
    kernel.run("%load_ext openmed_nb")
    return kernel


def test_the_report_is_a_value_that_shows_itself(loaded):
    """The magic returns the report of the doctor, with a text and an HTML form, and says how it is in words."""
    reply = loaded.run("report = %openmed_doctor\nreport")

    assert reply.status == "ok", reply.error
    assert re.search(r"\d+ ok, \d+ warnings?, \d+ failed", reply.text), reply.text
    assert "torch" in reply.text
    assert reply.html.count("<table>") >= 1
    assert loaded.value("type(report).__name__") == "DoctorReport"


def test_json_of_the_report(loaded):
    """With --json the same is one JSON object with every finding."""
    reply = loaded.run("%openmed_doctor --json")

    answer = json.loads(reply.text)
    assert {"ok", "warning", "failed", "not applicable"} >= {one["status"] for one in answer["findings"]}


def test_a_model_that_is_not_loaded_is_looked_at_by_name(loaded):
    """A name of a model adds what is to be said about that model."""
    assert "bundled_small" in loaded.run("%openmed_doctor bundled_small").text


def test_forecast_of_a_named_model(loaded):
    """--ops forecasts the operators of a model by name, and the bundled one stays on MPS."""
    reply = loaded.run("forecast = %openmed_doctor --ops bundled_small\nforecast")

    assert reply.status == "ok", reply.error
    assert loaded.value("type(forecast).__name__") == "Forecast"
    assert loaded.value("forecast.exit_code") == 0


def test_forecast_of_a_variable(loaded):
    """--ops takes a variable of the notebook that holds a pipeline."""
    loaded.run("import openmed_nb as nb\nmine = nb.load_pipeline('bundled_small', device='cpu')")

    assert loaded.run("forecast = %openmed_doctor --ops mine\nforecast").status == "ok"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%openmed_doctor --nonsense", "MagicError"),
        ("%openmed_doctor one two", "MagicError"),
        ("%openmed_doctor bundled --ops bundled", "MagicError"),
        ("%openmed_doctor --ops disease_detection_tinny", "UnknownModel"),
        ("%openmed_doctor disease_detection_tinny", "UnknownModel"),
    ],
)
def test_mistakes_are_one_clean_error(loaded, line, error):
    """A mistake is one of our errors, and the session stays as it was."""
    before = loaded.state()
    reply = loaded.run(line)

    assert (reply.status, reply.error[0], len(reply.error[2])) == ("error", error, 1)
    assert loaded.state() == before


def test_a_note_in_a_variable_is_not_part_of_the_error(loaded):
    """The text of a variable is taken for no name of a model, and is never shown."""
    loaded.run("note = 'Patient John Smith has asthma.'")
    reply = loaded.run("%openmed_doctor note")

    assert reply.error[0] == "UnknownModel"
    assert "Smith" not in str(reply)


def test_help(loaded):
    """--help prints what the magic takes."""
    assert "--ops MODEL" in loaded.run("%openmed_doctor --help").streams["stdout"]
