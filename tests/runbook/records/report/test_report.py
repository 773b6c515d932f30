import atexit
import getpass
import json
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import psutil
import pytest

from helpers.sample_reports import PROFILE
from openmed_nb.__main__ import main
from openmed_nb._utils import child
from openmed_nb.errors import ConfigurationError, RunInterrupted
from openmed_nb.runbook.bench.timing import Disturbance
from openmed_nb.runbook.checks.parity_report import CPU_ONLY
from openmed_nb.runbook.records.report import (
    SCHEMA_FILE,
    DeviceReport,
    _summarize_verdict,
    run_report,
)
from openmed_nb.runbook.records.running import _describe_result, redact, tail_lines
from openmed_nb.runbook.records.steps import STEPS, Step, StepOptions, StepResult, _logbook, _memory, _parity
from openmed_nb.runbook.verdict.metrics import Evidence
from openmed_nb.runbook.verdict.verdict import evaluate
from openmed_nb.session import SESSION

HERE = Path(__file__).parent
SCRIPTS = Path(__file__).parents[4] / "scripts"
USER = "jane_doe"

pytestmark = pytest.mark.real_computer


@pytest.fixture(scope="module")
def planted_steps(helper):
    """Module of planted steps."""
    return helper(HERE / "planted_steps.py")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Home directory of a named user, to which planted steps write their process ids."""
    folder = tmp_path_factory.mktemp("Users") / USER
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HOME": folder, "LOGNAME": USER, "PLANTED": folder}.items():
            patch.setenv(name, str(value))
        patch.syspath_prepend(str(HERE))  # Inherited by the processes of the steps.
        yield folder


@pytest.fixture(scope="module")
def run_steps(planted_steps, home):  # noqa: ARG001 - the processes of the steps use this home directory
    """Function that runs a quick report of planted steps, and returns it. A name can be that of another step."""

    def run_steps(folder, *functions, quick=True, names=()):
        steps = []
        for name, function in zip(names or functions, functions, strict=True):
            timeout = 5.0 if name == "hang" else 60.0
            steps.append(Step(name, name, getattr(planted_steps, function), timeout_seconds=timeout))
        return run_report(folder, StepOptions(quick=quick), steps)

    return run_steps


def find_running_processes(home):
    """Return the ids of the processes of the last hanging step that survive.

    A killed process that is not a child of this one ends some milliseconds after the signal, or later on a busy computer.
    """
    file = home / "pids"  # Does not exist if the step was killed early.
    pids = set(map(int, file.read_text("utf-8").split())) if file.exists() else set()
    ended = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    running = [process for process in psutil.process_iter(["status"]) if process.info["status"] not in ended]
    _, alive = psutil.wait_procs([process for process in running if process.pid in pids], timeout=30)
    return [process.pid for process in alive]


# Outcome and message of each planted step, and a fragment of its last lines.
OUTCOMES = {
    "abort": ("crashed", "The process was ended by SIGABRT.", "failed assertion `unexpected shape'"),
    "hang": ("timed out", "The time limit of 5 s was exceeded.", "planted_steps.py"),
    "kill_itself": ("crashed", "The process was ended by SIGKILL.", ""),
    "exhaust_memory": ("failed", "Out of memory: MemoryError.", ""),
    "fail": ("failed", "The process exited with status 1: KeyError: 'a name of ***'.", "in fail"),
    "print_names": (
        "failed",
        "ConfigurationError: ~/secret.py cannot be read by ***.",
        "File ~/secret.py of *** on ***, token ***",
    ),
}


@pytest.fixture(scope="module")
def planted_folder(tmp_path_factory):
    """Directory of the report of planted steps."""
    return tmp_path_factory.mktemp("report") / "new"


@pytest.fixture(scope="module")
def planted_report(run_steps, planted_folder):
    """Report of steps that end in every way, between two steps with results."""
    return run_steps(planted_folder, "succeed", *OUTCOMES, "report_failure")


@pytest.mark.parametrize("name", OUTCOMES)
def test_every_failure_of_a_step_is_an_outcome(planted_report, name):
    outcome, message, fragment = OUTCOMES[name]
    step = planted_report.outcome_for(name)

    assert (step.outcome, step.message, step.status) == (outcome, message, None)
    assert step.remedy
    assert not fragment or any(fragment in line for line in step.output), step.output


def fail_after_its_value(text):
    """Print much, and return the length of a text. The process fails after its value is written."""
    sys.stdout.write("0123456789\n" * 10_000)
    atexit.register(os._exit, 120)
    return len(text)


def test_child_that_fails_has_no_value(home):  # noqa: ARG001 - the process imports this module
    outcome = child.run(fail_after_its_value, ("x" * (1 << 20),), 60.0, os.environ)

    assert outcome[:2] == (120, None)
    assert 60_000 < len(outcome.output) < 1 << 16
    assert set(outcome.output.split()) == {"0123456789"}


def test_interrupt_at_the_start_of_a_child_ends_it(monkeypatch):
    started = []
    start = subprocess.Popen

    def start_and_interrupt(*arguments, **options):
        started.append(start(*arguments, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        child.run(len, ("",), 60.0, os.environ)

    assert started[0].poll() == -signal.SIGKILL


def test_output_is_not_stored_if_it_may_quote_a_text(planted_steps, tmp_path, home):  # noqa: ARG001
    steps = [Step("fail", "fail", planted_steps.fail)]
    (outcome,) = run_report(tmp_path, StepOptions(texts=["He has asthma."]), steps).steps

    assert (outcome.message, outcome.output) == ("The process exited with status 1.", ())


def test_sweep_compares_its_knee_with_the_batch_size_of_the_next_steps(run_steps, tmp_path):
    """The knee is a number of full rows, and not of notes."""
    report = run_steps(tmp_path, "sweep", "describe_batch")
    evidence = report.evidence()

    assert (evidence["knee"], evidence["batch"], evidence["knee_gain"]) == (16, 16, 0.0)
    assert report.outcome_for("describe_batch").message == "None"


def test_results_state_what_was_not_measured():
    options = StepOptions("bundled_small", quick=True, backward=False)
    profile = replace(PROFILE, disturbance=Disturbance("the computer is busy"))
    known = Evidence(task="training", disturbed_measurements=("nb.sweep(model)",))
    results = (_parity(options), StepResult(profile, (profile,)))
    parity, profile = (_describe_result(result, known) for result in results)

    assert (profile["status"], parity["status"]) == ("warning", "not applicable")
    assert "disturbed_measurements" not in parity["evidence"]
    assert profile["evidence"]["disturbed_measurements"] == ["nb.sweep(model)", "nb.runbook.profile(model)"]
    assert parity["message"].startswith(f"{CPU_ONLY} Logits")
    assert [sample.step for sample in _memory(options).displayed.epoch_samples] == [*range(1, 11)]
    book = _logbook(options).displayed
    assert (book.model.name, book.dataset.items) == ("bundled_small", 4)


def test_other_steps_continue_after_failures(planted_report):
    outcomes = [planted_report.outcome_for(name).outcome for name in ("succeed", "report_failure")]
    failure = planted_report.outcome_for("report_failure")

    assert outcomes == ["done", "done"]
    assert planted_report.missing_steps == tuple(OUTCOMES)
    assert planted_report.exit_code == 1
    assert planted_report.verdict.endswith(
        f"2 of 8 steps finished; missing: {', '.join(OUTCOMES)}. Steps to review: report_failure. "
        f"Run the same command again: it repeats only {', '.join(OUTCOMES)}."
    )
    assert (failure.status, failure.message) == ("failed", "Seen on cpu. Failed: long products.")
    assert failure.report_json["device"] is None


def test_verdict_states_that_texts_are_built_in(planted_report):
    report = replace(planted_report, subject=replace(planted_report.subject, texts=3))
    verdict = evaluate(Evidence(device="cpu", knee=8))

    assert "The notes are the built-in sentences." in _summarize_verdict(planted_report, verdict)
    assert "built-in" not in _summarize_verdict(report, verdict)


def test_processes_of_a_hanging_step_are_killed(planted_report, home):
    assert planted_report.outcome_for("hang").outcome == "timed out"
    assert not find_running_processes(home)


def test_files_contain_no_private_names(planted_report, planted_folder, home):  # noqa: ARG001 - writes the files
    names = {str(home), USER, getpass.getuser(), platform.node()}
    for file in planted_folder.iterdir():
        text = file.read_text("utf-8")
        assert [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)] == [], file.name
        assert "hf_" not in text


def test_json_matches_its_schema_and_is_read_back(planted_report, planted_folder, helper):
    schema = SCHEMA_FILE.read_text("utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(schema))
    stored = json.loads((planted_folder / "report.json").read_text("utf-8"))

    assert schema == helper(SCRIPTS / "write_schemas.py").report_schema()
    validator.validate(stored)
    assert not validator.is_valid({**stored, "note": "a text"})
    assert DeviceReport.read(planted_folder / "report.json") == planted_report


def test_page_is_self_contained_and_has_last_lines(planted_report, planted_folder):
    page = (planted_folder / "report.html").read_text("utf-8")

    assert all(f'<section id="{step.step}">' in page for step in planted_report.steps)
    assert not [word for word in ("http", "src=", "<script", "<b>", "<i>", "@import") if word in page]
    assert "All is &lt;b&gt;well&lt;/b&gt;." in page
    assert "failed assertion `unexpected shape&#x27;" in page


def test_second_run_resumes_and_other_arguments_restart(run_steps, tmp_path):
    events = []
    functions = ("succeed", "fail", "measure_busy", "succeed")
    names = (*functions[:-1], "logbook")
    first = run_steps(tmp_path, *functions, names=names)
    unsubscribe = SESSION.subscribe(lambda event: events.append(str(event)) if event else None)
    try:
        second = run_steps(tmp_path, *functions, names=names)
    finally:
        unsubscribe()
    restarted = run_steps(tmp_path, "succeed", quick=False)

    assert second.outcome_for("succeed") == first.outcome_for("succeed")
    assert events == [
        "Reporting: fail (1 of 4 steps)",
        "Reporting: measure_busy (2 of 4 steps)",
        "Reporting: logbook (3 of 4 steps)",
        "Reporting: this computer (4 steps)",
    ]
    assert second.notes == ("Kept from a previous run: 1 step.",)
    assert second.verdict.endswith("it repeats only fail, measure_busy, logbook.")
    assert json.loads((tmp_path / "logbook.json").read_text("utf-8")) == second.outcome_for("logbook").report_json
    assert re.match(r"Restarted: .* another quick\.", restarted.notes[0])
    assert (restarted.exit_code, restarted.missing_steps) == (0, ())


def test_interrupt_kills_the_step_and_keeps_results(run_steps, home, tmp_path, interruptible):  # noqa: ARG001
    (home / "pids").unlink(missing_ok=True)  # A process id of an earlier step may be in use again.
    with pytest.raises(RunInterrupted, match=r"after 1 step\. Run the same report again"):
        run_steps(tmp_path, "succeed", "interrupt")

    assert [step.step for step in DeviceReport.read(tmp_path / "report.json").steps] == ["succeed"]
    assert not find_running_processes(home)


def test_step_exits_with_a_killed_report(home, tmp_path):
    code = (
        "import sys; from pathlib import Path; import planted_steps\n"
        "from openmed_nb.runbook.records.report import run_report\n"
        "from openmed_nb.runbook.records.steps import Step, StepOptions\n"
        "run_report(Path(sys.argv[1]), StepOptions(), [Step('x', 'x', planted_steps.kill_report)])"
    )
    (home / "pids").unlink(missing_ok=True)
    completed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=HERE, check=False)

    assert completed.returncode == -9
    for process in psutil.process_iter(["cmdline", "environ"]):
        is_step = any("openmed_nb._utils.child" in word for word in process.info["cmdline"] or ())
        if is_step and (process.info["environ"] or {}).get("PLANTED") == str(home):
            process.wait(60)


def test_unavailable_device_falls_back_to_the_cpu(run_steps, tmp_path):
    """If the device step crashes, the other steps measure the CPU. If it succeeds later, they run again."""
    report = run_steps(tmp_path, "abort", "succeed", names=("device", "succeed"))
    available = replace(report.steps[0], outcome="done", report_json={"device": "mps"})

    assert report.outcome_for("succeed").message == "Found on cpu. All is <b>well</b>."
    assert report.verdict.startswith("The device is unavailable (The process was ended by SIGABRT)")
    assert report.with_outcome(available).missing_steps == ("succeed",)
    assert report.with_outcome(available).notes == ("Restarted: the device was cpu and is mps.",)


def test_unusable_folder_raises_before_any_step(run_steps, tmp_path, capsys):
    (tmp_path / "report.json").write_text("{}", "utf-8")

    assert main(["report", str(tmp_path / "report.json" / "folder")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=f"Pass a new folder, or delete that file in '{tmp_path.name}'"):
        run_steps(tmp_path, "succeed")
    assert (tmp_path / "report.json").read_text("utf-8") == "{}"


TEXTS_WITH_NAMES = [
    ("/Users/jane/x.py and /home/jane_k/y", "~/x.py and /home/***/y"),
    ("jane@janes-mac: janeway", "***@***: janeway"),
    ("/Users/janet/x", "/Users/***/x"),
]


@pytest.mark.parametrize(("text", "redacted"), TEXTS_WITH_NAMES)
def test_redact_masks_private_names(text, redacted):
    assert redact([text], "/Users/jane", ("janes-mac", "jane")) == [redacted]


def test_tail_lines_keeps_the_end_or_the_fault(home):  # noqa: ARG001 - its name is redacted
    lines = tail_lines(f"{USER} begins\n" * 6000 + f"{'x' * 296} {USER}\n")

    assert len(lines) == 30
    assert lines[-1] == f"{'x' * 296} ***"
    assert set(lines[:-1]) == {"*** begins"}
    frames = [f'  File "/opt/{number}/site-packages/torch/x.py"' for number in range(90)]
    assert tail_lines("\n".join(["before", "assertion", "Fatal Python error: Aborted", *frames]))[:4] == (
        "before",
        "assertion",
        "Fatal Python error: Aborted",
        '  File "site-packages/torch/x.py"',
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("options", [[], ["--quick", "--training"]])
def test_report_of_all_steps_is_complete(options, tmp_path, capsys):
    status = main(["report", str(tmp_path), *options])
    printed = capsys.readouterr()
    report = DeviceReport.read(tmp_path / "report.json")

    assert (status, report.missing_steps) == (0, ()), report
    assert [step.step for step in report.steps] == [step.name for step in STEPS]
    assert f"{len(STEPS)} of {len(STEPS)} steps finished." in printed.out
    assert printed.err.count("Reporting: ") == len(STEPS) + 1  # The last event reports completion.
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text("utf-8"))).validate(report.to_dict())
    assert report.outcome_for("logbook").report_json["metrics"]
    assert str(Path.home()) not in (tmp_path / "report.json").read_text("utf-8")
