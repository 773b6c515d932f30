"""What is measured: each task does its work on each device, in phases, and leaves what a person passed as it was."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import openmed_nb as nb
from openmed_nb.errors import ConfigurationError, UnreadableText
from openmed_nb.notebook import verbs
from openmed_nb.runbook.measure.benches import Asked
from openmed_nb.session import SESSION, Session

TEXTS = [
    "the patient has asthma and diabetes mellitus .",
    "no history of hypertension .",
    "",
    "seen . " * 90 + "asthma was seen and hypertension .",
]
EXAMPLE = torch.tensor([[1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]])


@pytest.fixture(params=["cpu", pytest.param("mps", marks=pytest.mark.real_computer)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device: the CPU, and the simulated MPS of an outer simulation of the test's own."""
    with nb.simulated_mps() if request.param == "mps" else nullcontext():
        yield request.param


class Tagger(torch.nn.Module):
    """A model with everything that measuring could change: a buffer that counts, dropout, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.learns = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.norm, self.dropout = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return logits, and the loss before them where there are labels."""
        logits = self.learns(self.dropout(self.norm(self.frozen(x))))
        return logits if labels is None else (torch.nn.functional.cross_entropy(logits, labels), logits)


def add_up(batch: torch.Tensor) -> torch.Tensor:
    """Do a step of a person's own."""
    return batch.sum()


def subject_of(*arguments: Any, **named: Any) -> Any:
    """Return what is measured, as the session says."""
    return verbs.subject_of(SESSION, Asked(*arguments, **named))[0]


