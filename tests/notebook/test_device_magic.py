"""``%openmed_device`` as a notebook and a terminal see it."""

import json
import re

import pytest


def test_device_magic_shows_device_and_reason(kernel):
    """%openmed_device shows device and reason, as text and as HTML, and prints nothing."""
    reply = kernel.run("%openmed_device")

    assert reply.text.startswith("Device: cpu (")
    assert "OPENMED_DEVICE" in reply.text
    assert "OPENMED_DEVICE" in reply.html
    assert reply.streams == {}


def test_device_magic_overrides_the_shell(kernel):
    """The override affects the magic, the functions and the openmed package."""
    kernel.run("%openmed_device cpu")

    assert "%openmed_device" in kernel.run("%openmed_device").text
    assert kernel.value("__import__('openmed_nb').device().requested_by") == "%openmed_device"
    assert kernel.value("__import__('os').environ['OPENMED_TORCH_DEVICE']") == "cpu"


def test_reset_gives_the_word_back_to_the_shell(kernel):
    """%openmed_device --reset drops the override and the variable that published it."""
    kernel.run("%openmed_device auto")

    assert "OPENMED_DEVICE" in kernel.run("%openmed_device --reset").text
    assert kernel.value("__import__('os').environ.get('OPENMED_TORCH_DEVICE')") is None


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("--json", "device"),
        ("cpu --json", "device"),
        ("--list --json", "devices"),
        ("--explain --json", "resolution_order"),
    ],
)
def test_json_is_valid_and_without_quotes_around_it(kernel, line, key):
    """--json shows JSON as it is, for every answer."""
    reply = kernel.run(f"%openmed_device {line}")

    assert key in json.loads(reply.text)
    assert reply.html == ""


@pytest.mark.parametrize("line", ["cpu # the slow one", "cpu #", "CPU", "  cpu  ", "'cpu'", '"cpu"', "default", "''"])
def test_spellings_of_the_line(kernel, line):
    """Comments, capitals, spaces and quotes around a device change nothing."""
    reply = kernel.run(f"%openmed_device {line}")

    assert reply.status == "ok"
    assert reply.text.startswith("Device: cpu ")


@pytest.mark.parametrize("line", ["cpu;", "cpu ;", "cpu;  # quiet", ";"])
def test_semicolon_suppresses_the_display(kernel, line):
    """A trailing semicolon does the work and shows nothing, as in Python."""
    assert kernel.run(f"%openmed_device {line}").is_empty


def test_assignment_gets_the_choice(kernel):
    """Behind an assignment the magic gives a DeviceChoice, and nothing is shown."""
    assert kernel.run("choice = %openmed_device cpu").is_empty
    assert kernel.value("(type(choice).__name__, choice.device, choice.requested)") == ("DeviceChoice", "cpu", "cpu")


@pytest.mark.parametrize("line", ["-h", "--help", "cpu --help"])
def test_help_describes_every_flag(kernel, line):
    """-h and --help print the usage and change nothing."""
    before = kernel.state()
    reply = kernel.run(f"%openmed_device {line}")
    printed = reply.streams["stdout"]

    assert printed.startswith("%openmed_device [")
    assert all(flag in printed for flag in ("--reset", "--list", "--explain", "--json", "auto, cpu, cuda"))
    assert reply.shown == []
    assert kernel.state() == before


def test_question_mark_opens_the_help(kernel):
    """%openmed_device? opens the usage."""
    assert "--explain" in kernel.run("%openmed_device?").page


def test_error_of_a_variable_names_it(run_ipython):
    """A bad value in the shell's variable is an error that names the variable, and --list still answers."""
    code = "%load_ext openmed_nb\ndevices = %openmed_device --list\nprint(devices)\n%openmed_device"
    process = run_ipython(code, OPENMED_DEVICE="banana")

    assert "Devices" in process.stdout
    assert "'banana' (from OPENMED_DEVICE)" in process.stdout + process.stderr


@pytest.mark.parametrize("arguments", [(), ("--simple-prompt",)])
def test_terminal_shows_plain_text(run_ipython, arguments):
    """A terminal prints the text form without HTML and an error as one line, also with the simple prompt."""
    code = "%load_ext openmed_nb\nget_ipython().run_cell('%openmed_device cpu')\n%openmed_device banana"
    process = run_ipython(code, *arguments)
    lines = [line for line in (process.stdout + process.stderr).splitlines() if line.strip()]

    assert "Device: cpu (" in process.stdout
    assert [line for line in lines if re.search("banana|Error|Traceback", line)] == lines[-1:]
    assert lines[-1].startswith("UnknownDeviceError: 'banana' (from %openmed_device)")
    assert "<" not in process.stdout
    assert process.returncode != 0
