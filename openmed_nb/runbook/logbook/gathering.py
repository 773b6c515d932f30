"""Gathering a logbook: the one place that asks the computer, torch and git, and reads the dataset."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ...devices.allocators import allocator
from ...devices.backend import gpu_uuid
from ...devices.computer import Computer
from ...devices.environment import SET_BY, EnvPlan
from ...devices.machine import Machine, import_psutil
from ...devices.names import own_name, processor_name
from ...devices.request import DeviceRequest, canonical, kind_of
from ...errors import ConfigurationError, given_path
from ...training.samples import installed_bytes
from ..signals.reading import read_signals
from ..signals.values import Signals
from .background import read_background
from .datasets import dataset_of
from .figures import joined, reported_device, told_by
from .hypotheses import hypotheses_of
from .logbook import SCHEMA, Logbook
from .plain_values import LARGEST
from .repository import read_code
from .round_trip import measure_round_trip
from .sections import Model, Run
from .storage import cache_folders, places, read_mounts
from .surroundings import Background, Conditions, Hardware, Place, Setting, Software
from .training_facts import loader_of, randomness_of
from .variables import home_folder, kept_value, kept_variables

PACKAGES = (
    *("numpy", "tokenizers", "safetensors", "huggingface-hub", "accelerate", "datasets", "lightning"),
    *("pytorch-lightning", "peft", "ipython", "ipywidgets", "psutil"),
)
"""Packages that change speed, answers, or how they are shown."""

CONDITIONS = (
    "power_source",
    "power_mode",
    "heat",
    "memory_pressure",
    "speed_limit",
    "battery",
    "memory_available",
    "swap_used",
)


@dataclass(frozen=True)
class Said:
    """What a person says of a run.

    Attributes:
        reports: What ``nb.sweep()`` and the others returned.
        dataset: Texts, or the path of a file or a folder.
        batch_size: How many rows a batch had.
        length: How many tokens a row had.
        seeds: A seed, or seeds by name.
        loader: The ``DataLoader`` of a training.
        hypotheses: Pairs of what was suspected and what rules it out.
        applications: Whether busy programs are named.
        artifact_store: What to connect to; ``None`` to leave that.
        folder: A folder of the person's code; the one in which Python runs where nobody says.
    """

    reports: tuple[Any, ...] = ()
    dataset: Any = None
    batch_size: int | None = None
    length: int | None = None
    seeds: Any = None
    loader: Any = None
    hypotheses: Any = ()
    applications: bool = False
    artifact_store: str | None = None
    folder: str | os.PathLike[str] | None = None

    def check(self) -> None:
        """Refuse numbers that are none.

        Raises:
            ConfigurationError: For them.
        """
        for name in ("batch_size", "length"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or not 1 <= number < LARGEST):
                raise ConfigurationError(f"{name} is no number of rows or tokens.", "Pass a whole number from 1.")


def gather(
    said: Said, computer: Computer, device: str, model: Model | None = None, folder: Path | None = None
) -> Logbook:
    """Return the logbook of this moment.

    Args:
        said: What the person says.
        computer: The computer; torch is loaded already.
        device: The device in force, as torch spells it; that of the reports counts where all name one.
        model: Which model.
        folder: Where its files are; ``None`` where it has none.

    Raises:
        ConfigurationError: For reports, texts, seeds, a loader, hypotheses, a folder or a store that are none; then nothing was
            asked of the computer.
        DeviceError: For reports of a device that is not here.
    """
    said.check()
    told = told_by(said.reports)
    dataset = None if said.dataset is None else dataset_of(said.dataset)
    hypotheses = hypotheses_of(said.hypotheses, said.dataset)
    loader, randomness = loader_of(said.loader), randomness_of(said.seeds)
    code = given_path(said.folder or ".", "folder")
    device = confirmed(reported_device(told) or device, device, computer)
    machine, environ = computer.machine, computer.changes.environ
    network = None if said.artifact_store is None else measure_round_trip(said.artifact_store)
    signals = read_signals(machine, device, uuid=gpu_uuid(device))
    plan = computer.environment(device)
    return Logbook(
        schema=SCHEMA,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        simulated=(machine.simulated and kind_of(device) == "mps") or any(one.simulated for one in told),
        software=software(machine, computer.torch.version),
        code=read_code(code),
        hardware=hardware(computer, device),
        model=model,
        dataset=dataset,
        run=joined(told, Run(batch_size=said.batch_size, length=said.length)),
        loader=loader,
        randomness=randomness,
        environment=kept_variables(environ),
        mps_variables=settings(plan) if device == "mps" else (),
        conditions=conditions(signals, after=bool(told)),
        background=Background() if machine.simulated else read_background(said.applications),
        storage=storage(environ, folder),
        network=network,
        hypotheses=hypotheses,
        figures=told,
    )


def settings(plan: EnvPlan) -> tuple[Setting, ...]:
    """Return what became of torch's variables for MPS; a value that looks as none of them does is not kept.

    Example:
        >>> from openmed_nb.devices.environment import plan
        >>> settings(plan({"PYTORCH_ENABLE_MPS_FALLBACK": "two words"}))[0].value
        '***'
    """
    cleaned = ((one, None if one.value is None else kept_value(one.name, one.value)) for one in plan.settings)
    return tuple(Setting(one.name, value, SET_BY[one.origin], one.effect) for one, value in cleaned)


def confirmed(reported: str, device: str, computer: Computer) -> str:
    """Return the device that reports are of, as torch spells it.

    Args:
        reported: What they say.
        device: The device in force, which is known to be here.
        computer: The computer.

    Raises:
        DeviceError: Where it is none of this computer, which then can tell nothing of it.
    """
    if canonical(reported) == canonical(device):
        return device
    return computer.confirm(DeviceRequest.parse(reported, "report")).device


def software(machine: Machine, torch: str | None) -> Software:
    """Return the versions of what runs; no package is imported for that.

    Args:
        machine: The facts of this computer.
        torch: The version that torch says it has.
    """
    versions = {name: found for name in PACKAGES if (found := version_of(name)) is not None}
    macos = ".".join(map(str, machine.macos)) if machine.macos else None
    system = f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}"
    return Software(
        own_version(),
        platform.python_version(),
        torch,
        version_of("transformers"),
        versions,
        system,
        machine.architecture,
    )


def own_version() -> str:
    """Return the version of the toolkit that runs, which need not be the installed one."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def version_of(name: str) -> str | None:
    """Return the version of an installed package, ``None`` where it is not installed.

    Example:
        >>> version_of("no-such-package")
    """
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(computer: Computer, device: str) -> Hardware:
    """Return what the device is, and the most memory that was used until now."""
    machine, torch = computer.machine, sys.modules.get("torch")
    return Hardware(
        device=device,
        name=own_name(device, machine, computer.torch),
        chip=machine.chip or processor_name(),
        memory_bytes=machine.memory_bytes or installed_bytes(),
        threads=None if torch is None else int(torch.get_num_threads()),
        memory_limit=computer.limit(device),
        device_peak_bytes=None if torch is None else allocator(device).memory().peak,
        resident_peak_bytes=resident_peak(),
    )


def resident_peak() -> int | None:
    """Return the most memory that this process had, in bytes; ``None`` where the system does not say.

    macOS counts in bytes and Linux in kibibytes (``getrusage``), Windows has a count of its own.

    Example:
        >>> resident_peak() > 0
        True
    """
    if sys.platform == "win32":
        psutil = import_psutil()
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def conditions(signals: Signals, after: bool) -> Conditions:
    """Return power, heat and memory.

    Args:
        signals: What the computer says.
        after: Whether the run is over, because its reports are there.

    Example:
        >>> conditions(Signals(power_source="battery"), after=False).power_source
        'battery'
    """
    return Conditions("after" if after else "before", **{name: getattr(signals, name) for name in CONDITIONS})


def storage(environ: Mapping[str, str], model: Path | None) -> tuple[Place, ...]:
    """Return where caches and the model lie."""
    folders = cache_folders(environ, home_folder())
    return places(folders | ({"model": model} if model else {}), read_mounts(platform.system()))
