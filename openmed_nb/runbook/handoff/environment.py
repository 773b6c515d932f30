"""The pinned packages of a bundle, and the wheel of this package."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigurationError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


TOOLKIT = "openmed-nb"

PLATFORM = ("sys_platform", "platform_system", "platform_machine", "os_name")
"""What a marker names that makes a package one of some computers only."""


@dataclass(frozen=True)
class Installed:
    """An installed package.

    Attributes:
        version: Its version.
        requires: What it requires, as its metadata has it.
    """

    version: str
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pin:
    """A package in the version that is installed.

    Attributes:
        name: Its normalized name.
        version: Its version, without what names a build, such as ``+cpu``, which other computers do not have.
        build: The version with its build.
        marker: On which computers it is needed; empty for all.
    """

    name: str
    version: str
    build: str
    marker: str = ""

    def __str__(self) -> str:
        line = f"{self.name}=={self.version}"
        return f"{line} ; {self.marker}" if self.marker else line


Find = Callable[[str], "Installed | None"]


def find_installed(name: str) -> Installed | None:
    """Return an installed package, ``None`` where it is not.

    Example:
        >>> find_installed("no-such-package")
    """
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return Installed(found.version, tuple(found.requires or ()))


@dataclass
class Closure:
    """All that a package needs, found by following what each one requires.

    Attributes:
        find: Returns an installed package.
        markers: For each package that was found, on which computers it is needed; an empty marker is all of them.
    """

    find: Find
    markers: dict[str, set[str]] = field(default_factory=dict)
    seen: set[tuple[str, str, str]] = field(default_factory=set)

    def follow(self, name: str, extras: Iterable[str] = (), marker: str = "") -> None:
        """Add what a package needs.

        Args:
            name: The package.
            extras: Which of its extras are needed.
            marker: On which computers it is needed.

        Raises:
            ConfigurationError: Where something that it needs is not installed.
        """
        found = self.installed(name)
        for extra in ("", *extras):
            if (name, extra, marker) in self.seen:
                continue
            self.seen.add((name, extra, marker))
            for required in needed(found.requires, extra):
                below, own = normal(required.name), marker or platform_marker(required)
                self.markers.setdefault(below, set()).add(own)
                self.follow(below, sorted(required.extras), own)

    def installed(self, name: str) -> Installed:
        """Return a package.

        Raises:
            ConfigurationError: Where it is not installed.
        """
        found = self.find(name)
        if found is None:
            what = f"{name} is needed and not installed, so the environment cannot be locked."
            raise ConfigurationError(what, f"Install it: python -m pip install {name}.")
        return found


def lock(package: str = TOOLKIT, find: Find = find_installed) -> tuple[Pin, ...]:
    """Return every package that a package needs, without itself, in alphabetical order.

    Args:
        package: The package.
        find: Returns an installed package, ``None`` where it is not.

    Raises:
        ConfigurationError: Where one is not installed.

    Example:
        >>> there = {"a": Installed("1", ("B>=1", "c; sys_platform == 'win32'")), "b": Installed("2.0+cpu")}
        >>> [str(pin) for pin in lock("a", there.get)]
        ['b==2.0']
    """
    closure = Closure(find)
    closure.follow(package)
    return tuple(_pin(name, closure) for name in sorted(closure.markers) if name != package)


def needed(requires: Iterable[str], extra: str) -> Iterator[Requirement]:
    """Yield what is required here, with an extra or, where that is empty, without any."""
    from packaging.requirements import Requirement

    for text in requires:
        required = Requirement(text)
        if required.marker is None:
            if not extra:
                yield required
        elif required.marker.evaluate({"extra": extra}) and bool(extra) == ("extra" in str(required.marker)):
            yield required


def platform_marker(required: Requirement) -> str:
    """Return a marker that is about computers, empty where there is none."""
    marker = str(required.marker or "")
    return marker if any(name in marker for name in PLATFORM) and "extra" not in marker else ""


def normal(name: str) -> str:
    """Return the normalized name of a package."""
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def requirements_text(pins: Iterable[Pin], about: str) -> str:
    """Return a requirements file.

    Args:
        pins: The packages.
        about: What it was locked on.
    """
    lines = (f"{pin}  # {pin.build} here" if pin.build != pin.version else str(pin) for pin in pins)
    return "\n".join([f"# The environment of this bundle, locked on {about}.", *lines, ""])


def unmet(text: str, versions: Callable[[str], str | None]) -> Mapping[str, tuple[str, str | None]]:
    """Return which lines of a requirements file are not met: for each package the version that is wanted and the one that is there.

    Args:
        text: The file.
        versions: Returns the version of an installed package, ``None`` where it is not.

    Raises:
        ConfigurationError: For a line that names no package, such as ``-r other.txt``.

    Example:
        >>> unmet("torch==2.13.0  # 2.13.0+cpu here", {"torch": "2.13.0+cu130"}.get), unmet("a==1", {}.get)
        ({}, {'a': ('1', None)})
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


