"""The smoke test of a bundle: does it do on this computer what it did where it was written?"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...devices import backend
from ...devices.computer import Computer
from ...devices.machine import read_machine
from ...devices.request import DeviceRequest
from ...errors import ConfigurationError, DeviceUnavailable, OpenMedError, UnknownDevice, cause, given_path
from ...models.content import content_of
from ...models.loading import LoadSpec, model_folder
from ..logbook.files import write_whole
from ..logbook.gathering import Said, gather, own_version, version_of
from ..logbook.logbook import Logbook
from ..logbook.models import model_of_files
from ..logbook.plain_values import from_plain
from ..workloads.annotating import subject_of_files
from .checksums import changed_files
from .documents import REQUIREMENTS, RESULT
from .golden import GOLDEN, LOGBOOK, MODEL, TEXTS, Golden, entities_found
from .judgement import Observed, SmokeReport
from .requirements import TOOLKIT, unmet
from .trial import check_numbers, measure

BUNDLE = "bundle"
AGAIN = "Take the bundle from where it came from again."


def smoke(
    bundle: str | os.PathLike[str], device: str | None = None, model: str | os.PathLike[str] | None = None
) -> SmokeReport:
    """Run the smoke test of a bundle; nothing is fetched, and the bundle stays as it is.

    Args:
        bundle: The folder that ``nb.handoff()`` has written.
        device: Where it runs; the device of the golden run where nobody says, or where that is not here, the best one.
        model: Where the model is that was not copied into the bundle.

    Returns:
        What was found; ``exit_code`` is 1 where something failed.

    Raises:
        ConfigurationError: For a folder that is no bundle.
        DeviceUnavailable, UnknownDevice: For a device that was asked for and cannot be used.
    """
    folder = given_path(bundle, "bundle").absolute()
    changed = changed_files(folder, (GOLDEN, TEXTS, LOGBOOK, REQUIREMENTS))
    golden = read_golden(folder)
    texts, former = read_texts(folder, golden, changed), former_logbook(folder, changed)
    missing = {**unmet(read_text(folder / REQUIREMENTS), version_of), **other_toolkit(former)}
    seen = Observed(golden, changed, missing, former)
    fatal = [name for name in changed if name in {GOLDEN, TEXTS} or name.startswith(f"{MODEL}/")]
    if fatal:
        return SmokeReport(replace(seen, stopped="its files are not those of the bundle"))
    try:
        return SmokeReport(tried(seen, folder, texts, device, model))
    except (DeviceUnavailable, UnknownDevice, ConfigurationError):
        raise
    except OpenMedError as error:
        return SmokeReport(replace(seen, stopped=str(error)))


def tried(
    seen: Observed, bundle: Path, texts: list[str], asked: str | None, model: str | os.PathLike[str] | None
) -> Observed:
    """Return what was seen, with the golden run repeated.

    Args:
        seen: What was seen before anything ran.
        bundle: The folder.
        texts: The texts of the golden run.
        asked: The device that was asked for.
        model: Where the model is that was not copied.
    """
    golden = seen.golden
    computer = Computer(os.environ, read_machine, backend)
    device, other = device_for(golden.device, asked, computer)
    spec: LoadSpec = golden.spec(bundle, None if model is None else str(model))
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


def other_toolkit(former: Logbook | None) -> dict[str, tuple[str, str | None]]:
    """Return the version of the toolkit that is wanted and the one that runs, where they differ.

    Args:
        former: The logbook of the bundle.
    """
    wanted, here = former.software.openmed_nb if former else "", own_version()
    return {TOOLKIT: (wanted, here)} if wanted and wanted != here else {}


def read_texts(bundle: Path, golden: Golden, changed: Mapping[str, str]) -> list[str]:
    """Return the texts of the golden run; none where their file is not the one that was written, which is told elsewhere.

    Raises:
        ConfigurationError: Where they are not those that the golden run read.
    """
    if TEXTS in changed:
        return []
    try:
        texts: tuple[str, ...] = from_plain(tuple[str, ...], json.loads(read_text(bundle / TEXTS)))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"The {TEXTS} of the bundle is damaged.", AGAIN) from error
    if len(texts) != len(golden.entities):
        raise ConfigurationError(f"The {TEXTS} of the bundle has other texts than its {GOLDEN}.", AGAIN)
    return list(texts)


def read_golden(bundle: Path) -> Golden:
    """Return the golden run of a bundle.

    Raises:
        ConfigurationError: Where it cannot be read.
    """
    try:
        golden: Golden = from_plain(Golden, json.loads(read_text(bundle / GOLDEN)))
    except (ValueError, RecursionError) as error:
        what = f"The {GOLDEN} of {bundle.name!r} is damaged: {cause(error)}."
        raise ConfigurationError(what, AGAIN) from error
    try:
        check_numbers(golden)
    except ConfigurationError as error:
        raise ConfigurationError(f"The {GOLDEN} of {bundle.name!r} is damaged: {error.what}", AGAIN) from error
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
        raise ConfigurationError(what, AGAIN) from error


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
    command.add_argument("--model", help="the folder of the model, where it is not in the bundle")
    asked = command.parse_args(arguments)
    try:
        report = smoke(bundle, asked.device, asked.model)
    except OpenMedError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        keep({"passed": False, **error.to_dict()}, bundle / RESULT)
        return 1
    sys.stdout.write(f"{report}\n")
    keep(report.to_dict(), bundle / RESULT)
    return report.exit_code


def keep(result: dict[str, Any], file: Path) -> None:
    """Write a result; where that cannot be, it is said, and what was found counts all the same."""
    try:
        write_whole(file, json.dumps(result, indent=2) + "\n")
    except OSError as error:
        sys.stderr.write(f"{file.name} could not be written: {cause(error)}.\n")
