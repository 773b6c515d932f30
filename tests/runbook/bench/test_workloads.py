"""Tests of the workloads of each task: results, phases, and unchanged inputs."""

import copy
import itertools
import threading
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, InvalidTextError
from openmed_nb.runbook.bench import workloads
from openmed_nb.runbook.bench.workloads import RepeatingLoader, build_benchmarks
from openmed_nb.session import SESSION

pytestmark = pytest.mark.usefixtures("quick_collection")

TEXTS = [
    "the patient has asthma and diabetes mellitus .",
    "no history of hypertension .",
    "",
    "seen . " * 90 + "asthma was seen and hypertension .",
]
EXAMPLE = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])
BATCH = torch.ones(4, 8)


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
        self.frozen = torch.nn.Linear(4, 4)
        self.trainable = torch.nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x, labels=None):
        """Return logits, and the loss before them if there are labels."""
        logits = self.trainable(self.dropout(self.norm(self.frozen(x))))
        return logits if labels is None else (torch.nn.functional.cross_entropy(logits, labels), logits)


class MutatingLinear(torch.nn.Linear):
    """Model that modifies its input in place."""

    def forward(self, x):
        """Modify the input and return the output."""
        return super().forward(x.mul_(3))


def sum_batch(batch):
    """Run a custom step."""
    return batch.sum()


def make_target(*arguments, **options):
    """Return the target of a benchmark."""
    return workloads.make_target(*arguments, **{"arguments": {}, **options})[0]


def run_steps(workload, count=2):
    """Return the results of some steps."""
    return [workload.run(batch) for batch in itertools.islice(workload.batches(), count)]


