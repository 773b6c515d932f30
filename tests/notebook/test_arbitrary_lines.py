"""Arbitrary lines and cells have a result or one of our errors, which changes nothing and does not quote the note."""

import json
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers.leaks import LONG_WORD, MARKER, SENTENCE, find_leaks
from helpers.session_state import read_state
from openmed_nb._render.display import Json
from openmed_nb.annotation.references import file_name_remedy
from openmed_nb.errors import OpenMedError
from openmed_nb.session import SESSION

pytestmark = pytest.mark.filterwarnings("ignore:Text 0 looks like a file name")  # The line is annotated anyway.
in_ready_kernel = pytest.mark.usefixtures("ready")

WORDS = st.sampled_from(
    [
        *("--simulate", "--simulate=mps", "--simulate=off", "--memory", "--memory=8GiB", "--memory=1", "off", "--sim"),
        *("--reset", "--list", "--explain", "--json", "-h", "--help", "--", "-", "--re", "--j=", "--bogus", "---"),
        *("--model", "--strategy", "--device", "--out", "--model=bundled_small", "--out=found", "--strategy=none"),
        *("auto", "cpu", "CPU", "cuda", "cuda:0", "cuda:99", "cuda:", "mps", "mps:0", "mps:1", "gpu", "default"),
        *("banana", "bundled_small", "bundeld", "disease_detection_tiny", "some/model", "/", "~", ".", "..", "~nobody"),
        *("none", "simple", "first", "MAX", "found", "class", "1", "é", "__builtins__x", "'", '"', "''", "'a b'", "\\"),
        *("a" * 300, ";", "#", "# x", "cpu;", "$x", "{x}", "\x00", "\n", "\t", "💊", "%", "%s", "{", "\u202e"),
        *("0x1f", "-1", "@file"),
    ]
)
FLAGS = st.sampled_from(["--model", "--strategy", "--device", "--out", "--simulate", "--memory"])
PAIRS = st.lists(st.tuples(FLAGS, st.sampled_from([" ", "="]), WORDS | st.text(max_size=15)).map("".join), max_size=3)
LINES = st.one_of(st.lists(WORDS, max_size=5).map(" ".join), PAIRS.map(" ".join), st.text(max_size=40))
CELLS = st.one_of(
    st.text(max_size=200),
    st.lists(
        st.sampled_from(["asthma", "no fever", "\n", "\r", "\x00", "\ufeff", "\u200b", "é" * 50, "😷", "   "])
    ).map(" ".join),
)
IN_ONE_SHELL = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture
def ready(shell):
    """Load the small model, so that torch is imported and the device confirmed before states are compared."""
    shell.find_cell_magic("openmed_ner")("--model bundled_small", "He has asthma.")


def run_magic(magic, *arguments):
    """Run a magic, check its result or its error, and return it."""
    SESSION.end_simulation()
    SESSION.reset()
    before = read_state()
    try:
        result = magic(*arguments)
    except OpenMedError as error:
        result = error
    if isinstance(result, OpenMedError):
        assert read_state() == before
        assert result._render_traceback_() == [f"{type(result).__name__}: {result}"]
        assert len(str(result).splitlines()) == 1
        assert result.remedy.endswith(".")
        assert json.dumps(result.to_dict())
    elif isinstance(result, Json):
        assert json.loads(result)
    elif result is not None:
        assert str(result)
        assert result._repr_html_().startswith('<div class="openmed-nb')
        assert json.dumps(result.to_dict())
    return result


@in_ready_kernel
@pytest.mark.parametrize("magic", ["openmed_device", "openmed_panel", "openmed_ner"])
@IN_ONE_SHELL
@given(line=LINES)
@example(line="--list --json")
@example(line="''")
@example(line='"')
@example(line="--")
@example(line="--simulate mps --memory '512 MiB'")
@example(line="--simulate mps --memory 1MiB")
@example(line="--model=--")
@example(line="--close --model bundled")
@example(line=".CSV")
def test_any_line_has_a_result_or_one_of_our_errors(shell, magic, line):
    """Variables are expanded first."""
    run_magic(partial(shell.run_line_magic, magic), line)


@in_ready_kernel
@IN_ONE_SHELL
@given(line=LINES)
@example(line="--model=")
@example(line="--out=")
@example(line="--out=--")
def test_any_line_of_the_cell_magic_does_not_quote_the_note(shell, line):
    result = run_magic(shell.find_cell_magic("openmed_ner"), line, "The patient has leprosy.\n")
    assert not (isinstance(result, OpenMedError) and "leprosy" in str(result))


@in_ready_kernel
@IN_ONE_SHELL
@given(cell=CELLS, strategy=st.sampled_from(["none", "simple", "first", "average", "max"]))
@example(cell="\x00", strategy="first")
@example(cell="\u200b", strategy="none")
@example(cell="\u200b\ufeff", strategy="simple")
@example(cell="asthma " * 100, strategy="first")
@example(cell="notes.csv\n", strategy="first")
def test_any_cell_is_annotated(shell, cell, strategy):
    """Only white space and the name of a file are not, and every entity is inside the text."""
    found = run_magic(shell.find_cell_magic("openmed_ner"), f"--strategy {strategy}", cell)
    if isinstance(found, OpenMedError):
        assert not cell.strip() or file_name_remedy(cell.strip())
        return
    assert found.text == cell
    assert all(0 <= entity["start"] <= entity["end"] <= len(cell) for entity in found)


