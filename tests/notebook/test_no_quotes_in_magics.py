"""Errors of magics do not contain text of their line or cell, which may be text of a note."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.leaks import LONG_WORD, MARKER, SENTENCE, find_leaks

CELL = f"{SENTENCE} and asthma."

OPTIONS = {
    "openmed_device": ["--simulate", "--memory", "--simulate mps --memory"],
    "openmed_ner": ["--model", "--strategy", "--device", "--from", "--out"],
    "openmed_panel": ["--model"],
    "openmed_doctor": ["--ops"],
    "openmed_log": ["--diff"],
    "openmed_sweep": ["--length", "--max-batch-size", "--seconds", "--device"],
}
"""The options that take a value, by magic."""

FLAGS = {
    "openmed": [],
    "openmed_device": ["--reset", "--list", "--explain", "--json"],
    "openmed_panel": ["--close"],
    "openmed_release": ["--keep-models"],
    "openmed_doctor": ["--json"],
    "openmed_log": ["--json"],
    "openmed_sweep": ["--training", "--json"],
    "openmed_report": ["--quick", "--json"],
}
"""The options without a value, by magic. Each is tested with a value, which it does not accept."""

FILE_ARGUMENT_MAGICS = {"openmed_report", "openmed_log"}
"""Magics that accept any word as the name of a file or a folder."""


def invalid_cells() -> list[str]:
    """Return invalid cells that pass text of a note as each argument of each magic."""
    cells = []
    for magic in ("openmed", *OPTIONS, "openmed_release", "openmed_report"):
        for word in (SENTENCE, LONG_WORD):
            cells.append(f"%{magic} --{word}")
            cells.append(f"%{magic} -{word}")
            if magic not in FILE_ARGUMENT_MAGICS | {"openmed_ner"}:
                cells.append(f'%{magic} "{word}"')
                cells.append(f'%{magic} x "{word}"')
        cells.append(f"%{magic} -HIV positive {MARKER}")
        cells.append(f"%{magic} '{SENTENCE}")
        cells.append(f'%{magic} "a" "{SENTENCE}" --bogus')
        for option in OPTIONS.get(magic, []):
            for word in (SENTENCE, LONG_WORD):
                text = " She has asthma." if magic == "openmed_ner" and option != "--from" else ""
                cells.append(f'%{magic} {option} "{word}"{text}')
                cells.append(f'%{magic} {option}="{word}"{text}')
                cells.append(f"%{magic} {option} {word}{text}")
        cells.extend(f'%{magic} {flag}="{SENTENCE}"' for flag in FLAGS.get(magic, []))
        cells.extend(
            f'%{magic} {flag} "{SENTENCE}" "{SENTENCE}"'
            for flag in FLAGS.get(magic, [])
            if magic not in FILE_ARGUMENT_MAGICS
        )
    cells.extend([
        f"%openmed_ner -{MARKER} positive",
        f"%openmed_ner --{MARKER} positive",
        f"%openmed_ner --model {MARKER} --{MARKER} positive",
        f"%%openmed_ner {SENTENCE}\n{CELL}",
        f"%%openmed_ner -{MARKER} has HIV\n{CELL}",
        f"%%openmed_ner --device nope\n{CELL}",
        f"%%openmed_ner --model nope\n{CELL}",
        f"%%openmed_ner --strategy nope\n{CELL}",
        f"%%openmed_ner --out 1x\n{CELL}",
        f"%%openmed_ner --from note\n{CELL}",
        f"%%openmed_ner --bogus\n{CELL}",
        f"%%openmed_ner --model note\n{CELL}",
        f'%%openmed_ner --out "{SENTENCE}"\n{CELL}',
        f"%openmed_ner --from note {SENTENCE}",
        "%openmed_ner --from numbers",
        "%openmed_ner --from keyed",
        "%openmed_ner --from thing",
        "%openmed_ner --from kind",
        "%openmed_ner --from mixed",
        "%openmed_ner --from encoded",
        f"%%openmed_device cpu\n{CELL}",
        f"%%openmed_doctor\n{CELL}",
        f"%%openmed_sweep\n{CELL}",
        f"%%openmed_log\n{CELL}",
        f"%%openmed_report\n{CELL}",
        f"%%openmed_release\n{CELL}",
        f"%%openmed_panel\n{CELL}",
        f"%%openmed\n{CELL}",
        "%openmed_doctor thing",
        "%openmed_doctor kind",
        "%openmed_doctor note",
        "%openmed_doctor mixed",
        "%openmed_doctor --ops thing",
        "%openmed_doctor --ops note",
        "%openmed_sweep thing",
        "%openmed_sweep note",
        "%openmed_sweep {note}",
        "%openmed_device {note}",
        "%openmed_device $note",
        '%openmed_log "FILE"',
        '%openmed_log --diff "FILE"',
        '%openmed_report "FILE"',
        '%openmed_doctor "FILE"',
        '%openmed_sweep "FILE"',
        '%openmed_ner --model "FILE" She has asthma.',
        '%openmed_ner --model "FOLDER" She has asthma.',
        '%openmed_doctor "FOLDER"',
    ])  # fmt: skip
    return cells


SETUP_CODE = f"""
note = {SENTENCE!r}
numbers = [{SENTENCE!r}, 1]
keyed = {{{SENTENCE!r}: 1}}
class Thing:
    def __repr__(self):
        return note
