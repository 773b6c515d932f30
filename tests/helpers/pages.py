"""The pages of the README and the docs, and the code in them."""

import re
from pathlib import Path
from typing import NamedTuple

from helpers import ROOT

DOCS = ROOT / "docs"
GENERATED = (DOCS / "reference",)
"""Folders of pages that are written when the site is built. ``test_site.py`` follows the links to them."""

DIRECTIVE_PATTERN = re.compile(r"^```\{[^\n]*\n.*?^```$", re.DOTALL | re.MULTILINE)
"""A directive of the documentation site, such as a table of contents."""

CODE_FENCE_PATTERN = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)\n```$", re.DOTALL | re.MULTILINE
)
"""A block of code. A block without a language is a notebook cell. A comment above it says why tests cannot run it."""


class CodeBlock(NamedTuple):
    """A block of code of a page.

    Attributes:
        language: ``"python"``, ``"sh"`` or another language; empty for a notebook cell.
        code: The lines of the block.
        not_run: The reason why tests cannot run it, or an empty string.
    """

    language: str
    code: str
    not_run: str


def doc_paths() -> list[Path]:
    """Return the files of the docs that are written by hand."""
    return [
        path
        for path in sorted(DOCS.rglob("*.md"))
        if not any(path.is_relative_to(folder) for folder in (*GENERATED, DOCS / "examples"))
    ]


def read_pages() -> dict[str, str]:
    """Return the text of each page, without directives, by its path in the repository."""
    return {
        path.relative_to(ROOT).as_posix(): DIRECTIVE_PATTERN.sub("", path.read_text("utf-8"))
        for path in (ROOT / "README.md", *doc_paths(), ROOT / "CONTRIBUTING.md")
    }


def find_code_blocks(text: str) -> list[CodeBlock]:
    """Return the blocks of code of a page, in order."""
    return [
        CodeBlock(match["language"], match["code"], match["reason"] or "")
        for match in CODE_FENCE_PATTERN.finditer(text)
    ]


def remove_code_blocks(text: str) -> str:
    """Return the prose of a page."""
    return CODE_FENCE_PATTERN.sub("", text)
