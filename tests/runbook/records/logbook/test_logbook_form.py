"""The form of a logbook: JSON, its published schema, Markdown, HTML and text."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import openmed_nb
from openmed_nb._utils.plain import from_json_data
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.logbook.logbook import SCHEMA_FILE, Logbook
from openmed_nb.runbook.records.logbook.privacy import sanitize_environ
from openmed_nb.runbook.records.logbook.sections import Hypothesis

SCRIPTS = Path(__file__).parents[4] / "scripts"
BARE = {"model": None, "dataset": None, "loader": None, "network": None}


@pytest.fixture(scope="module")
def schema():
    """The published schema, which keeps the rules of its draft."""
    published = json.loads(SCHEMA_FILE.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def test_published_schema_follows_from_the_dataclasses(helper):
    assert SCHEMA_FILE.read_text("utf-8") == helper(SCRIPTS / "write_schemas.py").logbook_schema()


@pytest.mark.parametrize("changes", [{}, BARE], ids=["everything known", "nothing said"])
def test_logbook_keeps_the_schema(logbooks, schema, changes):
    schema.validate(json.loads(json.dumps(logbooks.but("", **changes).to_dict())))


@pytest.mark.parametrize("section", ["", "software", "code", "conditions", "run"])
def test_unknown_field_is_refused(logbooks, schema, section):
    """A field that nobody knows, on any level, is refused by the schema and by reading alike."""
    plain = logbooks.WHOLE.to_dict()
    (plain[section] if section else plain)["note"] = "text"

    assert not schema.is_valid(plain)
    with pytest.raises(ValueError, match="fields of another kind"):
        from_json_data(Logbook, plain)


def test_logbook_is_read_as_it_was_written(logbooks, tmp_path):
    file = logbooks.WHOLE.save(tmp_path / "run.json")

    assert openmed_nb.runbook.Logbook.read(file) == logbooks.WHOLE
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_markdown_has_everything_and_escapes_it(logbooks, tmp_path):
    """Markdown, which saving writes, has every value that is known; words that are code there or to a browser are shown as words."""
    book = replace(logbooks.WHOLE, hypotheses=(*logbooks.WHOLE.hypotheses, Hypothesis("<script>a|b</script>", "`x`")))
    book.save(tmp_path / "run.md")
    text = (tmp_path / "run.md").read_text("utf-8")

    assert text == book.to_markdown()
    assert text.startswith("# Logbook on mps\n")
    for word in ("2.13.0", "Apple M2 Pro", "adapter", "OMP_NUM_THREADS", "slow loader", "12" * 32, "100.0"):
        assert word in text
    assert "<script>" not in text + book._repr_html_()
    assert "&lt;script&gt;a\\|b" in text


def test_text_has_only_what_was_said(logbooks):
    """The text says what the logbook is of, and nothing that differs from computer to computer."""
    text = str(logbooks.WHOLE)

    assert "bundled in float32" in text
    assert "32 rows of 128 tokens" in text
    for word in ("2.13", "Apple", "adapter", "2026", "5c5c", "100.0", "SIMULATED"):
        assert word not in text
    assert "Apple M2 Pro" in logbooks.WHOLE._repr_html_()


def test_simulation_is_marked_in_every_form(logbooks):
    simulated = replace(logbooks.WHOLE, simulated=True)

    assert all("SIMULATED" in form for form in (str(simulated), simulated.to_markdown(), simulated._repr_html_()))
    assert simulated.to_dict()["simulated"] is True


@pytest.mark.parametrize("kind", ["network", "cloud"])
def test_cache_that_is_far_away_is_a_warning(logbooks, kind):
    book = logbooks.but("", storage=(replace(logbooks.WHOLE.storage[0], kind=kind),))

    for form in (str(book), book._repr_html_(), book.to_markdown()):
        assert f"on a {kind} volume" in form
        assert "HF_HOME" in form
    assert (book.report().status, logbooks.WHOLE.report().status) == ("warning", "")


DEBUG_LOGGING = [
    ("TRANSFORMERS_VERBOSITY", "debug", True),
    ("TRANSFORMERS_VERBOSITY", "error", False),
    ("HF_HUB_VERBOSITY", "DEBUG", True),
    ("HF_DEBUG", "1", True),
    ("HF_DEBUG", "0", False),
    ("TORCH_LOGS", "+dynamo", True),
    ("TORCH_LOGS", "inductor,+all", True),
    ("TORCH_LOGS", "-torch", False),
    ("PYTORCH_DEBUG_MPS_ALLOCATOR", "15", True),
    ("PYTORCH_DEBUG_MPS_ALLOCATOR", "0", False),
    ("OMP_NUM_THREADS", "8", False),
]


@pytest.mark.parametrize(("name", "value", "warns"), DEBUG_LOGGING)
def test_debug_logging_is_a_warning(logbooks, name, value, warns):
    book = logbooks.but("", environment=sanitize_environ({name: value}))

    assert (f"{name} logs" in str(book)) is warns
    assert (f"{name} logs" in book.to_markdown()) is warns
    assert book.report().status == ("warning" if warns else "")


SCHEMA_NAME = "openmed_nb/logbook/1"
REPLACED = [
    (SCHEMA_NAME, "openmed_nb/profile/1"),
    (SCHEMA_NAME, "openmed_nb/logbook/0"),
    ('"simulated"', '"simulated": true, "simulated"'),
    ('"simulated"', '"simulate"'),
    ('"battery": 80', '"battery": "80"'),
    ("100.0", "NaN"),
    ("100.0", "1" + "0" * 400),
    ('"before"', '"later"'),
    ("12" * 32, "the patient"),
    ("12" * 32, "12" * 32 + "\\n"),
    ('"adapter"', '"\\ud800"'),
    ('"batch_size": 32', '"batch_size": -5'),
    ("2026-03", "\u0662\u0660\u0662\u0666-03"),
    ("OMP_NUM_THREADS", "HF_TOKEN"),
]
NO_LOGBOOKS = ["a note", "", "[1, 2]", "# Logbook on cpu\n", '{"schema": "openmed_nb/logbook/1"']


@pytest.mark.parametrize(("before", "after"), REPLACED)
def test_damaged_logbook_is_refused(logbooks, tmp_path, before, after):
    """What is newer, or has another value than a field can have, is refused without showing that value."""
    file = Path(logbooks.WHOLE.save(tmp_path / "run.json"))
    text = file.read_text("utf-8")
    file.write_text(text.replace(before, after, 1), "utf-8")

    assert before in text
    with pytest.raises(ConfigurationError, match=r"'run\.json' is not a logbook") as caught:
        Logbook.read(file)
    assert "patient" not in str(caught.value)


def test_newer_logbook_is_refused_with_both_versions(logbooks, tmp_path):
    file = Path(logbooks.WHOLE.save(tmp_path / "run.json"))
    file.write_text(file.read_text("utf-8").replace(SCHEMA_NAME, "openmed_nb/logbook/2"), "utf-8")

    with pytest.raises(ConfigurationError, match=r"of version 2, and this openmed_nb reads version 1") as caught:
        Logbook.read(file)
    assert "with a newer one" in caught.value.remedy


@pytest.mark.parametrize("text", NO_LOGBOOKS)
def test_other_file_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match=r"'run\.json' is not a logbook") as caught:
        Logbook.read(tmp_path / "run.json")
    assert "a note" not in str(caught.value)


def test_unreadable_file_is_refused_by_its_name_alone(tmp_path):
    (tmp_path / "picture.json").write_bytes(b"\xff\xfe\x00")

    for name in ("missing.json", "picture.json"):
        with pytest.raises(ConfigurationError, match=f"^'{name}'") as caught:
            Logbook.read(tmp_path / name)
        assert str(tmp_path) not in str(caught.value)
        assert caught.value.__context__ is None


OWN = {
    "notes.json": '{"patient": "someone"}',
    "notes.md": "# Logbook on my experiments\nthree months of work\n",
    "mine.json": '{"schema": "openmed_nb/logbook/1", my things',
    "list.json": "[1, 2]",
}


@pytest.mark.parametrize(("name", "text"), OWN.items(), ids=OWN)
def test_own_file_is_not_replaced(logbooks, tmp_path, name, text):
    """A file that is no logbook, or merely begins as one does, is left alone."""
    (tmp_path / name).write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match="already exists and is not a logbook"):
        logbooks.WHOLE.save(tmp_path / name)
    assert (tmp_path / name).read_text("utf-8") == text


def test_logbook_of_any_version_is_replaced(logbooks, tmp_path):
    """A logbook of any version, its names in another order or with a byte order mark, is replaced by saving."""
    file = tmp_path / "run.json"
    old = tmp_path / "old.json"
    file.write_text("\ufeff" + json.dumps(logbooks.WHOLE.to_dict(), sort_keys=True), "utf-8")
    old.write_text('{\n  "schema": "openmed_nb/logbook/7"}', "utf-8")

    assert Logbook.read(file) == logbooks.WHOLE
    for place in (file, old, tmp_path / "run.md", tmp_path / "run.md"):
        logbooks.WHOLE.save(place)
    assert not file.read_text("utf-8").startswith("\ufeff")
    assert Logbook.read(old) == logbooks.WHOLE


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_links_and_modes_stay(logbooks, tmp_path):
    file = Path(logbooks.WHOLE.save(tmp_path / "run.json"))
    link = tmp_path / "link.json"
    link.symlink_to(file)
    file.chmod(0o600)
    logbooks.but("", simulated=True).save(link)

    assert link.is_symlink()
    assert Logbook.read(file).simulated
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", [None, 5, "a\0.json", "a\ud800.json", "~nobody.is.here/x.json"], ids=repr)
def test_value_that_is_no_path_is_refused(logbooks, name):
    for use in (logbooks.WHOLE.save, Logbook.read):
        with pytest.raises(ConfigurationError, match="the file of a logbook"):
            use(name)


@pytest.mark.parametrize("name", ["run.json", "run.md", "run.txt", "run", "no/such/folder/run.json"])
def test_unwritable_file_is_refused(logbooks, tmp_path, name):
    """Another ending, a folder that is not there, and half a character in a logbook made by hand are one clear error."""
    book = logbooks.but("", environment={"TMPDIR": "/opt/\udcff"}) if name in {"run.json", "run.md"} else logbooks.WHOLE

    with pytest.raises(ConfigurationError, match="cannot be written"):
        book.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    )
)
def test_any_json_is_a_value_error(stored):
    with pytest.raises(ValueError, match="it "):
        from_json_data(Logbook, stored)
