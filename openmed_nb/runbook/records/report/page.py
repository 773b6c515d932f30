"""Rendering of a report as a self-contained HTML page and as Markdown for an issue."""

from __future__ import annotations

from dataclasses import replace

from ...._render.display import FAILED, NOT_APPLICABLE, OK, WARNING, Report, drop_empty_tables, escape, to_html, to_text
from ...._render.drawing import render_charts, status_badge
from ..logbook.logbook import escape_markdown, table_to_markdown
from .record import DONE, ReportData, StepOutcome
from .steps import STEPS

FENCE = "~" * 8

# The page supports light and dark color schemes: all colors are system colors or translucent.
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


def render_page(report: ReportData, displayed: Report) -> str:
    """Return a report as an HTML page with its conclusion and a section for each step that ran."""
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in displayed.sentences)
    missing = "".join(f"<li>{escape(sentence)}</li>" for sentence in report.not_measured) or "<li>None.</li>"
    step_links = "".join(
        f'<li><a href="#{escape(step.step)}">{escape(_step_title(step))}</a> {_status_html(step)}</li>'
        for step in report.steps
    )
    parts = (
        f"<h1>{escape(displayed.title)}</h1>{paragraphs}<ul>{step_links}</ul>",
        f"<details><summary>Missing measurements</summary><ul>{missing}</ul></details>",
        # Without the table of the steps, which have sections of their own.
        _scrollable_html(Report("System", html_sentences=("",), metrics=displayed.metrics)),
        *map(_render_section, report.steps),
    )
    viewport = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f'<meta charset="utf-8">{viewport}<title>{escape(displayed.title)}</title>{PAGE_STYLE}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>{"".join(parts)}</main></body></html>\n'


def _scrollable_html(report: Report) -> str:
    """Return a report as HTML that scrolls horizontally on narrow pages, with keyboard support."""
    return f'<div class="wide" role="group" aria-label="{escape(report.title)}" tabindex="0">{to_html(report)}</div>'


def _step_title(outcome: StepOutcome) -> str:
    return next((step.title for step in STEPS if step.name == outcome.step), outcome.step)


def _status_html(outcome: StepOutcome) -> str:
    """Return the status of a step, or its outcome if it has no result, as a colored badge with a label."""
    label = (outcome.status or "") if outcome.outcome == DONE else outcome.outcome
    status = label if label in {OK, WARNING, NOT_APPLICABLE} else FAILED
    return f'<span class="state">{status_badge(status)} {escape(label)}</span>'


def _render_section(outcome: StepOutcome) -> str:
    """Return the section of a step with its message, charts and full report."""
    parts = [f'<section id="{escape(outcome.step)}"><h2>{escape(_step_title(outcome))} {_status_html(outcome)}</h2>']
    parts += [f"<p>{escape(sentence)}</p>" for sentence in (outcome.message, outcome.remedy) if sentence]
    if outcome.output:
        lines = escape("\n".join(outcome.output))
        parts.append(f'<pre tabindex="0" aria-label="Last lines of the output">{lines}</pre>')
    if outcome.report:
        parts.append(render_charts(*outcome.report.charts))
        is_open = "" if outcome.status in {OK, NOT_APPLICABLE} else " open"
        full_report = _scrollable_html(replace(outcome.report, charts=()))
        summary = f"<summary>Full report ({outcome.seconds:.0f} s)</summary>"
        parts.append(f"<details{is_open}>{summary}{full_report}</details>")
    return "".join([*parts, "</section>"])


def render_issue(report: ReportData, displayed: Report) -> str:
    """Return a report as Markdown for an issue, with details of the steps that have problems."""
    parts = [f"# {escape_markdown(displayed.title)}", *map(escape_markdown, displayed.sentences)]
    parts += map(table_to_markdown, drop_empty_tables((*displayed.tables, *displayed.metrics)))
    for step in report.steps:
        text = "\n".join(step.output)
        if not text and step.report and step.status in {WARNING, FAILED}:
            text = to_text(step.report)
        if text:
            parts.append(f"## {escape_markdown(_step_title(step))}\n\n{FENCE}\n{text.replace(FENCE, '')}\n{FENCE}")
    return "\n\n".join(parts) + "\n"
