"""A report as one page that needs nothing else, and as one text for an issue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Report, escape, filled, to_html, to_text
from ...._render.drawing import badge, drawn
from ..logbook.logbook import escaped, markdown_of
from .record import DONE, Outcome, Record
from .steps import STEPS

ABOUT = {one.name: one.about for one in STEPS}

FENCE = "~" * 8

# The page follows the light or dark scheme of the browser: every colour is the system's own or half transparent.
PAGE_STYLE = """<style>
:root {color-scheme: light dark;}
body {background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word;}
section {border-top: 1px solid #8886; margin-top: 2rem;}
h1 {font-size: 1.6rem; line-height: 1.25;} h1 + p {font-size: 1.1rem;} h2 {font-size: 1.2rem;}
.wide {overflow-x: auto;} .wide th, .wide td {overflow-wrap: anywhere; min-width: 5.5rem;} .wide tbody th {min-width: 7rem;}
.state {font-size: 0.85rem; font-weight: 600; white-space: nowrap;}
pre {overflow-x: auto; font-size: 0.8rem; border-left: 3px solid #c92a2a; padding-left: 0.7rem;}
.openmed-picture th {overflow-wrap: anywhere !important;}
</style>"""


def page_of(record: Record, shown: Report) -> str:
    """Return a report as a page of HTML: what it comes to, and a section for each step that has run."""
    said = "".join(f"<p>{escape(one)}</p>" for one in shown.sentences if one not in record.not_measured)
    unknown = "".join(f"<li>{escape(one)}</li>" for one in record.not_measured) or "<li>Nothing.</li>"
    lines = "".join(
        f'<li><a href="#{escape(one.step)}">{escape(about(one))}</a> {state_of(one)}</li>' for one in record.steps
    )
    parts = (
        f"<h1>{escape(shown.title)}</h1>{said}<ul>{lines}</ul>",
        f"<details><summary>What was not measured</summary><ul>{unknown}</ul></details>",
        wide(Report("Of what", spoken=("",), figures=shown.figures)),
        *map(section_of, record.steps),
    )
    narrow = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{narrow}<title>{escape(shown.title)}</title>{PAGE_STYLE}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{"".join(parts)}</main></body></html>\n'


def wide(report: Report) -> str:
    """Return a report as HTML that scrolls, by keys too, where the page is narrower."""
    return f'<div class="wide" role="group" aria-label="{escape(report.title)}" tabindex="0">{to_html(report)}</div>'


def about(outcome: Outcome) -> str:
    return ABOUT.get(outcome.step, outcome.step)


def state_of(outcome: Outcome) -> str:
    """Return what a step found, or what became of it, as a coloured sign and a word."""
    word = (outcome.status or "") if outcome.outcome == DONE else outcome.outcome
    kind = word if word in {OK, WARNING, NOT_APPLICABLE} else FAILED
    return f'<span class="state">{badge(kind)} {escape(word)}</span>'


def section_of(outcome: Outcome) -> str:
    """Return the part of the page on a step: what happened to it, its pictures, and all that it says."""
    parts = [f'<section id="{escape(outcome.step)}"><h2>{escape(about(outcome))} {state_of(outcome)}</h2>']
    parts += [f"<p>{escape(one)}</p>" for one in (outcome.what, outcome.remedy) if one]
    if outcome.output:
        lines = escape("\n".join(outcome.output))
        parts.append(f'<pre tabindex="0" aria-label="The last lines that it printed">{lines}</pre>')
    if outcome.report:
        parts.append(drawn(*outcome.report.pictures))
        is_open = "" if outcome.status in {OK, NOT_APPLICABLE} else " open"
        whole = f"<summary>All of it ({outcome.seconds:.0f} s)</summary>{wide(replace(outcome.report, pictures=()))}"
        parts.append(f"<details{is_open}>{whole}</details>")
    return "".join([*parts, "</section>"])


def issue_of(record: Record, shown: Report) -> str:
    """Return a report as Markdown for an issue: what it comes to, a line for each step, and more of those that are not well."""
    tables = [markdown_of(one) for one in filled((*shown.tables, *shown.figures))]
    return "\n\n".join([f"# {escaped(shown.title)}", *map(escaped, shown.sentences), *tables, *troubles(record)]) + "\n"


def troubles(record: Record) -> Iterator[str]:
    """Yield the last lines of each step without an answer, and what each other one says that is not well."""
    for one in record.steps:
        if one.output:
            yield fenced(about(one), "\n".join(one.output))
        elif one.report and one.status in {WARNING, FAILED}:
            yield fenced(about(one), to_text(one.report))


def fenced(title: str, text: str) -> str:
    inside = text.replace(FENCE, "")
    return f"## {escaped(title)}\n\n{FENCE}\n{inside}\n{FENCE}"
