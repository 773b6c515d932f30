"""The toolkit as a wheel, made of the files that are running, so that it can be installed without an index."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ...errors import ConfigurationError
from .requirements import TOOLKIT

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
