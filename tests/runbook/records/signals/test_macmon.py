"""macmon: recorded outputs of several releases, invalid outputs, and processes that fail or hang."""

import json
import re
from dataclasses import astuple
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.machine import run_command
from openmed_nb.runbook.records.macmon import (
    NO_SENSORS,
    NO_VALID_OUTPUT,
    NOT_INSTALLED,
    READ,
    REMEDIES,
    START_SECONDS,
    MacmonReading,
    find_macmon,
    parse_macmon,
    read_macmon,
)

RECORDED = Path(__file__).parents[3] / "recorded" / "macmon"


def load_output(release):
    """Return the recorded output of a release."""
    return (RECORDED / f"macmon_{release}.txt").read_text("utf-8")


# Power of the processor, the GPU, the Neural Engine and the whole Mac, and temperatures, of each recorded output.
RELEASES = {
    "0_5_1": (0.20486385, 0.017451683, 0.0, 5.876533, 43.73614, 36.95167),
    "0_6": (0.2523320317, 0.00444294745, 0.0, 9.391488, 44.50918579, None),
    "0_7_2": (9.75, 38.5, 0.0, 66.4, 61.25, 58.5),
    "0_8_2": (4.5, 11.25, 0.25, 24.6, 52.4, 49.75),
    "0_8_2_macos_27": (None, 14.5, None, 41.75, 55.0, 53.5),
}


@pytest.mark.parametrize("release", RELEASES)
def test_parse_macmon_reads_the_output_of_each_release(release):
    state, *values = astuple(parse_macmon(load_output(release)))

    assert state == READ
    assert values == [None if value is None else pytest.approx(value) for value in RELEASES[release]]


def test_readme_names_every_recorded_file():
    documented = re.findall(r"`(\w+\.txt)`", (RECORDED / "README.md").read_text("utf-8"))

    assert sorted(documented) == sorted(file.name for file in RECORDED.glob("*.txt"))


SAMPLE = json.loads(load_output("0_8_2"))


def lines_of(*changes):
    """Return lines of output with changed fields; a field without a value is left out."""
    samples = ({**SAMPLE, **change} for change in changes)
    return "\n".join(
        json.dumps({name: value for name, value in sample.items() if value is not ...}) for sample in samples
    )


# Changed fields of each line, the attribute, and its value.
VALUES = [
    ([{"gpu_power": 10.0}, {"gpu_power": 20.0}], "gpu_power", 15.0),
    # The counters of some chips change only in every second interval.
    ([{"cpu_power": 0.0}, {"cpu_power": 8.0}], "cpu_power", 4.0),
    ([{"gpu_power": 0.0}], "gpu_power", 0.0),
    ([{"ane_power": 0.0}], "neural_engine_power", 0.0),
    ([{"cpu_power": 0.0, "ane_power": 0.0}], "neural_engine_power", None),
    ([{"cpu_power": 0.0, "gpu_power": 0.0}], "gpu_power", None),
    ([{"cpu_power": ..., "gpu_power": 3.0}], "gpu_power", 3.0),
    ([{"sys_power": 0.0}, {"sys_power": 20.0}], "system_power", 20.0),
    ([{"gpu_power": 10**400}], "gpu_power", None),
    ([{"gpu_power": float("nan")}], "gpu_power", None),
    ([{"gpu_power": True}], "gpu_power", None),
    ([{"temp": {"gpu_temp_avg": 0.0}}], "gpu_temperature", None),
    ([{"temp": ...}], "cpu_temperature", None),
]


@pytest.mark.parametrize(("changes", "attribute", "value"), VALUES)
def test_parse_macmon_returns_means_of_valid_values(changes, attribute, value):
    reading = parse_macmon(lines_of(*changes))

    assert reading.state == READ
    assert getattr(reading, attribute) == value


