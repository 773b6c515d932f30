"""What belongs together: ids and texts, gold and results, tables and results."""

import io
import itertools
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

import openmed_nb as nb
from helpers.annotations import annotate
from openmed_nb.annotation.gold import GoldSpan, GoldText, GoldTexts
from openmed_nb.errors import ConfigurationError, OpenMedWarning, UnmatchedIdsError

COURSE_NOTES = Path(__file__).parents[2] / "notebooks" / "data" / "notes.csv"
NOTES = ["She has asthma.", "No complaints.", "Known gout and asthma."]
IDS = ["a7", "b2", "c9"]
COLUMNS = {"text_column": "note", "id_column": "patient"}


@pytest.fixture
def table():
    return pd.DataFrame({"patient": IDS, "note": NOTES, "ward": [1, 2, 3]}, index=[30, 10, 20])


class TestIdsOfTexts:
    def test_series_of_ids_is_aligned_with_the_index_of_the_texts(self, table):
        found = annotate(table["note"], ids=table["patient"].iloc[[2, 0, 1]])
        assert list(found.ids) == IDS
        assert found.to_frame()["patient"].tolist() == ["a7", "c9", "c9"]

    def test_series_of_ids_with_another_index_is_rejected(self, table):
        with pytest.raises(UnmatchedIdsError) as caught:
            annotate(table["note"], ids=table["patient"].set_axis([30, 10, 21]))
        assert caught.value.unmatched == (20,)

    @pytest.mark.parametrize(
        "make_chunks",
        [
            pytest.param(lambda table: pa.Table.from_pandas(table).to_reader(max_chunksize=1), id="Arrow"),
            pytest.param(lambda table: pd.read_csv(io.StringIO(table.to_csv()), chunksize=2), id="pandas"),
        ],
    )
    def test_tables_that_are_read_in_chunks_keep_their_ids(self, table, make_chunks):
        found = annotate(make_chunks(table), **COLUMNS)
        assert found.ids == IDS
        assert found["c9"] == found.results[2]
        assert found.to_frame()["patient"].tolist() == ["a7", "c9", "c9"]
        without_ids = annotate(make_chunks(table), text_column="note")
        assert without_ids.ids is None
        assert without_ids.to_frame()["word"].tolist() == ["asthma", "gout", "asthma"]


class TestTablesOfNotes:
    def test_ids_have_their_own_name_in_frames_and_files(self, table, tmp_path):
        found = annotate(table, **COLUMNS)
        assert "patient" in found.to_frame()
        found.save(tmp_path / "found.csv")
        assert pd.read_csv(tmp_path / "found.csv")["patient"].tolist() == ["a7", "c9", "c9"]
        assert found.score(pd.read_csv(tmp_path / "found.csv")).total.strict.f1 == 1.0
        assert found.score(found.to_frame()).total.strict.f1 == 1.0

    @pytest.mark.parametrize("rows", [[2, 0, 1], [2]])
    @pytest.mark.parametrize("ignore_index", [True, False])
    def test_mask_puts_each_text_in_the_row_of_its_id(self, table, rows, ignore_index):
        masked = annotate(table, **COLUMNS).mask()
        changed = table.iloc[rows].reset_index(drop=True) if ignore_index else table.iloc[rows]
        assert masked.to_frame(changed)["masked_text"].tolist() == [masked[row].text for row in rows]
        assert "b2: No complaints." in str(masked)

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda table: table.reset_index(drop=True), id="other index"),
            pytest.param(lambda table: table.set_axis([10, 20, 30]), id="permuted index"),
            pytest.param(lambda table: pd.concat([table, table[:1]]), id="repeated row"),
            pytest.param(lambda table: table[["ward"]].reset_index(drop=True), id="no texts and a new index"),
        ],
    )
    def test_rows_that_are_not_certain_are_rejected(self, table, change):
        found = annotate(table, text_column="note")
        for pair in (found.mask().to_frame, found.to_frame):
            with pytest.raises(UnmatchedIdsError):
                pair(table=change(table))

    @pytest.mark.filterwarnings("ignore:1 id occurs more than once", "ignore:2 notes have no id")
    @pytest.mark.parametrize(
        ("ids", "index"),
        [
            pytest.param(["p", "p", "q"], [0, 1, 2], id="repeated ids"),
            pytest.param([None, None, "q"], [0, 1, 2], id="missing ids"),
            pytest.param(None, [7, 7, 8], id="repeated index"),
            pytest.param(None, [0, 1, 2], id="numbered rows"),
        ],
    )
    def test_rows_without_texts_are_not_matched_in_order(self, ids, index):
        table = pd.DataFrame({"note": NOTES, "ward": [1, 2, 3]}, index=index).assign(mrn=ids)
        found = annotate(table, text_column="note", id_column=None if ids is None else "mrn")
        shuffled = table.iloc[[1, 0, 2]].set_axis(index).drop(columns="note")
        for pair in (found.mask().to_frame, found.to_frame):
            with pytest.raises(UnmatchedIdsError):
                pair(table=shuffled)

    def test_frame_has_the_row_of_each_note(self, table):
        found = annotate(table[1:], **COLUMNS)
        frame = found.to_frame(table.iloc[[2, 1, 0]])
        assert frame[["patient", "ward"]].to_numpy().tolist() == [["c9", 3], ["c9", 3]]
        assert "note" not in frame

    def test_frame_rejects_a_table_with_its_own_columns(self, table):
        with pytest.raises(ConfigurationError, match="column 'score'"):
            annotate(table, **COLUMNS).to_frame(table.assign(score=1))

    def test_edited_frame_of_a_series_is_gold(self, table):
        found = annotate(table["note"])
        scores = found.score(found.to_frame().iloc[[2, 0]])
        assert (scores.total.strict.precision, scores.num_without_rows) == (pytest.approx(2 / 3), 1)
        assert "1 text has no row in the table of gold entities" in str(scores)
        with pytest.raises(UnmatchedIdsError):
            found.score(found.to_frame().reset_index(drop=True))
        with pytest.raises(ConfigurationError, match="belongs to a different text"):
            found.score(found.to_frame().assign(span_text="flu"))

    def test_frame_of_a_run_in_another_order_is_no_gold(self, table):
        for options in ({"text_column": "note"}, COLUMNS):
            found = annotate(table.reset_index(drop=True), **options)
            other = annotate(table.iloc[::-1].reset_index(drop=True), text_column="note")
            assert found.score(found.to_frame()).total.strict.f1 == 1.0
            with pytest.raises(ConfigurationError):
                found.score(other.to_frame())

    def test_rows_of_a_list_match_by_position_with_equal_texts_only(self, table):
        found = annotate(NOTES)
        numbered = table.reset_index(drop=True)
        assert found.to_frame(numbered)["ward"].tolist() == [1, 3, 3]
        for other in (table, numbered[["ward"]], numbered[::-1].reset_index(drop=True)):
            with pytest.raises(UnmatchedIdsError, match="the column of the texts"):
                found.to_frame(other)


