"""The names and links in the README and the docs are valid; ``test_how_to.py`` runs their code."""

import ast
import inspect
import pkgutil
import re

import pytest

import openmed_nb
from helpers.pages import GENERATED, ROOT, doc_paths, find_code_blocks, read_pages, remove_code_blocks
from openmed_nb.notebook.magics import OpenMedMagics, parse_line, split_options

PAGES = read_pages()

PICTURE_PATTERN = re.compile(
    r'<picture>((?:<source media="\(prefers-reduced-motion: reduce\)[^>]+>){2})?'
    r'<source media="\(prefers-color-scheme: dark\)" srcset="([\w/.]+)">'
    r'<img alt="([^"]{20,})" (?:width="376" )?src="([\w/.]+)"></picture>'
)
MAX_WORDS = 1500
MAX_IMAGE_BYTES = 2_000_000
"""Maximum size of an image or animation in bytes."""

parametrize_pages = pytest.mark.parametrize("page", PAGES)


def code_blocks(page, language):
    """Return the code blocks of a page in one language."""
    return [block.code for block in find_code_blocks(PAGES[page]) if block.language == language]


def code_spans(page):
    """Return the code spans in the prose of a page."""
    return re.findall(r"`([^`\n]+)`", remove_code_blocks(PAGES[page]))


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
    headings = re.findall(r"^#+ (.+)$", remove_code_blocks(path.read_text("utf-8")), flags=re.MULTILINE)
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
            assert page == "docs/index.md", f"{link} does not exist on GitHub. Write the name as code."
            continue
        assert target.exists(), link
        assert not anchor or anchor in heading_anchors(target), link
    for path in re.findall(r"\b((?:scripts|benchmarks|binder|notebooks)/\w+\.\w+)", PAGES[page]):
        assert (ROOT / path).exists(), path


CONTENTS = (
    "docs/index.md",
    "docs/tutorials.md",
    "docs/how_to.md",
    "docs/explanation.md",
    "docs/reference.md",
    "docs/troubleshooting/index.md",
)
"""Pages that list other pages."""


def test_readme_links_every_page():
    """The README or a page of contents, which the README links to, links to each notebook and each page of the docs."""
    linked = {link for page in ("README.md", *CONTENTS) for link in linked_files(page)}
    notebooks = set((ROOT / "notebooks").glob("*.ipynb"))

    assert {ROOT / page for page in CONTENTS} <= linked_files("README.md")
    assert {*doc_paths(), *notebooks} - linked == set()


def linked_files(page):
    """Return the files of the repository that a page links to."""
    links = re.findall(r"\]\(([^)#\s]+)", PAGES[page].replace("\n", ""))
    return {((ROOT / page).parent / link).resolve() for link in links if "://" not in link}


@parametrize_pages
def test_page_is_short(page):
    """No page has more than 1,500 words, without the borders of tables."""
    assert len(re.findall(r"[^\s|]+", PAGES[page])) <= MAX_WORDS


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
        for stills, dark, _, light in pictures:
            assert dark == light.replace("_light.", "_dark.")
            moving = [name for name in (dark, light) if name.endswith(".gif")]
            still = re.findall(r'srcset="([\w/.]+)"', stills)
            assert still == [name.replace(".gif", "_still.png") for name in moving]
            used |= {((ROOT / page).parent / name).resolve() for name in (dark, light, *still)}
    assert used == set((ROOT / "docs" / "pictures").iterdir())
    assert max(path.stat().st_size for path in used) < MAX_IMAGE_BYTES
