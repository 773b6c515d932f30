"""A report as one page that needs nothing else, and as one text for an issue."""

from __future__ import annotations

from dataclasses import replace

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Report, drop_empty_tables, escape, to_html, to_text
from ...._render.drawing import render_charts, status_badge
from ..logbook.logbook import escape_markdown, table_to_markdown
from .record import DONE, ReportData, StepOutcome
from .steps import STEPS

FENCE = "~" * 8

# The page follows the light or dark scheme of the browser: every color is the system's own or half transparent.
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


def render_page(record: ReportData, shown: Report) -> str:
    """Return a report as a page of HTML: what it comes to, and a section for each step that has run."""
    known = (sentence for sentence in shown.sentences if sentence not in record.not_measured)
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in known)
    unknown = "".join(f"<li>{escape(sentence)}</li>" for sentence in record.not_measured) or "<li>Nothing.</li>"
    lines = "".join(
        f'<li><a href="#{escape(step.step)}">{escape(_step_title(step))}</a> {_status_html(step)}</li>'
        for step in record.steps
    )
    parts = (
        f"<h1>{escape(shown.title)}</h1>{said}<ul>{lines}</ul>",
        f"<details><summary>What was not measured</summary><ul>{unknown}</ul></details>",
        _scrollable_html(Report("Of what", html_sentences=("",), metrics=shown.metrics)),
        *map(_render_section, record.steps),
    )
    narrow = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{narrow}<title>{escape(shown.title)}</title>{PAGE_STYLE}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{"".join(parts)}</main></body></html>\n'


def _scrollable_html(report: Report) -> str:
    """Return a report as HTML that scrolls, by keys too, where the page is narrower."""
    return f'<div class="wide" role="group" aria-label="{escape(report.title)}" tabindex="0">{to_html(report)}</div>'


def _step_title(outcome: StepOutcome) -> str:
    return next((step.about for step in STEPS if step.name == outcome.step), outcome.step)


def _status_html(outcome: StepOutcome) -> str:
    """Return what a step found, or what became of it, as a coloured sign and a word."""
    word = (outcome.status or "") if outcome.outcome == DONE else outcome.outcome
    kind = word if word in {OK, WARNING, NOT_APPLICABLE} else FAILED
    return f'<span class="state">{status_badge(kind)} {escape(word)}</span>'


def _render_section(outcome: StepOutcome) -> str:
    """Return the part of the page on a step: what happened to it, its pictures, and all that it says."""
    parts = [f'<section id="{escape(outcome.step)}"><h2>{escape(_step_title(outcome))} {_status_html(outcome)}</h2>']
    parts += [f"<p>{escape(sentence)}</p>" for sentence in (outcome.message, outcome.remedy) if sentence]
    if outcome.output:
        lines = escape("\n".join(outcome.output))
        parts.append(f'<pre tabindex="0" aria-label="The last lines that it printed">{lines}</pre>')
    if outcome.report:
        parts.append(render_charts(*outcome.report.charts))
        is_open = "" if outcome.status in {OK, NOT_APPLICABLE} else " open"
        whole = f"<summary>All of it ({outcome.seconds:.0f} s)</summary>{_scrollable_html(replace(outcome.report, charts=()))}"
        parts.append(f"<details{is_open}>{whole}</details>")
    return "".join([*parts, "</section>"])


def render_issue(record: ReportData, shown: Report) -> str:
    """Return a report as Markdown for an issue: what it comes to, a line for each step, and more of those that are not well."""
    parts = [f"# {escape_markdown(shown.title)}", *map(escape_markdown, shown.sentences)]
    parts += map(table_to_markdown, drop_empty_tables((*shown.tables, *shown.metrics)))
    for step in record.steps:
        text = "\n".join(step.output)
        if not text and step.report and step.status in {WARNING, FAILED}:
            text = to_text(step.report)
        if text:
            parts.append(f"## {escape_markdown(_step_title(step))}\n\n{FENCE}\n{text.replace(FENCE, '')}\n{FENCE}")
    return "\n\n".join(parts) + "\n"
