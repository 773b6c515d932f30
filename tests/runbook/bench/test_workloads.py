"""What is measured: each task does its work on each device, in phases, and leaves what a person passed as it was."""

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
ROWS = torch.ones(4, 8)


@pytest.fixture(params=["cpu", pytest.param("mps", marks=pytest.mark.real_computer)])
def place(request):
    """A device: the CPU, and the simulated MPS of an outer simulation of the test's own."""
    with nb.simulated_mps() if request.param == "mps" else nullcontext():
        yield request.param


class Tagger(torch.nn.Module):
    """A model with everything that measuring could change: a buffer that counts, dropout, and a frozen layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.learns = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.norm, self.dropout = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)

    def forward(self, x, labels=None):
        """Return logits, and the loss before them if there are labels."""
        logits = self.learns(self.dropout(self.norm(self.frozen(x))))
        return logits if labels is None else (torch.nn.functional.cross_entropy(logits, labels), logits)


class Writing(torch.nn.Linear):
    """A model that writes into its input."""

    def forward(self, x):
        """Return an answer, and leave other numbers in the input."""
        return super().forward(x.mul_(3))


def add_up(batch):
    """Do a step of a person's own."""
    return batch.sum()


def subject_of(*passed, **named):
    """Return what is measured."""
    return workloads.make_target(*passed, **{"arguments": {}, **named})[0]


def steps(workload, count=2):
    """Return what some steps gave."""
    return [workload.run(batch) for batch in itertools.islice(workload.batches(), count)]


def state_of(model):
    """Return copies of all that measuring could change in a model."""
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "gradients": [copy.deepcopy(one.grad) for one in model.parameters()],
        "learns": [one.requires_grad for one in model.parameters()],
        "modes": [one.training for one in model.modules()],
        "devices": {str(one.device) for one in model.parameters()},
        "hooks": [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()],
    }


def assert_same_state(model, before):
    """Assert that a model is as it was."""
    after = state_of(model)
    torch.testing.assert_close(after.pop("weights"), before.pop("weights"), rtol=0, atol=0)
    torch.testing.assert_close(after.pop("gradients"), before.pop("gradients"), rtol=0, atol=0, allow_subclasses=True)
    assert after == before


