"""``nb.report``: every way in which a step can end is a line of it, it goes on where it stopped, and it names nobody."""

import getpass
import json
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import psutil
import pytest

import openmed_nb as nb
from openmed_nb.__main__ import main
from openmed_nb.errors import ConfigurationError, RunInterrupted
from openmed_nb.runbook.records.logbook.sections import ReportMetrics
from openmed_nb.runbook.records.report.record import SCHEMA_FILE, redact, tail_lines
from openmed_nb.runbook.records.report.report import (
    SHIPPED_REPORTS_FOLDER,
    DeviceReport,
    compare_speeds,
    find_shipped_report,
    run_report,
)
from openmed_nb.runbook.records.report.running import describe_exit
from openmed_nb.runbook.records.report.steps import STEPS, Step
from openmed_nb.runbook.records.runner import differences_between
from openmed_nb.runbook.records.signals import GpuStatus, SystemStatus
from openmed_nb.session import SESSION
from openmed_nb.simulation.operators import DEFECTS

HERE = Path(__file__).parent
SCRIPTS = Path(__file__).parents[4] / "scripts"
PERSON = "jane_doe"

pytestmark = pytest.mark.real_computer


@pytest.fixture(scope="module")
def planted(helper):
    """The module of planted steps."""
    return helper(HERE / "planted_steps.py")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The home of a person with a name, in which planted steps also write their numbers; processes find those steps."""
    folder = tmp_path_factory.mktemp("Users") / PERSON
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOME": folder, "LOGNAME": PERSON, "PLANTED": folder}.items():
            patch.setenv(name, str(value))
        patch.syspath_prepend(str(HERE))
        yield folder


@pytest.fixture
def steps(planted, home):  # noqa: ARG001 - the home is that of their processes
    """A function that returns a table of planted steps by their names."""
    return lambda *names: [Step(name, name, getattr(planted, name), 1, 60.0) for name in names]


def still_running(home):
    """Return the numbers of those processes of the step that hung last which still run."""
    file = home / "pids"  # A step that is ended soon has none.
    numbers = set(map(int, file.read_text("utf-8").split())) if file.exists() else set()
    ended = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    running = [process for process in psutil.process_iter(["status"]) if process.info["status"] not in ended]
    return [process.pid for process in running if process.pid in numbers]


OUTCOMES = {
    "aborts": ("crashed", "SIGABRT ended it.", "failed assertion `a shape that nobody expected'"),
    "hangs": ("timed out", "It took longer than 5 s and was ended.", "planted_steps.py"),
    "is_killed": ("crashed", "SIGKILL ended it.", ""),
    "takes_all_memory": ("failed", "The memory ran out: MemoryError.", ""),
    "fills_the_disk": ("failed", "The disk is full: [Errno 27] File too large.", ""),
    "fails": ("failed", "It ended with status 1: KeyError: 'a name of ***'.", "in fails"),
    "tells_names": (
        "failed",
        "ConfigurationError: ~/secret.py cannot be read by ***.",
        "File ~/secret.py of *** on ***, token ***",
    ),
}
"""For each planted step: what becomes of it, in words, and what one of its last lines has in it."""


@pytest.fixture(scope="module")
def found(planted, home, tmp_path_factory):  # noqa: ARG001 - the home is that of their processes
    """The report of steps that end in every way, between two that answer, with its folder."""
    folder = tmp_path_factory.mktemp("report") / "new"
    table = [
        Step(name, name, getattr(planted, name), 1, limit=5.0 if name == "hangs" else 60.0)
        for name in ("well", *OUTCOMES, "wrong")
    ]
    return run_report(folder, True, False, table), folder


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_end_of_a_step_is_a_line(found, name):
    """A step that dies, hangs, is killed, has no memory or room, or fails says so, with its last lines and what to do."""
    outcome, what, line = OUTCOMES[name]
    step = found[0].outcome_for(name)

    assert (step.outcome, step.message, step.status) == (outcome, what, None)
    assert step.remedy
    assert not line or any(line in printed for printed in step.output), step.output


def test_a_process_that_fails_after_its_answer_is_a_line():
    """A step whose process answers and then ends with a status of its own is a failure in words, not an error."""
    answer = {"message": "Seen on cpu.", "report": {"title": "Found on cpu"}}

    assert describe_exit(120, 5.0, answer, ("lost sys.stderr",), False)[:2] == (
        "failed",
        "It ended with status 120: lost sys.stderr.",
    )


def test_the_others_go_on(found):
    """Steps before and after those that end badly have their answers, and the report counts, and exits with 1."""
    report = found[0]

    assert [report.outcome_for(name).outcome for name in ("well", "wrong")] == ["done", "done"]
    assert report.missing_steps == tuple(OUTCOMES)
    assert report.exit_code == 1
    assert f"2 of 9 steps ran: not {', '.join(OUTCOMES)}. To be looked at: wrong." in report.verdict
    assert (report.outcome_for("wrong").status, report.outcome_for("wrong").message) == ("failed", "Seen on cpu. Failed: long products.")
    assert report.outcome_for("wrong").report_json["device"] is None


def test_nothing_of_a_step_stays(found, home):
    """The process of a step that hangs is gone afterwards, with the process that it had started itself."""
    assert found[0].outcome_for("hangs").outcome == "timed out"
    assert not still_running(home)


def test_no_form_of_it_names_anybody(found, home):
    """Neither page nor JSON nor text has the home, the person or the computer in it, whatever a step printed."""
    names = {str(home), PERSON, getpass.getuser(), platform.node()}
    for file in found[1].iterdir():
        text = file.read_text("utf-8")
        assert [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)] == [], file.name
        assert "hf_" not in text


def test_json_is_read_again_and_keeps_its_schema(found, helper):
    """The JSON keeps the published schema, which is what the dataclasses say, and is read as the same report."""
    report, folder = found
    schema = SCHEMA_FILE.read_text("utf-8")
    checker = jsonschema.Draft202012Validator(json.loads(schema))
    stored = json.loads((folder / "report.json").read_text("utf-8"))

    assert schema == helper(SCRIPTS / "write_schemas.py").report_schema()
    checker.validate(stored)
    assert not checker.is_valid({**stored, "note": "a text"})
    assert DeviceReport.read(folder / "report.json") == report


def test_page_and_text(found):
    """The page has every step, needs nothing from anywhere and escapes all; the text for an issue has the last lines."""
    page, issue = ((found[1] / name).read_text("utf-8") for name in ("report.html", "issue.md"))

    assert all(f'<section id="{step.step}">' in page for step in found[0].steps)
    assert not [word for word in ("http", "src=", "<script", "<b>", "<i>", "@import") if word in page]
    assert "All is &lt;b&gt;well&lt;/b&gt;." in page
    assert "failed assertion `a shape that nobody expected'" in issue
    assert "| aborts | crashed |" in issue


def test_the_gpu_is_named_where_there_is_one(found):
    """What the report is of names the GPU as the signals have it, and none where they know of none."""

    def facts(gpu):
        step = replace(found[0].steps[0], step="signals", report=SystemStatus(gpu).to_report())
        return dict(replace(found[0], steps=(step,)).to_report().metrics[0].rows)

    assert facts(GpuStatus("Apple M4", 10))["GPU"] == "Apple M4"
    assert "GPU" not in facts(GpuStatus())


def test_it_goes_on_where_it_stopped(steps, tmp_path):
    """A second run keeps the answers and runs the other steps; with other arguments it starts anew and says why."""
    table = steps("well", "fails")
    told = []
    first = run_report(tmp_path, True, False, table)
    stop = SESSION.subscribe(lambda activity: told.append(str(activity)) if activity else None)
    try:
        second = run_report(tmp_path, True, False, table)
    finally:
        stop()
    anew = run_report(tmp_path, False, False, table[:1])

    assert second.outcome_for("well") == first.outcome_for("well")
    assert re.fullmatch(r"Reporting: fails, about \d+ \w+ left \(step 2 of 2\)", told[0])
    assert told[1:] == ["Reporting: this computer (2 steps)"]
    assert second.notes == ("Kept from an earlier run: 1 step.",)
    assert anew.notes[0].startswith("Started anew: quick was True and is False; planned steps was ")
    assert (anew.exit_code, anew.missing_steps) == (0, ())


def test_interrupt_ends_the_step_and_keeps_the_answers(steps, home, tmp_path, interruptible):  # noqa: ARG001
    """Ctrl-C ends the running step with all that it started, and what was found before is on disk, to go on from."""
    with pytest.raises(RunInterrupted, match=r"Interrupted after 1 step\. To go on, run the same report again\."):
        run_report(tmp_path, True, False, steps("well", "interrupts"))

    assert [step.step for step in DeviceReport.read(tmp_path / "report.json").steps] == ["well"]
    assert not still_running(home)


def test_a_step_ends_with_a_report_that_is_killed(home, tmp_path):
    """Where the report itself is killed, nothing can end the step, and it ends by itself."""
    code = (
        "import sys; from pathlib import Path; import planted_steps as planted\n"
        "from openmed_nb.runbook.records.report.report import run_report\n"
        "from openmed_nb.runbook.records.report.steps import Step\n"
        "run_report(Path(sys.argv[1]), True, False, [Step('x', 'x', planted.kills_the_report, 1)])"
    )
    (home / "pids").unlink(missing_ok=True)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=HERE, check=False)

    assert done.returncode == -9
    for process in psutil.process_iter(["cmdline"]):
        if any("openmed_nb.runbook.records.report.running" in word for word in process.info["cmdline"] or ()):
            process.wait(60)


def test_a_device_that_cannot_be_tried_is_left_to_the_cpu(steps, tmp_path):
    """Where trying the device ends its process, the others measure the CPU, and the verdict says so; mended, all begins anew."""
    trying = replace(steps("aborts")[0], name="device")
    report = run_report(tmp_path, True, False, [trying, *steps("well")])
    mended = replace(report.steps[0], outcome="done", report_json={"device": "mps"})

    assert report.outcome_for("well").message == "Found on cpu. All is <b>well</b>."
    assert report.verdict.startswith(
        "The device cannot be used (SIGABRT ended it), and the rest was measured on the CPU."
    )
    assert report.with_outcome(mended).missing_steps == ("well",)
    assert report.with_outcome(mended).notes == ("Started anew: the device was cpu and is mps.",)


def test_steps_go_on_where_nothing_can_be_written(steps, home):
    """What cannot be written while steps run is written with the next one, and is an error at the end alone."""
    folder = home / "blocked"
    with pytest.raises(ConfigurationError, match=r"The report cannot be written into 'blocked'"):
        run_report(folder, True, False, steps("blocks_the_page", "well"))

    assert DeviceReport.read(folder / "report.json").missing_steps == ()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(steps, tmp_path, capsys):
    """A file in the place of the folder, and a folder with another report.json, are errors in one line, with status 2."""
    (tmp_path / "file").write_text("mine", "utf-8")
    (tmp_path / "report.json").write_text("{}", "utf-8")

    assert main(["report", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=r"is not a report of nb\.report"):
        run_report(tmp_path, True, False, steps("well"))
    assert (tmp_path / "report.json").read_text("utf-8") == "{}"


NAMES = [
    ("/Users/jane/x.py and /home/jane_k/y", "~/x.py and /home/***/y"),
    ("C:\\Users\\tom\\x", "C:\\Users\\***\\x"),
    ("jane@janes-mac: janeway", "***@***: janeway"),
    ("/Users/janet/x", "/Users/***/x"),
    ("a device of jane.", "a device of ***."),
]


@pytest.mark.parametrize(("text", "kept"), NAMES)
def test_names_are_masked(text, kept):
    """The home is a tilde; people's folders, this person and this computer are masked, and other words stay."""
    assert redact([text], "/Users/jane", ("janes-mac", "jane")) == [kept]