class TestResultsWithoutEntities:
    @pytest.mark.parametrize("texts", [[], [None], pd.Series([], dtype=object)], ids=repr)
    def test_every_method_returns(self, texts, tmp_path):
        found = annotate(texts).with_context("all").filter("disease", min_score=0.5, negated=False)
        assert len(found.to_frame()) == 0
        assert found.mask() is not None
        assert found.score([[] for _ in texts]).total.strict.gold == 0
        found.save(tmp_path / "found.jsonl")
        found.export("conll", tmp_path / "found.conll")
        assert str(found.show())


class TestOneText:
    def test_one_text_is_filtered_and_has_the_annotations_of_one_note(self):
        one = annotate("Known gout and asthma.")
        many = annotate(["Known gout and asthma."])
        assert one.found.to_frame().equals(many.to_frame())
        assert one.with_context().filter(negated=False)[0]["negated"] is False
        assert len(one.filter("disease", min_score=one[0]["score"])) in {1, 2}


class TestScores:
    @pytest.mark.filterwarnings("ignore:No annotated note")
    def test_saved_predictions_are_no_gold(self, tmp_path):
        found = annotate(NOTES)
        found.save(tmp_path / "found.jsonl")
        gold = nb.read_annotations(tmp_path / "found.jsonl")
        assert len(gold) == 0
        assert gold.num_predicted > 0
        with pytest.raises(ConfigurationError, match="predictions=True"):
            found.score(gold)

    def test_score_does_not_depend_on_the_order_of_gold(self):
        found = annotate(["Asthma and gout."])
        spans = [(0, 15, "DISEASE"), (0, 3, "DISEASE"), (0, 6, "OTHER"), (7, 15, "DISEASE")]
        totals = {repr(found.score([order]).total) for order in itertools.permutations(spans)}
        assert len(totals) == 1
        assert str(found.score([spans])).count(" strict ") == 3  # All labels and each of the two.

    def test_labels_that_differ_are_renamed_or_stated(self):
        found = annotate(NOTES[:1])
        gold = [[(8, 14, "Disease")]]
        assert found.score(gold, labels={"Disease": "DISEASE"}).total.strict.f1 == 1.0
        with pytest.warns(OpenMedWarning, match=r"labels=\{'Disease': 'DISEASE'\}"):
            assert found.score(gold).total.strict.f1 == 0.0
        with pytest.warns(OpenMedWarning, match="label 'DISEAS'. Did you mean 'DISEASE'?"):
            found.score([[(8, 14, "DISEASE")]], labels={"DISEAS": "DRUG"})

    def test_parity_takes_gold_by_id_and_renames_labels(self):
        texts = pd.Series(NOTES[:2], index=["x", "y"])
        gold = {"y": [], "x": [(8, 14, "Disease")]}
        report = nb.runbook.parity("bundled_small", texts, device="cpu", gold=gold, labels={"Disease": "DISEASE"})
        assert report.gold.recall == 1.0
        with pytest.raises(UnmatchedIdsError, match="2 texts cannot"):
            nb.runbook.parity("bundled_small", NOTES[:2], device="cpu", gold=gold, labels={"Disease": "DISEASE"})

    @pytest.mark.filterwarnings("ignore:1 id occurs more than once")
    @pytest.mark.parametrize("format_name", ["doccano", "label-studio"])
    def test_repeated_ids_of_an_exported_file_match_by_text(self, tmp_path, format_name):
        found = annotate(["Asthma.", "Gout.", "Asthma.", "Gout."], ids=["a", "a", "b", "a"])
        found.export(format_name, tmp_path / "notes.json")
        gold = nb.read_annotations(tmp_path / "notes.json", format=format_name, predictions=True)
        assert found.score(replace(gold, texts=gold.texts[::-1])).total.strict.f1 == 1.0

    def test_files_match_the_names_of_gold(self, tmp_path):
        for name, text in {"2": "She has asthma.", "10": "Well."}.items():
            (tmp_path / f"{name}.txt").write_text(text)
        asthma = GoldText("2", "She has asthma.", (GoldSpan(8, 14, "DISEASE"),))
        gold = GoldTexts((asthma, GoldText("10", None, ())))
        assert annotate(tmp_path / "*.txt").score(gold).total.strict.f1 == 1.0