def steps(workload: Any, count: int = 2) -> list[Any]:
    """Return what some steps gave."""
    return [workload.run(batch) for batch in itertools.islice(workload.batches(), count)]


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return copies of all that measuring could change in a model."""
    return {
        "weights": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "gradients": [copy.deepcopy(one.grad) for one in model.parameters()],
        "learns": [one.requires_grad for one in model.parameters()],
        "modes": [one.training for one in model.modules()],
        "devices": {str(one.device) for one in model.parameters()},
        "hooks": [len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules()],
    }


def assert_same_state(model: torch.nn.Module, before: dict[str, Any]) -> None:
    """Assert that a model is as it was."""
    after = state_of(model)
    torch.testing.assert_close(after.pop("weights"), before.pop("weights"), rtol=0, atol=0)
    torch.testing.assert_close(after.pop("gradients"), before.pop("gradients"), rtol=0, atol=0, allow_subclasses=True)
    assert after == before


def test_annotation_finds_what_the_pipeline_finds(place: str, keyword_model: Path):
    """The phases of an annotation step give the very entities of the pipeline, long texts and empty ones included."""
    expected = nb.load_pipeline(str(keyword_model), device="cpu")(TEXTS)
    bench = subject_of(str(keyword_model), TEXTS).on(place)
    for rows in (1, 3, 4, 9):
        found = list(itertools.chain.from_iterable(steps(bench.stream(rows), 4)))
        for number, answer in enumerate(found):
            wanted = expected[number % len(TEXTS)]
            assert [(one["start"], one["end"], one["entity_group"]) for one in answer] == [
                (one["start"], one["end"], one["entity_group"]) for one in wanted
            ], (rows, number)
            assert [one["score"] for one in answer] == pytest.approx([one["score"] for one in wanted], abs=1e-5)
        assert len(found) == 4 * rows
        assert any(found), rows


def test_annotation_of_a_pipeline(place: str, random_model: Path):
    """A pipeline is measured where it is as it is, and elsewhere with a copy, with its own way to make entities."""
    pipe = nb.load_pipeline(str(random_model), device="cpu", aggregation_strategy="first")
    before = state_of(pipe.model)
    bench = subject_of(pipe, TEXTS).on(place)
    (found,) = steps(bench.stream(len(TEXTS)), 1)

    assert (bench.annotator.network.model is pipe.model) == (place == "cpu")
    assert [[(one["start"], one["end"]) for one in answer] for answer in found] == [
        [(one["start"], one["end"]) for one in answer] for answer in pipe(TEXTS)
    ]
    assert_same_state(pipe.model, before)


def test_annotation_bucket(place: str, keyword_model: Path):
    """A bucket is full rows of one length, at most of as many tokens as the model reads; labels and scores come to the host."""
    bench = subject_of(str(keyword_model), length=16).on(place)
    workload = bench.bucket(5)
    (labels, scores), _ = steps(workload)

    assert (workload.rows, workload.length, workload.task) == (5, 16, "annotation")
    assert labels.shape == scores.shape == (5, 16)
    assert subject_of(str(keyword_model)).on(place).bucket(1).length == 64
    with pytest.raises(ConfigurationError, match="length=1000 is more than the 64 tokens"):
        subject_of(str(keyword_model), length=1000).on(place).bucket(1)


def test_annotation_in_batches_of_tokens(place: str, keyword_model: Path):
    """So many texts have a budget of as many tokens as so many full rows, and are one batch where they are alike."""
    bench = subject_of(str(keyword_model), ["seen . " * 12] * 3, length=16).on(place)
    some, any_number = bench.stream(700), bench.stream()
    filled = next(some.batches())

    assert (some.rows, some.batch_tokens, bench.bucket(700).batch_tokens) == (700, 700 * 16, 700 * 16)
    assert max(inputs["input_ids"].size for inputs in filled.inputs) > bench.annotator.budget.tokens
    assert any_number.batch_tokens == bench.annotator.budget.tokens
    assert subject_of(torch.nn.Identity(), EXAMPLE).on(place).bucket(2).batch_tokens is None


def test_rows_of_a_pipeline_do_not_limit_what_is_asked(random_model: Path):
    """The number of rows that a pipeline was made with is that of its own budget alone."""
    pipe = nb.load_pipeline(str(random_model), device="cpu", batch_size=2)
    filled = next(subject_of(pipe, ["asthma"] * 8).on("cpu").stream(8).batches())

    assert [len(inputs["input_ids"]) for inputs in filled.inputs] == [8]


@pytest.mark.parametrize(
    ("training", "names"),
    [(False, ["data", "transfer", "forward"]), (True, ["data", "transfer", "forward", "backward", "optimizer"])],
)
def test_module(place: str, training: bool, names: list[str]):
    """A module is run forward without gradients, or trained, on a copy; its own weights, gradients and modes stay."""
    model = Tagger().train()
    model.norm.eval()
    model.learns.weight.grad = torch.full_like(model.learns.weight, 7.0)
    before = state_of(model)
    bench = subject_of(model, {"x": EXAMPLE, "labels": torch.tensor([0, 2])}, training=training).on(place)
    trained = [one.detach().clone() for one in bench.model.parameters()]
    workload = bench.bucket(6)
    steps(workload, 3)

    assert list(workload.seconds_of_phases(workload.batches())) == names
    assert workload.task == ("training step" if training else "forward pass")
    assert bench.model is not model
    assert bench.model.training == training
    changed = [
        not torch.equal(one.cpu(), was.cpu()) for one, was in zip(bench.model.parameters(), trained, strict=True)
    ]
    assert any(changed) == training
    assert changed[:2] == [False, False]  # The frozen layer.
    assert_same_state(model, before)


def test_training_of_a_named_model(place: str, keyword_model: Path):
    """A named model is trained on full rows with labels, under its name, and the session knows nothing of it."""
    before = SESSION.inventory()
    subject = subject_of(str(keyword_model), training=True, length=8)
    workload = subject.on(place).bucket(3)
    steps(workload, 1)

    assert (workload.task, workload.rows, workload.length) == ("training step", 3, 8)
    assert subject.name == subject_of(str(keyword_model)).name
    assert str(SESSION.inventory()) == str(before)


def test_training_of_a_pipeline(place: str, random_model: Path):
    """A pipeline's model is trained as a copy."""
    pipe = nb.load_pipeline(str(random_model), device="cpu")
    before = state_of(pipe.model)
    steps(subject_of(pipe, training=True).on(place).stream(), 1)

    assert_same_state(pipe.model, before)


