"""The code of the README, the landing page and the guides runs, page by page, in a real kernel and without a network."""

import re
import shlex

import pytest

import reference_pages
from helpers.kernels import run_kernel
from helpers.pages import find_code_blocks, read_pages

RUNNABLE = {"", "python"}
"""Languages that run: notebook cells, which have no language, and Python."""

ALL_PAGES = read_pages()
BLOCKS = {
    page: [block for block in find_code_blocks(text) if block.language in RUNNABLE]
    for page, text in ALL_PAGES.items()
    if page in {"README.md", "docs/index.md"} or page.startswith(("docs/how_to/", "docs/explanation/"))
}
"""Blocks that run in order, by page."""

NOT_RUN = {
    "compiles for about a minute": ["docs/how_to/annotate_faster.md"],
    "downloads a model from the Hugging Face Hub": ["docs/how_to/mask.md"],
    "is a file of settings": ["docs/how_to/load_the_extension.md"],
    "needs a run that was interrupted": ["docs/how_to/resume.md"],
    "needs at least 50 notes": ["docs/how_to/validate_a_dtype.md"],
    "needs notes that were reviewed": ["docs/how_to/annotate_a_table.md"],
    "needs two other computers": ["docs/how_to/use_several_computers.md"],
    "trains for minutes": ["docs/how_to/check_a_device.md"],
}
"""Pages with a block that does not run, by the reason in the comment above the block."""

SLOW = {
    "docs/how_to/annotate_faster.md",
    "docs/how_to/bring_up_a_model.md",
    "docs/how_to/decide_on_a_device.md",
    "docs/how_to/hand_over_a_run.md",
    "docs/how_to/use_several_computers.md",
}
"""Pages that take more than a few seconds. The part ``docs`` of the slow suite runs them."""

EXPECTED_OUTPUT = {
    "README.md": ["", "[type 2 diabetes mellitus](DISEASE)"],
    "docs/index.md": ["Device: cpu", "[type 2 diabetes mellitus](DISEASE)", "", "3 mentions of diseases found"],
    "docs/how_to/annotate_a_text.md": ["[asthma](DISEASE)", "", "[asthma](DISEASE, negated", "[migraine](DISEASE)"],
    "docs/how_to/check_a_device.md": ["computation"],
    "docs/how_to/choose_device.md": ["Device: cpu (requested by %openmed_device)"],
    "docs/how_to/keep_texts_out_of_outputs.md": [""],
    "docs/how_to/load_the_extension.md": ["", "Device: cpu", "", ""],
    "docs/how_to/release_memory.md": ["Released"],
    "docs/how_to/simulate_a_mac.md": ["SIMULATED", "Device: cpu"],
    "docs/how_to/use_the_panel.md": [""],
}
"""Expected text in the output of each notebook cell, by page. A page with only Python needs no row."""

NOTES = {
    "notes/p1.txt": "Seen for asthma.",
    "notes/p2.txt": "No complaints.",
    "notes/ward[A]/p3.txt": "Migraine since 2019.",
    "p1.txt": "Seen for asthma.",
    "p2.txt": "Known gout.",
    "notes.csv": "note_id,patient,text\nn1,p1,Seen for asthma.\nn2,p2,No complaints.\n",
}
"""Files that a reader has, in the folder in which the code of a page runs."""


@pytest.fixture(scope="module")
def page_kernel(tmp_path_factory):
    """A kernel for all pages, which stores its measurements in a folder of its own."""
    data = str(tmp_path_factory.mktemp("data"))
    with run_kernel(str(tmp_path_factory.mktemp("kernel")), OPENMED_NB_DATA=data) as kernel:
        yield kernel


@pytest.fixture
def kernel(page_kernel, tmp_path):
    """The kernel without the variables and settings of other pages, in a folder with notes."""
    for name, text in NOTES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    page_kernel.run("get_ipython().config.pop('OpenMedMagics', None)\n%reload_ext openmed_nb")
    page_kernel.run(f"%reset -f\n__import__('os').chdir({str(tmp_path)!r})")
    page_kernel.run("__import__('gc').freeze()")  # Collecting the objects of the libraries takes seconds.
    return page_kernel


PAGES = [
    pytest.param(page, marks=[pytest.mark.slow, pytest.mark.docs, pytest.mark.timeout(300)] if page in SLOW else [])
    for page, blocks in BLOCKS.items()
    if not all(block.not_run for block in blocks)
]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_page_runs(page, kernel):
    """No block of a page raises an error, and each notebook cell shows the expected text."""
    blocks = [block for block in BLOCKS[page] if not block.not_run]
    replies = [kernel.run(block.code) for block in blocks]
    cells = [reply for reply, block in zip(replies, blocks, strict=True) if block.language == ""]

    assert [reply.error[:2] for reply in replies] == [("", "")] * len(blocks)
    for reply, expected in zip(cells, EXPECTED_OUTPUT.get(page, []), strict=True):
        assert expected in reply.text


def test_reasons_of_blocks_that_do_not_run():
    """Each reason in a page is in the table, and each row of the table is true."""
    found: dict[str, list[str]] = {}
    for page, blocks in BLOCKS.items():
        for reason in dict.fromkeys(block.not_run for block in blocks if block.not_run):
            found.setdefault(reason, []).append(page)

    assert found == NOT_RUN
    assert set(BLOCKS) >= SLOW


PROGRAM_PATTERN = re.compile(r"^(?:openmed-nb|python -m openmed_nb)\b(.*)$", flags=re.MULTILINE)
COMMANDS = dict(
    re.findall(
        r"^## `python -m openmed_nb ?([\w-]*)`$(.*?)(?=^## |\Z)",
        reference_pages.command_line_page(),
        re.MULTILINE | re.DOTALL,
    )
)
"""What ``--help`` prints for each command of the program, by its name."""


@pytest.mark.parametrize("page", ALL_PAGES)
def test_shell_lines_have_valid_options(page):
    """Each option of the program in a block for a shell is in the help of its command."""
    for block in find_code_blocks(ALL_PAGES[page]):
        if block.language != "sh":
            continue
        for line in PROGRAM_PATTERN.findall(block.code):
            words = shlex.split(line, comments=True)
            command = words[0] if words and words[0] in COMMANDS else ""
            options = [word for word in words if word.startswith("-")]
            assert [option for option in options if option not in COMMANDS[command]] == [], line
