"""Texts that workers read themselves: files, and columns of dask.dataframe."""

import pickle
import socket
import traceback
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import openmed_nb as nb
from openmed_nb.annotation.references import MISSING, read_text, text_fingerprint
from openmed_nb.distributed.columns import ColumnText, Partition, column_references, get_partitions, is_column
from openmed_nb.errors import ConfigurationError

TEXTS = ["the patient has asthma .", "no history .", "", "type 2 diabetes mellitus\r\nand hypertension"]
WORDS = [["asthma"], [], [], ["diabetes mellitus", "hypertension"]]


def words(found):
    """Return the words of each text."""
    return [[entity["word"] for entity in entities] for entities in found]


@pytest.fixture
def column(tmp_path):
    """A column of parquet files, in several partitions."""
    import dask.dataframe as dd

    for number in range(3):
        table = pd.DataFrame({"note": [*TEXTS[number:], None], "other": 1})
        table.to_parquet(tmp_path / f"{number}.parquet")
    return dd.read_parquet(str(tmp_path / "*.parquet"))["note"]


def dask_strings(convert):
    """Return the setting of Dask that says whether it makes strings of objects."""
    import dask

    return dask.config.set({"dataframe.convert-string": convert})


EXPECTED = [*WORDS, [], *WORDS[1:], [], *WORDS[2:], []]


class TestPartitions:
    """A partition of a column carries itself alone."""

    @pytest.fixture
    def table(self):
        """A table, of which one column is texts and the other far larger."""
        notes, others = [f"asthma {row}" for row in range(1000)], [f"{row:04}" * 250 for row in range(1000)]
        return pd.DataFrame({"note": notes, "other": others})

    @pytest.mark.parametrize("change", [lambda column: column, lambda column: column.str.upper().dropna()])
    def test_rows_of_a_table(self, table, change):
        """A row of a table in memory carries no other partition and no other column, and rows of one share theirs."""
        import cloudpickle
        import dask.dataframe as dd

        column = dd.from_pandas(table, npartitions=10)["note"]
        rows = list(column_references(change(column)))
        notes = sum(map(len, table["note"]))
        one, chunk = len(cloudpickle.dumps(rows[500])), len(cloudpickle.dumps(rows[500:600]))
        assert notes / 10 < one < notes / 2 < len(pickle.dumps(table)) / 50
        assert chunk < one + 99 * 40  # Each row has its number and the fingerprint of its text.
        assert [row.read().lower() for row in rows[::99]] == table["note"][::99].tolist()

    def test_rows_of_files(self, column):
        """A row of a file carries where it is, and none of the texts."""
        import cloudpickle

        sent = cloudpickle.dumps(column_references(column)[0])
        assert len(sent) < 20000
        assert b"asthma" not in sent

    def test_sorted_column(self, table):
        """A column that is sorted needs all partitions in each, and is read as well."""
        import dask.dataframe as dd

        column = dd.from_pandas(table, npartitions=3).sort_values("note")["note"]
        assert [row.read() for row in column_references(column)] == sorted(table["note"])

    def test_names(self, column):
        """The same column named twice is read twice: in between its files can change."""
        first, again = get_partitions(column), get_partitions(column)
        assert len(first) == 3
        assert not set(first) & set(again)

    def test_rows_have_the_fingerprints_of_their_texts(self, column):
        """A row is told from others by its text alone, as in a list: a run over one goes on over the other."""
        rows = list(column_references(column))
        assert list(map(text_fingerprint, rows)) == [text_fingerprint(row.read()) for row in rows]
        assert [number for number, row in enumerate(rows) if row.fingerprint() == MISSING] == [4, 8, 11]

    def test_row_that_changed_is_not_read(self, column, tmp_path):
        """A row whose file has another text by now is an error: its entities would be placed in the wrong text."""
        row = column_references(column)[1]
        table = pd.read_parquet(tmp_path / "0.parquet")
        table["note"] = table["note"][::-1].to_numpy()
        table.to_parquet(tmp_path / "0.parquet")
        again = ColumnText(get_partitions(column)[0], row.row, row.characters, row.of_text)
        assert "RowChanged" in str(read_text(again, 1))


