"""Formats of a logbook: JSON with its schema, HTML and text."""

import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb._utils.plain import from_json_data, to_json
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.logbook.logbook import SCHEMA_FILE, Logbook
from openmed_nb.runbook.records.logbook.privacy import sanitize_environ
from openmed_nb.runbook.records.logbook.sections import StorageLocation

SCRIPTS = Path(__file__).parents[4] / "scripts"
UNKNOWN_SECTIONS = {"model": None, "dataset": None, "network": None}


def render_forms(book):
    """Return the text and the HTML of a logbook."""
    return str(book), book._repr_html_()


@pytest.fixture(scope="module")
def schema():
    """Validator of the published schema."""
    published = json.loads(SCHEMA_FILE.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def test_schema_file_is_up_to_date(helper):
    assert SCHEMA_FILE.read_text("utf-8") == helper(SCRIPTS / "write_schemas.py").logbook_schema()


@pytest.mark.parametrize("changes", [{}, UNKNOWN_SECTIONS], ids=["complete", "unknown"])
def test_logbook_conforms_to_the_schema(logbooks, schema, changes):
    schema.validate(json.loads(json.dumps(logbooks.change_section("", **changes).to_dict())))


@pytest.mark.parametrize("section", ["", "software", "code", "conditions", "run"])
def test_schema_and_parser_reject_unknown_fields(logbooks, schema, section):
    data = logbooks.COMPLETE.to_dict()
    (data[section] if section else data)["note"] = "text"

    assert not schema.is_valid(data)
    with pytest.raises(ValueError, match=r"\bfields\b"):
        from_json_data(Logbook, data)


def test_read_returns_the_saved_logbook(logbooks, tmp_path):
    file = logbooks.COMPLETE.save(tmp_path / "run.json")

    assert Logbook.read(file) == logbooks.COMPLETE
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_html_contains_all_values_escaped(logbooks):
    page = replace(logbooks.COMPLETE, hypotheses={"<script>": "no"})._repr_html_()

    for word in ("2.13.0", "Apple M2 Pro", "adapter", "OMP_NUM_THREADS", "121212121212", "100", "&lt;script&gt;"):
        assert word in page
    assert "<script>" not in page


def test_text_contains_settings_and_sections(logbooks):
    text = str(logbooks.COMPLETE)

    for word in ("bundled in float32", "32 rows of 128 tokens", "2.13", "Apple", "adapter", "5c5c"):
        assert word in text
    assert "SIMULATED" not in text


def test_every_format_labels_simulation(logbooks):
    simulated = replace(logbooks.COMPLETE, simulated=True)

    assert all("SIMULATED" in form for form in render_forms(simulated))
    assert simulated.to_dict()["simulated"] is True


@pytest.mark.parametrize("kind", ["network", "cloud"])
def test_remote_cache_is_a_warning(logbooks, kind):
    book = logbooks.change_section("", storage={"cache": StorageLocation("x", kind)})

    for form in render_forms(book):
        assert f"on a {kind} volume" in form
        assert "HF_HOME" in form
    assert (book.to_report().status, logbooks.COMPLETE.to_report().status) == ("warning", "")


# Values of logging variables that enable verbose logging, and other values.
VERBOSE = {
    "TRANSFORMERS_VERBOSITY": "debug",
    "HF_HUB_VERBOSITY": "DEBUG",
    "HF_DEBUG": "1",
    "TORCH_LOGS": "inductor,+all",
    "PYTORCH_DEBUG_MPS_ALLOCATOR": "15",
}
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_DEBUG": "0",
    "TORCH_LOGS": "-torch",
    "PYTORCH_DEBUG_MPS_ALLOCATOR": "0",
    "OMP_NUM_THREADS": "8",
}


def test_verbose_logging_is_a_warning(logbooks):
    loud = logbooks.change_section("", environment=sanitize_environ(VERBOSE))
    quiet = logbooks.change_section("", environment=sanitize_environ(QUIET))

    for form in render_forms(loud):
        assert [name for name in VERBOSE if f"{name} enables verbose logging" not in form] == []
    assert not any("enables verbose logging" in form for form in render_forms(quiet))
    assert (loud.to_report().status, quiet.to_report().status) == ("warning", "")


