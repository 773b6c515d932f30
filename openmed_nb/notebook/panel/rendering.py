"""Render each region of the panel as HTML: pure functions of a :class:`PanelState` that escape all external text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..._render.display import (
    SIMULATED_SUFFIX,
    SIMULATION_NOTICE,
    Report,
    Table,
    escape,
    format_bytes,
    pluralize,
    to_html,
)
from ...devices.choice import GPU_QUESTION
from ...devices.machine import is_marked_simulated
from .state import MEMORY_COLUMNS, PanelState

STYLE_SHEET = Path(__file__).with_name("panel.css").read_text("utf-8").partition("*/\n")[2]
# The style sheet, which the panel contains once.
STYLES = f"<style>\n{STYLE_SHEET}</style>"

CELL_RUNNING_NOTICE = "A cell is running. Clicks are processed when it finishes."

CLICK_PENDING_NOTICE = "Waiting for the running cell to finish."

# Every panel contains this text. The style sheet shows only it when the front end marks the kernel as disconnected.
STALE_PANEL_HTML = '<p role="alert">The kernel was restarted; this panel is no longer connected. <strong>Run this cell again.</strong></p>'

# Size of the sparkline in SVG units, and the margin for half of its stroke.
WIDTH = 120
HEIGHT = 20
STROKE_MARGIN = 1


def status(state: PanelState) -> str:
    """Render the active device, emphasized, and the reason; a screen reader announces a change."""
    headline, *details = state.status
    first = escape(headline)
    if state.choice is not None:
        device = f"{state.choice.device}{SIMULATED_SUFFIX if state.choice.simulated else ''}"
        reason = headline.removeprefix("Device: ").removeprefix(device)
        first = f"<strong>{escape(device)}</strong>{escape(reason)}"
    notices = (SIMULATION_NOTICE,) if state.simulated else ()
    content = _block(f'<p class="openmed-first">{first}</p>', _paragraphs((*details, *notices)))
    return f'<div role="status">{content}</div>'


def devices(state: PanelState) -> str:
    """Render a collapsed table of the devices; without MPS hardware, its variables are there too."""
    table = replace(state.devices.to_report().tables[0], caption="Devices")
    environment_tables = () if state.devices.has_mps else state.environment_tables
    return _details(GPU_QUESTION if state.devices.unavailable else "All devices", table, *environment_tables)


def environment(state: PanelState) -> str:
    """Render the tables of the variables, collapsed unless a variable has a suggested action; nothing without MPS."""
    if not state.devices.has_mps:
        return ""
    settings = state.explanation.environment.settings
    counts = Counter(setting.effect for setting in settings)
    effects = ", ".join(f"{count} {effect}" for effect, count in counts.items())
    has_remedy = any(setting.remedy for setting in settings)
    return _details(f"MPS variables: {effects}", *state.environment_tables, opened=has_remedy)


def memory(state: PanelState) -> str:
    """Render the memory in use with its history, and the limit with a bar.

    Each kind of memory has the same pattern in the legend and in the bar. Screen readers skip the bar, because the text
    has the same values.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in MEMORY_COLUMNS)
    rows = ""
    for bar in state.memory:
        legend = []
        stripes = ""
        for index, part in enumerate(bar.parts):
            swatch = f'<span class="openmed-swatch openmed-part-{index}" aria-hidden="true"></span>'
            legend.append(f'<span class="openmed-used">{swatch}{_nowrap_sizes(str(part))}</span>')
            fraction = min(1, part.size / bar.limit) if bar.limit else 0
            stripes += f'<div class="openmed-part-{index}" style="width:{fraction:.2%}"></div>'
        used = f"{' '.join(legend)}{_sparkline(bar.history)}"
        limit = f'{_nowrap_sizes(bar.row[2])}<div class="openmed-bar" aria-hidden="true">{stripes}</div>'
        rows += f'<tr><th scope="row">{escape(bar.name)}</th><td>{used}</td><td>{limit}</td></tr>'
    title = '<caption class="openmed-unseen">Memory in use</caption>'
    table = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _block(f'<div class="openmed-memories">{table}</div>')


