"""Installed packages that do not fit together, and loaded ones that were replaced on the disk since."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING, Any

from ...display import FAILED, OK, WARNING, Finding

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# The packages whose requirements are looked at.
CHECKED = (
    *("openmed-nb", "torch", "torchvision", "torchaudio", "transformers", "accelerate", "tokenizers", "safetensors"),
    *("huggingface-hub", "ipywidgets", "jupyterlab-widgets"),
)

# The extras that are in use: every torch user has the "torch" extra of transformers, however it was installed.
EXTRAS = ("", "torch")

# What importlib.metadata raises for files that are damaged or gone; it differs between releases of Python.
UNREADABLE = (OSError, ValueError, KeyError, TypeError)

Versions = Mapping[str, str]  # By the normalized names of packages; empty if the files do not say.


def package_findings(
    installed: Versions, requirements: Mapping[str, Sequence[str]], loaded: Versions
) -> tuple[Finding, ...]:
    """Return what is wrong with packages, or one finding that nothing is; pure.

    Args:
        installed: The version of each package on the disk.
        requirements: What each package requires, as its metadata has it.
        loaded: The version that each imported package says it has.
    """
    found = [_unreadable(name) for name, version in installed.items() if not version]
    found += [
        finding
        for package, texts in requirements.items()
        for text in texts
        if (finding := _unmet(package, text, installed))
    ]
    for name, here in loaded.items():
        there = installed.get(name)
        if there and here.partition("+")[0] != there.partition("+")[0]:
            evidence = f"{name} {here} is loaded, and {there} is installed"
            found.append(Finding(name, WARNING, evidence, "Restart the kernel."))
    return tuple(dict.fromkeys(found)) or (Finding("packages", OK, f"{len(requirements)} packages fit together"),)


def _unmet(package: str, text: str, installed: Versions) -> Finding | None:
    """Return what is wrong with one requirement of a package; ``None`` if it is met or does not count."""
    required = _parsed(text)
    if required is None:
        return _unreadable(package)
    # A requirement counts on this system, in this Python, with the extras in use.
    if required.marker and not any(required.marker.evaluate({"extra": extra}) for extra in EXTRAS):
        return None
    name, wanted = _normal(required.name), f"{required.name}{required.specifier}"
    version = installed.get(name)
    if version is None and not (required.marker and "extra" in str(required.marker)):
        problem = "which is not installed"
    elif version and not _meets(required, version):
        problem = f"and {name} {version} is installed"
    else:
        return None
    command = f'python -m pip install --upgrade {package} "{wanted}"'
    remedy = f"Install versions that fit, then restart the kernel: {command}."
    evidence = f"{package} {installed.get(package, '')} needs {wanted}, {problem}"
    return Finding(f"{package} and {name}", FAILED, evidence, remedy)


def _meets(required: Requirement, version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return required.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True  # Whoever built it under such a version knows better than its number.


def _unreadable(package: str) -> Finding:
    remedy = f"Reinstall it: python -m pip install --force-reinstall {package}."
    return Finding(package, WARNING, f"the metadata of {package} cannot be read", remedy)


def _normal(name: str) -> str:
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def _parsed(text: str) -> Requirement | None:
    """Return a requirement; ``None`` if it cannot be read."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def find_distribution(name: str) -> Any:
    """Return an installed ``importlib.metadata.Distribution``; ``None`` if it is not installed."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def read_packages(
    find: Callable[[str], Any] = find_distribution,
) -> tuple[Versions, Mapping[str, Sequence[str]], Versions]:
    """Return the installed versions, what the installed packages of ``CHECKED`` require, and the loaded versions."""
    found = {name: one for name in CHECKED if (one := find(name)) is not None}
    requirements = {name: _requirements(one) for name, one in found.items()}
    named = {_normal(one.name) for texts in requirements.values() for one in map(_parsed, texts) if one}
    others = {name: one for name in sorted(named - found.keys()) if (one := find(name)) is not None}
    installed = {name: _version(one) for name, one in (found | others).items()}
    versions = {name: getattr(sys.modules.get(name.replace("-", "_")), "__version__", None) for name in found}
    return installed, requirements, {name: str(version) for name, version in versions.items() if version}


def _version(found: Any) -> str:
    try:
        return str(found.metadata.get("Version") or "")  # Not by index, which may warn or raise, by the Python.
    except UNREADABLE:
        return ""


def _requirements(found: Any) -> tuple[str, ...]:
    try:
        return tuple(found.requires or ())
    except UNREADABLE:
        return ()
