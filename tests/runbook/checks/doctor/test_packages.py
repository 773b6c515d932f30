"""Checks of incompatible packages, and of imported packages that were replaced."""

import sys
from email.message import Message
from importlib.metadata import Distribution
from types import SimpleNamespace

import pytest
import torch

from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.runbook.checks.doctor_checks import package_findings

GOOD = {
    "openmed-nb": "0.1.0",
    "torch": "2.13.0+cu130",
    "torchvision": "0.28.0+cu130",
    "transformers": "5.23.0",
    "accelerate": "1.15.0",
    "tokenizers": "0.23.3",
    "huggingface-hub": "2.4.0",
    "ipywidgets": "8.1.9",
    "jupyterlab-widgets": "3.0.17",
}
NEEDED = {
    "openmed-nb": ("torch>=2.6", "transformers>=5", "ipywidgets>=7.7"),
    "torchvision": ("torch==2.13.0", "scipy; extra == 'scipy'"),
    "transformers": (
        "tokenizers<0.24.0,>=0.23.1",
        "huggingface_hub<3.0,>=1.31.0",
        'torch>=2.6; extra == "torch"',
        'accelerate>=1.1.0; extra == "torch"',
        'torch<2; extra == "old"',
        'torch<1; python_version < "3"',
    ),
    "accelerate": ("torch>=2.0.0",),
    "ipywidgets": ("jupyterlab_widgets~=3.0.17",),
}
"""Selected requirements of real packages."""


def make_distribution(version, requirements=()):
    """Return the metadata of an installed package, without a version if it is empty."""
    metadata = Message()
    if version:
        metadata["Version"] = version
    return SimpleNamespace(metadata=metadata, requires=requirements)


def find_problems(versions, requirements=NEEDED, loaded=None, **options):
    """Return the findings about packages with these versions, ``None`` for a missing package."""
    installed = {
        name: make_distribution(version, requirements.get(name, ()))
        for name, version in versions.items()
        if version is not None
    }
    modules = {name: SimpleNamespace(__version__=version) for name, version in (loaded or {}).items()}
    return package_findings(find=installed.get, modules=modules, **options)


@pytest.mark.parametrize(
    ("changes", "dependents"),
    [
        ({"torch": "2.5.1"}, "openmed-nb torchvision transformers"),
        ({"torch": "2.14.0.dev20260710"}, "torchvision"),
        ({"torch": "2.13.0"}, ""),
        ({"tokenizers": "0.24.0"}, "transformers"),
        ({"tokenizers": None}, "transformers"),
    ],
)
def test_unmet_requirement_names_both_packages(changes, dependents):
    problems = [finding for finding in find_problems(GOOD | changes) if finding.status != OK]

    assert {finding.name for finding in problems} == {
        f"{name} and {next(iter(changes))}" for name in dependents.split()
    }
    assert {finding.status for finding in problems} <= {FAILED}
    assert all("python -m pip install" in finding.remedy for finding in problems)


def test_unmet_requirement_has_evidence_and_command():
    (other,) = find_problems({"transformers": "5.23.0", "torch": "2.5.1"}, {"transformers": ["torch>=2.6"]})
    (missing,) = find_problems({"openmed-nb": "0.1.0"}, {"openmed-nb": ["torch>=2.6"]})

    assert other.evidence == "transformers 5.23.0 requires torch>=2.6, but torch 2.5.1 is installed"
    assert other.remedy == (
        'Install compatible versions, then restart the kernel: python -m pip install --upgrade transformers "torch>=2.6".'
    )
    assert missing.evidence == "openmed-nb 0.1.0 requires torch>=2.6, which is not installed"


@pytest.mark.parametrize(
    ("package", "needed", "version", "command"),
    [
        ("transformers", "torch>=2.6", "5", '--upgrade transformers "torch==2.14.1"'),
        ("torchvision", "torch==2.13.0", "0.28", '--upgrade torchvision "torch==2.13.0"'),
        ("torch", "filelock>=3", "2.14.1", '--upgrade torch==2.14.1 "filelock>=3"'),
    ],
)
def test_remedy_pins_torch_release(package, needed, version, command):
    """The newest torch may not support MPS on this Mac, so remedies pin the release unless another one is required."""
    assert command in find_problems({package: version}, {package: [needed]}, torch="torch==2.14.1")[0].remedy


@pytest.mark.parametrize("needed", [["torch >> 2"], ["\x00", ">", ""]])
def test_unreadable_metadata_is_one_warning(needed):
    (finding,) = find_problems({"torch": "2.13.0", "accelerate": "1.15.0"}, {"accelerate": needed})

    assert finding.status == WARNING
    assert "cannot be read" in finding.evidence


@pytest.mark.parametrize(
    ("version", "loaded", "names"),
    [
        ("2.14.0", {"torch": "2.13.0+cpu"}, ["torch"]),
        ("2.13.0", {"torch": "2.13.0+cpu"}, []),
        ("2.13.0", {}, []),
    ],
)
def test_upgraded_package_requires_restart(version, loaded, names):
    findings = find_problems({"torch": version}, {}, loaded)
    stale = [finding for finding in findings if finding.remedy == "Restart the kernel."]

    assert [(finding.name, finding.status) for finding in stale] == [(name, WARNING) for name in names]


def test_package_check_imports_nothing():
    before = set(sys.modules)
    asked = []
    package_findings(find=lambda name: asked.append(name) or make_distribution(torch.__version__, ["numpy"]))

    assert {"torch", "numpy"} <= set(asked)
    assert {name.partition(".")[0] for name in set(sys.modules) - before}.isdisjoint({"torchvision", "tensorflow"})


def test_damaged_metadata_files_warn(tmp_path):
    contents = {"torch": None, "transformers": b"\xff\xfe", "accelerate": b"Name: accelerate\n", "torchvision": b""}
    folders = {name: tmp_path / f"{name}-1.0.dist-info" for name in contents}
    for name, content in contents.items():
        folders[name].mkdir()
        if content is not None:
            (folders[name] / "METADATA").write_bytes(content)

    findings = package_findings(find=lambda name: Distribution.at(folders[name]) if name in contents else None)
    assert {finding.name: finding.status for finding in findings} == dict.fromkeys(contents, WARNING)