class TestAnnotation:
    """Annotating texts."""

    def test_finds_what_the_pipeline_finds(self, place, keyword_model):
        """The phases of a step give the very entities of the pipeline, long texts and empty ones included."""
        expected = nb.load_pipeline(str(keyword_model), device="cpu")(TEXTS)
        bench = subject_of(str(keyword_model), TEXTS).build(place)
        for rows in (1, 3, 4, 9):
            found = list(itertools.chain.from_iterable(steps(bench.data_workload(rows), 4)))
            for answer, wanted in zip(found, itertools.cycle(expected), strict=False):
                assert [(one["start"], one["end"], one["entity_group"]) for one in answer] == [
                    (one["start"], one["end"], one["entity_group"]) for one in wanted
                ], rows
                assert [one["score"] for one in answer] == pytest.approx([one["score"] for one in wanted], abs=1e-5)
            assert len(found) == 4 * rows
            assert any(found), rows

    def test_pipeline(self, place, random_model):
        """A pipeline is measured as it is on its device, and elsewhere with a copy, with its own way to make entities."""
        pipe = nb.load_pipeline(str(random_model), device="cpu", aggregation_strategy="first")
        before = state_of(pipe.model)
        bench = subject_of(pipe, TEXTS).build(place)
        (found,) = steps(bench.data_workload(len(TEXTS)), 1)

        assert (bench.annotator.network.model is pipe.model) == (place == "cpu")
        assert [[(one["start"], one["end"]) for one in answer] for answer in found] == [
            [(one["start"], one["end"]) for one in answer] for answer in pipe(TEXTS)
        ]
        assert_same_state(pipe.model, before)

    def test_bucket(self, place, keyword_model):
        """A bucket is full rows of one length, at most as many tokens as the model reads; labels and scores come to the host.

        Few come as the probabilities that they are of.
        """
        workload = subject_of(str(keyword_model), length=16).build(place).fixed_shape_workload(5)
        (probabilities,), _ = steps(workload)
        (labels, scores), _ = steps(subject_of(str(keyword_model), length=16).build(place).fixed_shape_workload(50))

        assert (workload.rows, workload.length, workload.task, workload.dtype) == (5, 16, "annotation", "float32")
        assert probabilities.shape[:2] == (5, 16)
        assert labels.shape == scores.shape == (50, 16)
        assert subject_of(str(keyword_model)).build(place).fixed_shape_workload(1).length == 64
        with pytest.raises(ConfigurationError, match="length=1000 is more than the 64 tokens"):
            subject_of(str(keyword_model), length=1000).build(place).fixed_shape_workload(1)

    def test_batches_of_tokens(self, place, keyword_model, random_model):
        """Texts have a budget of as many tokens as full rows of their number, whatever rows a pipeline was made with."""
        bench = subject_of(str(keyword_model), ["seen . " * 12] * 3, length=16).build(place)
        some, any_number = bench.data_workload(700), bench.data_workload()
        own = nb.load_pipeline(str(random_model), device="cpu", batch_size=2)
        filled = next(subject_of(own, ["asthma"] * 8).build("cpu").data_workload(8).batches())

        assert (some.rows, some.batch_tokens, bench.fixed_shape_workload(700).batch_tokens) == (700, 700 * 16, 700 * 16)
        sizes = [inputs["input_ids"].size for inputs in next(some.batches()).arrays]
        assert max(sizes) > bench.annotator.budget.max_tokens == any_number.batch_tokens
        assert subject_of(torch.nn.Identity(), EXAMPLE).build(place).fixed_shape_workload(2).batch_tokens is None
        assert [len(inputs["input_ids"]) for inputs in filled.arrays] == [8]

    def test_texts(self, keyword_model):
        """Texts of a generator are read once and measured again and again; unreadable ones raise when they are read."""
        bench = subject_of("bundled_small", (text for text in ["She has asthma."])).build("cpu")

        assert [len(one) for one in steps(bench.data_workload(2), 2)] == [2, 2]
        for text, words in ((None, "not NoneType"), (["asthma"], "not list")):
            workload = subject_of(str(keyword_model), [text]).build("cpu").data_workload(2)
            with pytest.raises(InvalidTextError, match=words):
                next(workload.batches())


