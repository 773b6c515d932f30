"""The generated pages: every public name, magic, variable, error and symptom, without Sphinx."""

import ast
import doctest
import json
import re

import pytest

import openmed_nb as nb
import reference_pages
import source_calls
from helpers import ROOT
from helpers.public_api import LOADER, PUBLIC
from openmed_nb.runbook.verdict.rules import SYMPTOMS


@pytest.fixture(scope="module")
def pages():
    """All generated pages."""
    return reference_pages.all_pages()


def documented_names(pages):
    """Return the qualified names of all objects that autodoc documents, and of constants."""
    text = "\n".join(pages.values())
    names = set(re.findall(r"\.\. auto(?:function|class|exception):: (\S+)", text))
    constants = re.findall(r"\.\. currentmodule:: (\S+)\n\n\.\. py:data:: (\S+)", text)
    return names | {f"{module}.{name}" for module, name in constants}


def stub_names(stub):
    """Return the public names of a stub, without modules, which have an index of their own names."""
    namespace = ".".join(stub.relative_to(ROOT).parent.parts)
    for statement in ast.parse(stub.read_text("utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and statement.level and statement.module:
            yield from (f"{namespace}.{alias.asname}" for alias in statement.names)


def test_reference_has_every_public_name(pages):
    """Each name of the stubs, of the namespaces and of the errors is documented, a class under one of its names."""
    documented = documented_names(pages)
    objects = {id(getattr_path(name)) for name in documented}
    stubs = [ROOT / "openmed_nb" / folder / "__init__.pyi" for folder in ("", "training", "runbook")]
    public = [name for stub in stubs for name in stub_names(stub)]
    public += [f"openmed_nb.{name}" for name in (*PUBLIC, *LOADER)]
    public += [f"openmed_nb.errors.{name}" for name in reference_pages.error_classes()]

    assert len(public) > 100
    assert [
        name
        for name in public
        if name not in documented and not (isinstance(getattr_path(name), type) and id(getattr_path(name)) in objects)
    ] == []


def getattr_path(qualified):
    """Return the value of a qualified name of the package."""
    value = nb
    for part in qualified.split(".")[1:]:
        value = getattr(value, part, None)
    return value


@pytest.mark.parametrize("name", sorted(reference_pages.repository_pages()))
def test_page_of_the_repository_is_current(pages, name):
    """``python docs/_ext/reference_pages.py`` changes nothing."""
    assert (ROOT / "docs" / name).read_text("utf-8") == pages[name]


def test_results_of_public_functions_have_pages(pages):
    """A class that a public function returns has a page, although it is not a public name."""
    assert {"reference/api/openmed_nb.annotation.results.Annotations-class.rst"} <= set(pages)
    assert "filter" in pages["reference/api/openmed_nb.annotation.results.Annotations-class.rst"]


def test_every_magic_has_a_page_with_its_help(pages):
    for name in reference_pages.magic_functions():
        assert "--help" in pages[f"reference/magics/{name}.md"]
        assert f"%{name}" in pages["reference/magics/index.md"]
    assert "pictures/device_dark.png" in pages["reference/magics/openmed_device.md"]


def test_every_command_has_its_help(pages):
    page = pages["reference/command_line.md"]

    assert re.findall(r"^## `(.*)`$", page, flags=re.MULTILINE) == [
        "python -m openmed_nb",
        "python -m openmed_nb doctor",
        "python -m openmed_nb report",
        "python -m openmed_nb bring-up",
    ]
    assert page.count("--help") >= 3


def test_every_variable_is_described(pages):
    """Each environment variable of the package has a comment, which is its description."""
    variables = reference_pages.package_variables()

    assert {"OPENMED_TORCH_DEVICE", "OPENMED_DEVICE", "PYTORCH_ENABLE_MPS_FALLBACK"} <= set(variables)
    assert [name for name, description in variables.items() if len(description.split()) < 4] == []
    assert all(f"### {name}\n" in pages["reference/environment_variables.md"] for name in variables)


def test_errors_have_their_messages_and_remedies(pages):

    assert "| message | remedy |" in pages["reference/errors/DeviceUnavailableError.md"]
    assert sum(page.count("\n| ") for name, page in pages.items() if "ConfigurationError" in name) > 150


def test_every_symptom_is_a_heading(pages):
    page = pages["troubleshooting/index.md"]
    topics = re.findall(r"^## (.*)$", page, flags=re.MULTILINE)
    headings = re.findall(r"^### (.*)$", page, flags=re.MULTILINE)

    assert [topic.lower() for topic in topics] == list(dict.fromkeys(row.topic for row in SYMPTOMS))
    assert [heading.lower() for heading in headings] == [row.symptom.lower() for row in SYMPTOMS]
    assert {"MPS or CUDA out of memory", "float64 is not supported", "Low GPU utilization"} <= set(headings)


def test_resume_file_is_described_with_its_fields(pages, tmp_path):
    """The page names each field of a line that a run writes, and starts with the purpose of the file."""
    section = pages["reference/files/index.md"].partition("## Resume file\n")[2].partition("\n## ")[0]
    nb.annotate(["Seen for asthma.", None], "bundled_small", resume=tmp_path / "run.jsonl", progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text("utf-8").splitlines()[1:]]

    assert section.strip().startswith("A resume file stores the results of a run")
    assert {field for line in lines for field in line} <= set(
        re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE)
    )
    assert '"word": "asthma"' in section


def test_front_ends_name_existing_tests():
    """Each test that the table of front ends names is in its file."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "front_ends.md").read_text("utf-8"))

    assert len(named) > 5
    assert [(path, name) for path, name in named if f"def {name}(" not in (ROOT / path).read_text("utf-8")] == []


@pytest.mark.parametrize("module", [source_calls, reference_pages])
def test_examples_of_the_extension(module):
    assert doctest.testmod(module).failed == 0