@pytest.mark.real_computer
@pytest.mark.usefixtures("quick_workers")
class TestOnWorkers:
    """What workers read."""

    @pytest.fixture
    def on_pool(self, pool, keyword_model):
        """A function that annotates texts on the cluster of the tests."""
        return lambda texts, **options: nb.annotate(texts, keyword_model, client=pool.client, progress=False, **options)

    def test_files(self, on_pool, tmp_path, monkeypatch):
        """The workers find the files that a pattern stands for, also one from the folder of this process, and read them."""
        for number, text in enumerate(TEXTS):
            (tmp_path / f"note {number}.txt").write_bytes(text.encode())
        monkeypatch.chdir(tmp_path)
        assert words(on_pool(Path("*.txt"))) == WORDS
        assert words(on_pool([tmp_path / "note 3.txt"])) == [WORDS[3]]

    def test_no_file(self, on_pool, pool, tmp_path):
        """A pattern that stands for no file there is refused, with the name of the computer; no log shows it."""
        with pytest.raises(ConfigurationError, match=rf"There is no file '.*smith.*\.md' on {socket.gethostname()}"):
            on_pool(tmp_path / "smith*.md")
        assert "smith" not in str(pool.client.get_worker_logs())

    def test_column(self, found_in, on_pool, column, tmp_path):
        """Its rows are numbered through its partitions; an empty row is no text; a run of one computer goes on on a cluster."""
        file, options = tmp_path / "run.jsonl", {"on_error": "record"}
        begun = found_in(column, resume=file, **options)
        assert len(file.read_text("utf-8").splitlines()) == 13
        for found in begun, on_pool(column, **options), on_pool(column, resume=file, **options):
            assert words(found) == EXPECTED
            assert (found.missing, found.errors) == ((4, 8, 11), {})
        with pytest.raises(ConfigurationError, match="Text 0 is not the one"):
            on_pool(column.str.upper(), resume=file, **options)

    def test_column_of_another_process(self, on_pool, pool, column, keyword_model, tmp_path):
        """A run over a column that another process began goes on here, and reads nothing again."""
        file, files = tmp_path / "run.jsonl", str(tmp_path / "*.parquet")

        def begin():
            import dask.dataframe as dd

            first = dd.read_parquet(files)["note"].partitions[0]
            nb.annotate(first, keyword_model, device="cpu", on_error="record", resume=file, progress=False)

        pool.client.submit(begin).result()
        begun = file.read_bytes()
        assert len(begun.splitlines()) == 1 + len(TEXTS) + 1
        assert words(on_pool(column, on_error="record", resume=file)) == EXPECTED
        assert file.read_bytes().startswith(begun)
        assert len(file.read_bytes().splitlines()) == 1 + len(EXPECTED)

    @pytest.mark.parametrize("place", ["found_in", "on_pool"])
    def test_repaired_column(self, request, tmp_path, place):
        """What had no result is read again, and no other row of its partition is; the run goes on over a list as well."""
        import dask.dataframe as dd

        annotated, file = request.getfixturevalue(place), tmp_path / "run.jsonl"
        broken = pd.Series(["asthma", None, "\ud800", "", "hypertension"], dtype=object)
        repaired = pd.Series(["asthma", "hypertension", "asthma", "asthma", "hypertension"])
        with dask_strings(convert=False):
            first = annotated(dd.from_pandas(broken, npartitions=2), resume=file, on_error="record")
        assert (first.missing, list(first.errors)) == ((1,), [2])
        found = annotated(dd.from_pandas(repaired, npartitions=1), resume=file)
        assert words(found) == [["asthma"], ["hypertension"], ["asthma"], ["asthma"], ["hypertension"]]
        assert list(annotated(repaired.tolist(), resume=file)) == list(found)

    @pytest.mark.parametrize("place", ["found_in", "on_pool"])
    def test_table_has_the_index_of_the_rows(self, request, place):
        """The table of entities has the labels of the rows, through all partitions, and joins with them."""
        import dask.dataframe as dd

        notes = pd.DataFrame(
            {"note": ["no", "asthma", None, "asthma"], "patient": list("abcd")},
            index=pd.Index([513, 514, 516, 517], name="id"),
        )
        found = request.getfixturevalue(place)(dd.from_pandas(notes, npartitions=2)["note"])
        assert found.to_frame().join(notes["patient"])["patient"].tolist() == ["b", "d"]
        assert found.to_frame().index.name == "id"

    @pytest.mark.parametrize("place", ["found_in", "on_pool"])
    def test_persisted_column(self, request, pool, column, place):
        """A column that a cluster holds is refused by that; as it was before, or held by this process, it is read."""
        annotated = request.getfixturevalue(place)
        held = pool.client.persist(column)
        for one in held, held.str.upper(), held.partitions[0]:
            message = r"in the memory of a cluster\. Pass it as it was before persist"
            with pytest.raises(ConfigurationError, match=message):
                annotated(one)
        for one in column, column.persist(scheduler="synchronous"):
            assert words(annotated(one, on_error="record")) == EXPECTED

    def test_mixed_column(self, found_in, on_pool):
        """Dask makes a string of a number in a column of objects, and what is missing stays so."""
        import dask.dataframe as dd

        table = pd.DataFrame({"note": ["asthma", None, np.nan, 5]}, dtype=object)
        column = dd.from_pandas(table, npartitions=2)["note"]
        for found in found_in(column, on_error="record"), on_pool(column, on_error="record"):
            assert words(found) == [["asthma"], [], [], []]
            assert (found.missing, found.errors) == ((1, 2), {})

    @pytest.mark.parametrize("place", ["found_in", "on_pool"])
    def test_no_text_in_errors(self, request, pool, place):
        """What a reader fails with is told by its kind: its message, which repeats a text, is in no error and no log."""
        import dask.dataframe as dd

        table = pd.DataFrame({"note": ["asthma of Mr Smith", "x"]})
        column = dd.from_pandas(table, npartitions=1)["note"].astype(float)
        message = rf"cannot be read on {socket.gethostname()}: ValueError\."
        with pytest.raises(ConfigurationError, match=message) as caught:
            request.getfixturevalue(place)(column)
        shown = "".join(traceback.format_exception(caught.value))
        logs = f"{pool.client.get_worker_logs()} {pool.client.get_scheduler_logs()}"
        assert "Smith" not in shown + logs
        assert caught.value.__context__ is None

    def test_rows(self, pool, column):
        """The rows of a column are a sequence that holds none of them; their sizes are those of their partition."""
        rows = column_references(column, pool.client)
        identities = [row.identity for row in rows]
        assert identities == [row.identity for row in column_references(column)]
        assert identities == [rows[number].identity for number in range(len(rows))]
        assert (len({*identities}), len(rows)) == (len({*TEXTS, None}), 12)  # Equal texts have equal identities.
        assert [row.row for row in rows] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
        assert rows[-1].row == 2
        assert {row.characters for row in list(rows)[:5]} == {sum(map(len, TEXTS)) // 5}
        with pytest.raises(IndexError):
            rows[12]

    def test_unreadable_column(self, pool, column, tmp_path):
        """A column whose files are gone is refused before a text goes out."""
        (tmp_path / "1.parquet").unlink()
        message = r"The column cannot be read on .+: No such file or directory\."
        with pytest.raises(ConfigurationError, match=message) as caught:
            column_references(column, pool.client)
        assert "parquet" not in str(caught.value)
        assert "1.parquet" not in str(pool.client.get_worker_logs())

    def test_whole_table(self, on_pool, column):
        """A whole table is refused, with the way to its column."""
        assert not any(map(is_column, (column.to_frame(), ["asthma"])))
        with pytest.raises(ConfigurationError, match="is a table"):
            on_pool(column.to_frame())


def unreadable():
    """Fail as a reader does that says what it read."""
    raise ValueError("could not convert string to float: 'asthma of Mr Smith'")


def test_a_row_that_cannot_be_read():
    """A row that cannot be read when its turn comes is told by its number and the kind of the failure."""
    error = read_text(ColumnText(Partition("gone", "rows", {"rows": (unreadable,)}), 0, 5, 0x1F), 7)
    what = f"Text 7: its row cannot be read on {socket.gethostname()}: ValueError."
    assert str(error) == f"{what} Make the row readable there."
    assert error.__context__ is None


def test_a_row_is_not_shown():
    """What stands for a row shows nothing of it."""
    row = ColumnText(Partition("secret", "secret", {}), 0, 5, 0x1F)
    assert "secret" not in f"{row!r} {row.partition!r}"
    assert row.partition == Partition("secret", "other", {"other": 1})
    assert hash(row.partition) == hash(Partition("secret", "other", {"other": 1}))