def test_own_step(place: str):
    """A function does its step with the batches as they are, and what it returns comes back."""
    batches = [torch.ones(3, 2), torch.ones(2, 2)]
    workload = subject_of(lambda batch: batch.to(place).sum(), batches).on(place).stream()
    found = [float(one) for one in steps(workload, 4)]

    assert found == [6.0, 4.0, 6.0, 4.0]
    assert (workload.task, workload.rows, list(workload.seconds_of_phases(workload.batches()))) == (
        "own step",
        3,
        ["data", "step"],
    )


def test_own_step_of_any_size():
    """A function that makes batches is asked for the rows that are measured, once for each bucket."""
    asked: list[int] = []

    def make(rows: int) -> torch.Tensor:
        asked.append(rows)
        return torch.ones(rows)

    bench = subject_of(add_up, make).on("cpu")

    assert [float(one) for one in steps(bench.bucket(5), 3)] == [5.0] * 3
    assert [float(one) for one in steps(bench.stream(), 1)] == [1.0]
    assert asked == [5, 1]


def test_loader_is_read_again_and_again():
    """A loader is read again when it ends, with its last batch as it is, and its workers are counted."""
    items = [torch.full((4,), float(number)) for number in range(5)]
    for workers in (0, 1):
        loader = torch.utils.data.DataLoader(items, batch_size=2, num_workers=workers)
        workload = subject_of(torch.nn.Identity(), loader).on("cpu").stream()
        firsts = [[float(row[0]) for row in batch] for batch in steps(workload, 7)]
        assert firsts == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4], [0, 1]], workers
        assert (workload.workers, workload.ahead, workload.rows) == (workers, 2 * workers, 2)


def test_loader_has_its_own_batch_size():
    """A loader's batch is repeated or cut for a bucket of any size, and its stream has none but its own."""
    bench = subject_of(torch.nn.Identity(), torch.utils.data.DataLoader(EXAMPLE, batch_size=2)).on("cpu")

    assert [len(steps(bench.bucket(rows), 1)[0]) for rows in (1, 3, 8)] == [1, 3, 8]
    with pytest.raises(ConfigurationError, match="A loader has a batch size of its own"):
        bench.stream(3)


class Once(torch.utils.data.IterableDataset):
    """A dataset that can be read only once."""

    def __init__(self) -> None:
        self.items = iter([torch.ones(4)] * 4)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self.items


def test_loader_that_is_used_up():
    """A loader whose items are gone gets an error and not a loop without end."""
    for model in (torch.nn.Identity(), add_up):
        workload = subject_of(model, torch.utils.data.DataLoader(Once(), batch_size=2)).on("cpu").stream()
        with pytest.raises(ConfigurationError, match="The loader gives no batch"):
            steps(workload, 5)