class TestModule:
    """Forward passes and training steps."""

    @pytest.mark.parametrize(
        ("training", "names"),
        [(False, ["data", "transfer", "forward"]), (True, ["data", "transfer", "forward", "backward", "optimizer"])],
    )
    def test_module(self, place, training, names):
        """A module is run forward without gradients, or trained, on a copy; its own weights, gradients and modes stay."""
        model = Tagger().train()
        model.norm.eval()
        model.learns.weight.grad = torch.full_like(model.learns.weight, 7.0)
        before = state_of(model)
        bench = subject_of(model, {"x": EXAMPLE, "labels": torch.tensor([0, 2])}, training=training).build(place)
        trained = [one.detach().clone() for one in bench.model.parameters()]
        workload = bench.fixed_shape_workload(6)
        steps(workload, 3)
        phases = workload.seconds_of_phases(workload.batches())

        assert list(phases) == names
        assert min(phases.values()) >= 0
        assert workload.seconds(next(workload.batches())) > 0
        assert workload.task == ("training step" if training else "forward pass")
        assert bench.model is not model
        assert bench.model.training == training
        changed = [
            not torch.equal(one.cpu(), was.cpu()) for one, was in zip(bench.model.parameters(), trained, strict=True)
        ]
        assert any(changed) == training
        assert changed[:2] == [False, False]  # The frozen layer.
        assert_same_state(model, before)

    def test_training_of_a_model_for_texts(self, place, keyword_model, random_model):
        """A named model is trained under its name, unknown to the session, and a pipeline's as a copy, on full rows with labels."""
        pipe, loaded = nb.load_pipeline(str(random_model), device="cpu"), SESSION.inventory()
        before = state_of(pipe.model)
        subject = subject_of(str(keyword_model), training=True, length=8)
        workload = subject.build(place).fixed_shape_workload(3)
        steps(workload, 1)
        steps(subject_of(pipe, training=True).build(place).data_workload(), 1)

        assert (workload.task, workload.rows, workload.length) == ("training step", 3, 8)
        assert subject.name == subject_of(str(keyword_model)).name
        assert str(SESSION.inventory()) == str(loaded)
        assert_same_state(pipe.model, before)

    def test_model_that_writes_into_its_input(self):
        """The tensors that a loader hands out as they are keep their numbers, and every step has the same ones."""
        for training in (False, True):
            items = [torch.ones(4, 8), torch.ones(4, 8)]
            bench = subject_of(Writing(8, 8), DataLoader(items, batch_size=None), training=training).build("cpu")
            steps(bench.data_workload(), 5)
            bucket = bench.fixed_shape_workload(3)
            batch = next(bucket.batches())
            for _ in range(3):
                bucket.run(batch)
            assert all(bool((item == 1).all()) for item in (*items, batch.args[0])), training

    def test_model_that_only_reads_gets_the_batch_itself(self):
        """On the CPU a batch is not copied for a model that leaves it as it is."""
        workload = subject_of(torch.nn.Identity(), ROWS).build("cpu").fixed_shape_workload(4)
        batch = next(workload.batches())

        assert [workload.run(batch) is batch.args[0] for _ in range(2)] == [False, True]

    def test_dtype_and_name(self):
        """A workload says the type of the numbers and the name, and a module without parameters has no type."""
        assert subject_of(torch.nn.Linear(4, 2).bfloat16(), EXAMPLE.bfloat16()).build("cpu").fixed_shape_workload(1).dtype == "bfloat16"
        assert subject_of(torch.nn.Identity(), EXAMPLE).build("cpu").fixed_shape_workload(1).dtype is None
        assert subject_of(torch.nn.Identity(), EXAMPLE).name == "Identity"

    def test_models_that_cannot_be_measured(self):
        """A model that cannot be copied is refused and named, and so is one in training in which nothing learns."""
        locked, frozen = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2).requires_grad_(False)
        locked.lock = threading.Lock()

        with pytest.raises(ConfigurationError, match="Linear cannot be copied"):
            subject_of(locked, EXAMPLE).build("cpu")
        with pytest.raises(ConfigurationError, match="depends on a parameter that learns"):
            steps(subject_of(frozen, EXAMPLE, training=True).build("cpu").fixed_shape_workload(2), 1)

    @pytest.mark.real_computer
    def test_numbers_of_64_bits_on_mps(self):
        """MPS has no numbers of 64 bits, which is an error before anything is measured."""
        with nb.simulated_mps():
            for verb in (nb.sweep, nb.compare, nb.runbook.profile):
                with pytest.raises(ConfigurationError, match="Linear has numbers in float64"):
                    verb(torch.nn.Linear(8, 8).double(), ROWS.double())


class TestOwnStep:
    """A function of the person's own."""

    def test_batches(self, place):
        """A function does its step with the batches as they are, and what it returns comes back."""
        batches = [torch.ones(3, 2), torch.ones(2, 2)]
        workload = subject_of(lambda batch: batch.to(place).sum(), batches).build(place).data_workload()

        assert [float(one) for one in steps(workload, 4)] == [6.0, 4.0, 6.0, 4.0]
        assert (workload.task, workload.rows) == ("own step", 3)
        assert list(workload.seconds_of_phases(workload.batches())) == ["data", "step"]
        with pytest.raises(StopIteration):
            workload.seconds_of_phases(iter(()))

    def test_batches_of_any_size(self):
        """A function that makes batches is asked for the rows that are measured, once for each bucket; a list has one size."""
        asked: list[int] = []
        bench = subject_of(add_up, lambda rows: (asked.append(rows), torch.ones(rows))[1]).build("cpu")

        assert [float(one) for one in steps(bench.fixed_shape_workload(5), 3)] == [5.0] * 3
        assert [float(one) for one in steps(bench.data_workload(), 1)] == [1.0]
        assert asked == [5, 1]
        with pytest.raises(ConfigurationError, match="No batch of 4 rows can be made for add_up"):
            subject_of(add_up, [EXAMPLE]).build("cpu").fixed_shape_workload(4)

    def test_enough_rows(self):
        """A batch with the rows that were asked for passes, also if the sequence comes first, and one without tensors."""
        for batch in (torch.ones(4, 2), torch.ones(9, 2), torch.ones(3, 4, 2), {"ids": [1]}):
            workload = subject_of(len, lambda _rows, batch=batch: batch).build("cpu").fixed_shape_workload(4)
            assert steps(workload, 1) == [len(batch)]

    def test_step_that_takes_things_out(self):
        """A step may take things out of its batch: each one gets mappings and lists of its own, with the same tensors."""
        data = [{"x": [ROWS], "labels": [1]}, {"x": [ROWS], "labels": [2]}]

        def step(batch):
            assert batch["x"].pop() is ROWS
            return batch.pop("labels")[0]

        assert steps(subject_of(step, data).build("cpu").data_workload(), 5) == [1, 2, 1, 2, 1]
        assert [(len(one["x"]), len(one["labels"])) for one in data] == [(1, 1)] * 2


