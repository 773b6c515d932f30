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
from openmed_nb._utils.plain import from_plain
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.records.logbook.logbook import SCHEMA_FILE, Logbook
from openmed_nb.runbook.records.logbook.privacy import kept_variables
from openmed_nb.runbook.records.logbook.sections import Hypothesis

SCRIPTS = Path(__file__).parents[4] / "scripts"
BARE = {"model": None, "dataset": None, "loader": None, "network": None}


@pytest.fixture(scope="module")
def schema():
    """The published schema, which keeps the rules of its draft."""
    published = json.loads(SCHEMA_FILE.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(published)
    return jsonschema.Draft202012Validator(published)


def test_the_published_schema(helper):
    """The schema in the package is what the dataclasses say, and lets no unknown field in."""
    text = SCHEMA_FILE.read_text("utf-8")

    assert text == helper(SCRIPTS / "write_schemas.py").logbook_schema()
    assert json.loads(text)["additionalProperties"] is False


@pytest.mark.parametrize("changes", [{}, BARE], ids=["everything known", "nothing said"])
def test_logbooks_keep_the_schema(logbooks, schema, changes):
    """A logbook in which everything is known, and one in which nothing was said, keep the published schema."""
    book = logbooks.but("", **changes)

    schema.validate(json.loads(json.dumps(book.to_dict())))


@pytest.mark.parametrize("place", ["", "software", "code", "conditions", "run"])
def test_the_schema_refuses_other_fields(logbooks, schema, place):
    """A field that nobody knows, on any level, is refused by the schema and by reading alike."""
    plain = logbooks.WHOLE.to_dict()
    (plain[place] if place else plain)["note"] = "text"

    assert not schema.is_valid(plain)
    with pytest.raises(ValueError, match="fields of another kind"):
        from_plain(Logbook, plain)


def test_a_logbook_is_read_as_it_was_written(logbooks, tmp_path):
    """What was saved is read as the same value, by the class that has a public name."""
    file = logbooks.WHOLE.save(tmp_path / "run.json")

    assert openmed_nb.runbook.Logbook.read(file) == logbooks.WHOLE
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]


def test_markdown_and_html(logbooks, tmp_path):
    """Markdown, which saving writes, has every value that is known; words that are code there or to a browser are shown as words."""
    book = replace(logbooks.WHOLE, hypotheses=(*logbooks.WHOLE.hypotheses, Hypothesis("<script>a|b</script>", "`x`")))
    book.save(tmp_path / "run.md")
    text = (tmp_path / "run.md").read_text("utf-8")

    assert text == book.markdown()
    assert text.startswith("# Logbook on mps\n")
    for word in ("2.13.0", "Apple M2 Pro", "adapter", "OMP_NUM_THREADS", "slow loader", "12" * 32, "100.0"):
        assert word in text
    assert "<script>" not in text + book._repr_html_()
    assert "&lt;script&gt;a\\|b" in text


def test_the_text_has_only_what_was_said(logbooks):
    """The text says what the logbook is of, and whether it is simulated, and nothing that differs from computer to computer."""
    text, simulated = str(logbooks.WHOLE), replace(logbooks.WHOLE, simulated=True)

    assert "bundled in float32" in text
    assert "32 rows of 128 tokens" in text
    for word in ("2.13", "Apple", "adapter", "2026", "5c5c", "100.0", "SIMULATED"):
        assert word not in text
    assert "Apple M2 Pro" in logbooks.WHOLE._repr_html_()
    assert all("SIMULATED" in form for form in (str(simulated), simulated.markdown(), simulated._repr_html_()))
    assert simulated.to_dict()["simulated"] is True


@pytest.mark.parametrize("kind", ["network", "cloud"])
def test_a_cache_that_is_far_away_is_a_warning(logbooks, kind):
    """A cache on a network volume, or in a cloud, is said in every form, with what to do; one on a disk is not."""
    book = logbooks.but("", storage=(replace(logbooks.WHOLE.storage[0], kind=kind),))

    for form in (str(book), book._repr_html_(), book.markdown()):
        assert f"on a {kind} volume" in form
        assert "HF_HOME" in form
    assert (book.report().status, logbooks.WHOLE.report().status) == ("warning", "")
    assert "volume" not in str(logbooks.WHOLE)


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
    """A library that logs all that it does is said in every form: it takes time."""
    book = logbooks.but("", environment=kept_variables({name: value}))

    assert (f"{name} logs" in str(book)) is warns
    assert (f"{name} logs" in book.markdown()) is warns
    assert book.report().status == ("warning" if warns else "")


