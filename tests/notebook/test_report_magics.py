"""``%openmed_doctor``, ``%openmed_sweep`` and ``%openmed_log`` in a real kernel: the reports, their JSON, and the mistakes."""

import json
import re

import pytest


@pytest.fixture
def loaded(kernel, tmp_path):
    """A kernel with the extension, in an empty folder."""
    kernel.run("%reset -f")
    kernel.run(f"%load_ext openmed_nb\nimport os\nhere = os.getcwd()\nos.chdir({str(tmp_path)!r})")
    yield kernel
    kernel.run("os.chdir(here)")


def test_doctor_returns_its_report(loaded):
    """The magic returns the report of the doctor, with a text and an HTML form, and says how it is in words."""
    reply = loaded.run("report = %openmed_doctor\nreport")

    assert reply.status == "ok", reply.error
    assert re.search(r"\d+ ok, \d+ warnings?, \d+ failed", reply.text), reply.text
    assert "torch" in reply.text
    assert reply.html.count("<table ") >= 1
    assert loaded.value("type(report).__name__") == "DoctorReport"


def test_json_of_the_doctor(loaded):
    """With --json the same is one JSON object with every finding."""
    answer = json.loads(loaded.run("%openmed_doctor --json").text)

    assert {"ok", "warning", "failed", "not applicable"} >= {finding["status"] for finding in answer["findings"]}


def test_forecast(loaded):
    """--ops forecasts the operators of a model by name or of a pipeline in a variable; the bundled one stays on MPS."""
    reply = loaded.run("forecast = %openmed_doctor --ops bundled_small\nforecast")
    assert reply.status == "ok", reply.error
    assert loaded.value("(type(forecast).__name__, forecast.exit_code)") == ("Forecast", 0)
    loaded.run("import openmed_nb as nb\nmine = nb.load_pipeline('bundled_small', device='cpu')")
    assert loaded.run("forecast = %openmed_doctor --ops mine\nforecast").status == "ok"


def test_sweep_returns_its_report(loaded):
    """The magic returns the report, which shows the knee in its text and the curves in its HTML, and prints nothing."""
    reply = loaded.run("report = %openmed_sweep bundled_small --length 16 --max-batch-size 2\nreport")

    assert reply.status == "ok", reply.error
    assert reply.text.startswith("Best batch size on ")
    assert "Each row has 16 tokens." in reply.text
    assert "data:image/svg" in reply.html
    assert loaded.value("(type(report).__name__, [point.rows for point in report.points])") == ("SweepReport", [1, 2])
    assert reply.streams.get("stderr", "") == ""


def test_sweep_of_training_steps_is_json(loaded):
    """--training measures training steps, a variable may hold the pipeline, and --json is one JSON object."""
    loaded.run("import openmed_nb as nb\nmine = nb.load_pipeline('bundled_small', device='cpu')")
    reply = loaded.run("%openmed_sweep mine --training --length 8 --max-batch-size 3 --device cpu --json")
    answer = json.loads(reply.text)

    assert (answer["task"], answer["device"]) == ("training step", "cpu")
    assert answer["knee"] in {2, 3}


def test_logbook_is_written_and_compared(loaded, tmp_path):
    """With a file it is written; --diff says first whether it may be compared with now; --json is one JSON object of each."""
    loaded.run("%openmed_log run.json")
    reply = loaded.run("diff = %openmed_log --diff run.json\ndiff")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json"]
    assert reply.text.startswith(("May be compared", "Comparable")), reply
    assert json.loads((tmp_path / "run.json").read_text("utf-8"))["schema"] == "openmed_nb/logbook/1"
    assert json.loads(loaded.run("%openmed_log --json").text)["hardware"]["device"] == "cpu"
    assert json.loads(loaded.run("%openmed_log --diff run.json --json").text)["comparable"] is True


def test_logbook_is_not_overwritten(loaded, tmp_path):
    """An existing file is not changed; a new file is named, and Tab completes it."""
    printed = loaded.run("%openmed_log run.json").streams["stdout"]
    before = (tmp_path / "run.json").read_bytes()
    reply = loaded.run("%openmed_log run.json")

    assert printed.startswith("Saved to ")
    assert reply.error[0] == "MagicError"
    assert (tmp_path / "run.json").read_bytes() == before
    assert loaded.complete("%openmed_log --d") == ["--diff"]
    assert "run.json" in loaded.complete("%openmed_log --diff r")