def copy_state(model):
    """Return copies of the state of a model that a measurement could change."""
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "gradients": [copy.deepcopy(parameter.grad) for parameter in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "devices": {str(parameter.device) for parameter in model.parameters()},
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def get_span(entity):
    """Return the offsets and the label of an entity."""
    return entity["start"], entity["end"], entity["entity_group"]


def assert_same_state(model, expected):
    """Assert that the state of a model is unchanged."""
    state = copy_state(model)
    torch.testing.assert_close(state.pop("weights"), expected.pop("weights"), rtol=0, atol=0)
    torch.testing.assert_close(state.pop("gradients"), expected.pop("gradients"), rtol=0, atol=0, allow_subclasses=True)
    assert state == expected


class TestAnnotation:
    """Workloads that annotate texts."""

    def test_results_equal_those_of_pipeline(self, device, keyword_model):
        """Long and empty texts are included."""
        expected = nb.load_pipeline(str(keyword_model), device="cpu")(TEXTS)
        benchmark = make_target(str(keyword_model), TEXTS).build(device)
        for rows in (1, 3, 4, 9):
            results = list(itertools.chain.from_iterable(run_steps(benchmark.data_workload(rows), 4)))
            for entities, expected_entities in zip(results, itertools.cycle(expected), strict=False):
                assert [get_span(entity) for entity in entities] == [get_span(entity) for entity in expected_entities]
                scores = [entity["score"] for entity in expected_entities]
                assert [entity["score"] for entity in entities] == pytest.approx(scores, abs=1e-5)
            assert len(results) == 4 * rows
            assert any(results), rows

    def test_pipeline_is_copied_to_other_devices(self, device, random_model):
        """The aggregation strategy of the pipeline is used on all devices."""
        pipe = nb.load_pipeline(str(random_model), device="cpu", aggregation_strategy="first")
        state = copy_state(pipe.model)
        benchmark = make_target(pipe, TEXTS).build(device)
        (results,) = run_steps(benchmark.data_workload(len(TEXTS)), 1)

        assert (benchmark.annotator.network.model is pipe.model) == (device == "cpu")
        expected = pipe(TEXTS)
        assert [[get_span(entity) for entity in entities] for entities in results] == [
            [get_span(entity) for entity in entities] for entities in expected
        ]
        assert_same_state(pipe.model, state)

    def test_fixed_shape_workload_has_full_rows(self, device, keyword_model):
        """Small batches return probabilities, and large batches return labels and scores."""
        workload = make_target(str(keyword_model), length=16).build(device).fixed_shape_workload(5)
        (probabilities,), _ = run_steps(workload)
        (labels, scores), _ = run_steps(
            make_target(str(keyword_model), length=16).build(device).fixed_shape_workload(50)
        )

        assert (workload.rows, workload.length, workload.task, workload.dtype) == (5, 16, "annotation", "float32")
        assert probabilities.shape[:2] == (5, 16)
        assert labels.shape == scores.shape == (50, 16)
        assert make_target(str(keyword_model)).build(device).fixed_shape_workload(1).length == 64
        with pytest.raises(ConfigurationError, match="length=1000 exceeds the maximum of 64 tokens"):
            make_target(str(keyword_model), length=1000).build(device).fixed_shape_workload(1)

    def test_batch_tokens_follow_rows_and_length(self, device, keyword_model, random_model):
        """The batch size of a pipeline is ignored."""
        benchmark = make_target(str(keyword_model), ["seen . " * 12] * 3, length=16).build(device)
        workload = benchmark.data_workload(700)
        default_workload = benchmark.data_workload()
        pipe = nb.load_pipeline(str(random_model), device="cpu", batch_size=2)
        padded = next(make_target(pipe, ["asthma"] * 8).build("cpu").data_workload(8).batches())

        assert (workload.rows, workload.batch_tokens, benchmark.fixed_shape_workload(700).batch_tokens) == (
            700,
            700 * 16,
            700 * 16,
        )
        sizes = [inputs["input_ids"].size for inputs in next(workload.batches()).arrays]
        assert max(sizes) > benchmark.annotator.budget.max_tokens == default_workload.batch_tokens
        assert make_target(torch.nn.Identity(), EXAMPLE).build(device).fixed_shape_workload(2).batch_tokens is None
        assert [len(inputs["input_ids"]) for inputs in padded.arrays] == [8]

    def test_texts_of_generator_are_repeated(self, keyword_model):
        """Invalid texts raise an error when they are tokenized."""
        benchmark = make_target("bundled_small", (text for text in ["She has asthma."])).build("cpu")

        assert [len(results) for results in run_steps(benchmark.data_workload(2), 2)] == [2, 2]
        for text, message in ((None, "not NoneType"), (["asthma"], "not list")):
            workload = make_target(str(keyword_model), [text]).build("cpu").data_workload(2)
            with pytest.raises(InvalidTextError, match=message):
                next(workload.batches())


class TestModule:
    """Forward passes and training steps of modules."""

    @pytest.mark.parametrize(
        ("training", "names"),
        [(False, ["data", "transfer", "forward"]), (True, ["data", "transfer", "forward", "backward", "optimizer"])],
    )
    def test_steps_do_not_change_the_module(self, device, training, names):
        """The copy runs forward passes without gradients, or is trained."""
        model = Tagger().train()
        model.norm.eval()
        model.trainable.weight.grad = torch.full_like(model.trainable.weight, 7.0)
        state = copy_state(model)
        benchmark = make_target(model, {"x": EXAMPLE, "labels": torch.tensor([0, 2])}, training=training).build(device)
        initial_parameters = [parameter.detach().clone() for parameter in benchmark.model.parameters()]
        workload = benchmark.fixed_shape_workload(6)
        run_steps(workload, 3)
        phases = workload.time_phases(workload.batches())

        assert list(phases) == names
        assert min(phases.values()) >= 0
        assert workload.time_step(next(workload.batches())) > 0
        assert workload.task == ("training step" if training else "forward pass")
        assert benchmark.model is not model
        assert benchmark.model.training == training
        changed = [
            not torch.equal(parameter.cpu(), initial.cpu())
            for parameter, initial in zip(benchmark.model.parameters(), initial_parameters, strict=True)
        ]
        assert any(changed) == training
        assert changed[:2] == [False, False]  # Parameters of the frozen layer.
        assert_same_state(model, state)

    def test_training_uses_synthetic_labeled_rows(self, device, keyword_model, random_model):
        """A named model is unknown to the session, and the model of a pipeline is copied."""
        pipe = nb.load_pipeline(str(random_model), device="cpu")
        inventory = SESSION.inventory()
        state = copy_state(pipe.model)
        target = make_target(str(keyword_model), training=True, length=8)
        workload = target.build(device).fixed_shape_workload(3)
        run_steps(workload, 1)
        run_steps(make_target(pipe, training=True).build(device).data_workload(), 1)

        assert (workload.task, workload.rows, workload.length) == ("training step", 3, 8)
        assert target.name == make_target(str(keyword_model)).name
        assert str(SESSION.inventory()) == str(inventory)
        assert_same_state(pipe.model, state)

    def test_inputs_are_unchanged_by_mutating_model(self):
        for training in (False, True):
            items = [torch.ones(4, 8), torch.ones(4, 8)]
            benchmark = make_target(MutatingLinear(8, 8), DataLoader(items, batch_size=None), training=training).build(
                "cpu"
            )
            run_steps(benchmark.data_workload(), 5)
            workload = benchmark.fixed_shape_workload(3)
            batch = next(workload.batches())
            for _ in range(3):
                workload.run(batch)
            assert all(bool((item == 1).all()) for item in (*items, batch.args[0])), training

    def test_cpu_batch_is_not_copied_for_reading_model(self):
        workload = make_target(torch.nn.Identity(), BATCH).build("cpu").fixed_shape_workload(4)
        batch = next(workload.batches())

        assert [workload.run(batch) is batch.args[0] for _ in range(2)] == [False, True]

    def test_workload_has_dtype_and_name(self):
        assert (
            make_target(torch.nn.Linear(4, 2).bfloat16(), EXAMPLE.bfloat16()).build("cpu").fixed_shape_workload(1).dtype
            == "bfloat16"
        )
        assert make_target(torch.nn.Identity(), EXAMPLE).build("cpu").fixed_shape_workload(1).dtype is None
        assert make_target(torch.nn.Identity(), EXAMPLE).name == "Identity"

    def test_unsupported_models_raise_errors(self):
        """The model cannot be copied, or it has no trainable parameter."""
        locked = torch.nn.Linear(4, 2)
        frozen = torch.nn.Linear(4, 2).requires_grad_(False)
        locked.lock = threading.Lock()

        with pytest.raises(ConfigurationError, match="Linear cannot be copied"):
            make_target(locked, EXAMPLE).build("cpu")
        with pytest.raises(ConfigurationError, match="depends on a trainable parameter"):
            run_steps(make_target(frozen, EXAMPLE, training=True).build("cpu").fixed_shape_workload(2), 1)

    @pytest.mark.real_computer
    def test_float64_on_mps_raises_error(self):
        with nb.simulated_mps():
            for measure in (nb.sweep, nb.compare, nb.runbook.profile):
                with pytest.raises(ConfigurationError, match=r"Linear.*float64"):
                    measure(torch.nn.Linear(8, 8).double(), BATCH.double())


class TestStepFunction:
    """Custom step functions."""

    def test_step_receives_batches_unchanged(self, device):
        batches = [torch.ones(3, 2), torch.ones(2, 2)]
        workload = make_target(lambda batch: batch.to(device).sum(), batches).build(device).data_workload()

        assert [float(total) for total in run_steps(workload, 4)] == [6.0, 4.0, 6.0, 4.0]
        assert (workload.task, workload.rows) == ("own step", 3)
        assert list(workload.time_phases(workload.batches())) == ["data", "step"]
        with pytest.raises(StopIteration):
            workload.time_phases(iter(()))

    def test_batch_function_receives_requested_rows(self):
        requested: list[int] = []

        def make_batch(rows):
            requested.append(rows)
            return torch.ones(rows)

        benchmark = make_target(sum_batch, make_batch).build("cpu")

        assert [float(total) for total in run_steps(benchmark.fixed_shape_workload(5), 3)] == [5.0] * 3
        assert [float(total) for total in run_steps(benchmark.data_workload(), 1)] == [1.0]
        assert requested == [5, 1]
        with pytest.raises(ConfigurationError, match="sum_batch has no batch with 4 rows"):
            make_target(sum_batch, [EXAMPLE]).build("cpu").fixed_shape_workload(4)

    def test_rows_may_be_second_dimension(self):
        """A batch without tensors is also accepted."""
        for batch in (torch.ones(4, 2), torch.ones(9, 2), torch.ones(3, 4, 2), {"ids": [1]}):
            workload = make_target(len, lambda _rows, batch=batch: batch).build("cpu").fixed_shape_workload(4)
            assert run_steps(workload, 1) == [len(batch)]

    def test_step_may_remove_items_of_batch(self):
        """Each step receives copies of mappings and lists, with the same tensors."""
        data = [{"x": [BATCH], "labels": [1]}, {"x": [BATCH], "labels": [2]}]

        def step(batch):
            assert batch["x"].pop() is BATCH
            return batch.pop("labels")[0]

        assert run_steps(make_target(step, data).build("cpu").data_workload(), 5) == [1, 2, 1, 2, 1]
        assert [(len(batch["x"]), len(batch["labels"])) for batch in data] == [(1, 1)] * 2


class SinglePassDataset(IterableDataset):
    """Dataset that can be iterated only once."""

    def __init__(self):
        self.items = iter([torch.ones(4)] * 4)

    def __iter__(self):
        return self.items


class StubLoader:
    """Loader with one worker and repeated batches."""

    num_workers = 1

    def __init__(self, count, persistent):
        self.count = count
        self.persistent_workers = persistent

    def __iter__(self):
        return iter([BATCH] * self.count)


def make_loader(*sizes):
    """Return a loader with batches of these sizes."""
    return DataLoader(torch.ones(max(sizes), 8), batch_sampler=[list(range(size)) for size in sizes])


class TestLoader:
    """Batches of a loader."""

    def test_loader_is_repeated(self):
        """Each iterator starts with the first batch, and the last batch may be smaller."""
        items = [torch.full((4,), float(number)) for number in range(5)]
        for workers in (0, 1):
            loader = DataLoader(items, batch_size=2, num_workers=workers)
            workload = make_target(torch.nn.Identity(), loader).build("cpu").data_workload()
            for count in (7, 1):
                values = [[float(row[0]) for row in batch] for batch in run_steps(workload, count)]
                assert values == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]][:count], workers
            assert (workload.workers, workload.prefetched_batches, workload.rows) == (workers, 2 * workers, 2)

    def test_loader_batch_is_resized_for_fixed_shapes(self):
        """A data workload uses the batch size of the loader."""
        benchmark = make_target(torch.nn.Identity(), DataLoader(EXAMPLE, batch_size=2)).build("cpu")

        assert [len(run_steps(benchmark.fixed_shape_workload(rows), 1)[0]) for rows in (1, 3, 8)] == [1, 3, 8]
        with pytest.raises(ConfigurationError, match="The loader sets the batch size"):
            benchmark.data_workload(3)

    def test_exhausted_loader_raises_error(self):
        for model in (torch.nn.Identity(), sum_batch):
            workload = make_target(model, DataLoader(SinglePassDataset(), batch_size=2)).build("cpu").data_workload()
            with pytest.raises(ConfigurationError, match="The loader yields no batches"):
                run_steps(workload, 5)

    def test_random_generators_are_restored(self):
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(BATCH, batch_size=2, shuffle=True, generator=generator)
        generator_state = generator.get_state()
        torch_state = torch.get_rng_state()
        make_target(torch.nn.Identity(), DataLoader(EXAMPLE, shuffle=True)).build("cpu").fixed_shape_workload(2)
        for model in (torch.nn.Identity(), lambda batch: batch):
            target = make_target(model, loader)
            with (
                build_benchmarks(target, ["cpu"]) as benchmarks,
                benchmarks["cpu"].data_workload().open_batches() as batches,
            ):
                list(itertools.islice(batches, 5))
            assert torch.equal(generator.get_state(), generator_state), model
        assert torch.equal(torch.get_rng_state(), torch_state)

    def test_batches_of_several_sizes_have_median_and_mean(self):
        workload = make_target(torch.nn.Identity(), make_loader(1, 100, 100, 100)).build("cpu").data_workload()
        run_steps(workload, 8)
        metrics = nb.compare(
            torch.nn.Linear(8, 8), make_loader(1, 50), devices="cpu", rounds=6, utilization_seconds=0
        ).for_device("cpu")

        assert (workload.rows, workload.median_rows, workload.mean_rows) == (1, 100, 75.25)
        assert metrics.rows in {1, 50}
        assert metrics.rows_per_second == pytest.approx(metrics.mean_rows / metrics.seconds)
        assert 20 < metrics.mean_rows < 30

    def test_worker_startup_is_excluded(self):
        """Persistent workers do not restart. With one batch per pass, the startup is part of the data phase."""
        for count, persistent, num_startups in ((3, False, 2), (3, True, 0), (1, False, 0)):
            batches = RepeatingLoader(StubLoader(count, persistent), Counter())
            startup_seconds = [batches.worker_startup_seconds for _ in itertools.islice(batches, 7)]
            assert sum(seconds > 0 for seconds in startup_seconds) == num_startups, (count, persistent)
        workload = (
            make_target(torch.nn.Identity(), DataLoader(BATCH, batch_size=2, num_workers=1))
            .build("cpu")
            .data_workload()
        )
        with workload.open_batches() as batches:
            step_seconds = [workload.time_steps(batches) for _ in range(4)]
            data_seconds = [workload.time_phases(batches)["data"] for _ in range(4)]
        assert min(*step_seconds, *data_seconds) >= 0

    def test_strings_in_batches_are_unchanged(self):
        items = [{"x": torch.ones(8), "identity": "a"} for _ in range(4)]

        class NamedRowsModel(torch.nn.Module):
            """Model that takes names of rows."""

            def forward(self, x, identity):
                """Return the inputs unchanged."""
                return x, identity

        benchmark = make_target(NamedRowsModel(), DataLoader(items, batch_size=2)).build("cpu")
        assert [outputs[1] for outputs in run_steps(benchmark.data_workload(), 2)] == [["a", "a"]] * 2


