"""The batch size that a sweep measured is kept and used."""

import json

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import OpenMedWarning
from openmed_nb.runbook.bench.sweep import Point, SweepReport
from openmed_nb.session import SESSION


@pytest.fixture
def pipe(own_pipe_of, keyword_model):
    """A separate pipeline over the keyword model."""
    return own_pipe_of(keyword_model)


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB."


def test_padding_is_measured_again_after_a_failure(pipe, on_forward):
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
    assert len({*lengths}) == len(lengths) == 3
    lengths.clear()
    pipe(texts)
    assert len({*lengths}) == 1


class TestLearned:
    """What was measured of a model on this computer is used without being asked for, until something of it changes."""

    @pytest.fixture(autouse=True)
    def data(self, tmp_path, monkeypatch):
        """Where it is kept, and a session without models."""
        monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path))
        SESSION.unload()
        yield tmp_path / "validation_records"
        SESSION.unload()

    def fresh(self, folder, home):
        """Return a pipeline in a session that has loaded nothing yet."""
        SESSION.unload()
        return nb.load_pipeline(folder, device=home)

    def test_tuned_batch_size_is_used_until_reset(self, data, keyword_model, home):
        pipe = self.fresh(keyword_model, home)
        usual = pipe.batch_tokens
        for tokens in (64, 96):  # The second one replaces the first one.
            SESSION.save_batch_size(SESSION.models.key_of(pipe.model).spec, home, tokens)
        again = self.fresh(keyword_model, home)
        choice = nb.device(home)

        assert again.batch_tokens == 96
        assert [tokens for _, tokens in choice.tuned_batch_tokens] == [96]
        assert "Tuned batch sizes on this machine" in str(choice)
        assert "96" not in str(choice)
        again.reset_calibration()
        assert (again.batch_tokens, nb.device(home).tuned_batch_tokens) == (usual, ())
        assert self.fresh(keyword_model, home).batch_tokens == usual
        assert list(data.iterdir()) == []

    def test_tuned_batch_size_applies_to_existing_pipelines(self, keyword_model, home):
        """An explicit ``batch_tokens`` takes precedence."""
        pipe = self.fresh(keyword_model, home)
        other = nb.load_pipeline(keyword_model, device=home, aggregation_strategy="simple")
        SESSION.save_batch_size(SESSION.models.key_of(pipe.model).spec, home, 96)
        taken = pipe.batch_tokens, other.batch_tokens, nb.load_pipeline(keyword_model, device=home).batch_tokens
        pipe.batch_tokens = 32

        assert (taken, pipe.batch_tokens) == ((96, 96, 96), 32)

    @pytest.mark.parametrize(
        "name", ["weights", "config", "tokenizer", "torch", "transformers", "device_name", "dtype"]
    )
    def test_tuned_batch_size_expires_when_identity_changes(self, data, keyword_model, home, name):
        """A corrupt record is ignored."""
        pipe = self.fresh(keyword_model, home)
        usual = pipe.batch_tokens
        SESSION.save_batch_size(SESSION.models.key_of(pipe.model).spec, home, 96)
        (file,) = data.iterdir()
        kept = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps({**kept, "identity": {**kept["identity"], name: "other"}}), "utf-8")
        (data / "damaged.batch_size").write_text("{", "utf-8")

        assert self.fresh(keyword_model, home).batch_tokens == usual

    @pytest.mark.parametrize(("knee", "tokens"), [(4, 256), (8, None), (None, None)])
    def test_sweep_result_is_stored(self, monkeypatch, keyword_model, home, knee, tokens):
        """It is not stored if throughput still increases at the knee, or if there is no knee."""
        points = (Point(4, 10.0), Point(8, 11.0))
        report = SweepReport("mine", "annotation", device=home, points=points, knee=knee, length=64)
        monkeypatch.setattr("openmed_nb.runbook.bench.sweep.run_sweep", lambda *_: report)
        usual = self.fresh(keyword_model, home).batch_tokens
        nb.sweep(keyword_model, device=home)

        assert self.fresh(keyword_model, home).batch_tokens == (tokens or usual)

    def test_tuned_batch_size_warns_if_record_cannot_be_written(self, monkeypatch, tmp_path, keyword_model, home):
        """The measurement still applies to the pipeline."""
        (tmp_path / "file").write_text("", "utf-8")
        monkeypatch.setenv("OPENMED_NB_DATA", str(tmp_path / "file"))
        pipe = self.fresh(keyword_model, home)

        with pytest.warns(OpenMedWarning, match="cannot be stored"):
            SESSION.save_batch_size(SESSION.models.key_of(pipe.model).spec, home, 96)
        assert pipe.batch_tokens == 96
