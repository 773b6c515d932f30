"""Formats of a logbook: JSON with its schema, HTML and text."""

import itertools
import json
import os
from pathlib import Path

import jsonschema
import pytest

from helpers.logbooks import COMPLETE, change
from openmed_nb._utils.plain import from_json_data, to_json
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.gathering import sanitize_environ
from openmed_nb.runbook.records.logbook import SCHEMA_FILE, Logbook, StorageLocation

SCRIPTS = Path(__file__).parents[4] / "scripts"
VALIDATOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text("utf-8")))


def render_forms(book):
    """Return the text and the HTML of a logbook."""
    return str(book), book._repr_html_()


def test_schema_file_is_up_to_date(helper):
    assert SCHEMA_FILE.read_text("utf-8") == helper(SCRIPTS / "write_schemas.py").logbook_schema()
    VALIDATOR.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("changes", [{}, {"model": None, "dataset": None, "network": None}])
def test_logbook_conforms_to_the_schema(changes):
    VALIDATOR.validate(json.loads(json.dumps(change("", **changes).to_dict())))


@pytest.mark.parametrize("section", ["", "conditions", "run"])
def test_schema_and_parser_reject_unknown_fields(section):
    data = COMPLETE.to_dict()
    (data[section] if section else data)["note"] = "text"

    assert not VALIDATOR.is_valid(data)
    with pytest.raises(ValueError, match=r"\bfields\b"):
        from_json_data(Logbook, data)


def test_html_contains_all_values_escaped():
    page = change("", hypotheses={"<script>": "no"})._repr_html_()

    for word in ("2.13.0", "Apple M2 Pro", "adapter", "OMP_NUM_THREADS", "121212121212", "100", "&lt;script&gt;"):
        assert word in page
    assert "<script>" not in page


@pytest.mark.parametrize("kind", ["network", "cloud"])
def test_remote_cache_is_a_warning(kind):
    book = change("", storage={"cache": StorageLocation("x", kind)})

    assert all(f"on a {kind} volume" in form and "HF_HOME" in form for form in render_forms(book))
    assert (book.to_report().status, COMPLETE.to_report().status) == ("warning", "")


# Values of logging variables that enable verbose logging, and other values.
VERBOSE = {
    "TRANSFORMERS_VERBOSITY": "debug",
    "HF_HUB_VERBOSITY": "DEBUG",
    "HF_DEBUG": "1",
    "TORCH_LOGS": "inductor,+all",
    "PYTORCH_DEBUG_MPS_ALLOCATOR": "15",
}
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_DEBUG": "0", "TORCH_LOGS": "-torch", "OMP_NUM_THREADS": "8"}


def test_verbose_logging_is_a_warning():
    loud = change("", environment=sanitize_environ(VERBOSE))
    quiet = change("", environment=sanitize_environ(QUIET))

    for form in render_forms(loud):
        assert [name for name in VERBOSE if f"{name} enables verbose logging" not in form] == []
    assert (loud.to_report().status, quiet.to_report().status) == ("warning", "")


SCHEMA_NAME = "openmed_nb/logbook/1"
# Replacements in a valid logbook, and whole files.
CORRUPTIONS = [
    (SCHEMA_NAME, "openmed_nb/profile/1"),
    (SCHEMA_NAME, "openmed_nb/logbook/2"),
    ("100.0", "NaN"),
    ("12" * 32, "the patient"),
    ('"batch_size": 32', '"batch_size": -5'),
    ('"OMP_NUM_THREADS": "8"', '"the patient": "8"'),
    "a note",
    "[1, 2]",
    '{"schema": "openmed_nb/logbook/1"',
]


@pytest.mark.parametrize("content", CORRUPTIONS, ids=itertools.count())
def test_read_rejects_other_files_without_quoting_them(tmp_path, content):
    text = content if isinstance(content, str) else to_json(COMPLETE).replace(*content, 1)
    file = tmp_path / "run.json"
    file.write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match=r"'run\.json' is not a logbook") as caught:
        Logbook.read(file)
    assert "patient" not in str(caught.value)
    assert "a note" not in str(caught.value)


USER_FILES = ['{"patient": "John"}', '{"schema": "openmed_nb/logbook/1", my things', "[1, 2]"]


@pytest.mark.parametrize("text", USER_FILES)
def test_save_does_not_replace_user_files(tmp_path, text):
    """A file that only starts like a logbook is not replaced either."""
    (tmp_path / "notes.json").write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match="already exists and is not a logbook"):
        COMPLETE.save(tmp_path / "notes.json")
    assert (tmp_path / "notes.json").read_text("utf-8") == text


def test_save_replaces_logbooks_of_any_version(tmp_path):
    """The order of the keys and a byte order mark do not matter."""
    file = tmp_path / "run.json"
    old = tmp_path / "old.json"
    file.write_text("\ufeff" + json.dumps(COMPLETE.to_dict(), sort_keys=True), "utf-8")
    old.write_text('{\n  "schema": "openmed_nb/logbook/7"}', "utf-8")

    assert Logbook.read(file) == COMPLETE
    for path in (file, old):
        assert Logbook.read(COMPLETE.save(path)) == COMPLETE


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have these modes")
def test_save_preserves_links_and_modes(tmp_path):
    file = Path(COMPLETE.save(tmp_path / "run.json"))
    link = tmp_path / "link.json"
    link.symlink_to(file)
    file.chmod(0o600)
    change("", simulated=True).save(link)

    assert link.is_symlink()
    assert Logbook.read(file).simulated
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["run.md", "run", "no/such/folder/run.json"])
def test_save_reports_other_extensions_and_missing_folders(tmp_path, name):
    with pytest.raises(ConfigurationError, match="cannot be written"):
        COMPLETE.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