def test_make_target_rejects_invalid_arguments():
    """The error is raised before the session loads a model."""
    names = SESSION.inventory().names
    identity = torch.nn.Identity()
    linear = torch.nn.Linear(8, 8)
    loader = DataLoader(EXAMPLE)
    cases = [
        ((3,), {}, "int cannot be measured"),
        ((torch.nn.Linear, EXAMPLE), {}, "Linear is a class"),
        ((identity,), {}, "There are no inputs for Identity"),
        ((identity, 5), {}, "int without a tensor"),
        ((identity, DataLoader(EXAMPLE[:0])), {}, "yields no batches"),
        ((identity, EXAMPLE), {"arguments": {"dtype": "float16"}}, "Identity does not accept dtype"),
        ((linear, DataLoader(TensorDataset(BATCH, BATCH))), {}, "too many positional"),
        ((linear, DataLoader([{"x": BATCH}])), {}, "missing a required argument"),
        ((linear, torch.ones(0, 8)), {}, "has no rows"),
        (("bundled_small", "asthma"), {}, "str is not"),
        (("bundled_small", []), {}, "has no texts"),
        (("bundled_small", ["", " "]), {}, "are blank"),
        (("bundled_small", ["asthma"]), {"training": True}, "cannot be trained on texts"),
        (("bundled_small",), {"arguments": {"speed": 3}}, "speed"),
        *((("bundled_small",), {"length": length}, f"length.*{length}") for length in (0, True)),
        *(((model, loader), {"length": 8}, "length=8 has no effect") for model in (identity, sum_batch)),
        *(((sum_batch, data), {}, "cannot be iterated repeatedly") for data in (None, iter([EXAMPLE]))),
        *(((sum_batch, data), {}, "is a single batch") for data in (EXAMPLE, {"x": EXAMPLE}, "abc")),
    ]
    for arguments, options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            make_target(*arguments, **options)
        assert SESSION.inventory().names == names, message


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_steps_decode_their_own_batch():
    """Each step waits for its results, however far behind the GPU is."""
    expected = list(nb.load_pipeline("bundled", device="cpu")(TEXTS * 2))
    with workloads.open_benchmark("bundled", TEXTS, training=False, device="cuda", arguments={}) as benchmark:
        workload = benchmark.data_workload(len(expected))
        with workload.open_batches() as batches:
            results = [list(workload.run(batch)) for batch in itertools.islice(batches, 50)]
    entity_counts = [len(entities) for entities in expected]
    assert [[len(entities) for entities in result] for result in results] == [entity_counts] * len(results)
