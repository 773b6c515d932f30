"""Every statement about MPS names a source and the date at which it was read, or says that nobody has measured it.

A statement is a sentence or table row with a word of ``SUBJECT`` and a word of ``CLAIM``. Its paragraph or row has a
``SOURCE``, and its page a ``DATE``. Sentences and sections about the simulation describe the simulation, not MPS.
"""

import ast
import re

import pytest

from helpers import ROOT
from openmed_nb.runbook.checks.silent_errors import KNOWN_BUGS
from openmed_nb.runbook.verdict.rules import SYMPTOMS, gates

GENERATED = {"reference", "reference_engineering.md", "troubleshooting"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not GENERATED & set(page.parts)),
]
# Modules with remedies and reasons. The texts of the simulation are those of torch.
FOLDERS = ("devices", "training", "runbook/checks")

SUBJECT = re.compile(r"\b(?:MPS|Metal|MPSGraph|MLX|Core ML|Neural Engine|Apple [Ss]ilicon|M[1-5])\b")
CLAIM = re.compile(
    r"\b(?:slow|fast|wrong|incorrect|silent|fail|crash|abort|grow|leak|corrupt|hang|reject|refuse|accept|ignore|support|lack"
    r"|compile|cop(?:y|ies)|convert|cannot|recommend|need|require|wait|reach|in software)\w*"
    r"|\b(?:since|before|from|until) torch \d|\d+(?:\.\d+)?\s?(?:%|GB|GiB|times)"
)
SOURCE = re.compile(
    r"[\w/-]+#\d+|\b[\w-]+\.(?:py|mm|cpp|yaml)\b|\bbinar(?:y|ies)\b|torch's (?:own|sources)|users' logs|https://[\w.]+"
    r"|#on-a-mac\)|[Nn]ot (?:yet )?(?:been )?(?:measured|tested)|[Nn]o measurement|[Nn]obody has measured"
)
DATE = re.compile(r"\bread in [^.]*\b20\d\d")
MIN_WORDS = 6  # Shorter texts of the package are labels.
NEAR_LINES = 3  # The source of a text of the package is in it, or in a comment or string next to it.


def find_statements(text):
    """Return the sentences of a text that claim something about MPS."""
    visible = re.sub(r"\]\([^)]*\)|`[^`]*`", "]", text)
    sentences = re.split(r"(?<=[.!?:])\s", visible)
    return [s for s in sentences if SUBJECT.search(s) and CLAIM.search(s) and "simulat" not in s.lower()]


def read_blocks(markdown):
    """Return the paragraphs, list items and table rows, without code, tags, and pages and sections on the simulation."""
    markdown = re.sub(r"```.*?```|<[^>]*>", "", markdown, flags=re.DOTALL)
    blocks = [""]
    is_about_simulation = re.match(r"# .*simulat", markdown, re.IGNORECASE) is not None
    simulated = is_about_simulation
    for line in map(str.strip, markdown.splitlines()):
        if line.startswith("#"):
            simulated = is_about_simulation or "simulat" in line.lower()
        elif simulated or not line:
            blocks.append("")
        elif re.match(r"[|*-] ?|\d+\. ", line):
            blocks.append(line)
        else:
            blocks[-1] += f" {line}"
    return blocks


def find_texts(file):
    """Yield the texts of a module that are no docstrings, each with the lines next to it."""
    source = file.read_text("utf-8")
    lines = source.splitlines()
    nodes = [ast.parse(source)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.Constant, ast.JoinedStr)):
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            text = "".join(constant for constant in constants if isinstance(constant, str))
            yield text, "\n".join(lines[max(0, node.lineno - 1 - NEAR_LINES) : node.end_lineno + NEAR_LINES])
        elif not isinstance(node, ast.Expr):
            nodes += ast.iter_child_nodes(node)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_names_source_and_date_of_statements(page):
    markdown = page.read_text("utf-8")
    blocks = [block for block in read_blocks(markdown) if find_statements(block)]

    assert [block for block in blocks if not SOURCE.search(block)] == []
    assert not blocks or DATE.search(markdown), f"add 'read in <month> <year>' to {page.name}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_remedies_and_reasons_name_their_sources(folder):
    unsourced = [
        text
        for file in sorted((ROOT / "openmed_nb" / folder).rglob("*.py"))
        for text, near in find_texts(file)
        if len(text.split()) >= MIN_WORDS and find_statements(text) and not SOURCE.search(near)
    ]

    assert unsourced == []


def test_tables_of_errors_and_symptoms_name_source_and_release():
    for bug in KNOWN_BUGS:
        assert re.search(r"#\d+$", bug.issue)
        assert re.search(r"torch|macOS", bug.affected), bug.issue
    for symptom in SYMPTOMS:
        assert symptom.sources, symptom.symptom
        assert all(re.search(r"#\d+$", source) for source in symptom.sources), symptom.symptom
    assert DATE.search(str(gates()))