NO_VALUES = {name: 0.0 for name in SAMPLE if name.endswith("_power")} | {"temp": {"cpu_temp_avg": 0.0}}
# Outputs without a value, and the state of the reading.
INVALID_OUTPUTS = [
    (None, NO_VALID_OUTPUT),
    ("error: unexpected argument '-s' found\n", NO_VALID_OUTPUT),
    (load_output("0_8_2")[:100], NO_VALID_OUTPUT),
    ("[" * 100_000, NO_VALID_OUTPUT),
    ("9" * 5000, NO_VALID_OUTPUT),
    ('{"cpu": 3, "memory": {"percent": 40}}', NO_VALID_OUTPUT),
    ("[1, 2]\n3\nnull\n", NO_VALID_OUTPUT),
    (lines_of(NO_VALUES), NO_SENSORS),
]


@pytest.mark.parametrize(("output", "state"), INVALID_OUTPUTS, ids=range(len(INVALID_OUTPUTS)))
def test_parse_macmon_without_values_states_the_reason(output, state):
    assert parse_macmon(output) == MacmonReading(state)
    assert REMEDIES[state]


@given(st.text(max_size=200) | st.dictionaries(st.sampled_from([*SAMPLE]), st.floats() | st.text()).map(json.dumps))
def test_parsed_values_are_in_their_ranges(output):
    values = [value for name, value in vars(parse_macmon(output)).items() if name != "state" and value is not None]

    assert all(0 <= value <= 10_000 for value in values)


def install(folder, script):
    """Install a program with the name of macmon, and return its path."""
    program = folder / "macmon"
    program.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    program.chmod(0o755)
    return str(program)


@pytest.mark.real_computer
def test_find_macmon_searches_folders_before_the_path(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.chdir(tmp_path)
    install(tmp_path, "exit 1")
    assert find_macmon({"PATH": "::."}, ()) is None
    assert find_macmon({}, [str(first)]) is None

    for folder in (second, first):
        folder.mkdir()
        path = install(folder, "exit 1")
        assert find_macmon({"PATH": str(second)}, [str(first)]) == path

    (first / "macmon").chmod(0o644)
    assert find_macmon({"PATH": str(second)}, [str(first)]) == str(second / "macmon")


@pytest.mark.real_computer
def test_read_macmon_without_macmon_runs_nothing():
    assert read_macmon(pytest.fail, None) == MacmonReading(NOT_INSTALLED)


# Programs, and the state of the reading. The first prints a line per sample, as macmon does.
PROGRAMS = {
    "prints": (f'for _ in $(seq "$5"); do cat "{RECORDED}/macmon_0_8_2.txt"; done', READ),
    "fails after its output": (f'cat "{RECORDED}/macmon_0_8_2.txt"; exit 101', READ),
    "rejects its arguments": ('echo "error: unexpected argument" >&2; exit 2', NO_VALID_OUTPUT),
}


@pytest.mark.real_computer
@pytest.mark.parametrize("name", PROGRAMS)
def test_read_macmon_runs_one_process_with_a_time_limit(tmp_path, name):
    script, state = PROGRAMS[name]
    path = install(tmp_path, script)
    calls = []

    def run(command, *, seconds):
        calls.append((command, seconds))
        return run_command(command, seconds=seconds)

    assert read_macmon(run, path, seconds=3).state == state
    assert calls == [([path, "-i", "1000", "pipe", "-s", "3"], START_SECONDS + 3)]


@pytest.mark.real_computer
def test_read_macmon_ends_a_hanging_program(tmp_path):
    path = install(tmp_path, f"echo $$ >{tmp_path}/pid\nsleep 600 &\necho $! >>{tmp_path}/pid\nwait")

    reading = read_macmon(lambda command, *, seconds: run_command(command, seconds=seconds / 6), path)

    assert reading == MacmonReading(NO_VALID_OUTPUT)
    pids = map(int, (tmp_path / "pid").read_text().split())
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    running = [process for process in processes if process.status() != psutil.STATUS_ZOMBIE]
    assert psutil.wait_procs(running, timeout=10)[1] == []