DAMAGED = {
    "cut off": (lambda text: text[: len(text) // 2], "cut off or damaged"),
    "no JSON": (lambda _text: "a note", "is not a logbook"),
    "empty": (lambda _text: "", "is not a logbook"),
    "other JSON": (lambda _text: "[1, 2]", "is not a logbook"),
    "another schema": (lambda text: text.replace("openmed_nb/logbook/1", "openmed_nb/profile/1"), "is not a logbook"),
    "a newer one": (lambda text: text.replace("openmed_nb/logbook/1", "openmed_nb/logbook/2"), "version 2"),
    "a lacking field": (lambda text: text.replace('"simulated"', '"simulate"', 1), "has no simulated"),
    "another type": (
        lambda text: text.replace('"battery": 80', '"battery": "80"'),
        "its conditions.battery cannot be str",
    ),
    "no number": (lambda text: text.replace("100.0", "NaN"), "no finite number"),
    "another word": (lambda text: text.replace('"before"', '"later"'), "none of before, after"),
    "no checksum": (lambda text: text.replace("12" * 32, "the patient"), "does not look as it must"),
    "half a character": (lambda text: text.replace('"adapter"', '"\\ud800"'), "half a character"),
    "a huge figure": (lambda text: text.replace("100.0", "1" + "0" * 400), "is too large"),
    "a negative batch": (lambda text: text.replace('"batch_size": 32', '"batch_size": -5'), "does not look as it must"),
    "a checksum and more": (lambda text: text.replace("12" * 32, "12" * 32 + "\\n"), "does not look as it must"),
    "other digits": (lambda text: text.replace("2026-03", "\u0662\u0660\u0662\u0666-03"), "does not look as it must"),
    "a secret": (lambda text: text.replace("OMP_NUM_THREADS", "HF_TOKEN"), "variables that no logbook holds"),
    "a name twice": (lambda text: text.replace("{", '{"simulated": true, ', 1), "cut off or damaged"),
    "version 0": (lambda text: text.replace("openmed_nb/logbook/1", "openmed_nb/logbook/0"), "is not a logbook"),
    "Markdown": (lambda _text: "# Logbook on cpu\n", "cannot be read again"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused(logbooks, tmp_path, damage, says):
    """What is no logbook, is cut off, is newer or has other values is refused in one line that says which."""
    file = Path(logbooks.WHOLE.save(tmp_path / "run.json"))
    file.write_text(damage(file.read_text("utf-8")), "utf-8")

    with pytest.raises(ConfigurationError, match=says) as caught:
        Logbook.read(file)
    assert "patient" not in str(caught.value)
    assert "a note" not in str(caught.value)


def test_files_that_are_not_there_are_refused(tmp_path):
    """A file that is missing, or is no text, is refused with its name alone."""
    (tmp_path / "picture.json").write_bytes(b"\xff\xfe\x00")

    for name in ("missing.json", "picture.json"):
        with pytest.raises(ConfigurationError, match=f"'{name}' cannot be read"):
            Logbook.read(tmp_path / name)


OWN = {
    "notes.json": '{"patient": "someone"}',
    "notes.md": "# Logbook on my experiments\nthree months of work\n",
    "mine.json": '{"schema": "openmed_nb/logbook/1", my things',
    "list.json": "[1, 2]",
}


@pytest.mark.parametrize(("name", "text"), OWN.items(), ids=OWN)
def test_files_of_the_person_are_spared(logbooks, tmp_path, name, text):
    """A file that is no logbook, or merely begins as one does, is left alone."""
    (tmp_path / name).write_text(text, "utf-8")

    with pytest.raises(ConfigurationError, match="already exists and is not a logbook"):
        logbooks.WHOLE.save(tmp_path / name)
    assert (tmp_path / name).read_text("utf-8") == text


def test_logbooks_are_replaced(logbooks, tmp_path):
    """A logbook of any version, its names in another order or with a byte order mark, is replaced by saving."""
    file, old = tmp_path / "run.json", tmp_path / "old.json"
    file.write_text("\ufeff" + json.dumps(logbooks.WHOLE.to_dict(), sort_keys=True), "utf-8")
    old.write_text('{\n  "schema": "openmed_nb/logbook/7"}', "utf-8")

    assert Logbook.read(file) == logbooks.WHOLE
    for place in (file, old, tmp_path / "run.md", tmp_path / "run.md"):
        logbooks.WHOLE.save(place)
    assert not file.read_text("utf-8").startswith("\ufeff")
    assert Logbook.read(old) == logbooks.WHOLE


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_links_and_modes_stay(logbooks, tmp_path):
    """A link to a logbook stays a link, and a file that only its owner may read stays one."""
    file, link = Path(logbooks.WHOLE.save(tmp_path / "run.json")), tmp_path / "link.json"
    link.symlink_to(file)
    file.chmod(0o600)
    logbooks.but("", simulated=True).save(link)

    assert link.is_symlink()
    assert Logbook.read(file).simulated
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", [None, 5, "a\0.json", "a\ud800.json", "~nobody.is.here/x.json"], ids=repr)
def test_what_is_no_path_is_one_clear_error(logbooks, name):
    """What is no path is an error of ours, in saving and in reading."""
    for use in (logbooks.WHOLE.save, Logbook.read):
        with pytest.raises(ConfigurationError, match="the file of a logbook"):
            use(name)


@pytest.mark.parametrize("name", ["run.json", "run.md", "run.txt", "run", "no/such/folder/run.json"])
def test_what_cannot_be_saved(logbooks, tmp_path, name):
    """Another ending, a folder that is not there, and half a character in a logbook made by hand are one clear error."""
    book = logbooks.but("", environment={"TMPDIR": "/opt/\udcff"}) if name in {"run.json", "run.md"} else logbooks.WHOLE

    with pytest.raises(ConfigurationError, match="cannot be written"):
        book.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda one: st.lists(one) | st.dictionaries(st.text(), one),
    )
)
def test_reading_anything_ends_in_a_value_or_in_one_error(stored):
    """Whatever JSON holds, reading it as a logbook raises ValueError and nothing else."""
    with pytest.raises(ValueError, match="it "):
        from_plain(Logbook, stored)
