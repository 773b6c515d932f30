"""The batch size that a sweep measured is kept and used."""

import json

import pytest
import torch

import openmed_nb as nb
from helpers.annotations import on_forward
from openmed_nb.errors import OpenMedWarning
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.session import SESSION

OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.fixture
def pipe(own_pipe_of, keyword_model):
    """A separate pipeline over the keyword model."""
    return own_pipe_of(keyword_model)


def test_padding_is_measured_again_after_a_failure(pipe):
    """Rows are not padded after a failure, because the model may read the padding."""
    texts = ["the patient has asthma .", "asthma", "no history"]
    lengths = []
    forward = pipe.model.forward

    def fail_once(*_inputs, **_options):
        pipe.model.forward = forward
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    pipe.model.forward = fail_once
    on_forward(pipe.model, lambda ids: lengths.append(ids.shape[1]))
    pipe(texts)
    assert lengths == [7, 4, 3]
    lengths.clear()
    pipe(texts)
    assert len({*lengths}) == 1


@pytest.fixture
def records(tmp_path, monkeypatch):
    """The folder of the tuned batch sizes, and a session without models."""
    monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path))
    SESSION.unload()
    yield tmp_path / "validation_records"
    SESSION.unload()


@pytest.fixture
def load(records, keyword_model, home):  # noqa: ARG001 - the records of the pipeline
    """A function that returns a pipeline in a session that has loaded nothing yet."""

    def load():
        SESSION.unload()
        return nb.load_pipeline(keyword_model, device=home)

    return load


def save(pipe, tokens):
    """Save a tuned batch size of the model of a pipeline."""
    SESSION.save_batch_size(SESSION.models.key_of(pipe.model).spec, str(pipe.device), tokens)


def test_tuned_batch_size_is_used_in_later_sessions(load, keyword_model, home):
    pipe = load()
    other = nb.load_pipeline(keyword_model, device=home, aggregation_strategy="simple")
    for tokens in (64, 96):  # The second one replaces the first one.
        save(pipe, tokens)
    sizes = [pipe.batch_tokens, other.batch_tokens, load().batch_tokens]
    choice = nb.device(home)

    assert sizes == [96, 96, 96]
    assert [tokens for _, tokens in choice.tuned_batch_tokens] == [96]
    assert "Tuned batch sizes on this machine" in str(choice)


@pytest.mark.parametrize("name", ["weights", "torch"])
def test_tuned_batch_size_expires_when_identity_changes(load, records, name):
    """A corrupt record is ignored."""
    pipe = load()
    default = pipe.batch_tokens
    save(pipe, 96)
    (file,) = records.iterdir()
    stored = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps({**stored, "identity": {**stored["identity"], name: "other"}}), "utf-8")
    (records / "damaged.batch_size").write_text("{", "utf-8")

    assert load().batch_tokens == default


@pytest.mark.parametrize(("knee", "tokens"), [(4, 256), (8, None), (None, None)])
def test_sweep_stores_knee(monkeypatch, load, keyword_model, knee, tokens):
    """It is not stored if throughput still increases at the knee, or if there is no knee."""
    pipe = load()
    default, home = pipe.batch_tokens, str(pipe.device)
    points = (Point(4, 10.0), Point(8, 11.0))
    report = SweepReport("mine", "annotation", device=home, points=points, knee=knee, length=64)
    monkeypatch.setattr("openmed_nb.runbook.bench.sweep.run_sweep", lambda *_: report)
    nb.sweep(keyword_model, device=home)

    assert load().batch_tokens == (tokens or default)


def test_tuned_batch_size_applies_if_it_cannot_be_stored(monkeypatch, tmp_path, load):
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path / "file"))
    pipe = load()

    with pytest.warns(OpenMedWarning, match="cannot be stored"):
        save(pipe, 96)
    assert pipe.batch_tokens == 96