SCHEMA_NAME = "openmed_nb/logbook/1"
CORRUPTIONS = [
    (SCHEMA_NAME, "openmed_nb/profile/1"),
    (SCHEMA_NAME, "openmed_nb/logbook/0"),
    ('"simulated"', '"simulated": true, "simulated"'),
    ("100.0", "NaN"),
    ("100.0", "1" + "0" * 400),
    ('"before"', '"later"'),
    ("12" * 32, "the patient"),
    ('"batch_size": 32', '"batch_size": -5'),
    ("OMP_NUM_THREADS", "HF_TOKEN"),
]
OTHER_FILES = [
    "a note",
    "",
    "[1, 2]",
    "# Logbook on cpu\n",
    '{"schema": "openmed_nb/logbook/1"',
]


@pytest.mark.parametrize("content", [*CORRUPTIONS, *OTHER_FILES], ids=itertools.count())
def test_read_rejects_other_files_without_quoting_them(logbooks, tmp_path, content):
    """The content is a replacement in a valid logbook, or a whole file."""
    text = content
    if content in CORRUPTIONS:
        text = to_json(logbooks.COMPLETE).replace(*content, 1)
        assert text != to_json(logbooks.COMPLETE)
    file = tmp_path / "run.json"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match=r"'run\.json' is not a logbook") as caught:
        Logbook.read(file)
    assert "patient" not in str(caught.value)
    assert "a note" not in str(caught.value)


def test_read_rejects_newer_logbook_with_both_versions(logbooks, tmp_path):
    file = tmp_path / "run.json"
    file.write_text(to_json(logbooks.COMPLETE).replace(SCHEMA_NAME, "openmed_nb/logbook/2"), "utf-8")

    with pytest.raises(ConfigurationError, match=r"of version 2, but this openmed_nb reads version 1") as caught:
        Logbook.read(file)
    assert "with a newer one" in caught.value.remedy


def test_read_error_contains_only_the_file_name(tmp_path):
    with pytest.raises(ConfigurationError, match=r"^'missing\.json'") as caught:
        Logbook.read(tmp_path / "missing.json")
    assert str(tmp_path) not in str(caught.value)
    assert caught.value.__context__ is None


USER_FILES = {
    "notes.json": '{"patient": "John"}',
    "mine.json": '{"schema": "openmed_nb/logbook/1", my things',
    "list.json": "[1, 2]",
}


@pytest.mark.parametrize(("name", "text"), USER_FILES.items(), ids=USER_FILES)
def test_save_does_not_replace_user_files(logbooks, tmp_path, name, text):
    """A file that only starts like a logbook is not replaced either."""
    (tmp_path / name).write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match="already exists and is not a logbook"):
        logbooks.COMPLETE.save(tmp_path / name)
    assert (tmp_path / name).read_text("utf-8") == text


def test_save_replaces_logbooks_of_any_version(logbooks, tmp_path):
    """The order of the keys and a byte order mark do not matter."""
    file = tmp_path / "run.json"
    old = tmp_path / "old.json"
    file.write_text("\ufeff" + json.dumps(logbooks.COMPLETE.to_dict(), sort_keys=True), "utf-8")
    old.write_text('{\n  "schema": "openmed_nb/logbook/7"}', "utf-8")

    assert Logbook.read(file) == logbooks.COMPLETE
    for path in (file, old):
        logbooks.COMPLETE.save(path)
    assert not file.read_text("utf-8").startswith("\ufeff")
    assert Logbook.read(old) == logbooks.COMPLETE


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have these modes")
def test_save_preserves_links_and_modes(logbooks, tmp_path):
    file = Path(logbooks.COMPLETE.save(tmp_path / "run.json"))
    link = tmp_path / "link.json"
    link.symlink_to(file)
    file.chmod(0o600)
    logbooks.change_section("", simulated=True).save(link)

    assert link.is_symlink()
    assert Logbook.read(file).simulated
    assert file.stat().st_mode & 0o777 == 0o600


def test_save_reports_unpaired_surrogate(logbooks, tmp_path):
    book = logbooks.change_section("", environment={"OMP_NUM_THREADS": "\udcff"})

    with pytest.raises(ConfigurationError, match="cannot be written"):
        book.save(tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run.md", "run", "no/such/folder/run.json"])
def test_save_reports_other_extensions_and_missing_folders(logbooks, tmp_path, name):
    with pytest.raises(ConfigurationError, match="cannot be written"):
        logbooks.COMPLETE.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    )
)
def test_parser_rejects_any_other_json(stored):
    with pytest.raises(ValueError, match=r"\w"):
        from_json_data(Logbook, stored)