class TestPatients:
    NOTES = pd.DataFrame({
        "note": [
            "She has asthma. Asthma is stable.", "She has asthma. Asthma is stable.", "No asthma. Known gout.",
            "Her mother had asthma. She has GOUT.", None, "Known gout.", "Known asthma.", "Return if pneumonia develops. PMH: possible gout.",
        ],
        "note_id": [1, 2, 3, 3, 4, 5, 6, 7],
        "patient": ["p1", "p1", "p1", "p2", "p2", "p2", None, "p3"],
    })  # fmt: skip

    def test_by_patient_counts_patients_and_not_mentions(self):
        """Copied notes, a repeated id, missing texts and patients, and each kind of context."""
        with pytest.warns(OpenMedWarning, match="1 id occurs more than once"):
            found = annotate(self.NOTES, text_column="note", id_column="note_id")
        with pytest.warns(OpenMedWarning, match="1 note has no group"):
            counts = found.by_patient(self.NOTES["patient"])
        assert list(counts.columns) == ["patient", "span_text", "mentions", "notes"]
        assert counts.to_numpy().tolist() == [
            ["p1", "asthma", 4, 2],
            ["p1", "gout", 1, 1],
            ["p2", "gout", 2, 2],
            ["p3", "gout", 1, 1],
        ]
        assert counts["span_text"].value_counts().to_dict() == {"gout": 3, "asthma": 1}
        with pytest.warns(OpenMedWarning) as caught:
            assert found.with_context("all").filter(negated=True).by_patient(self.NOTES["patient"].fillna("")).empty
        assert "not counted" in str(caught[-1].message)

    @pytest.mark.filterwarnings("ignore:120 ids occur more than once")
    def test_path_from_a_csv_file_to_patients_counts_as_pandas_does(self, tmp_path):
        """3,000 rows of Excel with copied notes, repeated ids, and missing texts and patients; a run that continues."""
        rows = pd.concat([pd.read_csv(COURSE_NOTES)] * 25, ignore_index=True)
        rows["text"] += " Café. Vaccination against influenza. Return if pneumonia develops."
        rows["patient"] = rows["patient"].mask(rows.index % 100 == 7)
        rows.columns = ["Case", "Pat.", "Day", "Letter"]
        rows.to_csv(tmp_path / "notes.csv", sep=";", encoding="cp1252", index=False)
        notes = pd.read_csv(tmp_path / "notes.csv", sep=";", encoding="cp1252")
        options = {"text_column": "Letter", "id_column": "Case", "resume": tmp_path / "run.jsonl"}
        annotate(notes[:1000], **options)
        found = annotate(notes, **options).with_context("all")
        review = found.review(tmp_path / "review.jsonl", sample=20)
        for note in review.notes:
            review.accept(note)
        with pytest.warns(OpenMedWarning, match="30 notes have no group"):
            patients = found.by_patient(notes["Pat."])
        with pytest.raises(UnmatchedIdsError, match=r"sort_index.*: 3,000 notes have a repeated"):
            found.to_frame(notes[::-1])
        found.to_frame(notes[::-1].sort_index()).to_csv(tmp_path / "diseases.csv", index=False)
        masked = found.mask().to_frame(notes)

        diseases = pd.read_csv(tmp_path / "diseases.csv")
        own = diseases.query("not negated and temporality != 'hypothetical' and experiencer == 'patient'")
        words = own["span_text"].str.lower().str.split().str.join(" ")
        expected = own.groupby(["Pat.", words])["note_index"].agg(["size", "nunique"]).reset_index()
        assert patients.to_numpy().tolist() == expected.to_numpy().tolist()
        assert diseases["Pat."].equals(notes["Pat."][diseases["note_index"]].reset_index(drop=True))
        assert found.review(tmp_path / "review.jsonl", sample=50).score().total.strict.f1_interval.low > 0.8
        assert masked.drop(columns="masked_text").equals(notes)
        assert masked["masked_text"].isna().equals(notes["Letter"].isna())
        assert found.export("doccano", tmp_path / "tasks.jsonl").notes == 2900

    def test_by_patient_matches_by_id_or_not_at_all(self):
        notes = self.NOTES.iloc[[0, 2, 5]]
        found = annotate(notes, text_column="note", id_column="note_id")
        expected = found.by_patient(notes["patient"]).to_numpy().tolist()
        others = self.NOTES.drop(index=3).set_index("note_id")["patient"].iloc[::-1]
        assert found.by_patient(others).to_numpy().tolist() == expected
        with pytest.raises(UnmatchedIdsError) as caught:
            found.by_patient(self.NOTES.set_index("note_id")["patient"])
        assert caught.value.unmatched == (3,)

    def test_by_patient_takes_a_list_for_a_list_and_a_column_for_a_table(self):
        notes = self.NOTES.iloc[[2, 0, 5]]
        groups = notes["patient"].tolist()
        for column, other in (
            (notes["note"], groups),
            (NOTES, notes["patient"].reset_index(drop=True)),
            (NOTES, groups[1:]),
        ):
            with pytest.raises(UnmatchedIdsError, match=r"column notes\['patient'\]|'patient'\].tolist"):
                annotate(column).by_patient(other)
        for column, column_groups in ((notes["note"], notes["patient"]), (notes["note"].tolist(), groups)):
            assert annotate(column).by_patient(column_groups).to_numpy()[:, 0].tolist() == ["p1", "p1", "p2"]

    @pytest.mark.filterwarnings("ignore:1 id occurs more than once")
    @pytest.mark.parametrize(
        ("rows", "remedy", "follow"),
        [
            ([0, 2, 5], "set_index", lambda table: table[::-1].set_index("note_id")["patient"]),
            ([0, 2, 3], "Annotate a table again", lambda table: table["patient"]),
        ],
    )
    def test_by_patient_names_a_remedy_that_works(self, rows, remedy, follow):
        table = self.NOTES.iloc[rows]
        found = annotate(table, text_column="note", id_column="note_id")
        for groups in (table["patient"][1:], table["patient"].reset_index(drop=True)):
            with pytest.raises(UnmatchedIdsError, match=remedy):
                found.by_patient(groups)
        assert found.by_patient(follow(table))["patient"][0] == "p1"

    def test_by_patient_takes_ids_and_columns_with_the_name_group(self):
        notes = pd.DataFrame({"group": ["No gout.", "Known asthma."], "id": ["b", "a"], "who": ["a", "b"]})
        found = annotate(notes, text_column="group", id_column="id")
        for groups in (notes["who"], notes.set_index("id")["who"].rename("group").iloc[::-1]):
            assert found.by_patient(groups).to_numpy().tolist() == [["b", "asthma", 1, 1]]

    def test_by_patient_needs_three_kinds_of_context(self):
        found = annotate(NOTES[:1], ids=["a7"])
        with pytest.raises(ConfigurationError, match="not have the context 'temporality'"):
            found.with_context("negated", "experiencer").by_patient(["p1"])
        with pytest.raises(ConfigurationError, match="tokens"):
            annotate(NOTES[:1], aggregation_strategy="none").by_patient(["p1"])
        with pytest.raises(ConfigurationError, match="groups: str"):
            found.by_patient("patient")
        with pytest.raises(ConfigurationError, match="groups contain"):
            found.by_patient([["p1"]])
        assert found.with_context("all").filter(uncertain=True).by_patient(["p1"]).empty