class Once(IterableDataset):
    """A dataset that can be read only once."""

    def __init__(self):
        self.items = iter([torch.ones(4)] * 4)

    def __iter__(self):
        return self.items


class Begins:
    """A loader with processes, of which each beginning is late."""

    num_workers = 1

    def __init__(self, count, persistent):
        self.count, self.persistent_workers = count, persistent

    def __iter__(self):
        return iter([ROWS] * self.count)


def of_sizes(*sizes):
    """Return a loader with batches of these sizes."""
    return DataLoader(torch.ones(max(sizes), 8), batch_sampler=[list(range(size)) for size in sizes])


class TestLoader:
    """Batches of a loader."""

    def test_is_read_again_and_again(self):
        """A loader is read again when it ends, with its last batch as it is, and from its first whenever it is begun."""
        items = [torch.full((4,), float(number)) for number in range(5)]
        for workers in (0, 1):
            loader = DataLoader(items, batch_size=2, num_workers=workers)
            workload = subject_of(torch.nn.Identity(), loader).build("cpu").data_workload()
            for count in (7, 1):
                firsts = [[float(row[0]) for row in batch] for batch in steps(workload, count)]
                assert firsts == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]][:count], workers
            assert (workload.workers, workload.prefetched_batches, workload.rows) == (workers, 2 * workers, 2)

    def test_has_its_own_batch_size(self):
        """A loader's batch is repeated or cut for a bucket of any size, and its stream has none but its own."""
        bench = subject_of(torch.nn.Identity(), DataLoader(EXAMPLE, batch_size=2)).build("cpu")

        assert [len(steps(bench.fixed_shape_workload(rows), 1)[0]) for rows in (1, 3, 8)] == [1, 3, 8]
        with pytest.raises(ConfigurationError, match="A loader has a batch size of its own"):
            bench.data_workload(3)

    def test_that_is_used_up(self):
        """A loader whose items are gone gets an error and not a loop without end."""
        for model in (torch.nn.Identity(), add_up):
            workload = subject_of(model, DataLoader(Once(), batch_size=2)).build("cpu").data_workload()
            with pytest.raises(ConfigurationError, match="The loader gives no batch"):
                steps(workload, 5)

    def test_random_numbers_stay(self):
        """Measuring draws from no generator: not from torch's, nor from that of a shuffling loader or its sampler."""
        generator = torch.Generator().manual_seed(7)
        loader = DataLoader(ROWS, batch_size=2, shuffle=True, generator=generator)
        before = generator.get_state(), torch.get_rng_state()
        subject_of(torch.nn.Identity(), DataLoader(EXAMPLE, shuffle=True)).build("cpu").fixed_shape_workload(2)
        for model in (torch.nn.Identity(), lambda batch: batch):
            subject = subject_of(model, loader)
            with build_benchmarks(subject, ["cpu"]) as on, on["cpu"].data_workload().open_batches() as batches:
                list(itertools.islice(batches, 5))
            assert torch.equal(generator.get_state(), before[0]), model
        assert torch.equal(torch.get_rng_state(), before[1])

    def test_sizes_of_batches(self):
        """Of batches of several sizes, the mean and the usual number of rows are known, and rows a second are those of all."""
        workload = subject_of(torch.nn.Identity(), of_sizes(1, 100, 100, 100)).build("cpu").data_workload()
        steps(workload, 8)
        one = nb.compare(
            torch.nn.Linear(8, 8), of_sizes(1, 50), devices="cpu", rounds=6, utilization_seconds=0
        ).for_device("cpu")

        assert (workload.rows, workload.usual_rows, workload.mean_rows) == (1, 100, 75.25)
        assert one.rows in {1, 50}
        assert one.rows_per_second == pytest.approx(one.mean_rows / one.seconds)
        assert 20 < one.mean_rows < 30

    def test_start_of_processes(self):
        """The start of a loader's processes is left out of a step, unless they are kept, or each pass has one batch."""
        for count, persistent, left_out in ((3, False, 2), (3, True, 0), (1, False, 0)):
            batches = RepeatingLoader(Begins(count, persistent), Counter())
            apart = [batches.starting for _ in itertools.islice(batches, 7)]
            assert sum(seconds > 0 for seconds in apart) == left_out, (count, persistent)
        workload = subject_of(torch.nn.Identity(), DataLoader(ROWS, batch_size=2, num_workers=1)).build("cpu").data_workload()
        with workload.open_batches() as batches:
            taken = [workload.seconds_of_steps(batches) for _ in range(4)]
            phases = [workload.seconds_of_phases(batches)["data"] for _ in range(4)]
        assert min(*taken, *phases) >= 0

    def test_strings_beside_tensors(self):
        """Strings at the top of a loader's batch are left as they are."""
        items = [{"x": torch.ones(8), "identity": "a"} for _ in range(4)]

        class Named(torch.nn.Module):
            """A model that takes names of rows."""

            def forward(self, x, identity):
                """Return what comes."""
                return x, identity

        bench = subject_of(Named(), DataLoader(items, batch_size=2)).build("cpu")
        assert [one[1] for one in steps(bench.data_workload(), 2)] == [["a", "a"]] * 2