def _pin(name: str, closure: Closure) -> Pin:
    build, markers = closure.installed(name).version, closure.markers[name]
    joined = "" if "" in markers else " or ".join(f"({one})" if len(markers) > 1 else one for one in sorted(markers))
    return Pin(name, build.partition("+")[0], build, joined)


PACKAGE = Path(__file__).parents[2]
"""The folder of the toolkit."""

SUFFIXES = (".py", ".json", ".txt", ".md", ".safetensors", ".typed")
"""What a package of ours is made of; anything else in its folder is not ours."""

WHEEL = "Wheel-Version: 1.0\nGenerator: openmed_nb\nRoot-Is-Purelib: true\nTag: py3-none-any\n"

LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The time of every file, so that the same files give the same wheel."""


def write_wheel(folder: Path) -> Path:
    """Write the wheel of the toolkit into a folder, and return it.

    Raises:
        ConfigurationError: Where the toolkit is not installed, so that nobody knows what it needs.
        OSError: Where it cannot be written.
    """
    try:
        installed = importlib.metadata.distribution(TOOLKIT)
    except importlib.metadata.PackageNotFoundError as error:
        what = "openmed_nb is not installed, so what it needs is not known."
        raise ConfigurationError(what, "Install it: python -m pip install openmed-nb.") from error
    name = f"{TOOLKIT.replace('-', '_')}-{installed.version}"
    file, contents = folder / f"{name}-py3-none-any.whl", {}
    contents.update(
        {f"{PACKAGE.name}/{one.relative_to(PACKAGE).as_posix()}": one.read_bytes() for one in package_files()}
    )
    contents.update({f"{name}.dist-info/{inside}": text for inside, text in metadata_files(installed)})
    contents[f"{name}.dist-info/RECORD"] = record(contents, f"{name}.dist-info/RECORD").encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, content in contents.items():
            archive.writestr(zipfile.ZipInfo(inside, LONG_AGO), content, zipfile.ZIP_DEFLATED, compresslevel=1)
    return file


def package_files() -> list[Path]:
    """Return the files of the toolkit, in alphabetical order.

    Example:
        >>> "errors.py" in [file.name for file in package_files()]
        True
    """
    files = (one for one in PACKAGE.rglob("*") if one.suffix in SUFFIXES or one.name == "py.typed")
    return sorted(
        one
        for one in files
        if one.is_file() and not any(part.startswith((".", "__pycache__")) for part in one.relative_to(PACKAGE).parts)
    )


def metadata_files(installed: importlib.metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield what a wheel says of itself: what the installed package says, its licences included."""
    yield "METADATA", (installed.read_text("METADATA") or "").encode()
    yield "WHEEL", WHEEL.encode()
    for file in installed.files or ():
        if "licenses" in file.parts and file.parts[0].endswith(".dist-info"):
            yield "/".join(file.parts[1:]), Path(str(file.locate())).read_bytes()


def record(contents: dict[str, bytes], name: str) -> str:
    r"""Return the list of files with their checksums that a wheel must have (PyPA, "Recording installed projects").

    Example:
        >>> record({"a.py": b""}, "a.dist-info/RECORD")
        'a.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\na.dist-info/RECORD,,\n'
    """
    lines = [f"{inside},sha256={_digest(content)},{len(content)}" for inside, content in contents.items()]
    return "\n".join([*lines, f"{name},,", ""])


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
