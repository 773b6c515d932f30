"""The extension of the site: generated pages, pictures for both themes, diagrams as HTML, links from code to the reference."""

from __future__ import annotations

import functools
import html
import re
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import page_links
import reference_pages

if TYPE_CHECKING:
    from sphinx.application import Sphinx

LOGGER = logging.getLogger(__name__)

# GitHub shows the README as the page of the project. On the site it is one page of many, so it has a title of its own.
TITLES = {"README": "Install and try it"}

# GitHub follows the system; the site has a switch, so both pictures are on the page.
PICTURE_PATTERN = re.compile(
    r'<picture>(?P<still><source media="\(prefers-reduced-motion: reduce\)[^>]*>)*'
    r'<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">'
    r'<img alt="(?P<alt>[^"]+)" (?:width="(?P<width>\d+)" )?src="(?P<light>[^"]+)"></picture>'
)
# An animation that repeats needs a switch that stops it (WCAG 2.2.2). It needs no script: see openmed_docs.css.
STOP_SWITCH = """
```{raw} html
<p class="stop-motion"><label><input type="checkbox"> Show a still picture</label></p>
```
"""
MERMAID_PATTERN = re.compile(r"^```mermaid\n(?P<code>.*?)^```$", flags=re.MULTILINE | re.DOTALL)
CODE_WORD_PATTERN = re.compile(r'<span class="pre">(?P<word>[^<&]+)</span>')
MIN_BROKEN_LENGTH = 12  # A shorter word of code fits in a column of a table on a phone.
NODE_PATTERN = re.compile(r'(?P<id>\w+)(?:\(\["(?P<round>[^"]*)"\]\)|\(\[(?P<plain>[^\]]*)\]\)|\["(?P<box>[^"]*)"\])?')


def write_reference(app: Sphinx) -> None:
    """Write the pages that are generated from the code, before Sphinx looks for files."""
    reference_pages.write(reference_pages.all_pages(), app.srcdir / "docs")