def test_what_cannot_be_measured():
    """A thing that is not a model, and unusable data, get an error that says what would do, and the session loads nothing."""
    before = SESSION.inventory().names
    identity, linear = torch.nn.Identity(), torch.nn.Linear(8, 8)
    loader = DataLoader(EXAMPLE)
    cases = [
        ((3,), {}, "int cannot be measured"),
        ((torch.nn.Linear, EXAMPLE), {}, "Linear is a class"),
        ((identity,), {}, "There is nothing to call Identity with"),
        ((identity, 5), {}, "int without a tensor"),
        ((identity, DataLoader(EXAMPLE[:0])), {}, "gives no batch"),
        ((identity, EXAMPLE), {"arguments": {"dtype": "float16"}}, "Identity takes no dtype"),
        ((linear, DataLoader(TensorDataset(ROWS, ROWS))), {}, "too many positional"),
        ((linear, DataLoader([{"x": ROWS}])), {}, "missing a required argument"),
        ((linear, torch.ones(0, 8)), {}, "has no rows"),
        (("bundled_small", "asthma"), {}, "str is not a series of texts"),
        (("bundled_small", []), {}, "There is no text"),
        (("bundled_small", ["", " "]), {}, "There is no word"),
        (("bundled_small", ["asthma"]), {"training": True}, "Texts cannot train a model"),
        (("bundled_small",), {"arguments": {"speed": 3}}, "There is no option speed"),
        *((("bundled_small",), {"length": length}, f"length cannot be {length}") for length in (0, True)),
        *(((model, loader), {"length": 8}, "length=8 has no effect here") for model in (identity, add_up)),
        *(((add_up, data), {}, "again and again") for data in (None, iter([EXAMPLE]))),
        *(((add_up, data), {}, "is one batch") for data in (EXAMPLE, {"x": EXAMPLE}, "abc")),
    ]
    for passed, named, words in cases:
        with pytest.raises(ConfigurationError, match=words):
            subject_of(*passed, **named)
        assert SESSION.inventory().names == before, words


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_steps_on_cuda_decode_what_was_computed():
    """Each of many steps over the same texts on CUDA gives the entities of those texts, however far behind the GPU is."""
    expected = list(nb.load_pipeline("bundled", device="cpu")(TEXTS * 2))
    with workloads.open_benchmark("bundled", TEXTS, training=False, device="cuda", arguments={}) as bench:
        workload = bench.data_workload(len(expected))
        with workload.open_batches() as batches:
            found = [list(workload.run(batch)) for batch in itertools.islice(batches, 50)]
    assert [[len(entities) for entities in answers] for answers in found] == [[*map(len, expected)]] * len(found)
