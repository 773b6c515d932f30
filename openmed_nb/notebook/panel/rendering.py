"""The HTML of each region of the panel: pure functions of what there is to see. Everything from outside is escaped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ..._render.display import (
    SIMULATION_NOTICE,
    Report,
    Table,
    escape,
    format_bytes,
    format_milliseconds,
    pluralize,
    to_html,
)
from ...devices.machine import format_device, is_marked_simulated
from .state import MEMORY_COLUMNS, PanelState

STYLE_SHEET = Path(__file__).with_name("panel.css").read_text("utf-8").partition("*/\n")[2]
# The style sheet of the panel, which stands in it once.
STYLES = f"<style>\n{STYLE_SHEET}</style>"

CELL_RUNNING_NOTICE = "A cell runs: what you click may wait for its end."

CLICK_PENDING_NOTICE = "Your click waits for the end of the running cell."

# Stands in every panel; the style sheet shows it alone when the front end says that the kernel of the panel has gone.
STALE_PANEL_HTML = '<p role="alert">The kernel was restarted, and this panel belongs to the former one. <strong>Run this cell again.</strong></p>'

# The size of the history line, in the units of its drawing, and the room for half of its stroke.
WIDTH = 120
HEIGHT = 20
STROKE_MARGIN = 1


def status(state: PanelState) -> str:
    """Return the device that is in force, large, and why; a screen reader announces a change."""
    first, *rest = state.status
    device, _, why = first.removeprefix("Device: ").partition(", ")
    large = f"<strong>{escape(device)}</strong>, {escape(why)}" if state.choice else escape(first)
    notes = (SIMULATION_NOTICE,) if state.simulated else ()
    said = _block(f'<p class="openmed-first">{large}</p>', _paragraphs((*rest, *notes)))
    return f'<div role="status">{said}</div>'


def devices(state: PanelState) -> str:
    """Return a table of the devices, folded up: whether each can be used, why not, and what to do."""
    table = replace(state.devices.to_report().tables[0], caption="Devices")
    missing = [one.device for one in state.devices.devices if one.usable is False]
    return _details(f"Why not {' or '.join(missing)}?" if missing else "All devices", table)


def environment(state: PanelState) -> str:
    """Return the tables of the variables, folded up unless one of them needs a remedy."""
    settings = state.explanation.environment.settings
    effects = ", ".join(f"{count} {effect}" for effect, count in Counter(one.effect for one in settings).items())
    needed = any(one.remedy for one in settings)
    return _details(f"MPS variables: {effects}", *state.environment_tables, opened=needed)


def memory(state: PanelState) -> str:
    """Return for each memory what is used and how that went, and its limit with a bar of how much of it is used.

    Each part has a pattern in words and bar. The bar is left out of what is read aloud, because the figures say the same.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in MEMORY_COLUMNS)
    rows = ""
    for bar in state.memory:
        words = []
        stripes = ""
        for index, part in enumerate(bar.parts):
            swatch = f'<span class="openmed-swatch openmed-part-{index}" aria-hidden="true"></span>'
            words.append(f'<span class="openmed-used">{swatch}{_nowrap_sizes(str(part))}</span>')
            share = min(1, part.size / bar.limit) if bar.limit else 0
            stripes += f'<div class="openmed-part-{index}" style="width:{share:.2%}"></div>'
        used = f"{' '.join(words)}{_sparkline(bar.history)}"
        limit = f'{_nowrap_sizes(bar.row[2])}<div class="openmed-bar" aria-hidden="true">{stripes}</div>'
        rows += f'<tr><th scope="row">{escape(bar.name)}</th><td>{used}</td><td>{limit}</td></tr>'
    title = '<caption class="openmed-unseen">Memory in use</caption>'
    table = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return _block(f'<div class="openmed-memories">{table}</div>')


def models(state: PanelState) -> str:
    """Return a table of what is loaded, folded up."""
    if not state.models:
        return _block(_paragraphs(["No model is in memory; Annotate loads one."]))
    names = f"{pluralize(len(state.models), 'model')} in memory: {', '.join(state.models.names)}"
    return _details(names, replace(state.models.table(), caption="Models in memory"))


def activity(state: PanelState) -> str:
    """Return what is under way, in words and with a sign that turns; empty where nothing is.

    That a cell runs is shown and not announced: a screen reader would say it at every cell.
    """
    if state.cell_running and state.pending_clicks:
        return f'<div role="status" class="openmed-activity">{CLICK_PENDING_NOTICE}</div>'
    if state.activity is None:
        return f'<div class="openmed-activity openmed-late">{CELL_RUNNING_NOTICE}</div>' if state.cell_running else ""
    sign = '<span class="openmed-spinner" aria-hidden="true"></span>'
    return f'<div role="status" class="openmed-activity">{sign}<span>{escape(state.activity)}</span></div>'


def message(state: PanelState) -> str:
    """Return what went wrong and what to do about it, or what the last click has to say; empty where there is nothing."""
    if state.error is not None:
        what = f"<p><strong>Error:</strong> {escape(state.error.message)}</p>"
        remedy = f"<p><strong>What to do:</strong> {escape(state.error.remedy)}</p>"
        return f'<div role="alert" class="openmed-error">{_block(what, remedy)}</div>'
    return f'<div role="status" class="openmed-said">{to_html(state.result)}</div>' if state.result else ""


def annotation(state: PanelState) -> str:
    """Return the last annotated text, with the time it took and the device; empty before the first."""
    if state.annotation is None:
        return ""
    report = state.annotation.to_report()
    notes = (SIMULATION_NOTICE,) if is_marked_simulated(state.annotation.device) else ()
    if state.answer_is_old:
        now = "no device" if state.choice is None else format_device(state.choice.device)
        notes = (
            *notes,
            f"This answer is of {state.annotation.device}, and the device is {now} now. Click Annotate for another.",
        )
    seconds = state.seconds or 0.0
    took = format_milliseconds(seconds, 0) if seconds >= 0.001 else "less than 1 ms"  # noqa: PLR2004 - one millisecond
    took = took.replace(" ms", "\N{NO-BREAK SPACE}ms")
    timed = replace(report, title=f"{report.title} in {took}")
    return f'<div role="status">{to_html(replace(timed, sentences=(*notes, *report.sentences)))}</div>'


def _nowrap_sizes(text: str) -> str:
    """Return a text as HTML in which sizes such as 9.8 MiB stay in one line, however narrow their cell is."""
    return re.sub(r"[\d.]+ (bytes|[KMGTP]iB)\b", r'<span class="openmed-size">\g<0></span>', escape(text))


def _sparkline(history: tuple[int, ...]) -> str:
    """Return how much was used at the last looks as a line over nothing; the highest look touches the upper edge."""
    if not history:
        return ""
    looks = (history[0], *history) if len(history) == 1 else history
    most = max(*looks, 1)
    step = WIDTH / (len(looks) - 1)
    points = " ".join(
        f"{step * number:.1f},{STROKE_MARGIN + (HEIGHT - STROKE_MARGIN) * (1 - used / most):.1f}"
        for number, used in enumerate(looks)
    )
    label = f"{format_bytes(min(looks))} to {format_bytes(max(looks))} at the last {pluralize(len(history), 'look')}"
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


# What a region shows below its heading.
SHOWN = {"Device": status, "Memory": memory, "Models": models, "Environment": environment}


def top(name: str, state: PanelState) -> str:
    """Return the heading of a region, and what it shows of a state."""
    show = SHOWN.get(name)
    return f'<h2 class="openmed-heading">{escape(name)}</h2>' + (show(state) if show else "")
