"""What the site adds to lists of links, without Sphinx."""

import doctest
import re

import nbformat
import pytest

import page_links
from helpers import ROOT

NUMBERS = {"five": "5", "ten": "10", "fifteen": "15", "twenty": "20"}


@pytest.mark.parametrize(
    ("text", "directives"),
    [
        ("<!-- toctree -->\n- [A](a.md)\n- [B](b/c.ipynb): text", [["", "A <a>", "B <b/c>"]]),
        ("<!-- toctree: x/index y -->\n| [A](../a.md) | text |", [["", "A <../a>", "x/index", "y"]]),
        (
            "<!-- toctree -->\n- [A](a.md)\n## One\n- [B](b.md)\n## None\n## Two\n- [C](c.md)",
            [["", "A <a>"], [":caption: One", "", "B <b>"], [":caption: Two", "", "C <c>"]],
        ),
        ("- [A](a.md)\n## One\n<!-- toctree: b/index -->", [["", "A <a>"], [":caption: One", "", "b/index"]]),
        ("<!-- toctree -->\nA [link](a.md) in a sentence, [an anchor](a.md#b)\n- [B](https://b.org/b.md)", []),
    ],
)
def test_toctree_has_the_links_of_lists(text, directives):
    lines = [["```{toctree}", ":hidden:", *lines, "```"] for lines in directives]
    expected = "\n\n".join("\n".join(block) for block in lines)

    assert page_links.add_toctree(text) == re.sub("<!--.*-->", expected, text)


def test_page_without_the_comment_is_unchanged():
    assert page_links.add_toctree("- [A](a.md)") == "- [A](a.md)"


def test_each_notebook_has_a_badge():
    text = (ROOT / "docs" / "tutorials.md").read_text("utf-8")
    badges = re.findall(r"labpath=(\S+)>", page_links.add_binder_badges(text, "owner/name"))

    assert badges == [f"notebooks/{path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def test_tutorials_repeat_the_time_of_each_notebook():
    text = (ROOT / "docs" / "tutorials.md").read_text("utf-8")
    times = dict(re.findall(r"^\| \[[^\]]+\]\(\.\./notebooks/(\S+)\) \| (\d+) \|", text, flags=re.MULTILINE))

    for path in (ROOT / "notebooks").glob("*.ipynb"):
        first = nbformat.read(path, as_version=4).cells[0].source
        number = re.search(r"\*\*Time:\*\* (?:about )?(\w+) minutes", first)[1]
        assert times[path.name] == NUMBERS.get(number, number), path.name


def test_examples_of_page_links():
    assert doctest.testmod(page_links).failed == 0
