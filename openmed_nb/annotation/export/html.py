"""A page with all notes and their marked entities, in one file without scripts and network access."""

from __future__ import annotations

from pathlib import Path

from ..._render.display import Report, escape, to_html
from .notes import Saveable, open_utf8

# Notes outside of the window are not drawn. All colors are system colors, for light and dark color schemes.
PAGE_START = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{color-scheme: light dark;}}
body {{background: Canvas; color: CanvasText; font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 0 auto; padding: 1rem; overflow-wrap: break-word;}}
h1 {{font-size: 1.4rem;}} h2 {{font-size: 1rem; margin: 0 0 0.3rem;}}
article {{border-top: 1px solid #8886; padding: 0.8rem 0; content-visibility: auto; contain-intrinsic-size: auto 8rem;}}
</style></head>
<body><main><h1>{title}</h1>{sentences}
"""
PAGE_END = "</main></body></html>\n"


def save_html(path: Path, found: Saveable) -> None:
    """Write all notes to a page."""
    summary = found.summary().to_report()
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in summary.sentences)
    with open_utf8(path) as file:
        file.write(PAGE_START.format(title=escape(summary.title), sentences=sentences))
        for name, segments in found.iter_named_segments(0, len(found), None):
            note = to_html(Report("", segments=tuple(segments)))
            file.write(f"<article><h2>Note {escape(name)}</h2>{note}</article>\n")
        file.write(PAGE_END)