def models(state: PanelState) -> str:
    """Render a collapsed table of the loaded models."""
    if not state.models:
        return _block(_paragraphs(['No models are loaded. Click "Annotate" to load one.']))
    summary = f"{pluralize(len(state.models), 'model')} loaded: {', '.join(state.models.names)}"
    return _details(summary, replace(state.models.table(), caption="Loaded models"))


def activity(state: PanelState) -> str:
    """Render the operation in progress with a spinner; empty if there is none.

    A running cell is displayed but not announced. Otherwise a screen reader would announce every cell.
    """
    if state.cell_running and state.pending_clicks:
        return f'<div role="status" class="openmed-activity">{CLICK_PENDING_NOTICE}</div>'
    if state.activity is None:
        return f'<div class="openmed-activity openmed-late">{CELL_RUNNING_NOTICE}</div>' if state.cell_running else ""
    spinner = '<span class="openmed-spinner" aria-hidden="true"></span>'
    return f'<div role="status" class="openmed-activity">{spinner}<span>{escape(state.activity)}</span></div>'


def message(state: PanelState) -> str:
    """Render the error of the last click with its remedy, or its result; empty if it has neither."""
    if state.error is not None:
        problem = f"<p><strong>Error:</strong> {escape(state.error.message)}</p>"
        remedy = f"<p><strong>Suggested action:</strong> {escape(state.error.remedy)}</p>"
        return f'<div role="alert" class="openmed-error">{_block(problem, remedy)}</div>'
    if state.result is None:
        return ""
    return f'<div role="status" class="openmed-result">{to_html(state.result)}</div>'


def annotation(state: PanelState) -> str:
    """Render the last annotated text in a box that the keyboard can scroll; empty if no text was annotated."""
    if state.annotation is None:
        return ""
    report = state.annotation.to_report()
    if is_marked_simulated(state.annotation.device):
        report = replace(report, sentences=(SIMULATION_NOTICE, *report.sentences))
    box = '<div class="openmed-answer" role="region" aria-label="Annotated text" tabindex="0">'
    return f'<div role="status">{box}{to_html(report)}</div></div>'


def _nowrap_sizes(text: str) -> str:
    """Return a text as HTML in which sizes such as 9.8 MiB do not wrap, however narrow the cell is."""
    return re.sub(r"[\d.]+ (bytes|[KMGTP]iB)\b", r'<span class="openmed-size">\g<0></span>', escape(text))


def _sparkline(history: tuple[int, ...]) -> str:
    """Render the memory in use at the last samples as a line chart, scaled to the largest sample."""
    if not history:
        return ""
    samples = history * 2 if len(history) == 1 else history
    largest = max(*samples, 1)
    step = WIDTH / (len(samples) - 1)
    points = " ".join(
        f"{step * index:.1f},{STROKE_MARGIN + (HEIGHT - STROKE_MARGIN) * (1 - used / largest):.1f}"
        for index, used in enumerate(samples)
    )
    if len(history) == 1:
        label = f"{format_bytes(history[0])} in 1 sample"
    else:
        label = f"{format_bytes(min(history))} to {format_bytes(max(history))} in the last {len(history)} samples"
    return (
        f'<svg class="openmed-line" role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{label}</title>'
        f'<polygon points="0,{HEIGHT} {points} {WIDTH},{HEIGHT}"/><polyline points="{points}"/></svg>'
    )


def _details(summary: str, *tables: Table, opened: bool = False) -> str:
    content = to_html(Report("", tables=tables))
    return _block(f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{content}</details>")


def _block(*parts: str) -> str:
    return f'<div class="openmed-nb tex2jax_ignore">{"".join(parts)}</div>'


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


# The renderer of the content below the heading of a region.
CONTENT_RENDERERS = {"Device": status, "Memory": memory, "Models": models, "Environment": environment}


def top(name: str, state: PanelState) -> str:
    """Render the heading of a region and its content."""
    render = CONTENT_RENDERERS.get(name)
    content = render(state) if render else ""
    return f'<h2 class="openmed-heading">{escape(name)}</h2>{content}' if content or not render else ""
