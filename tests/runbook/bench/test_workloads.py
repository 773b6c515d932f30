"""Tests of the workloads of each task: results, phases, and unchanged inputs."""

import itertools
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError
from openmed_nb.runbook.bench.workloads import make_target
from openmed_nb.session import SESSION

TEXTS = [
    "the patient has asthma and diabetes mellitus .",
    "no history of hypertension .",
    "",
    "seen . " * 90 + "asthma was seen and hypertension .",
]
EXAMPLE = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
IDENTITY = torch.nn.Identity()


@pytest.fixture(params=["cpu", pytest.param("mps", marks=pytest.mark.real_computer)])
def device(request):
    """Name of a device: the CPU, or MPS while it is simulated."""
    with nb.simulated_mps() if request.param == "mps" else nullcontext():
        yield request.param


class Tagger(torch.nn.Module):
    """Model with state that a measurement could change: a buffer, dropout, and a frozen layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)
        self.trainable = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, labels):
        """Return the loss, and the logits."""
        logits = self.trainable(self.dropout(self.norm(self.frozen(x))))
        return torch.nn.functional.cross_entropy(logits, labels), logits


def sum_batch(batch):
    """Run a custom step."""
    return batch.sum()


def build(model, data=None, device="cpu", **options):
    """Return a benchmark on a device."""
    return make_target(model, data, arguments={}, **options)[0].build(device)


def run_steps(workload, count=2):
    """Return the results of some steps."""
    return [workload.run(batch) for batch in itertools.islice(workload.batches(), count)]


def copy_state(model):
    """Return copies of the state of a model that a measurement could change."""
    return {
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "gradients": [None if weight.grad is None else weight.grad.tolist() for weight in model.parameters()],
        "modules": [(module.training, len(module._forward_hooks)) for module in model.modules()],
    }


def get_spans(entities):
    """Return the offsets and the labels of entities."""
    return [(entity["start"], entity["end"], entity["entity_group"]) for entity in entities]


class TestAnnotation:
    """Workloads that annotate texts."""

    def test_results_equal_those_of_pipeline(self, device, keyword_model):
        """Long texts are included and empty ones are not; texts of a generator are repeated, in random order."""
        benchmark = build(str(keyword_model), iter(TEXTS), device)
        expected = [*map(get_spans, nb.load_pipeline(str(keyword_model), device="cpu")(benchmark.texts))]
        assert sorted(benchmark.texts) == sorted(filter(None, TEXTS))
        for rows in (3, 9):
            results = list(itertools.chain.from_iterable(run_steps(benchmark.data_workload(rows), 4)))
            assert list(map(get_spans, results)) == list(itertools.islice(itertools.cycle(expected), 4 * rows))

    @pytest.mark.filterwarnings("ignore::openmed_nb.errors.OpenMedWarning")
    def test_pipeline_is_measured_by_its_files(self, keyword_model):
        pipe = nb.load_pipeline(str(keyword_model), device="cpu", dtype="int8")
        benchmark = build(pipe, TEXTS)

        assert benchmark.annotator.network.model is not pipe.model
        assert benchmark.data_workload().dtype == "int8"
        SESSION.unload()
        with pytest.raises(ConfigurationError, match="Pass the name of the model"):
            build(pipe, TEXTS)

    def test_fixed_shape_workload_has_full_rows(self, device, keyword_model):
        """Small batches return probabilities, and large batches return labels and scores."""
        benchmark = build(str(keyword_model), device=device, length=16)
        workload = benchmark.fixed_shape_workload(5)
        (probabilities,), _ = run_steps(workload)
        (labels, scores), _ = run_steps(benchmark.fixed_shape_workload(50))

        assert (workload.rows, workload.length, workload.task, workload.dtype) == (5, 16, "annotation", "float32")
        assert probabilities.shape[:2] == (5, 16)
        assert labels.shape == scores.shape == (50, 16)
        for length in (None, 64):  # The maximum of the model.
            assert build(str(keyword_model), device=device, length=length).fixed_shape_workload(1).length == 64
        with pytest.raises(ConfigurationError, match=r"length=65 .*at most 64 tokens"):
            build(str(keyword_model), device=device, length=65).fixed_shape_workload(1)

    def test_batch_tokens_follow_rows_and_length(self, keyword_model):
        benchmark = build(str(keyword_model), ["seen . " * 12] * 3, length=16)
        workload = benchmark.data_workload(700)
        _chunk, batches = next(workload.batches())
        sizes = [batch.num_rows * batch.length for batch in batches]

        assert workload.rows == 700
        assert workload.batch_tokens == benchmark.fixed_shape_workload(700).batch_tokens == 700 * 16
        assert max(sizes) > benchmark.annotator.budget.max_tokens == benchmark.data_workload().batch_tokens
        assert build(IDENTITY, EXAMPLE).fixed_shape_workload(2).batch_tokens is None

    def test_stored_batch_size_applies_without_rows(self, keyword_model):
        """A step has enough texts for a full batch."""
        spec, device = SESSION.load_spec(str(keyword_model), {"device": "cpu"})
        SESSION.save_batch_size(spec, device, 40 * 64)
        workload = build(str(keyword_model), TEXTS).data_workload()

        assert (workload.rows, workload.batch_tokens) == (40, 40 * 64)

    def test_missing_texts_are_not_measured(self, keyword_model):
        """A missing text is not in the number of texts, as in annotate()."""
        model = str(keyword_model)
        texts = ["asthma", None, "fever", float("nan")]

        assert nb.compare(model, texts, devices="cpu", seconds=1e-6).texts == 2
        assert nb.runbook.profile(model, texts, device="cpu", steps=1).texts == 2
        assert nb.runbook.validate_precision(model, texts, device="cpu").parity.texts == 2
        assert nb.logbook(dataset=texts).dataset.items == 2


class TestModule:
    """Forward passes and training steps of modules."""

    @pytest.mark.parametrize(
        ("training", "task", "names"),
        [
            (False, "forward pass", ["data", "transfer", "forward"]),
            (True, "training step", ["data", "transfer", "forward", "backward", "optimizer"]),
        ],
    )
    def test_steps_do_not_change_the_module(self, device, training, task, names):
        """The copy runs forward passes without gradients, or is trained."""
        model = Tagger().train()
        model.norm.eval()
        model.trainable.weight.grad = torch.full_like(model.trainable.weight, 7.0)
        copies: list[torch.nn.Module] = []
        model.register_forward_hook(lambda module, *_: copies.append(module))
        state = copy_state(model)
        benchmark = build(model, {"x": EXAMPLE, "labels": torch.tensor([0, 2])}, device, training=training)
        workload = benchmark.fixed_shape_workload(6)
        run_steps(workload, 3)
        copied = copies[0]
        weights = dict(model.named_parameters())
        changed = {name for name, tensor in copied.named_parameters() if tensor.tolist() != weights[name].tolist()}

        assert list(workload.time_phases(workload.batches())) == names
        assert workload.time_step(next(workload.batches())) > 0
        assert (workload.task, workload.dtype, benchmark.name) == (task, "float32", "Tagger")
        assert copied is not model
        assert copied.training == training
        assert bool(changed) == training
        assert not any(name.startswith("frozen") for name in changed)
        assert copy_state(model) == state

    def test_training_uses_synthetic_labeled_rows(self, device, keyword_model):
        """The model is unknown to the session."""
        inventory = str(SESSION.inventory())
        workload = build(str(keyword_model), device=device, training=True, length=8).fixed_shape_workload(3)
        run_steps(workload, 1)

        assert (workload.task, workload.rows, workload.length) == ("training step", 3, 8)
        assert str(SESSION.inventory()) == inventory

    def test_unsupported_models_raise_errors(self):
        """The model cannot be copied, or it has no trainable parameter."""
        locked = torch.nn.Linear(4, 2)
        locked.lock = threading.Lock()
        frozen = torch.nn.Linear(4, 2).requires_grad_(False)

        with pytest.raises(ConfigurationError, match="Linear cannot be copied"):
            build(locked, EXAMPLE)
        with pytest.raises(ConfigurationError, match="depends on a trainable parameter"):
            run_steps(build(frozen, EXAMPLE, training=True).fixed_shape_workload(2))


class TestStepFunction:
    """Custom step functions."""

    def test_step_receives_batches_unchanged(self, device):
        batches = [torch.ones(3, 2), torch.ones(2, 2)]
        workload = build(lambda batch: batch.to(device).sum(), batches, device).data_workload()

        assert [float(total) for total in run_steps(workload, 4)] == [6.0, 4.0, 6.0, 4.0]
        assert (workload.task, workload.rows) == ("own step", 3)
        assert list(workload.time_phases(workload.batches())) == ["data", "step"]

    def test_batch_function_receives_requested_rows(self):
        requested: list[int] = []

        def make_batch(rows):
            requested.append(rows)
            return torch.ones(rows)

        benchmark = build(sum_batch, make_batch)

        assert [float(total) for total in run_steps(benchmark.fixed_shape_workload(5), 3)] == [5.0] * 3
        assert [float(total) for total in run_steps(benchmark.data_workload(), 1)] == [1.0]
        assert requested == [5, 1]
        with pytest.raises(ConfigurationError, match="sum_batch has no batch with 4 rows"):
            build(sum_batch, [EXAMPLE]).fixed_shape_workload(4)

    @pytest.mark.parametrize(
        ("batch", "is_valid"),
        [(torch.ones(4, 2), True), (torch.ones(3, 4, 2), True), ({"ids": [1]}, True), (torch.ones(3, 2), False)],
    )
    def test_batch_function_must_return_requested_rows(self, batch, is_valid):
        """Rows may be the second dimension, and a batch may have no tensors."""
        benchmark = build(len, lambda _rows: batch)
        with nullcontext() if is_valid else pytest.raises(ConfigurationError, match="3 rows instead of 4"):
            assert run_steps(benchmark.fixed_shape_workload(4), 1) == [len(batch)]


class TestLoader:
    """Batches of a loader."""

    @pytest.mark.parametrize("workers", [0, 1])
    def test_loader_is_repeated(self, workers):
        """Each iterator starts with the first batch, and the last batch may be smaller."""
        items = [torch.full((4,), float(number)) for number in range(5)]
        workload = build(
            IDENTITY, DataLoader(items, 2, num_workers=workers, persistent_workers=workers > 0)
        ).data_workload()
        for count in (7, 1):
            values = [[float(row[0]) for row in batch] for batch in run_steps(workload, count)]
            assert values == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]][:count]
        assert (workload.workers, workload.prefetched_batches, workload.rows) == (workers, 2 * workers, 2)
        assert len(workload.persistent_workers) == workers

    def test_loader_batch_is_resized_for_fixed_shapes(self):
        """A data workload uses the batch size of the loader."""
        benchmark = build(IDENTITY, DataLoader(EXAMPLE, batch_size=2))

        assert [len(run_steps(benchmark.fixed_shape_workload(rows))[0]) for rows in (1, 3, 8)] == [1, 3, 8]
        with pytest.raises(ConfigurationError, match="The loader sets the batch size"):
            benchmark.data_workload(3)

    def test_tensors_without_rows_are_not_resized(self):
        example = (torch.tensor([[1], [2]]), torch.tensor(0.5), torch.ones(3))
        workload = build(IDENTITY, example).fixed_shape_workload(3)

        assert [tensor.tolist() for tensor in next(workload.batches()).args] == [[[1], [2], [1]], 0.5, [1.0, 1.0, 1.0]]

    def test_loader_without_batches_raises_error(self):
        with pytest.raises(ConfigurationError, match="The loader yields no batches"):
            run_steps(build(sum_batch, []).data_workload())


@pytest.mark.parametrize(
    ("model", "data", "options", "message"),
    [
        (["asthma"], "bundled_small", {}, "list cannot be measured.*first, and then the data"),
        (IDENTITY, None, {}, r"no inputs for Identity\. Pass data="),
        (IDENTITY, 5, {}, "int without a tensor"),
        (IDENTITY, EXAMPLE, {"arguments": {"dtype": "float16"}}, "Identity does not accept dtype"),
        (IDENTITY, torch.ones(0, 8), {}, "has no rows"),
        ("bundled_small", [], {}, "no texts to measure"),
        ("bundled_small", ["asthma"], {"training": True}, "list without a tensor"),
        ("bundled_small", None, {"length": 0}, "length.*0"),
        (IDENTITY, DataLoader(EXAMPLE), {"length": 8}, "length=8 has no effect"),
        *((sum_batch, data, {}, "cannot be iterated repeatedly") for data in (iter([EXAMPLE]), EXAMPLE)),
        (sum_batch, None, {}, r"no batches for sum_batch\. Pass data="),
    ],
)
def test_make_target_rejects_invalid_arguments(model, data, options, message):
    """The session loads no model."""
    names = SESSION.inventory().names

    with pytest.raises(ConfigurationError, match=message):
        make_target(model, data, **{"arguments": {}, **options})
    assert SESSION.inventory().names == names


@pytest.mark.parametrize("measure", [nb.compare, nb.runbook.profile, nb.runbook.parity, nb.runbook.validate_precision])
def test_texts_are_checked_before_torch_is_imported(monkeypatch, measure):
    """The module of the pipeline imports torch."""
    monkeypatch.setitem(sys.modules, "openmed_nb.annotation.pipeline", None)
    with pytest.raises(ConfigurationError, match="str is not"):
        measure("bundled_small", "Well.")
