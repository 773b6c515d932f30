"""The process of one step: it reads its task as a line of JSON, and writes its answer into a file.

The input stays open as long as the report runs: when it ends, so does this process, whatever ended the report.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import json
import sys
import tempfile
import threading
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ...display import FAILED, OK, plain, worst
from ...distributed.tethered import end_with_input
from ...errors import OpenMedError, cause
from ...plain import from_plain
from ...session import SESSION
from ..logbook.sections import ReportFigures
from .record import ANSWER, DISK_FULL, MEMORY_FULL, evidence_from, private
from .steps import Answer, Asked

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# A process says where it is each time that this share of its time is over, so that the last time tells where it hangs.
SAYS_WHERE = 0.3


def main() -> None:
    """Do the task, and write the answer; an error of ours is one too, any other one ends the process."""
    task = json.loads(sys.stdin.readline())
    tempfile.tempdir = task["aside"]
    threading.Thread(target=end_with_input, daemon=True).start()
    faulthandler.dump_traceback_later(SAYS_WHERE * task["limit"], repeat=True)
    try:
        answer = answered(task)
    except OpenMedError as error:
        answer = {"what": f"{type(error).__name__}: {error.what}", "remedy": error.remedy}
    except (MemoryError, OSError, RuntimeError) as error:
        if (full := what_is_full(error)) is None:
            raise
        answer = {"what": f"{full[0]}: {cause(error)}.", "remedy": full[1]}
    Path(task["aside"], ANSWER).write_text(json.dumps(private(answer), allow_nan=False), "utf-8")


def what_is_full(error: MemoryError | OSError | RuntimeError) -> tuple[str, str] | None:
    """Return what has no room left, and what to do; ``None`` for an error of another kind."""
    from ...devices.memory import is_out_of_memory

    if isinstance(error, OSError):
        return ("The disk is full", DISK_FULL) if error.errno in NO_ROOM else None
    return ("The memory ran out", MEMORY_FULL) if is_out_of_memory(error) else None


def answered(task: dict[str, Any]) -> dict[str, Any]:
    """Return what a step found, as plain values."""
    with contextlib.ExitStack() as stack:
        SESSION.start()
        if task["simulated"]:
            SESSION.simulate(**task["simulated"])
            stack.callback(SESSION.end_simulation)
        elif task["request"]:
            SESSION.use(task["request"])
        figures = tuple(from_plain(ReportFigures, one) for one in task["figures"])
        asked = Asked(task["quick"], task["training"], task["device"], figures)
        answer: Answer = resolve_name(task["run"])(asked)
        found: dict[str, Any] = plain(told(answer, task))
        return found


def told(answer: Answer, task: dict[str, Any]) -> dict[str, Any]:
    """Return what an answer says as a report, for a logbook and for a verdict."""
    from ..figures import figures_of
    from ..verdict.verdict import evidence_of

    shown, evidence = answer.shown.marked(), {}
    if answer.judged:
        known = evidence_from(task["evidence"])
        found = evidence_of(known, *answer.judged, task=known.task).measured
        evidence = {name: value for name, value in found.items() if name not in known.measured}
    findings: Any = getattr(answer.shown, "findings", ())
    findings = findings() if callable(findings) else findings
    failed = ", ".join(one.name for one in findings if one.status == FAILED)
    plainly = answer.shown.report()  # The whole report says once whether it is simulated.
    says = answer.says or " ".join((f"{plainly.title}.", *plainly.sentences[:1]))
    return {
        "what": " ".join(filter(None, (says, f"Failed: {failed}." if failed else ""))),
        "status": worst(findings) if findings else OK,
        "report": shown,
        "pictures": answer.pictures,
        "data": answer.shown,
        "figures": answer.figures or tuple(map(figures_of, answer.judged)),
        "evidence": evidence,
    }
