"""What the site adds to lists of links in Markdown; Sphinx is not needed.

GitHub shows a page of contents as a list or a table of links. The site also needs its pages in the navigation, has pages that
GitHub does not have, searches for keywords, and knows where Binder finds the notebooks.
"""

from __future__ import annotations

import re

TOCTREE_PATTERN = re.compile(r"^<!-- toctree(?:: (?P<more>[^>]*\S))? -->$", flags=re.MULTILINE)
ENTRY_PATTERN = re.compile(r"^(?:- |\| )\[(?P<title>[^\]]+)\]\((?P<path>[^)#:]+)\.(?:md|ipynb)\)", flags=re.MULTILINE)
SITE_LINK_PATTERN = re.compile(r"<!-- link: (?P<path>\S+) -->(?P<text>[^<]+)<!-- /link -->")
KEYWORDS_PATTERN = re.compile(r"^<!-- keywords: (?P<entries>.+) -->$", flags=re.MULTILINE)
NOTEBOOK_PATTERN = re.compile(r"(?<=^\| )\[[^\]]+\]\(\.\./(?P<path>notebooks/[^)]+\.ipynb)\)", flags=re.MULTILINE)


def add_toctree(text: str) -> str:
    r"""Replace the comment ``toctree`` by hidden tables of contents of the links that start list items or rows.

    The links below each heading are one group of the navigation. Pages after a colon in the comment belong to the heading above
    it; they exist on the site only.

    Example:
        >>> print(add_toctree("<!-- toctree -->\n\n## Train\n\n- [Use it](how_to/use.md)"))
        ```{toctree}
        :hidden:
        :caption: Train
        <BLANKLINE>
        Use it <how_to/use>
        ```
        <BLANKLINE>
        ## Train
        <BLANKLINE>
        - [Use it](how_to/use.md)
    """
    directives = []
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        entries = [f"{match['title']} <{match['path']}>" for match in ENTRY_PATTERN.finditer(section)]
        for match in TOCTREE_PATTERN.finditer(section):
            entries += (match["more"] or "").split()
        heading = section.partition("\n")[0]
        options = [":hidden:"]
        if heading.startswith("## "):
            options.append(f":caption: {heading.removeprefix('## ')}")
        if entries:
            directives.append("\n".join(["```{toctree}", *options, "", *entries, "```"]))
    return TOCTREE_PATTERN.sub(lambda _match: "\n\n".join(directives), text)


def add_binder_badges(text: str, repository: str) -> str:
    """Add a badge that opens Binder to each notebook of a table, if the address of the repository is known.

    Args:
        text: A page in Markdown, in a folder next to ``notebooks``.
        repository: Owner and name of the repository on GitHub. If it is empty, the page is unchanged.

    Example:
        >>> add_binder_badges("| [A note](../notebooks/01_a_note.ipynb) | 5 |", "")
        '| [A note](../notebooks/01_a_note.ipynb) | 5 |'
    """
    if not repository:
        return text
    address = f"https://mybinder.org/v2/gh/{repository}/HEAD?labpath="
    return NOTEBOOK_PATTERN.sub(
        lambda match: f"{match[0]} {{bdg-link-secondary}}`Binder <{address}{match['path']}>`", text
    )


def add_site_links(text: str) -> str:
    """Turn marked text into a link to a generated page, which does not exist on GitHub.

    Example:
        >>> add_site_links("See <!-- link: reference/files/index.md -->Files<!-- /link -->.")
        'See [Files](reference/files/index.md).'
    """
    return SITE_LINK_PATTERN.sub(r"[\g<text>](\g<path>)", text)


def add_keywords(text: str) -> str:
    """Add the words of a comment to the search of the site: words that readers type but that the page does not use.

    Index entries are found as a whole and come first. The keywords are found together with other words of the page.

    Example:
        >>> print(add_keywords("<!-- keywords: redact, de-identify -->"))
        ```{eval-rst}
        .. index:: ! redact, ! de-identify
        .. meta::
           :keywords: redact, de, identify
        ```
    """
    return KEYWORDS_PATTERN.sub(_keyword_directives, text)


def _keyword_directives(match: re.Match[str]) -> str:
    entries = ", ".join(f"! {entry}" for entry in match["entries"].split(", "))
    words = ", ".join(re.findall(r"\w+", match["entries"]))
    return f"```{{eval-rst}}\n.. index:: {entries}\n.. meta::\n   :keywords: {words}\n```"
