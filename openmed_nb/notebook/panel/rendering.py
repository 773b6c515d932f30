"""The HTML of each region of the panel: pure functions of what there is to see. Everything from outside is escaped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ...devices.machine import shows_simulated
from ...display import NOTE, Report, Table, escape, filled, to_html
from .state import NO_DEVICE, MemoryBar, PanelState

STYLE_SHEET = Path(__file__).with_name("panel.css").read_text("utf-8").partition("*/\n")[2]
# The style sheet of the panel, which stands in it once.
STYLES = f"<style>\n{STYLE_SHEET}</style>"

CELL_RUNS = "A cell runs: what you click may wait for its end."

CLICK_WAITS = "Your click waits for the end of the running cell."

# How many patterns the style sheet has for the parts of a bar.
PARTS = 2


def heading(name: str) -> str:
    return f'<h3 class="openmed-heading">{escape(name)}</h3>'


def status(state: PanelState) -> str:
    """Return the device that is in force, large, then why; a screen reader announces a change."""
    choice = state.choice
    bold = f"<strong>{escape(f'In force: {choice.device}')}</strong> ({escape(choice.grade)})." if choice else NO_DEVICE
    large = f'<p class="openmed-first">Asked for: {_breakable(state.asked)}. {bold}</p>'
    notes = (NOTE,) if state.simulated else ()
    return f'<div role="status">{_block(large, _paragraphs((*state.why, *notes)))}</div>'


def devices(state: PanelState) -> str:
    """Return a table of the devices: whether each can be used, why not, and what to do."""
    table = replace(state.devices.report().tables[0], caption="Devices")
    return f'<div class="openmed-devices">{_block(_table(table, titled=True))}</div>'


def environment(state: PanelState) -> str:
    """Return the tables of the variables, folded up unless one of them needs a remedy."""
    settings = state.explanation.environment.settings
    effects = ", ".join(f"{count} {effect}" for effect, count in Counter(one.effect for one in settings).items())
    summary = f"<summary>MPS variables: {escape(effects)}</summary>"
    opened = " open" if any(one.remedy for one in settings) else ""
    return _block(f"<details{opened}>{summary}{_tables(state.environment_tables)}</details>")


def memory(state: PanelState) -> str:
    """Return a bar for each memory, with its figures as text."""
    table = state.memory_table
    rows = "".join(_row(table.columns, bar.row[0], _bar(bar), escape(bar.row[2])) for bar in state.memory)
    return _block(_framed("Memory in use", table.columns, rows, titled=True))


def models(state: PanelState) -> str:
    if not state.models:
        return _block(_paragraphs(["No model is in memory; Annotate loads one."]))
    return _block(_table(replace(state.models.table(), caption="Models in memory"), titled=True))


def activity(state: PanelState) -> str:
    """Return what is under way, in words and with a sign that turns; empty where nothing is.

    That a cell runs is shown and not announced: a screen reader would say it at every cell.
    """
    if state.cell_runs and state.waiting:
        return f'<div role="status" class="openmed-activity">{CLICK_WAITS}</div>'
    if state.activity is None:
        return f'<div class="openmed-activity openmed-late">{CELL_RUNS}</div>' if state.cell_runs else ""
    sign = '<span class="openmed-spinner" aria-hidden="true"></span>'
    return f'<div role="status" class="openmed-activity">{sign}<span>{escape(state.activity)}</span></div>'


def message(state: PanelState) -> str:
    """Return what went wrong and what to do about it, or what the last click has to say; empty where there is nothing."""
    if state.error is not None:
        what = f"<p><strong>Error:</strong> {escape(state.error.what)}</p>"
        remedy = f"<p><strong>What to do:</strong> {escape(state.error.remedy)}</p>"
        return f'<div role="alert" class="openmed-error">{_block(what, remedy)}</div>'
    return f'<div role="status" class="openmed-said">{_report(state.said)}</div>' if state.said else ""


def answer(state: PanelState) -> str:
    """Return the last annotated text, with the time it took and the device; empty before the first."""
    if state.answer is None:
        return ""
    device = state.answer.device
    took = f"Annotated in {milliseconds(state.seconds or 0)} on {device}."
    notes = (NOTE,) if shows_simulated(device) else ()
    return f'<div role="status">{_block(_paragraphs((took, *notes)))}</div>{_report(state.answer.report())}'


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds.

    Example:
        >>> milliseconds(0.0123), milliseconds(2.5), milliseconds(0.0002)
        ('12 ms', '2,500 ms', 'less than 1 ms')
    """
    return f"{1000 * seconds:,.0f} ms" if seconds >= 0.001 else "less than 1 ms"  # noqa: PLR2004 - one millisecond


def _bar(bar: MemoryBar) -> str:
    """Return a bar and its figures; the bar is left out of what is read aloud, because the figures say the same."""
    parts = tuple((f"openmed-part-{index % PARTS}", part) for index, part in enumerate(bar.parts))
    stripes = "".join(
        f'<div class="{pattern}" style="width:{bar.percentage(part.size):.2f}%"></div>' for pattern, part in parts
    )
    figures = " ".join(
        f'<span class="openmed-used"><span class="openmed-swatch {pattern}" aria-hidden="true"></span>{escape(part)}</span>'
        for pattern, part in parts
    )
    return f'<div class="openmed-bar" aria-hidden="true">{stripes}</div>{figures}'


def _report(report: Report) -> str:
    """Return a report whose tables are those of the panel."""
    tables = _tables(report.tables)
    return to_html(replace(report, tables=())) + (_block(tables) if tables else "")


def _tables(tables: Iterable[Table]) -> str:
    return "".join(_table(table) for table in filled(tables))


def _table(table: Table, titled: bool = False) -> str:
    """Return a table that can stand in a narrow panel too; ``titled`` is for one below a heading that says the same."""
    (shown,) = filled([table])
    rows = "".join(_row(shown.columns, row[0], *(escape(cell) for cell in row[1:])) for row in shown.rows)
    return _framed(shown.caption, shown.columns, rows, titled)


def _framed(caption: str, columns: tuple[str, ...], rows: str, titled: bool) -> str:
    """Return the rows as a table; a caption that would be seen twice is for those who do not see."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    kind = ' class="openmed-unseen"' if titled else ""
    title = f"<caption{kind}>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(columns: tuple[str, ...], name: str, *cells: str) -> str:
    """Return a row of cells that are HTML; each knows its column, which a narrow panel shows next to it."""
    data = "".join(
        f'<td data-column="{escape(column)}">{cell}</td>' for column, cell in zip(columns[1:], cells, strict=True)
    )
    return f'<tr><th scope="row">{_breakable(name)}</th>{data}</tr>'


def _breakable(text: str) -> str:
    """Return a text that may break after an underscore, as the names of variables must where the panel is narrow."""
    return escape(text).replace("_", "_<wbr>")


def _block(*parts: str) -> str:
    return f'<div class="openmed-nb tex2jax_ignore">{"".join(parts)}</div>'


def _paragraphs(sentences: Iterable[str]) -> str:
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
