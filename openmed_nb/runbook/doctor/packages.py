"""Installed packages that do not fit together, and loaded ones that are no longer those that are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...display import FAILED, OK, WARNING, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

CHECKED = (
    *("openmed-nb", "torch", "torchvision", "torchaudio", "transformers", "accelerate", "tokenizers", "safetensors"),
    *("huggingface-hub", "ipywidgets", "jupyterlab-widgets"),
)
"""The packages whose requirements are looked at."""

EXTRAS = ("", "torch")
"""The extras that are in use: the "torch" extra of transformers is what a torch user has, however it was installed."""

UNREADABLE = (OSError, ValueError, KeyError, TypeError)
"""What ``importlib.metadata`` raises for files that are damaged or gone, which differs between releases of Python."""

Installed = Mapping[str, str]
"""Versions by the normalized names of packages; an empty version where the files do not say."""


def mismatches(installed: Installed, requirements: Mapping[str, Sequence[str]]) -> tuple[Finding, ...]:
    """Return what does not fit together among installed packages; pure.

    Args:
        installed: The version of each package.
        requirements: What each package requires, as its metadata has it.

    Example:
        >>> installed = {"torch": "2.13.0+cpu", "torchvision": "0.21.0"}
        >>> for finding in mismatches(installed, {"torchvision": ["torch==2.6.0", "numpy; extra == 'speed'"]}):
        ...     print(finding.status, finding.evidence)
        failed torchvision 0.21.0 needs torch==2.6.0, and torch 2.13.0+cpu is installed
    """
    unread = tuple(_unreadable(name) for name, version in installed.items() if not version)
    found = (_checked(package, text, installed) for package, texts in requirements.items() for text in texts)
    return tuple(dict.fromkeys((*unread, *(finding for finding in found if finding))))


def stale(installed: Installed, loaded: Installed) -> tuple[Finding, ...]:
    """Return which loaded packages were replaced on the disk since; pure.

    Args:
        installed: The version of each package on the disk.
        loaded: The version that each imported package says it has.

    Example:
        >>> stale({"torch": "2.14.0"}, {"torch": "2.13.0+cpu"})[0].remedy
        'Restart the kernel.'
        >>> stale({"torch": "2.13.0"}, {"torch": "2.13.0+cpu"})
        ()
    """
    both = [(name, loaded[name], installed[name]) for name in loaded if installed.get(name)]
    return tuple(
        Finding(name, WARNING, f"{name} {here} is loaded, and {there} is installed", "Restart the kernel.")
        for name, here, there in both
        if here.partition("+")[0] != there.partition("+")[0]
    )


def package_findings(
    installed: Installed, requirements: Mapping[str, Sequence[str]], loaded: Installed
) -> tuple[Finding, ...]:
    """Return what is wrong with packages, or one finding that nothing is."""
    wrong = (*mismatches(installed, requirements), *stale(installed, loaded))
    return wrong or (Finding("packages", OK, f"{len(requirements)} packages fit together"),)


def distribution_of(name: str) -> Any:
    """Return what is known of an installed package, ``None`` where it is not installed."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def read_packages(
    find: Callable[[str], Any] = distribution_of,
) -> tuple[Installed, Mapping[str, Sequence[str]], Installed]:
    """Return the versions of packages, what those of ``CHECKED`` that are installed require, and the loaded versions.

    Args:
        find: Returns the ``importlib.metadata.Distribution`` of a package, ``None`` where it is not installed.

    Example:
        >>> installed, requirements, loaded = read_packages()
        >>> "torch" in installed, "transformers" in requirements
        (True, True)
    """
    found = {name: one for name in CHECKED if (one := find(name)) is not None}
    requirements = {name: _requirements(one) for name, one in found.items()}
    named = {_normal(one.name) for texts in requirements.values() for one in map(_parsed, texts) if one}
    others = {name: one for name in sorted(named - found.keys()) if (one := find(name)) is not None}
    installed = {name: _version(one) for name, one in (found | others).items()}
    modules = ((name, sys.modules.get(name.replace("-", "_"))) for name in found)
    said = ((name, getattr(module, "__version__", None)) for name, module in modules)
    return installed, requirements, {name: str(version) for name, version in said if version}


def _checked(package: str, text: str, installed: Installed) -> Finding | None:
    """Return what is wrong with one requirement of a package, ``None`` where it is met or does not count."""
    required = _parsed(text)
    if required is None:
        return _unreadable(package)
    if not _counts(required):
        return None
    name = _normal(required.name)
    version = installed.get(name)
    if version is None:
        return None if required.marker and "extra" in str(required.marker) else _missing(package, required, installed)
    if not version or _meets(required, version):
        return None
    evidence = f"{package} {installed.get(package, '')} needs {_shown(required)}, and {name} {version} is installed"
    return Finding(f"{package} and {name}", FAILED, evidence, _remedy(package, required))


def _counts(required: Requirement) -> bool:
    """Tell whether a requirement is one of this system, this Python and the extras in use."""
    return required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in EXTRAS)


def _meets(required: Requirement, version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return required.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # Whoever built it under such a version knows better than its number.


def _missing(package: str, required: Requirement, installed: Installed) -> Finding:
    evidence = f"{package} {installed.get(package, '')} needs {_shown(required)}, which is not installed"
    return Finding(f"{package} and {_normal(required.name)}", FAILED, evidence, _remedy(package, required))


def _remedy(package: str, required: Requirement) -> str:
    command = f'python -m pip install --upgrade {package} "{_shown(required)}"'
    return f"Install versions that fit, then restart the kernel: {command}."


def _unreadable(package: str) -> Finding:
    remedy = f"Reinstall it: python -m pip install --force-reinstall {package}."
    return Finding(package, WARNING, f"the metadata of {package} cannot be read", remedy)


def _shown(required: Requirement) -> str:
    return f"{required.name}{required.specifier}"


def _normal(name: str) -> str:
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def _parsed(text: str) -> Requirement | None:
    """Return a requirement, ``None`` where it cannot be read."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def _version(distribution: Any) -> str:
    """Return the version that a package's files say, empty where they are damaged or gone."""
    try:
        return str(distribution.metadata.get("Version") or "")  # Not by index, which may warn or raise, by the Python.
    except UNREADABLE:
        return ""


def _requirements(distribution: Any) -> tuple[str, ...]:
    try:
        return tuple(distribution.requires or ())
    except UNREADABLE:
        return ()
