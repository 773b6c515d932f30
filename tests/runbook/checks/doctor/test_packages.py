"""Packages that do not fit together, and loaded ones that were replaced: tables of versions and requirements."""

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
"""What real packages require, shortened."""

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
"""What is installed otherwise, ``None`` where it is not, and the pairs that do not fit."""


def test_mismatch():
    """A requirement that is not met is named with both packages; extras count only where their package is there."""
    for changes, pairs in PAIRS:
        installed = {name: version for name, version in {**GOOD, **changes}.items() if version is not None}
        needed = {name: texts for name, texts in NEEDED.items() if name in installed}
        found = [one for one in package_findings(installed, needed, {}) if one.status != OK]
        assert {one.name for one in found} == pairs, changes
        assert {one.status for one in found} <= {FAILED}, changes
        assert all("python -m pip install" in one.remedy for one in found), changes


def test_words_of_a_mismatch():
    """The finding says which version is needed, which is there, if any, and the command that installs one that fits."""
    (other,) = package_findings({**GOOD, "torch": "2.5.1"}, {"transformers": NEEDED["transformers"]}, {})
    (missing,) = package_findings({"openmed-nb": "0.1.0"}, {"openmed-nb": ["torch>=2.6"]}, {})

    assert other.evidence == "transformers 5.23.0 requires torch>=2.6, but torch 2.5.1 is installed"
    assert other.remedy == (
        'Install compatible versions, then restart the kernel: python -m pip install --upgrade transformers "torch>=2.6".'
    )
    assert missing.evidence == "openmed-nb 0.1.0 requires torch>=2.6, which is not installed"


def test_torch_is_named_by_its_release():
    """Where the newest torch may be without MPS, commands name the release that fits this Mac, unless another is needed."""
    for package, needed, installed, command in (
        ("transformers", "torch>=2.6", {}, '--upgrade transformers "torch==2.14.1"'),
        ("torchvision", "torch==2.13.0", {}, '--upgrade torchvision "torch==2.13.0"'),
        ("torch", "filelock>=3", {"torch": "2.14.1"}, '--upgrade torch==2.14.1 "filelock>=3"'),
        ("transformers", "numpy>2", {"torch": ""}, "--force-reinstall torch==2.14.1."),
        ("torch", ">", {"torch": "2.14.1"}, "--force-reinstall torch==2.14.1."),
    ):
        finding = package_findings(installed, {package: [needed]}, {}, "torch==2.14.1")[0]
        assert command in finding.remedy, finding


def test_unreadable_metadata():
    """Metadata that cannot be read is a warning that names the package, once, and no error."""
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


def test_replaced_while_loaded():
    """A package that was upgraded while it is loaded asks for a restart; what names a build does not count."""
    for installed, loaded, names in STALE:
        found = [one for one in package_findings(installed, {}, loaded) if one.remedy == "Restart the kernel."]
        assert [(one.name, one.status) for one in found] == [(name, WARNING) for name in names], (installed, loaded)


def test_all_is_well():
    """Where nothing is wrong, one finding says so."""
    assert [(one.name, one.status) for one in package_findings(GOOD, NEEDED, {"torch": "2.13.0"})] == [("packages", OK)]


def test_this_environment():
    """The packages of this environment are read without importing one, and torch is loaded in the installed version."""
    import torch

    before = set(sys.modules)
    installed, requirements, loaded = read_packages()

    assert installed["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert loaded["torch"] == torch.__version__
    assert set(requirements) <= set(CHECKED_PACKAGES)
    assert "numpy" in installed
    assert {name.partition(".")[0] for name in set(sys.modules) - before}.isdisjoint({"torchvision", "tensorflow"})


def test_damaged_files(tmp_path):
    """Packages whose files are gone or hold something else are read as unreadable, and no error is raised."""
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
    assert {one.status for one in package_findings(installed, requirements, {})} == {WARNING}