thing = Thing()
kind = type(note, (), {{}})()
mixed = [note, thing, None]
encoded = note.encode()
"""


@pytest.fixture
def prepared_kernel(kernel: Any, tmp_path: Path) -> Any:
    """A kernel with the extension, variables that contain a note, and an empty working directory."""
    assert kernel.run("%load_ext openmed_nb\n%openmed_device cpu").status == "ok"
    assert kernel.run(f"import os\nfolder_before = os.getcwd()\nos.chdir({str(tmp_path)!r})").status == "ok"
    assert kernel.run(SETUP_CODE).status == "ok"
    yield kernel
    kernel.run("os.chdir(folder_before)")


def collect_outputs(reply: Any) -> list[tuple[str, str]]:
    """Return all displayed output of a cell."""
    name, value, lines = reply.error
    outputs = [("ename", name), ("evalue", value), *(("traceback", line) for line in lines)]
    outputs.extend(reply.streams.items())
    outputs.extend((mime_type, str(text)) for bundle in reply.shown for mime_type, text in bundle.items())
    outputs.append(("page", reply.page))
    return outputs


def test_magic_errors_do_not_leak_note_text(prepared_kernel, tmp_path):
    """Errors of magics do not contain the rejected arguments."""
    file = tmp_path / f"{SENTENCE}.json"
    file.write_text(json.dumps({SENTENCE: SENTENCE}), "utf-8")
    folder = tmp_path / f"{SENTENCE} folder"
    folder.mkdir()
    leaks = []
    for cell in invalid_cells():
        reply = prepared_kernel.run(cell.replace("FILE", str(file)).replace("FOLDER", str(folder)))
        if reply.status != "ok" or "openmed_ner" not in cell:
            leaks += find_leaks(cell, collect_outputs(reply))
    assert not leaks, "\n".join(leaks)


@pytest.mark.parametrize(
    "line",
    [
        f"- {MARKER} asthma",
        f"-- -{MARKER} asthma",
        f"-- --{MARKER} asthma",
        f"--model bundled_small - {MARKER} asthma",
        f"--model bundled_small -- - {MARKER} asthma",
        "-- --help asthma",
        f"-- {MARKER}'s asthma",
    ],
)
def test_ner_magic_annotates_lines_that_begin_with_dashes(prepared_kernel, line):
    """A single dash and everything after two dashes are part of the text."""
    reply = prepared_kernel.run(f"%openmed_ner {line}")
    assert reply.status == "ok", reply.error
    assert "asthma" in reply.text
    assert "DISEASE" in reply.text