def test_last_lines(home, tmp_path):  # noqa: ARG001 - whose name is looked for
    """Of what a process printed, its last lines are kept, or those around Python's fault; no name is cut in half."""
    file = tmp_path / "output"
    file.write_text(f"{PERSON} begins\n" * 6000 + f"{'x' * 296} {PERSON}\n", "utf-8")
    lines = tail_lines(file)

    assert len(lines) == 30
    assert lines[-1] == f"{'x' * 296} ***"
    assert set(lines[:-1]) == {"*** begins"}
    frames = [f'  File "/opt/{number}/site-packages/torch/x.py"' for number in range(90)]
    file.write_text("\n".join(["before", "assertion", "Fatal Python error: Aborted", *frames]), "utf-8")
    assert tail_lines(file)[:4] == (
        "before",
        "assertion",
        "Fatal Python error: Aborted",
        '  File "site-packages/torch/x.py"',
    )


def test_shipped_report_of_the_same_kind_is_compared(found, tmp_path):
    """A report is set beside a shipped one of its chip, torch and system; times and rates within a factor of 1.5 are alike."""

    def with_figures(chip, **values):
        figures = ReportMetrics("sweep", "bundled", "mps", None, False, values)
        step = replace(found[0].steps[0], figures=(figures,))
        return replace(found[0], subject=replace(found[0].subject, chip=chip), steps=(step,))

    ours = with_figures("M9", seconds=2.0, rows_per_second=80.0, points=5, data_seconds=0.0)
    shipped = with_figures("M9", seconds=1.0, rows_per_second=100.0, points=9, data_seconds=1.0)
    (tmp_path / "a.json").write_text(json.dumps(found[0].to_dict()), "utf-8")
    (tmp_path / "b.json").write_text(json.dumps(shipped.to_dict()), "utf-8")
    sentence, table = compare_speeds(ours, find_shipped_report(ours.subject, tmp_path))

    assert sentence == "As in the shipped report of such a computer: 1 of 2 figures."
    assert table.rows == (
        ("sweep, mps: seconds", "2", "1", "2.00"),
        ("sweep, mps: rows per second", "80", "100", "0.80"),
    )
    assert find_shipped_report(replace(ours.subject, chip="M10"), tmp_path) is None
    assert compare_speeds(ours, None)[0].startswith("No report")


