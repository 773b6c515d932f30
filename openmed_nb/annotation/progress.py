"""The progress bar of a run over many texts."""

from __future__ import annotations

from typing import Any

BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}]"
COUNT = "{desc}: {n_fmt} texts [{elapsed}, {rate_noinv_fmt}]"


def progress_bar(total: int | None, shown: bool, device: str) -> Any:
    """Return a bar with texts per second, in the form that the front end can show; none for what takes under a second."""
    from tqdm.auto import tqdm

    form = COUNT if total is None else BAR
    return tqdm(total=total, unit=" texts", desc=f"annotating on {device}", disable=not shown, delay=1, bar_format=form)
