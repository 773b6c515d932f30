"""Arbitrary lines and cells: a result or one of our errors, and after an error everything is as it was."""

import json
from functools import partial

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers.session_state import read_state
from openmed_nb._render.display import Json
from openmed_nb.errors import MagicError, OpenMedError
from openmed_nb.session import SESSION

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


def at_rest():
    """Undo the effects of the previous line, including a simulation."""
    SESSION.end_simulation()
    SESSION.reset()


@pytest.fixture(autouse=True)
def ready(shell):
    """Load the small model first, so that torch is loaded and the device confirmed before anything is compared."""
    shell.find_cell_magic("openmed_ner")("--model bundled_small", "He has asthma.")


def outcome(magic, *arguments):
    """Run a magic as IPython does once it has filled variables in, and check what came out."""
    before = read_state()
    try:
        result = magic(*arguments)
    except OpenMedError as error:
        assert read_state() == before
        check_error(error)
        return error
    check_result(result)
    return result


def check_error(error):
    """An error is one line with something to do."""
    assert error._render_traceback_() == [f"{type(error).__name__}: {error}"]
    assert len(str(error).splitlines()) == 1
    assert error.remedy.endswith(".")
    assert json.dumps(error.to_dict())


def check_result(result):
    """A result has a text and an HTML form, or is JSON, or was printed."""
    if isinstance(result, Json):
        assert json.loads(result)
    elif result is not None:
        assert str(result)
        assert result._repr_html_().startswith('<div class="openmed-nb')
        assert json.dumps(result.to_dict())


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
def test_any_line_has_a_result_or_one_of_our_errors(shell, magic, line):
    """Also through ``run_line_magic``, as here, which fills in variables first."""
    at_rest()
    outcome(partial(shell.run_line_magic, magic), line)


@IN_ONE_SHELL
@given(line=LINES)
@example(line="--model=")
@example(line="--out=")
@example(line="--out=--")
def test_any_line_behind_the_cell_magic_has_no_error_with_the_note(shell, line):
    at_rest()
    result = outcome(shell.find_cell_magic("openmed_ner"), line, "The patient has leprosy.\n")

    assert not (isinstance(result, OpenMedError) and "leprosy" in str(result))


@IN_ONE_SHELL
@given(cell=CELLS, strategy=st.sampled_from(["none", "simple", "first", "average", "max"]))
@example(cell="\x00", strategy="first")
@example(cell="\u200b", strategy="none")
@example(cell="\u200b\ufeff", strategy="simple")
@example(cell="asthma " * 600, strategy="first")
@example(cell="asthma " * 600, strategy="none")
def test_any_cell_is_annotated(shell, cell, strategy):
    """%%openmed_ner annotates any text but white space, shows it whole, and every entity lies inside of it."""
    found = outcome(shell.find_cell_magic("openmed_ner"), f"--strategy {strategy}", cell)

    if not cell.strip():
        assert isinstance(found, MagicError)
        return
    assert found.text == cell
    assert all(0 <= entity["start"] <= entity["end"] <= len(cell) for entity in found)