def test_other_torch_is_another_report(found):
    """Another torch is named with both values; other versions of other packages make no difference."""
    report = found[0]
    subject = report.subject
    newer = replace(subject, software=replace(subject.software, torch="9.0", packages={"numpy": "9"}))
    changes = differences_between(report.identity, replace(report, subject=newer).identity)

    assert changes == [f"torch was {subject.software.torch} and is 9.0"]


def test_shipped_reports_can_be_read():
    """Every report that is shipped is whole, real and keeps the schema, and names neither a folder nor a person."""
    checker = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text("utf-8")))
    for file in SHIPPED_REPORTS_FOLDER.glob("*.json"):
        stored = json.loads(file.read_text("utf-8"))
        checker.validate(stored)
        assert not DeviceReport.read(file).simulated
        assert redact(stored, "/nowhere", ()) == stored
    assert (SHIPPED_REPORTS_FOLDER / "README.md").is_file()


@pytest.mark.slow
def test_each_planted_defect_is_named(tmp_path):
    """On a simulated device with every silent error, the doctor's step names them all, and so does the verdict."""
    with nb.simulated_mps(defects=[defect.issue for defect in DEFECTS]):
        report = run_report(tmp_path, True, False, [step for step in STEPS if step.name == "doctor"])
    issue = (tmp_path / "issue.md").read_text("utf-8")

    assert report.outcome_for("doctor").status == "failed"
    assert [defect.issue for defect in DEFECTS if defect.issue not in issue] == []
    assert "SIMULATED" in issue


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [[], ["--quick", "--training"]])
def test_a_whole_report(options, tmp_path, capsys):
    """The real steps all have an answer here, in a JSON that keeps its schema, and the exit status says so."""
    status = main(["report", str(tmp_path), *options])
    printed = capsys.readouterr()
    report = DeviceReport.read(tmp_path / "report.json")

    assert (status, report.missing_steps) == (0, ()), report
    assert [step.step for step in report.steps] == [step.name for step in STEPS]
    assert f"{len(STEPS)} of {len(STEPS)} steps ran." in printed.out
    assert printed.err.count("Reporting: ") == len(STEPS) + 1  # The last one says that all are done.
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text("utf-8"))).validate(report.to_dict())
    assert report.outcome_for("logbook").report_json["metrics"]
    assert str(Path.home()) not in (tmp_path / "report.json").read_text("utf-8")