# The options of each magic: those with a value, and those without one.
OPTIONS = {
    "openmed": ([], []),
    "openmed_device": (
        ["--simulate", "--memory", "--simulate mps --memory"],
        ["--reset", "--list", "--explain", "--json"],
    ),
    "openmed_ner": (["--model", "--strategy", "--device", "--from", "--out"], []),
    "openmed_panel": (["--model"], ["--close"]),
    "openmed_doctor": ([], ["--json"]),
    "openmed_log": (["--diff"], ["--json"]),
    "openmed_sweep": (["--length", "--max-batch-size", "--seconds", "--device"], ["--training", "--json"]),
    "openmed_release": ([], ["--keep-models"]),
    "openmed_report": ([], ["--quick", "--json"]),
}
FILE_MAGICS = {"openmed_report", "openmed_log"}  # They accept any word as the name of a file or a folder.
VARIABLES = ("note", "numbers", "keyed", "thing", "kind", "mixed", "encoded")
CELL = f"{SENTENCE} and asthma."


def invalid_cells(magic, options, flags):
    """Yield invalid cells that contain text of a note in each argument of a magic."""
    for word in (SENTENCE, LONG_WORD):
        yield f"%{magic} --{word}"
        if magic not in FILE_MAGICS | {"openmed_ner"}:
            yield f'%{magic} "{word}"'
            yield f'%{magic} x "{word}"'
        for option in options:
            text = " She has asthma." if magic == "openmed_ner" and option != "--from" else ""
            yield f'%{magic} {option} "{word}"{text}'
            yield f"%{magic} {option}={word}{text}"
    yield f"%{magic} -HIV positive {MARKER}"
    yield f"%{magic} '{SENTENCE}"
    yield f'%{magic} "a" "{SENTENCE}" --bogus'
    for flag in flags:
        yield f'%{magic} {flag}="{SENTENCE}"'
        if magic not in FILE_MAGICS:
            yield f'%{magic} {flag} "{SENTENCE}" "{SENTENCE}"'
    if magic != "openmed_ner":
        yield f"%%{magic} cpu\n{CELL}"


NER_LINES = (
    SENTENCE, f"-{MARKER} has HIV", "--device nope", "--model nope", "--strategy nope", "--out 1x", "--from note", "--bogus",
    "--model note", f'--out "{SENTENCE}"',
)  # fmt: skip
INVALID_CELLS = [
    *(cell for magic, (options, flags) in OPTIONS.items() for cell in invalid_cells(magic, options, flags)),
    *(f"%%openmed_ner {line}\n{CELL}" for line in NER_LINES),
    *(f"%openmed_ner --from {name}" for name in (*VARIABLES, f"note {SENTENCE}")),
    *(f"%openmed_doctor {name}" for name in (*VARIABLES, '"FOLDER"')),
    *(f"%{magic} {name}" for magic in ("openmed_device", "openmed_sweep") for name in ("{note}", "$note")),
    *(f'%openmed_{line} "FILE"' for line in ("log", "log --diff", "report", "doctor", "sweep")),
    *(f'%openmed_ner --model "{name}" She has asthma.' for name in ("FILE", "FOLDER")),
    *(f"%openmed_ner {line}" for line in (f"-{MARKER} positive", f"--model {MARKER} --{MARKER} positive")),
]


SETUP_CODE = f"""
import os
folder_before = os.getcwd()
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
def prepared_kernel(kernel, tmp_path):
    """A kernel with the extension, variables that contain a note, and an empty working directory."""
    code = f"%load_ext openmed_nb\n%openmed_device cpu\n{SETUP_CODE}\nos.chdir({str(tmp_path)!r})"
    assert kernel.run(code).status == "ok"
    yield kernel
    kernel.run("os.chdir(folder_before)")


def collect_outputs(reply):
    """Return all displayed output of a cell."""
    name, value, lines = reply.error
    outputs = [("ename", name), ("evalue", value), *(("traceback", line) for line in lines)]
    outputs.extend(reply.streams.items())
    outputs.extend((mime_type, str(text)) for bundle in reply.shown for mime_type, text in bundle.items())
    outputs.append(("page", reply.page))
    return outputs


def test_magic_errors_do_not_quote_the_note(prepared_kernel, tmp_path):
    file = tmp_path / f"{SENTENCE}.json"
    file.write_text(json.dumps({SENTENCE: SENTENCE}), "utf-8")
    folder = tmp_path / f"{SENTENCE} folder"
    folder.mkdir()
    leaks = []
    for cell in INVALID_CELLS:
        reply = prepared_kernel.run(cell.replace("FILE", str(file)).replace("FOLDER", str(folder)))
        if reply.status != "ok" or "openmed_ner" not in cell:
            leaks += find_leaks(cell, collect_outputs(reply))
    assert not leaks, "\n".join(leaks)


@pytest.mark.parametrize(
    "line",
    [
        f"- {MARKER} asthma",
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
