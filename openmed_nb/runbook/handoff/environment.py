"""The pinned packages of a bundle, and the wheel of this package."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigurationError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TOOLKIT = "openmed-nb"

# What a marker names that makes a package one of some computers only.
PLATFORM = ("sys_platform", "platform_system", "platform_machine", "os_name")


@dataclass(frozen=True)
class InstalledPackage:
    """An installed package: its version, and what it requires, as its metadata has it."""

    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pin:
    """A package in the version that is installed."""

    name: str  # Its normalized name.
    version: str  # Its version, without what names a build, such as +cpu, which other computers do not have.
    build: str  # The version with its build.
    marker: str = ""  # On which computers it is needed; empty for all.

    def __str__(self) -> str:
        line = f"{self.name}=={self.version}"
        return f"{line} ; {self.marker}" if self.marker else line


FindPackage = Callable[[str], "InstalledPackage | None"]


def find_installed(name: str) -> InstalledPackage | None:
    """Return an installed package; ``None`` if it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return InstalledPackage(found.version, tuple(found.requires or ()))


def lock(package: str = TOOLKIT, find: FindPackage = find_installed) -> tuple[Pin, ...]:
    """Return every package that a package needs, without itself, in alphabetical order."""
    from packaging.utils import canonicalize_name

    markers: dict[str, set[str]] = {}  # On which computers each package is needed; an empty marker is all of them.
    seen: set[tuple[str, str, str]] = set()  # The packages that were followed, with the extra and the marker.

    @functools.cache
    def installed(name: str) -> InstalledPackage:
        found = find(name)
        if found is None:
            what = f"{name} is needed and not installed, so the environment cannot be locked."
            raise ConfigurationError(what, f"Install it: python -m pip install {name}.")
        return found

    def follow(name: str, extras: Iterable[str] = (), marker: str = "") -> None:
        """Add what a package needs with these extras, on the computers of a marker."""
        found = installed(name)
        for extra in ("", *extras):
            if (name, extra, marker) in seen:
                continue
            seen.add((name, extra, marker))
            for required in needed(found.requires, extra):
                own = str(required.marker or "")
                if "extra" in own or not any(one in own for one in PLATFORM):
                    own = ""
                below = str(canonicalize_name(required.name))
                markers.setdefault(below, set()).add(marker or own)
                follow(below, sorted(required.extras), marker or own)

    def pin(name: str) -> Pin:
        build, needing = installed(name).version, sorted(markers[name])
        several = [f"({one})" for one in needing] if len(needing) > 1 else needing
        return Pin(name, build.partition("+")[0], build, "" if "" in needing else " or ".join(several))

    follow(package)
    return tuple(pin(name) for name in sorted(markers) if name != package)


def needed(requires: Iterable[str], extra: str) -> Iterator[Requirement]:
    """Yield what is required here, with an extra or, if that is empty, without any."""
    from packaging.requirements import Requirement

    for text in requires:
        required = Requirement(text)
        if required.marker is None:
            if not extra:
                yield required
        elif required.marker.evaluate({"extra": extra}) and bool(extra) == ("extra" in str(required.marker)):
            yield required


def requirements_text(pins: Iterable[Pin], about: str) -> str:
    """Return a requirements file; ``about`` is what it was locked on."""
    lines = (f"{pin}  # {pin.build} here" if pin.build != pin.version else str(pin) for pin in pins)
    return "\n".join([f"# The environment of this bundle, locked on {about}.", *lines, ""])


def unmet(text: str, versions: Callable[[str], str | None]) -> Mapping[str, tuple[str, str | None]]:
    """Return which lines of a requirements file are not met: by package, the version that is wanted and the one that is there.

    Args:
        text: The file.
        versions: Returns the version of an installed package, ``None`` if it is not installed.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    try:
        wanted = [Requirement(line) for line in lines if line]
    except InvalidRequirement as error:
        what = "A line of requirements.txt names no package."
        raise ConfigurationError(what, "Take the bundle from where it came from again.") from error
    pins = {
        one.name: str(one.specifier).removeprefix("==") for one in wanted if not one.marker or one.marker.evaluate()
    }
    there = {name: versions(name) for name in pins}
    return {name: (pin, there[name]) for name, pin in pins.items() if (there[name] or "").partition("+")[0] != pin}


PACKAGE = Path(__file__).parents[2]

# What the package is made of; anything else in its folder is not part of it.
SUFFIXES = (".py", ".pyi", ".json", ".txt", ".md", ".sh", ".css", ".safetensors", ".typed")

WHEEL = "Wheel-Version: 1.0\nGenerator: openmed_nb\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

LONG_AGO = (1980, 1, 1, 0, 0, 0)  # The time of every file, so that the same files give the same wheel.


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the toolkit into a folder, and return it."""
    try:
        installed = importlib.metadata.distribution(TOOLKIT)
    except importlib.metadata.PackageNotFoundError as error:
        what = "openmed_nb is not installed, so what it needs is not known."
        raise ConfigurationError(what, "Install it: python -m pip install openmed-nb.") from error
    name = f"{TOOLKIT.replace('-', '_')}-{installed.version}"
    file, about = folder / f"{name}-py3-none-any.whl", f"{name}.dist-info"
    contents = {f"{PACKAGE.name}/{one.relative_to(PACKAGE).as_posix()}": one.read_bytes() for one in package_files()}
    contents[f"{about}/METADATA"] = (installed.read_text("METADATA") or "").encode()
    contents[f"{about}/WHEEL"] = WHEEL.encode()
    for one in installed.files or ():
        if "licenses" in one.parts and one.parts[0].endswith(".dist-info"):
            contents["/".join((about, *one.parts[1:]))] = Path(str(one.locate())).read_bytes()
    # The list of files with their checksums that a wheel must have (PyPA, "Recording installed projects").
    lines = []
    for inside, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        lines.append(f"{inside},sha256={digest},{len(content)}\n")
    contents[f"{about}/RECORD"] = f"{''.join(lines)}{about}/RECORD,,\n".encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in contents.items():
            # Weights hardly shrink, and compressing them takes longer than all the rest.
            kind = zipfile.ZIP_STORED if inside.endswith(".safetensors") else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(inside, LONG_AGO), content, kind, compresslevel=1)
    return file


def package_files() -> list[Path]:
    """Return the files of the toolkit, in alphabetical order."""
    files = (one for one in PACKAGE.rglob("*") if one.suffix in SUFFIXES or one.name == "py.typed")
    return sorted(
        one
        for one in files
        if one.is_file() and not any(part.startswith((".", "__pycache__")) for part in one.relative_to(PACKAGE).parts)
    )
