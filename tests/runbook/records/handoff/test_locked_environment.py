"""The locked environment and the wheel of a bundle."""

import importlib.metadata
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import openmed_nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.handoff.bundle import lock, requirements_text, write_wheel
from openmed_nb.runbook.records.handoff.smoke import unmet

LINUX = "sys_platform == 'linux' or sys_platform == 'darwin' or sys_platform == 'win32'"

CLOSURES = {
    "what it needs": ({"a": ("b", "c"), "b": (), "c": ("d",), "d": ()}, ["b==1", "c==1", "d==1"]),
    "nothing": ({"a": ()}, []),
    "a circle": ({"a": ("b",), "b": ("a", "c"), "c": ("b",)}, ["b==1", "c==1"]),
    "extras that nobody asks for": ({"a": ("b ; extra == 'more'",), "b": ()}, []),
    "extras that are asked for": ({"a": ("b[more]",), "b": ("c ; extra == 'more'",), "c": ()}, ["b==1", "c==1"]),
    "other computers": ({"a": ("b ; sys_platform == 'nowhere'",)}, []),
    "some computers": (
        {"a": (f"b ; {LINUX}",), "b": ("c",), "c": ()},
        [f"{name}==1 ; {LINUX}".replace("'", '"') for name in "bc"],
    ),
    "some computers and all": ({"a": (f"b ; {LINUX}", "c"), "b": (), "c": ("b",)}, ["b==1", "c==1"]),
    "another spelling": ({"a": ("B.c_d>=1",), "b-c-d": ()}, ["b-c-d==1"]),
}


@pytest.mark.parametrize(("packages", "pins"), CLOSURES.values(), ids=CLOSURES)
def test_everything_that_is_needed_is_pinned(packages, pins):
    """The lock has every package that is needed here, once, with the marker of those that only some computers need."""
    there = {name: SimpleNamespace(version="1", requires=requires) for name, requires in packages.items()}

    assert [str(pin) for pin in lock("a", there.get)] == pins


def test_a_package_that_is_missing_is_named():
    """An environment with a hole is not locked."""
    with pytest.raises(ConfigurationError, match="b is needed and not installed"):
        lock("a", {"a": SimpleNamespace(version="1", requires=["b"])}.get)


def test_the_environment_of_the_toolkit():
    """The lock of this environment has every direct requirement in its installed version, no build, and not the toolkit."""
    pins = {pin.name: pin for pin in lock()}
    direct = [Requirement(text) for text in importlib.metadata.requires("openmed-nb")]

    assert {one.name.lower() for one in direct if one.marker is None} <= pins.keys()
    assert "openmed-nb" not in pins
    assert pins["torch"].build == importlib.metadata.version("torch")
    assert not [pin for pin in pins.values() if "+" in pin.version]
    assert unmet(requirements_text(pins.values(), "this"), importlib.metadata.version) == {}


def test_what_is_not_met_is_told():
    """Another version and a package that is missing are told; another build, and what this computer does not need, are not."""
    text = "# locked\na==1\nb==2  # 2+cpu here\nc==3\nd==4 ; sys_platform == 'nowhere'\n"

    assert unmet(text, {"a": "1.1", "b": "2+cu130"}.get) == {"a": ("1", "1.1"), "c": ("3", None)}


def test_a_line_that_names_no_package():
    """A line that names another file is one clear error."""
    with pytest.raises(ConfigurationError, match="names no package"):
        unmet("a==1\n-r other.txt\n", {}.get)


def test_the_wheel_has_what_is_running(tmp_path):
    """The wheel has every file of the running package with its checksum, metadata and licences, and is the same each time."""
    first = write_wheel(tmp_path)
    content = first.read_bytes()
    with zipfile.ZipFile(first) as archive:
        names = archive.namelist()
        record = archive.read(f"openmed_nb-{openmed_nb.__version__}.dist-info/RECORD").decode()
        metadata = archive.read(f"openmed_nb-{openmed_nb.__version__}.dist-info/METADATA").decode()

    assert first.name == f"openmed_nb-{openmed_nb.__version__}-py3-none-any.whl"
    package = Path(openmed_nb.__file__).parent
    files = {one.relative_to(package.parent).as_posix() for one in package.rglob("*") if one.is_file()}
    assert {one for one in names if one.startswith("openmed_nb/")} == {one for one in files if not one.endswith(".pyc")}
    assert [line.split(",")[0] for line in record.splitlines()] == names
    assert "Name: openmed-nb" in metadata
    assert [name for name in names if name.endswith("LICENSE")]
    assert write_wheel(tmp_path).read_bytes() == content
