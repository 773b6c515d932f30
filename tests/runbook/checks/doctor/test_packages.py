"""Checks of incompatible packages, and of imported packages that were replaced."""

import sys
from importlib.metadata import Distribution

from openmed_nb._render.display import FAILED, OK, WARNING
from openmed_nb.runbook.checks.doctor.checks import CHECKED_PACKAGES, package_findings, read_packages

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

PAIRS = [
    ({"torch": "2.5.1"}, {"openmed-nb and torch", "torchvision and torch", "transformers and torch"}),
    (
        {"torch": "1.13.1"},
        {f"{name} and torch" for name in ("openmed-nb", "torchvision", "transformers", "accelerate")},
    ),
    ({"torch": "2.12.0"}, {"torchvision and torch"}),
    ({"torch": "2.14.0.dev20260710"}, {"torchvision and torch"}),
    ({"torch": "2.13.0"}, set()),
    ({"torch": "local-build"}, set()),
    ({"tokenizers": "0.24.0"}, {"transformers and tokenizers"}),
    ({"accelerate": "0.34.0"}, {"transformers and accelerate"}),
    ({"transformers": "4.57.0"}, {"openmed-nb and transformers"}),
    ({"jupyterlab-widgets": "1.1.11"}, {"ipywidgets and jupyterlab-widgets"}),
    ({"accelerate": None}, set()),
    ({"tokenizers": None}, {"transformers and tokenizers"}),
    ({"torchvision": None}, set()),
]
"""Changed versions, ``None`` for a missing package, and the incompatible pairs."""


def test_unmet_requirement_names_both_packages():
    for changes, pairs in PAIRS:
        installed = {name: version for name, version in {**GOOD, **changes}.items() if version is not None}
        needed = {name: texts for name, texts in NEEDED.items() if name in installed}
        problems = [finding for finding in package_findings(installed, needed, {}) if finding.status != OK]
        assert {finding.name for finding in problems} == pairs, changes
        assert {finding.status for finding in problems} <= {FAILED}, changes
        assert all("python -m pip install" in finding.remedy for finding in problems), changes


def test_unmet_requirement_has_evidence_and_command():
    (other,) = package_findings({**GOOD, "torch": "2.5.1"}, {"transformers": NEEDED["transformers"]}, {})
    (missing,) = package_findings({"openmed-nb": "0.1.0"}, {"openmed-nb": ["torch>=2.6"]}, {})

    assert other.evidence == "transformers 5.23.0 requires torch>=2.6, but torch 2.5.1 is installed"
    assert other.remedy == (
        'Install compatible versions, then restart the kernel: python -m pip install --upgrade transformers "torch>=2.6".'
    )
    assert missing.evidence == "openmed-nb 0.1.0 requires torch>=2.6, which is not installed"


def test_remedy_pins_torch_release():
    """The newest torch may not support MPS on this Mac, so remedies pin the release unless another one is required."""
    for package, needed, installed, command in (
        ("transformers", "torch>=2.6", {}, '--upgrade transformers "torch==2.14.1"'),
        ("torchvision", "torch==2.13.0", {}, '--upgrade torchvision "torch==2.13.0"'),
        ("torch", "filelock>=3", {"torch": "2.14.1"}, '--upgrade torch==2.14.1 "filelock>=3"'),
        ("transformers", "numpy>2", {"torch": ""}, "--force-reinstall torch==2.14.1."),
        ("torch", ">", {"torch": "2.14.1"}, "--force-reinstall torch==2.14.1."),
    ):
        finding = package_findings(installed, {package: [needed]}, {}, "torch==2.14.1")[0]
        assert command in finding.remedy, finding


def test_unreadable_metadata_is_one_warning():
    for torch, needed in (("", ["torch>=2"]), ("2.13.0", ["torch >> 2"]), ("2.13.0", ["\x00", ">", ""])):
        installed = {"torch": torch, "accelerate": "1.15.0"}
        (finding,) = package_findings(installed, {"accelerate": needed}, {})
        assert finding.status == WARNING, needed
        assert "cannot be read" in finding.evidence, needed


STALE = [
    ({"torch": "2.14.0"}, {"torch": "2.13.0+cpu"}, ["torch"]),
    ({"torch": "2.13.0"}, {"torch": "2.13.0+cpu"}, []),
    ({"torch": "2.13.0"}, {}, []),
    ({}, {"torch": "2.13.0"}, []),
    ({"torch": ""}, {"torch": "2.13.0"}, []),
]


def test_upgraded_package_requires_restart():
    for installed, loaded, names in STALE:
        findings = package_findings(installed, {}, loaded)
        stale = [finding for finding in findings if finding.remedy == "Restart the kernel."]
        assert [(finding.name, finding.status) for finding in stale] == [(name, WARNING) for name in names], (
            installed,
            loaded,
        )


def test_compatible_packages_are_ok():
    assert [(finding.name, finding.status) for finding in package_findings(GOOD, NEEDED, {"torch": "2.13.0"})] == [
        ("packages", OK)
    ]


def test_read_packages_imports_nothing():
    import torch

    before = set(sys.modules)
    installed, requirements, loaded = read_packages()

    assert installed["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert loaded["torch"] == torch.__version__
    assert set(requirements) <= set(CHECKED_PACKAGES)
    assert "numpy" in installed
    assert {name.partition(".")[0] for name in set(sys.modules) - before}.isdisjoint({"torchvision", "tensorflow"})


def test_damaged_metadata_files_warn(tmp_path):
    contents = {"torch": None, "transformers": b"\xff\xfe", "accelerate": b"Name: accelerate\n", "torchvision": b""}
    for name, content in contents.items():
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        if content is not None:
            (folder / "METADATA").write_bytes(content)

    installed, requirements, _ = read_packages(
        lambda name: Distribution.at(tmp_path / f"{name}-1.0.dist-info") if name in contents else None
    )

    assert installed == dict.fromkeys(contents, "")
    assert {finding.status for finding in package_findings(installed, requirements, {})} == {WARNING}