def test_batches_begin_anew():
    """Each time that batches are asked for they begin at the first."""
    workload = subject_of(torch.nn.Identity(), torch.utils.data.DataLoader(EXAMPLE, batch_size=1)).on("cpu").stream()

    assert [float(steps(workload, 1)[0][0, 0]) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_random_numbers_stay():
    """Getting ready to measure draws no random number, not even by looking at the first batch of a shuffled loader."""
    loader = torch.utils.data.DataLoader(EXAMPLE, batch_size=1, shuffle=True)
    before = torch.get_rng_state()
    subject_of(torch.nn.Identity(), loader).on("cpu").bucket(2)

    assert torch.equal(torch.get_rng_state(), before)


def test_seconds(place: str):
    """A step takes some time, and each phase is told in order."""
    workload = subject_of(torch.nn.Linear(4, 2), EXAMPLE).on(place).bucket(2)

    assert workload.seconds(next(workload.batches())) > 0
    assert all(seconds >= 0 for seconds in workload.seconds_of_phases(workload.batches()).values())


def test_no_batch_left():
    """Phases of a step without a batch end as iterators do."""
    workload = subject_of(torch.nn.Identity(), EXAMPLE).on("cpu").bucket(2)

    with pytest.raises(StopIteration):
        workload.seconds_of_phases(iter(()))


def test_dtype_and_name(keyword_model: Path):
    """A workload says the type of the numbers and the name, and a module without parameters has no type."""
    assert subject_of(torch.nn.Linear(4, 2).bfloat16(), EXAMPLE.bfloat16()).on("cpu").bucket(1).dtype == "bfloat16"
    assert subject_of(torch.nn.Identity(), EXAMPLE).on("cpu").bucket(1).dtype is None
    assert subject_of(torch.nn.Identity(), EXAMPLE).name == "Identity"
    assert subject_of(str(keyword_model)).on("cpu").bucket(1).dtype == "float32"


def test_model_with_a_lock():
    """A model that cannot be copied is refused, and named."""
    import threading

    model = torch.nn.Linear(4, 2)
    model.lock = threading.Lock()

    with pytest.raises(ConfigurationError, match="Linear cannot be copied"):
        subject_of(model, EXAMPLE).on("cpu")


def test_frozen_model_does_not_train():
    """A model in which nothing learns is refused in training."""
    workload = subject_of(torch.nn.Linear(4, 2).requires_grad_(False), EXAMPLE, training=True).on("cpu").bucket(2)

    with pytest.raises(ConfigurationError, match="depends on a parameter that learns"):
        steps(workload, 1)


LOADER = torch.utils.data.DataLoader(EXAMPLE)


def test_what_cannot_be_measured():
    """What is no model, and data that are none, get an error that says what would do, and the session loads nothing."""
    session = Session({"OPENMED_DEVICE": "cpu"})
    cases = [
        (Asked(3), "int is nothing that can be measured"),
        (Asked(torch.nn.Linear, EXAMPLE), "Linear is a class"),
        (Asked(torch.nn.Identity()), "There is nothing to call Identity with"),
        (Asked(torch.nn.Identity(), 5), "int without a tensor"),
        (Asked(torch.nn.Identity(), torch.utils.data.DataLoader(EXAMPLE[:0])), "gives no batch"),
        (Asked(torch.nn.Identity(), EXAMPLE, length=8), "length=8 is of no use here"),
        (Asked(torch.nn.Identity(), EXAMPLE, arguments={"dtype": "float16"}), "Identity takes no dtype"),
        (Asked("bundled_small", "asthma"), "str is not a series of texts"),
        (Asked("bundled_small", []), "There is no text to measure with"),
        (Asked("bundled_small", ["", " "]), "There is no word to measure with"),
        (Asked("bundled_small", ["asthma"], training=True), "Texts train nothing"),
        (Asked("bundled_small", length=0), "length cannot be 0"),
        (Asked("bundled_small", length=True), "length cannot be True"),
        (Asked("bundled_small", arguments={"speed": 3}), "There is no option speed"),
        (Asked(add_up), "NoneType gives add_up no batches"),
        (Asked(add_up, iter([EXAMPLE])), "no batches again and again"),
        (Asked(add_up, EXAMPLE), "Tensor is one batch"),
        (Asked(add_up, {"x": EXAMPLE}), "dict is one batch"),
        (Asked(add_up, "abc"), "str is one batch"),
        (Asked(add_up, LOADER, length=8), "length=8 is of no use here"),
    ]
    for asked, words in cases:
        with pytest.raises(ConfigurationError, match=words):
            verbs.subject_of(session, asked)
        assert session.inventory().names == (), words


def test_texts_that_cannot_be_read(keyword_model: Path):
    """Texts that are none get an error when they are read."""
    for text, words in ((None, "not NoneType"), (["asthma"], "not list")):
        workload = subject_of(str(keyword_model), [text]).on("cpu").stream(2)
        with pytest.raises(UnreadableText, match=words):
            next(workload.batches())


def test_own_step_without_a_size():
    """Batches that are there have no other size."""
    with pytest.raises(ConfigurationError, match="No batch of 4 rows can be made for add_up"):
        subject_of(add_up, [EXAMPLE]).on("cpu").bucket(4)


def test_texts_are_held_once():
    """Texts of a generator are read once and measured again and again."""
    bench = subject_of("bundled_small", (text for text in ["She has asthma."])).on("cpu")

    assert [len(one) for one in steps(bench.stream(2), 2)] == [2, 2]