def adapt_markdown(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace what GitHub shows by itself: pictures for both themes, and diagrams. Add what only the site can show."""
    text = page_links.add_binder_badges(page_links.add_toctree(source[0]), app.config.binder_repository)
    text = page_links.add_keywords(page_links.add_site_links(text))
    if docname in TITLES:
        text = re.sub(r"^# .+$", f"# {TITLES[docname]}", text, count=1, flags=re.MULTILINE)
    text = PICTURE_PATTERN.sub(_picture, text)
    source[0] = MERMAID_PATTERN.sub(lambda match: _diagram(match["code"], docname), text)


def _picture(match: re.Match[str]) -> str:
    """Return a picture for each theme. A moving picture has a still one for readers who switch motion off."""
    directives = []
    for theme in ("light", "dark"):
        path = match[theme]
        pictures = {path: f"only-{theme}"}
        if match["still"]:
            pictures = {path: f"only-{theme} moving", f"{path.removesuffix('.gif')}_still.png": f"only-{theme} still"}
        width = f":width: {match['width']}px\n" if match["width"] else ""
        directives += [
            f"```{{image}} {file}\n:alt: {html.unescape(match['alt'])}\n:class: {classes}\n{width}```\n"
            for file, classes in pictures.items()
        ]
    directives.append(f'```{{raw}} html\n<p class="picture-caption" aria-hidden="true">{match["alt"]}</p>\n```\n')
    if match["still"]:
        directives.append(STOP_SWITCH)
    return "\n" + "\n".join(directives)


def _diagram(code: str, docname: str) -> str:
    """Return a flowchart that is one chain as a list, which needs no script and wraps on a phone."""
    labels: dict[str, str] = {}
    order: list[str] = []
    for line in code.splitlines()[1:]:
        for step in filter(None, map(str.strip, line.split("-->"))):
            match = NODE_PATTERN.fullmatch(step)
            if match is None:
                LOGGER.warning("cannot show this part of a diagram: %s", step, location=docname)
                continue
            label = match["round"] or match["plain"] or match["box"]
            if label:
                labels[match["id"]] = label
            if match["id"] not in order:
                order.append(match["id"])
            elif match["id"] != order[-1]:
                LOGGER.warning("a diagram that is not a chain is not supported: %s", step, location=docname)
    items = "".join(f"<li><span>{labels.get(name, name)}</span></li>" for name in order)
    return f'```{{raw}} html\n<ol class="chain">{items}</ol>\n```'


class LinkCode(SphinxPostTransform):
    """Link code such as ``nb.annotate(notes)``, ``%openmed_ner`` and the names of errors to their pages of the reference."""

    default_priority = 20  # After Sphinx has resolved the references, so that links are known.

    def run(self, **_options: Any) -> None:
        """Replace each literal that is a public name by a link with that literal."""
        if self.app.builder.format != "html":
            return
        targets = code_targets()
        for literal in list(self.document.findall(nodes.literal)):
            if _is_linked(literal):
                continue
            name = re.split(r"[(\s=]", literal.astext(), maxsplit=1)[0]
            name = name.replace("%%", "%").removesuffix(".")
            if "xref" in literal["classes"] and f"nb.{name}" in targets:
                name = f"nb.{name}"  # A role of a docstring that Sphinx did not find in the module of the page.
            target = targets.get(name, "")
            if target and target.partition("#")[0] != self.env.docname:
                docname, _, anchor = target.partition("#")
                link = make_refnode(self.app.builder, self.env.docname, docname, anchor, literal.deepcopy())
                link["classes"].append("code-link")
                literal.replace_self(link)


def _is_linked(node: nodes.Node) -> bool:
    """Return whether a node is in a link or a heading."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, (nodes.reference, nodes.title)):
            return True
    return False


@functools.cache  # Every page asks for them.
def code_targets() -> dict[str, str]:
    """Return the page of each name that can appear in code."""
    targets = {
        reference_pages.short_name(name): f"docs/reference/api/{reference_pages.page_name(name, value)}"
        for name, value in reference_pages.public_names().items()
    }
    targets |= {f"%{name}": f"docs/reference/magics/{name}" for name in reference_pages.magic_functions()}
    targets |= {name: f"docs/reference/errors/{name}" for name in reference_pages.error_classes()}
    # The guides and examples call the result of annotate `found`.
    annotations = reference_pages.ANNOTATIONS
    targets |= {
        f"found.{name}": f"docs/reference/api/{annotations}-class#{annotations}.{name}"
        for name in reference_pages.members_of(reference_pages.result_classes()[annotations])
    }
    variables = reference_pages.package_variables()
    page = "docs/reference/environment_variables"
    return targets | {name: f"{page}#{name.lower().replace('_', '-')}" for name in variables}


def color_texts(_app: Sphinx, doctree: nodes.document, _docname: str = "") -> None:
    """Show the cells of ``%%openmed_ner`` as text: their words are no Python, and colors would look like marks."""
    for block in doctree.findall(nodes.literal_block):
        if block.astext().startswith("%%openmed_ner"):
            block["language"] = "text"


def allow_line_breaks(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Let long names in code break after their separators, so that a phone does not break them inside of a word or option."""
    if "body" in context:
        context["body"] = CODE_WORD_PATTERN.sub(_with_breaks, context["body"])


def _with_breaks(match: re.Match[str]) -> str:
    word = match["word"]
    if word.startswith("-"):
        return f'<span class="pre option">{word}</span>'
    if len(word) >= MIN_BROKEN_LENGTH:
        word = re.sub(r"(?<=[_./(=,-])(?=\w)", "<wbr>", word)
    return f'<span class="pre">{word}</span>'


def label_toggles(_app: Sphinx, _page: str, _template: str, context: dict[str, Any], _tree: object) -> None:
    """Name the buttons that expand the navigation, which the theme leaves without a name for screen readers."""
    generate = context.get("generate_toctree_html")
    if generate is not None:
        named = '<summary aria-label="Show its pages">'
        context["generate_toctree_html"] = lambda *args, **options: str(generate(*args, **options)).replace(
            "<summary>", named
        )


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write ``llms.txt``: one line for each page of the navigation, in its order."""
    if error or app.builder.name != "html":
        return
    titles = app.env.titles
    intro = "Medical NLP models in notebooks, on the best device of this computer, with the reason for that device."
    lines = ["# openmed_nb", "", f"> {intro}"]
    for part in app.env.toctree_includes[app.config.root_doc]:
        lines += ["", f"## {titles[part].astext()}", ""]
        waiting = [part]
        while waiting:
            page = waiting.pop(0)
            lines.append(f"- [{titles[page].astext()}]({page}.html)")
            waiting = [*app.env.toctree_includes.get(page, ()), *waiting]
    (app.outdir / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the functions to the events of Sphinx."""
    app.add_config_value("binder_repository", "", "env")
    app.connect("builder-inited", write_reference)
    app.connect("source-read", adapt_markdown)
    app.connect("doctree-read", color_texts)
    app.connect("html-page-context", allow_line_breaks, priority=900)
    app.connect("html-page-context", label_toggles, priority=900)  # After the theme.
    app.connect("build-finished", write_llms_txt)
    app.add_post_transform(LinkCode)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
