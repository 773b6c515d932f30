"""A report as one page that needs nothing else, and as one text for an issue."""

from __future__ import annotations

from dataclasses import replace

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Report, escape, filled, to_html, to_text
from ...._render.drawing import badge, drawn
from ..logbook.logbook import escaped, markdown_of
from .record import DONE, Outcome, Record
from .steps import STEPS

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
    known = (sentence for sentence in shown.sentences if sentence not in record.not_measured)
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in known)
    unknown = "".join(f"<li>{escape(sentence)}</li>" for sentence in record.not_measured) or "<li>Nothing.</li>"
    lines = "".join(
        f'<li><a href="#{escape(step.step)}">{escape(_about(step))}</a> {_state_of(step)}</li>' for step in record.steps
    )
    parts = (
        f"<h1>{escape(shown.title)}</h1>{said}<ul>{lines}</ul>",
        f"<details><summary>What was not measured</summary><ul>{unknown}</ul></details>",
        _wide(Report("Of what", spoken=("",), figures=shown.figures)),
        *map(_section_of, record.steps),
    )
    narrow = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{narrow}<title>{escape(shown.title)}</title>{PAGE_STYLE}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{"".join(parts)}</main></body></html>\n'


def _wide(report: Report) -> str:
    """Return a report as HTML that scrolls, by keys too, where the page is narrower."""
    return f'<div class="wide" role="group" aria-label="{escape(report.title)}" tabindex="0">{to_html(report)}</div>'


def _about(outcome: Outcome) -> str:
    return next((step.about for step in STEPS if step.name == outcome.step), outcome.step)


def _state_of(outcome: Outcome) -> str:
    """Return what a step found, or what became of it, as a coloured sign and a word."""
    word = (outcome.status or "") if outcome.outcome == DONE else outcome.outcome
    kind = word if word in {OK, WARNING, NOT_APPLICABLE} else FAILED
    return f'<span class="state">{badge(kind)} {escape(word)}</span>'


def _section_of(outcome: Outcome) -> str:
    """Return the part of the page on a step: what happened to it, its pictures, and all that it says."""
    parts = [f'<section id="{escape(outcome.step)}"><h2>{escape(_about(outcome))} {_state_of(outcome)}</h2>']
    parts += [f"<p>{escape(sentence)}</p>" for sentence in (outcome.what, outcome.remedy) if sentence]
    if outcome.output:
        lines = escape("\n".join(outcome.output))
        parts.append(f'<pre tabindex="0" aria-label="The last lines that it printed">{lines}</pre>')
    if outcome.report:
        parts.append(drawn(*outcome.report.pictures))
        is_open = "" if outcome.status in {OK, NOT_APPLICABLE} else " open"
        whole = f"<summary>All of it ({outcome.seconds:.0f} s)</summary>{_wide(replace(outcome.report, pictures=()))}"
        parts.append(f"<details{is_open}>{whole}</details>")
    return "".join([*parts, "</section>"])


def issue_of(record: Record, shown: Report) -> str:
    """Return a report as Markdown for an issue: what it comes to, a line for each step, and more of those that are not well."""
    parts = [f"# {escaped(shown.title)}", *map(escaped, shown.sentences)]
    parts += map(markdown_of, filled((*shown.tables, *shown.figures)))
    for step in record.steps:
        text = "\n".join(step.output)
        if not text and step.report and step.status in {WARNING, FAILED}:
            text = to_text(step.report)
        if text:
            parts.append(f"## {escaped(_about(step))}\n\n{FENCE}\n{text.replace(FENCE, '')}\n{FENCE}")
    return "\n\n".join(parts) + "\n"
