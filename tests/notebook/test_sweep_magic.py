"""``%openmed_sweep`` in a real kernel: the report, its JSON, and the mistakes."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def loaded(kernel):
    """A kernel with the extension."""
    kernel.run("%reset -f")
    kernel.run("%load_ext openmed_nb")
    return kernel


def test_the_report_is_a_value_that_shows_itself(loaded):
    """The magic returns the report, which shows the knee in its text and the curves in its HTML, and prints nothing."""
    reply = loaded.run("report = %openmed_sweep bundled_small --length 16 --largest 2\nreport")

    assert reply.status == "ok", reply.error
    assert reply.text.startswith("Batch sweep on ")
    assert "rows of 16 tokens" in reply.text
    assert "<svg" in reply.html
    assert loaded.value("type(report).__name__") == "SweepReport"
    assert loaded.value("[point.rows for point in report.points]") == [1, 2]
    assert reply.streams.get("stderr", "") == ""


def test_training_steps_of_a_variable_as_json(loaded):
    """--training measures training steps, a variable may hold the pipeline, and --json is one JSON object."""
    loaded.run("import openmed_nb as nb\nmine = nb.load_pipeline('bundled_small', device='cpu')")
    reply = loaded.run("%openmed_sweep mine --training --length 8 --largest 1 --device cpu --json")

    answer = json.loads(reply.text)
    assert (answer["task"], answer["device"], answer["knee"]) == ("training step", "cpu", 1)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("%openmed_sweep --nonsense", "MagicError"),
        ("%openmed_sweep one two", "MagicError"),
        ("%openmed_sweep --length many", "MagicError"),
        ("%openmed_sweep --largest 0", "ConfigurationError"),
        ("%openmed_sweep --seconds 0", "ConfigurationError"),
        ("%openmed_sweep --length 5000 bundled_small", "ConfigurationError"),
        ("%openmed_sweep --device mpss", "UnknownDevice"),
        ("%openmed_sweep disease_detection_tinny", "UnknownModel"),
    ],
)
def test_mistakes_are_one_clean_error(loaded, line, error):
    """A mistake is one of our errors, and the session stays as it was."""
    before = loaded.state()
    reply = loaded.run(line)

    assert (reply.status, reply.error[0], len(reply.error[2])) == ("error", error, 1)
    assert loaded.state() == before


def test_help(loaded):
    """--help prints what the magic takes."""
    assert "--training" in loaded.run("%openmed_sweep --help").streams["stdout"]
