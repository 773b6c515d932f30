"""The smoke test of a bundle: does it do on this computer what it did where it was written?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...devices import backend
from ...devices.computer import Computer
from ...devices.machine import read_machine
from ...devices.request import DeviceRequest
from ...errors import ConfigurationError, DeviceUnavailable, OpenMedError, cause
from ...models.content import content_of
from ...models.loading import LoadSpec, model_folder
from ..logbook.files import write_whole
from ..logbook.gathering import Said, gather, version_of
from ..logbook.logbook import Logbook
from ..logbook.models import model_of_files
from ..logbook.plain_values import from_plain
from ..workloads.annotating import subject_of_files
from .checksums import changed_files
from .documents import REQUIREMENTS, RESULT
from .golden import GOLDEN, LOGBOOK, MODEL, TEXTS, Golden, entities_found
from .judgement import Observed, SmokeReport
from .requirements import unmet
from .trial import measure

BUNDLE = "bundle"


def smoke(bundle: str | os.PathLike[str], device: str | None = None) -> SmokeReport:
    """Run the smoke test of a bundle; nothing is fetched, and the bundle stays as it is.

    Args:
        bundle: The folder that ``nb.handoff()`` has written.
        device: Where it runs; the device of the golden run where nobody says, or where that is not here, the best one.

    Returns:
        What was found; ``exit_code`` is 1 where something failed.

    Raises:
        ConfigurationError: For a folder that is no bundle.
        DeviceUnavailable, UnknownDevice: For a device that was asked for and cannot be used.
    """
    folder = Path(bundle).expanduser().absolute()
    changed = changed_files(folder, (GOLDEN, TEXTS, LOGBOOK, REQUIREMENTS))
    golden = read_golden(folder)
    missing = unmet(read_text(folder / REQUIREMENTS), version_of)
    seen = Observed(golden, changed, missing, former_logbook(folder, changed))
    fatal = [name for name in changed if name in {GOLDEN, TEXTS} or name.startswith(f"{MODEL}/")]
    if fatal:
        return SmokeReport(replace(seen, stopped="its files are not those of the bundle"))
    try:
        return SmokeReport(tried(seen, folder, device))
    except (DeviceUnavailable, ConfigurationError):
        raise
    except OpenMedError as error:
        return SmokeReport(replace(seen, stopped=str(error)))


def tried(seen: Observed, bundle: Path, asked: str | None) -> Observed:
    """Return what was seen, with the golden run repeated.

    Args:
        seen: What was seen before anything ran.
        bundle: The folder.
        asked: The device that was asked for.
    """
    golden, texts = seen.golden, json.loads(read_text(bundle / TEXTS))
    computer = Computer(os.environ, read_machine, backend)
    device, other = device_for(golden.device, asked, computer)
    spec: LoadSpec = golden.spec(bundle)
    folder = model_folder(spec)
    if content_of(folder) != golden.content:
        return replace(seen, other_model=True, other_device=other, stopped="the model is another one")
    bench = subject_of_files(spec, texts, None).on(device)
    computer.load_torch()
    book = gather(Said(dataset=texts), computer, device, model_of_files(MODEL, folder, golden.dtype), folder)
    entities = entities_found(bench, texts)
    trial = measure(bench, golden.batch_size, golden.rounds, golden.steps)
    return replace(seen, other_device=other, logbook=book.with_reports(trial), trial=trial, entities=entities)


def device_for(golden: str, asked: str | None, computer: Computer) -> tuple[str, str]:
    """Return the device to run on, and why it is not the one of the golden run, empty where it is.

    Raises:
        DeviceUnavailable, UnknownDevice: For a device that was asked for and cannot be used.
    """
    if asked is not None:
        device = computer.confirm(DeviceRequest.parse(asked, BUNDLE)).device
        return device, "" if device == golden else f"{device} was asked for instead of {golden}"
    try:
        return computer.confirm(DeviceRequest.parse(golden, BUNDLE)).device, ""
    except DeviceUnavailable:
        device = computer.confirm(DeviceRequest.parse("auto", BUNDLE)).device
        return device, f"{golden} cannot be used here, so it ran on {device}"


def read_golden(bundle: Path) -> Golden:
    """Return the golden run of a bundle.

    Raises:
        ConfigurationError: Where it cannot be read.
    """
    try:
        golden: Golden = from_plain(Golden, json.loads(read_text(bundle / GOLDEN)))
    except (ValueError, RecursionError) as error:
        what = f"The {GOLDEN} of {bundle.name!r} is damaged: {cause(error)}."
        raise ConfigurationError(what, "Take the bundle from where it came from again.") from error
    return golden


def read_text(file: Path) -> str:
    """Return the text of a file of a bundle.

    Raises:
        ConfigurationError: Where it cannot be read.
    """
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"The {file.name} of the bundle cannot be read: {cause(error)}."
        raise ConfigurationError(what, "Take the bundle from where it came from again.") from error


def former_logbook(bundle: Path, changed: dict[str, str]) -> Logbook | None:
    """Return the logbook of a bundle, ``None`` where it is not the one that was written."""
    return None if LOGBOOK in changed else Logbook.read(bundle / LOGBOOK)


def from_command_line(bundle: Path, arguments: list[str]) -> int:
    """Run the smoke test, print what was found, write it into the bundle, and return the exit status.

    Args:
        bundle: The folder.
        arguments: The words of the command line.
    """
    command = argparse.ArgumentParser("smoke.py", description="Repeat the smoke test of this bundle.")
    command.add_argument("--device", help="auto, cpu, cuda, cuda:N, mps or gpu; that of the golden run if left out")
    try:
        report = smoke(bundle, command.parse_args(arguments).device)
    except OpenMedError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    sys.stdout.write(f"{report}\n")
    keep(report.to_dict(), bundle / RESULT)
    return report.exit_code


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result; where that cannot be, it is said, and what was found counts all the same."""
    try:
        write_whole(file, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        sys.stderr.write(f"{file.name} could not be written: {cause(error)}.\n")
