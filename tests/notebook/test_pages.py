"""Tests that the code in the README and the docs runs unchanged and that all links are valid."""

import ast
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import openmed_nb
from openmed_nb.notebook.magics import OpenMedMagics, parse_line, split_options

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", sorted((ROOT / "docs").glob("*.md"))
GUIDES = [path for folder in ("how_to", "explanation") for path in sorted((ROOT / "docs" / folder).glob("*.md"))]
DIRECTIVE_PATTERN = re.compile(r"^```\{[^\n]*\n.*?^```$", re.DOTALL | re.MULTILINE)
"""A directive of the documentation site, such as a table of contents."""

PAGES = {
    str(path.relative_to(ROOT)): DIRECTIVE_PATTERN.sub("", path.read_text("utf-8"))
    for path in (README, *DOCS, *GUIDES, ROOT / "CONTRIBUTING.md")
}
GENERATED = (ROOT / "docs" / "reference", ROOT / "docs" / "troubleshooting")
"""Folders of pages that are written when the site is built. ``test_site.py`` follows the links to them."""

CODE_FENCE_PATTERN = re.compile(r"^```(\w*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
"""Fenced block of code and its language. A block without a language is a notebook cell."""

EXPECTED_OUTPUT = {
    "README.md": ["", "[type 2 diabetes mellitus](DISEASE)"],
    "docs/index.md": ["Device: cpu", "[type 2 diabetes mellitus](DISEASE)", "", "3 diseases found"],
    "docs/magics.md": ["[asthma](DISEASE)", "", "[asthma](DISEASE)", ""],
    "docs/devices.md": ["SIMULATED", "Device: cpu"],
    "docs/panel.md": [""],
    "docs/is_it_right.md": ["computation"],
}
"""Expected text in the output of each cell, by page."""

PICTURE_PATTERN = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([\w/.]+)">'
    r'<img alt="([^"]{20,})" src="([\w/.]+)"></picture>'
)
MAX_IMAGE_BYTES = 2_000_000
"""Maximum size of an image or animation in bytes."""

parametrize_pages = pytest.mark.parametrize("page", PAGES)


def code_blocks(page, language):
    """Return the code blocks of a page in one language."""
    return [code for name, code in CODE_FENCE_PATTERN.findall(PAGES[page]) if name == language]


def code_spans(page):
    """Return the code spans in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", CODE_FENCE_PATTERN.sub("", PAGES[page]))


def test_all_pages_with_cells_are_executed():
    """Every page with notebook cells is in ``EXPECTED_OUTPUT``."""
    assert {page for page in PAGES if code_blocks(page, "")} == set(EXPECTED_OUTPUT)


@pytest.mark.parametrize("page", EXPECTED_OUTPUT)
def test_cells(page, kernel):
    """Each cell runs in a kernel without an error, and its output contains the expected text."""
    replies = [kernel.run(cell) for cell in code_blocks(page, "")]

    assert [reply.error[0] for reply in replies] == [""] * len(EXPECTED_OUTPUT[page])
    for reply, expected in zip(replies, EXPECTED_OUTPUT[page], strict=True):
        assert expected in reply.text


@parametrize_pages
def test_magic_lines_have_valid_options(page):
    """Each line of a magic, in prose and in cells, has valid options and arguments."""
    cells = [line for cell in code_blocks(page, "") for line in cell.splitlines()]
    for line in (
        cell for cell in (*code_spans(page), *cells) if cell.lstrip("%").startswith("openmed") and cell[0] == "%"
    ):
        name, _, rest = line.lstrip("%").partition(" ")
        magic = getattr(OpenMedMagics, name)
        parse_line(magic, split_options(magic.parser, rest)[0] if name == "openmed_ner" else rest)


def find_package_calls(page):
    """Return the calls of the package's functions that a page shows, in Python and in prose."""
    code_snippets = [span for span in code_spans(page) if span.startswith("nb.") and span.endswith(")")]
    trees = [ast.parse(code) for code in (*code_blocks(page, "python"), *code_snippets)]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in nodes if ast.unparse(node.func).startswith("nb.") and "(" not in ast.unparse(node.func)]


@parametrize_pages
def test_referenced_names_exist(page):
    """Every name that a page uses from the package is public, and every call matches the signature of its function."""
    names = set(re.findall(r"\bnb\.((?:training\.|runbook\.|compat\.|loader\.)*\w+)", PAGES[page]))

    assert all(pkgutil.resolve_name(f"openmed_nb.{name}") is not None for name in names)
    assert not {name.partition(".")[0] for name in names} - set(openmed_nb.__all__)
    for call in find_package_calls(page):
        function = pkgutil.resolve_name(f"openmed_nb.{ast.unparse(call.func).removeprefix('nb.')}")
        inspect.signature(function).bind_partial(
            *call.args, **{keyword.arg: keyword.value for keyword in call.keywords}
        )


def heading_anchors(path):
    """Return the anchors that GitHub generates for the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", CODE_FENCE_PATTERN.sub("", path.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@parametrize_pages
def test_links_lead_to_files_and_headings(page):
    """Every link and every path in a command leads to an existing file, and every anchor to a heading in it."""
    folder = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page].replace("\n", "")) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (folder / name).resolve() if name else ROOT / page
        if any(target.is_relative_to(generated) for generated in GENERATED):
            continue
        assert target.exists(), link
        assert not anchor or anchor in heading_anchors(target), link
    for path in re.findall(r"\b((?:scripts|benchmarks|binder|notebooks)/\w+\.\w+)", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_readme_links_every_page():
    """The README links to every notebook and to every page of the docs, those of the site through its landing page."""
    linked = set(re.findall(r"\]\(([^)#]+)", PAGES["README.md"]))
    linked |= {f"docs/{link}" for link in re.findall(r"\]\(([^)#]+)", PAGES["docs/index.md"])}
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}

    assert "docs/index.md" in linked
    assert {f"docs/{path.name}" for path in DOCS} | notebooks <= linked


def test_architecture_lists_every_subpackage():
    """The table in architecture.md lists all subpackages and modules."""
    named = set(re.findall(r"^\| (`.*`) \|", PAGES["docs/architecture.md"], flags=re.MULTILINE))
    modules = {
        path.stem
        for path in (ROOT / "openmed_nb").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }

    assert {name for row in named for name in re.findall(r"`(\w+)`", row)} == modules - {
        "__init__",
        "__main__",
        "compat",
    }


def test_images_have_dark_and_light_variants():
    """Each image has a dark and a light variant and alternative text, and does not exceed the maximum size."""
    used = set()
    for page, text in PAGES.items():
        pictures = PICTURE_PATTERN.findall(text)
        assert len(pictures) == len(re.findall(r"<img|!\[", text)), page
        for dark, _, light in pictures:
            assert dark == light.replace("_light.", "_dark.")
            used |= {((ROOT / page).parent / name).resolve() for name in (dark, light)}
    assert used == set((ROOT / "docs" / "pictures").iterdir())
    assert max(path.stat().st_size for path in used) < MAX_IMAGE_BYTES
