"""Power and temperature of a Mac with Apple silicon, from the program ``macmon`` without administrator rights.

``macmon pipe`` prints one line of JSON per interval (https://github.com/vladkens/macmon). The names of the fields that are
read here are the same in the source of its releases 0.4.2 to 0.8.2. The package ``macmon`` on PyPI is another program.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ...devices.machine import RunCommand

MacmonState: TypeAlias = Literal["read", "not installed", "no valid output", "no sensors"]
READ: MacmonState = "read"
NOT_INSTALLED: MacmonState = "not installed"
NO_VALID_OUTPUT: MacmonState = "no valid output"
NO_SENSORS: MacmonState = "no sensors"
REMEDIES: Mapping[MacmonState, str] = {
    NOT_INSTALLED: "Install macmon to read power and temperature: brew install macmon.",
    NO_VALID_OUTPUT: "macmon printed no valid values. Update it: brew upgrade macmon.",
    NO_SENSORS: "macmon found no sensors, as in a virtual machine. Run on the Mac itself.",
}

# Folders of Homebrew, MacPorts, Nix and Cargo. A kernel that was started from the Dock has a short ``PATH``. They come before
# ``PATH``, where an environment can have the program of PyPI.
MACMON_FOLDERS = (
    "/opt/homebrew/bin",
    "/usr/local/bin",
    "/opt/local/bin",
    "/run/current-system/sw/bin",
    "~/.nix-profile/bin",
    "~/.cargo/bin",
)

# Releases before 0.8 need up to two seconds to start, on a busy machine more.
START_SECONDS = 5.0
INTERVAL_MILLISECONDS = 1000

MAX_CELSIUS = 150
MAX_WATTS = 10_000
# Fields of the output: mean power during the interval from energy counters, and sensors that are read at its end.
COUNTERS = ("cpu_power", "gpu_power", "ane_power")
SENSORS = ("sys_power", "cpu_temp_avg", "gpu_temp_avg")
MAX_VALUES = {
    **dict.fromkeys((*COUNTERS, "sys_power"), MAX_WATTS),
    "cpu_temp_avg": MAX_CELSIUS,
    "gpu_temp_avg": MAX_CELSIUS,
}


@dataclass(frozen=True)
class MacmonReading:
    """Means over an interval. A value that cannot be read is ``None``, never a guess.

    Attributes:
        state: Whether values were read, and if not, why.
        cpu_power: Power draw of the processor in watts.
        gpu_power: Power draw of the GPU in watts.
        neural_engine_power: Power draw of the Neural Engine in watts.
        system_power: Power draw of the whole Mac in watts.
        cpu_temperature: Mean temperature of the processor in degrees Celsius.
        gpu_temperature: Mean temperature of the GPU in degrees Celsius.
    """

    state: MacmonState
    cpu_power: float | None = None
    gpu_power: float | None = None
    neural_engine_power: float | None = None
    system_power: float | None = None
    cpu_temperature: float | None = None
    gpu_temperature: float | None = None


def find_macmon(environ: Mapping[str, str], folders: Sequence[str] = MACMON_FOLDERS) -> str | None:
    """Return the path of ``macmon``, or ``None`` if it is not installed."""
    searched = [os.path.expanduser(folder) for folder in folders] + environ.get("PATH", "").split(os.pathsep)  # noqa: PTH111
    # A relative folder could contain any program.
    return shutil.which("macmon", path=os.pathsep.join(folder for folder in searched if Path(folder).is_absolute()))


def read_macmon(run: RunCommand, path: str | None, seconds: int = 1) -> MacmonReading:
    """Read the mean power and temperature over some seconds.

    Longer intervals are more precise: the energy counters of some chips change only every two seconds (lablup/all-smi#424).

    Args:
        run: Runs a command.
        path: Path of ``macmon``, or ``None`` if it is not installed.
        seconds: Duration of the interval in seconds.
    """
    if path is None:
        return MacmonReading(NOT_INSTALLED)
    # Releases before 0.5 accept the interval only before the name of the subcommand.
    command = [path, "-i", str(INTERVAL_MILLISECONDS), "pipe", "-s", str(seconds)]
    return parse_macmon(run(command, seconds=START_SECONDS + seconds))


def parse_macmon(output: str | None) -> MacmonReading:
    """Return the means of the lines of ``macmon pipe``. Lines that are no JSON objects are ignored."""
    samples = []
    for line in (output or "").splitlines():
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(sample, dict):
            temperatures = sample.get("temp")
            samples.append({**sample, **(temperatures if isinstance(temperatures, dict) else {})})

    values = {
        name: list(_valid_numbers((sample.get(name) for sample in samples), maximum))
        for name, maximum in MAX_VALUES.items()
    }
    if not any(values.values()):
        return MacmonReading(NO_VALID_OUTPUT)
    # An energy counter that did not change is 0 in the output, and so is a sensor that could not be read.
    counters = {name: statistics.fmean(values[name]) for name in COUNTERS if values[name]}
    sensors = {name: statistics.fmean(filter(None, values[name])) for name in SENSORS if any(values[name])}
    # A processor that runs macmon needs power. If its counter stands still, as on macOS 27 (vladkens/macmon#76), the other
    # counters may stand still too, so their zeros are unknown values.
    if not counters.get("cpu_power"):
        counters = {name: watts for name, watts in counters.items() if watts}
    if not counters and not sensors:
        return MacmonReading(NO_SENSORS)
    return MacmonReading(
        READ,
        cpu_power=counters.get("cpu_power"),
        gpu_power=counters.get("gpu_power"),
        neural_engine_power=counters.get("ane_power"),
        system_power=sensors.get("sys_power"),
        cpu_temperature=sensors.get("cpu_temp_avg"),
        gpu_temperature=sensors.get("gpu_temp_avg"),
    )


def _valid_numbers(values: Iterable[object], maximum: int) -> Iterable[float]:
    """Yield the numbers from 0 to a maximum."""
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= maximum:
            yield float(value)
