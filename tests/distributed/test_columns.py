"""Texts that workers read: files, and columns of dask.dataframe."""

import pickle
import socket
import traceback
from pathlib import Path

import dask
import numpy as np
import pandas as pd
import pytest

from helpers.annotations import words
from openmed_nb.annotation.references import MISSING_FINGERPRINT, read_text, text_fingerprint
from openmed_nb.distributed.columns import ColumnText, Partition, column_references, get_partitions
from openmed_nb.errors import ConfigurationError

TEXTS = ["the patient has asthma .", "no history .", "no", "type 2 diabetes mellitus\r\nand hypertension"]
WORDS = [["asthma"], [], [], ["diabetes mellitus", "hypertension"]]


@pytest.fixture
def column(tmp_path):
    """Column of parquet files in several partitions."""
    import dask.dataframe as dd

    for number in range(3):
        pd.DataFrame({"note": [*TEXTS[number:], None], "other": 1}).to_parquet(tmp_path / f"{number}.parquet")
    return dd.read_parquet(str(tmp_path / "*.parquet"))["note"]


EXPECTED = [*WORDS, [], *WORDS[1:], [], *WORDS[2:], []]


class TestPartitions:
    """Contents of partitions and references."""

    @pytest.fixture
    def table(self):
        """Table with a column of texts and a much larger column."""
        notes = [f"asthma {row}" for row in range(1000)]
        return pd.DataFrame({"note": notes, "other": [f"{row:04}" * 250 for row in range(1000)]})

    @pytest.mark.parametrize("change", [lambda column: column, lambda column: column.str.upper().dropna()])
    def test_reference_to_table_contains_only_its_partition(self, table, change):
        """References to one partition share its contents."""
        import cloudpickle
        import dask.dataframe as dd

        column = dd.from_pandas(table, npartitions=10)["note"]
        rows = list(column_references(change(column)))
        notes = sum(map(len, table["note"]))
        row_size = len(cloudpickle.dumps(rows[500]))
        chunk_size = len(cloudpickle.dumps(rows[500:600]))
        assert notes / 10 < row_size < notes / 2 < len(pickle.dumps(table)) / 50
        assert chunk_size < row_size + 99 * 40  # Each reference contains its row and the fingerprint of its text.
        assert [row.read().lower() for row in rows[::99]] == table["note"][::99].tolist()

    def test_reference_to_file_contains_no_text(self, column):
        import cloudpickle

        pickled = cloudpickle.dumps(column_references(column)[0])
        assert len(pickled) < 20000
        assert b"asthma" not in pickled

    def test_sorted_column_is_supported(self, table):
        """Each partition of a sorted column needs all partitions of the source."""
        import dask.dataframe as dd

        column = dd.from_pandas(table, npartitions=3).sort_values("note")["note"]
        assert [row.read() for row in column_references(column)] == sorted(table["note"])

    def test_rows_have_the_fingerprints_of_their_texts(self, column):
        """A run over a list can therefore resume over a column."""
        rows = list(column_references(column))
        assert list(map(text_fingerprint, rows)) == [text_fingerprint(row.read()) for row in rows]
        assert [number for number, row in enumerate(rows) if row.fingerprint() == MISSING_FINGERPRINT] == [4, 8, 11]

    def test_changed_row_is_an_error(self, column, tmp_path):
        row = column_references(column)[1]
        table = pd.read_parquet(tmp_path / "0.parquet")
        table["note"] = table["note"][::-1].to_numpy()
        table.to_parquet(tmp_path / "0.parquet")
        changed = ColumnText(get_partitions(column)[0], row.row, row.approximate_length, row.text_fingerprint)
        assert "RowChangedError" in str(read_text(changed, 1))


