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
PAGES = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (README, *DOCS, ROOT / "CONTRIBUTING.md")}

FENCE = re.compile(r"^```(\w*)\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
"""A block of code, with its language; a block without one is a cell of a notebook."""

SHOWN = {
    "README.md": ["Device: cpu", "[type 2 diabetes mellitus](DISEASE)", "", "asthma"],
    "docs/magics.md": ["[asthma](DISEASE)", "", "[asthma](DISEASE)", ""],
    "docs/devices.md": ["SIMULATED", "Device: cpu"],
    "docs/panel.md": [""],
    "docs/is_it_right.md": ["computation"],
}
"""What the result of each cell of a page says."""

PICTURE = re.compile(
    r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="([\w/.]+)">'
    r'<img alt="([^"]{20,})" src="([\w/.]+)"></picture>'
)
HEAVIEST = 2_000_000
"""Bytes of one picture, also of a moving one."""

every_page = pytest.mark.parametrize("page", PAGES)


def blocks(page, language):
    """Return the blocks of code of a page in one language."""
    return [code for name, code in FENCE.findall(PAGES[page]) if name == language]


def spans(page):
    """Return the code spans in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page]))


def test_pages_with_cells_are_tried():
    """Every page that shows cells of a notebook is among those whose cells run."""
    assert {page for page in PAGES if blocks(page, "")} == set(SHOWN)


@pytest.mark.parametrize("page", SHOWN)
def test_cells(page, kernel):
    """Each cell runs in a kernel without an error, and its result is the one that the page promises."""
    replies = [kernel.run(cell) for cell in blocks(page, "")]

    assert [reply.error[0] for reply in replies] == [""] * len(SHOWN[page])
    for reply, said in zip(replies, SHOWN[page], strict=True):
        assert said in reply.text


@every_page
def test_lines_of_magics_have_valid_options(page):
    """Each line of a magic, in prose and in cells, has options and words that the magic takes."""
    cells = [line for cell in blocks(page, "") for line in cell.splitlines()]
    for line in (cell for cell in (*spans(page), *cells) if cell.lstrip("%").startswith("openmed") and cell[0] == "%"):
        name, _, rest = line.lstrip("%").partition(" ")
        magic = getattr(OpenMedMagics, name)
        parse_line(magic, split_options(magic.parser, rest)[0] if name == "openmed_ner" else rest)


def calls(page):
    """Return the calls of the package's functions that a page shows, in Python and in prose."""
    shown = [span for span in spans(page) if span.startswith("nb.") and span.endswith(")")]
    trees = [ast.parse(code) for code in (*blocks(page, "python"), *shown)]
    found = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node for node in found if ast.unparse(node.func).startswith("nb.") and "(" not in ast.unparse(node.func)]


@every_page
def test_python_names_what_exists(page):
    """Every name that a page uses from the package is public, and every call has arguments that its function takes."""
    names = set(re.findall(r"\bnb\.((?:training\.|runbook\.|compat\.|loader\.)*\w+)", PAGES[page]))

    assert all(pkgutil.resolve_name(f"openmed_nb.{name}") is not None for name in names)
    assert not {name.partition(".")[0] for name in names} - set(openmed_nb.__all__)
    for call in calls(page):
        function = pkgutil.resolve_name(f"openmed_nb.{ast.unparse(call.func).removeprefix('nb.')}")
        inspect.signature(function).bind_partial(
            *call.args, **{keyword.arg: keyword.value for keyword in call.keywords}
        )


def slugs(path):
    """Return the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_to_files_and_headings(page):
    """Every link of a page names a file that exists, and every anchor a heading in it; so do paths in commands."""
    folder = (ROOT / page).parent
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page].replace("\n", "")) if "://" not in link]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (folder / name).resolve() if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in slugs(target), link
    for path in re.findall(r"\b((?:scripts|benchmarks|binder|notebooks)/\w+\.\w+)", PAGES[page]):
        assert (ROOT / path).exists(), path


def test_readme_links_every_page():
    """The README leads to each page of the docs and to each notebook."""
    linked = set(re.findall(r"\]\(([^)#]+)", PAGES["README.md"]))
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}

    assert {f"docs/{path.name}" for path in DOCS} | notebooks <= linked


def test_architecture_lists_every_subpackage():
    """The table of the architecture lists all subpackages and modules."""
    named = set(re.findall(r"^\| (`.*`) \|", PAGES["docs/architecture.md"], flags=re.MULTILINE))
    floors = {
        path.stem
        for path in (ROOT / "openmed_nb").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }

    assert {name for row in named for name in re.findall(r"`(\w+)`", row)} == floors - {
        "__init__",
        "__main__",
        "compat",
    }


def test_pictures():
    """Each picture has a form for dark pages and one for light ones, words for who cannot see it, and is not too heavy."""
    used = set()
    for page, text in PAGES.items():
        found = PICTURE.findall(text)
        assert len(found) == len(re.findall(r"<img|!\[", text)), page
        for dark, _, light in found:
            assert dark == light.replace("_light.", "_dark.")
            used |= {((ROOT / page).parent / name).resolve() for name in (dark, light)}
    assert used == set((ROOT / "docs" / "pictures").iterdir())
    assert max(path.stat().st_size for path in used) < HEAVIEST