@pytest.mark.filterwarnings("ignore:. ids? occurs? more than once")
@pytest.mark.real_computer
@pytest.mark.usefixtures("quick_workers")
class TestOnWorkers:
    """Columns and files on workers."""

    def test_workers_expand_patterns_and_read_files(self, on_pool, tmp_path, monkeypatch):
        for number, text in enumerate(TEXTS):
            (tmp_path / f"note {number}.txt").write_bytes(text.encode())
        monkeypatch.chdir(tmp_path)
        assert words(on_pool(Path("*.txt"))) == WORDS
        assert words(on_pool([tmp_path / "note 3.txt"])) == [WORDS[3]]

    def test_pattern_without_files_names_the_host_but_is_not_logged(self, on_pool, pool, tmp_path):
        with pytest.raises(ConfigurationError, match=rf"smith.*\.md.* on {socket.gethostname()}"):
            on_pool(tmp_path / "smith*.md")
        assert "smith" not in str(pool.client.get_worker_logs())

    def test_run_over_column_resumes_on_cluster(self, found_in, on_pool, column, tmp_path):
        """The rows are numbered across partitions, and empty rows are missing texts."""
        file = tmp_path / "run.jsonl"
        options = {"on_error": "record"}
        local = found_in(column, resume=file, **options)
        assert len(file.read_text("utf-8").splitlines()) == 1 + len(TEXTS) + 1  # Of equal rows, one.
        for annotations in local, on_pool(column, **options), on_pool(column, resume=file, **options):
            assert words(annotations) == EXPECTED
            assert (annotations.missing, annotations.errors) == ((4, 8, 11), {})

    def test_resume_repeats_only_failed_rows(self, found_in, on_pool, tmp_path):
        import dask.dataframe as dd

        file = tmp_path / "run.jsonl"
        invalid = pd.Series(["asthma", None, "\ud800", "no", "hypertension"], dtype=object)
        repaired = pd.Series(["asthma", "hypertension", "asthma", "asthma", "hypertension"])
        with dask.config.set({"dataframe.convert-string": False}):
            first = on_pool(dd.from_pandas(invalid, npartitions=2), resume=file, on_error="record")
        assert (first.missing, list(first.errors)) == ((1,), [2])
        found = found_in(dd.from_pandas(repaired, npartitions=1), resume=file)
        assert words(found) == [["asthma"], ["hypertension"], ["asthma"], ["asthma"], ["hypertension"]]

    def test_to_frame_has_the_index_of_the_column(self, on_pool):
        import dask.dataframe as dd

        notes = pd.DataFrame(
            {"note": ["no", "asthma", None, "asthma"], "patient": list("abcd")},
            index=pd.Index([513, 514, 516, 517], name="id"),
        )
        found = on_pool(dd.from_pandas(notes, npartitions=2)["note"])
        assert found.to_frame().join(notes["patient"])["patient"].tolist() == ["b", "d"]
        assert found.to_frame().index.name == "id"

    def test_persisted_column_is_rejected(self, on_pool, pool, column):
        persisted = pool.client.persist(column)
        for remote in persisted, persisted.partitions[0]:
            with pytest.raises(
                ConfigurationError, match=r"in the memory of a cluster\. Pass the column without persist"
            ):
                on_pool(remote)
        assert words(on_pool(column.persist(scheduler="synchronous"), on_error="record")) == EXPECTED

    def test_numbers_in_object_column_become_strings(self, found_in, on_pool):
        import dask.dataframe as dd

        table = pd.DataFrame({"note": ["asthma", None, np.nan, 5]}, dtype=object)
        column = dd.from_pandas(table, npartitions=2)["note"]
        for annotations in found_in(column, on_error="record"), on_pool(column, on_error="record"):
            assert words(annotations) == [["asthma"], [], [], []]
            assert (annotations.missing, annotations.errors) == ((1, 2), {})

    def test_reader_errors_contain_no_text(self, on_pool, pool):
        """The message of the reader, which quotes a text, is neither in the error nor in a log."""
        import dask.dataframe as dd

        table = pd.DataFrame({"note": ["asthma of Mr Smith", "x"]})
        column = dd.from_pandas(table, npartitions=1)["note"].astype(float)
        message = rf"cannot be read on {socket.gethostname()}: ValueError\."
        with pytest.raises(ConfigurationError, match=message) as caught:
            on_pool(column)
        output = "".join(traceback.format_exception(caught.value))
        logs = f"{pool.client.get_worker_logs()} {pool.client.get_scheduler_logs()}"
        assert "Smith" not in output + logs
        assert caught.value.__context__ is None

    def test_column_references_are_a_sequence(self, pool, column):
        rows = column_references(column, pool.client)
        identities = [row.identity for row in rows]
        assert identities == [row.identity for row in column_references(column)]
        assert identities == [rows[number].identity for number in range(len(rows))]
        assert (len({*identities}), len(rows)) == (len({*TEXTS, None}), 12)  # Equal texts have equal identities.
        assert rows[-1].row == 2
        assert rows[0].approximate_length == sum(map(len, TEXTS)) // 5
        with pytest.raises(IndexError):
            rows[12]

    def test_column_with_missing_files_is_rejected(self, pool, column, tmp_path):
        (tmp_path / "1.parquet").unlink()
        message = r"The column cannot be read on .+: No such file or directory\."
        with pytest.raises(ConfigurationError, match=message) as caught:
            column_references(column, pool.client)
        assert "parquet" not in str(caught.value)
        assert "1.parquet" not in str(pool.client.get_worker_logs())

    def test_table_is_rejected(self, on_pool, column):
        with pytest.raises(ConfigurationError, match="is a table"):
            on_pool(column.to_frame())


def raise_reader_error():
    """Raise an error whose message quotes a text."""
    raise ValueError("could not convert string to float: 'asthma of Mr Smith'")


def test_unreadable_row_is_reported_with_number_and_error_type():
    error = read_text(ColumnText(Partition("gone", "rows", {"rows": (raise_reader_error,)}), 0, 5, 0x1F), 7)
    assert "Text 7" in str(error)
    assert f"on {socket.gethostname()}: ValueError." in str(error)
    assert "Smith" not in str(error)
    assert error.__context__ is None


def test_repr_of_reference_contains_no_names():
    row = ColumnText(Partition("secret", "secret", {}), 0, 5, 0x1F)
    assert "secret" not in f"{row!r} {row.partition!r}"
    assert row.partition == Partition("secret", "other", {"other": 1})
    assert hash(row.partition) == hash(Partition("secret", "other", {"other": 1}))
