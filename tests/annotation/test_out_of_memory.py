"""A device that runs out of memory gets smaller batches, and no text is lost.

The model is real; before its forward pass it raises what the allocator of a device says, where the batch is too large.
"""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from helpers.annotations import on_forward
from helpers.tiny_models import sentences
from openmed_nb.errors import DeviceUnavailableError
from openmed_nb.simulation.device import simulated_device

MPS = RuntimeError(
    "MPS backend out of memory (MPS allocated: 5.21 GiB, other allocations: 384.00 KiB, max allowed: 5.33 GiB). "
    "Tried to allocate 256.00 MiB on private pool."
)
ALLOCATORS = {
    "MPS": MPS,
    "CUDA": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 14.74 GiB."),
    "Python": MemoryError(),
}


class SmallMemory:
    """Lets a model run out of memory where a batch has more tokens than a limit.

    Attributes:
        sizes: The tokens of every batch that was tried.
        poison: A token with which every batch is too large.
    """

    def __init__(self, limit, error=None):
        self.limit, self.error, self.sizes, self.poison = limit, error, [], -1

    def __call__(self, ids):
        """Raise the error where a batch is too large."""
        self.sizes.append(ids.numel())
        if ids.numel() > self.limit or (ids == self.poison).any():
            if self.error is None:
                torch.empty(10**15)  # The real allocator of this computer refuses.
            raise self.error

    @property
    def refused(self):
        """How many batches were too large."""
        return sum(size > self.limit for size in self.sizes)


@pytest.fixture
def limited(new_pipe):
    """A function that returns a pipeline, and the memory that its model has."""

    def limited(limit, error=None, strategy="simple", **options):
        pipe, memory = new_pipe(strategy, **options), SmallMemory(limit, error)
        on_forward(pipe.model, memory)
        return pipe, memory

    return limited


class TestSmallerBatches:
    """Batches are halved until they fit."""

    @pytest.mark.parametrize("error", [*ALLOCATORS.values(), None], ids=[*ALLOCATORS, "this computer"])
    def test_errors_of_every_allocator(self, limited, answers_to, error):
        """Whatever allocator is short of memory, all texts are answered as with enough of it."""
        texts = sentences(60)
        pipe, memory = limited(200, error)
        assert pipe(texts) == answers_to(texts)
        assert memory.refused > 0

    @pytest.mark.parametrize(("strategy", "limit"), [("none", 64), ("first", 65), ("average", 130)])
    def test_small_memory(self, limited, answers_to, strategy, limit):
        """All texts have results, down to one window at a time."""
        texts = sentences(40)
        pipe, memory = limited(limit, strategy=strategy)
        assert pipe(texts) == answers_to(texts, strategy)
        assert memory.refused > 0

    def test_budget_stays_reduced(self, limited):
        """In a long stream, out-of-memory errors occur only at the start."""
        pipe, memory = limited(200, batch_tokens=256)
        answers = list(pipe(text for text in sentences(600)))
        assert len(answers) == 600
        assert memory.refused > 0
        assert memory.refused < 0.1 * len(memory.sizes)
        assert max(memory.sizes[len(memory.sizes) // 2 :]) <= 200

    def test_budget_is_halved_no_further_than_needed(self, limited):
        """A budget whose half fits is halved once, even if several chunks run out of memory."""
        pipe, memory = limited(512, batch_tokens=1024)
        assert len(list(pipe(text for text in sentences(1500)))) == 1500
        assert max(memory.sizes[len(memory.sizes) // 2 :]) > 256

    def test_next_call_uses_full_budget(self, limited):
        """Another call begins with the whole budget, because memory may have become free."""
        pipe, memory = limited(200)
        pipe(sentences(60))
        memory.limit, memory.sizes = 10**9, []
        pipe(sentences(60))
        assert max(memory.sizes) > 200

    @pytest.mark.real_computer  # It begins its own simulation.
    def test_few_shapes(self, limited, answers_to):
        """On MPS, empty rows are removed before a window fails."""
        texts = sentences(9, longest=20)
        pipe, memory = limited(32, MPS, batch_tokens=2048)
        with simulated_device() as mps:
            pipe.device = "mps"
            assert pipe(texts) == answers_to(texts)
        assert mps.cache_clears == memory.refused > 0


class TestOneWindow:
    """A window that does not fit alone is an error, and the only one."""

    def test_window_error_has_number_of_tokens(self, limited):
        """The error has the number of tokens, the device and the reason, but no text."""
        pipe, _memory = limited(20, MPS)
        with pytest.raises(
            DeviceUnavailableError, match=r"A window of 28 tokens does not fit in the memory of (cpu|mps:0)"
        ) as caught:
            pipe("asthma " * 26)
        assert "MPS backend out of memory" in str(caught.value)
        assert "asthma" not in str(caught.value)

    def test_other_texts_have_results(self, limited, answers_to):
        """The texts around one that does not fit have their answers, and the error is in its place."""
        texts = ["asthma", "asthma " * 26, "diabetes mellitus", "has " * 150, "hypertension"]
        pipe, _memory = limited(20)
        answers = [answer for chunk in pipe.default_annotator().annotate(texts) for answer in chunk.outcomes()]
        assert [isinstance(answer, DeviceUnavailableError) for answer in answers] == [False, True, False, True, False]
        assert [answers[place] for place in (0, 2, 4)] == answers_to([texts[place] for place in (0, 2, 4)])

    def test_stream_continues_after_window_error(self, limited):
        """A stream continues after a text that does not fit."""
        pipe, _memory = limited(20)
        answers = pipe(text for text in ["asthma", "asthma " * 26, "diabetes"])
        assert len(next(answers)) == 1
        with pytest.raises(DeviceUnavailableError):
            next(answers)
        assert len(next(answers)) == 1
        assert next(answers, None) is None


class TestOtherFailures:
    """Another error ends the stream, and earlier results are kept."""

    @pytest.mark.parametrize(
        "error",
        [
            RuntimeError("CUDA error: device-side assert triggered"),
            IndexError("index out of range in self"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_earlier_results_are_returned(self, limited, answers_to, error):
        """Earlier chunks have results. The error is an OpenMedError that does not contain the text."""
        pipe, memory = limited(10**9, error)
        memory.poison = pipe.tokenizer.mask_token_id
        texts, answers = [*sentences(400), "asthma [MASK]", "asthma"], []
        with pytest.raises(DeviceUnavailableError, match=r"The model could not run on (cpu|mps:0)") as caught:
            answers.extend(pipe(text for text in texts))
        assert len(answers) > 40
        assert answers == answers_to(texts[: len(answers)])
        assert caught.value.__cause__ is error
        assert not any(word in str(caught.value) for word in ("patient", "diabetes", "asthma"))

    @pytest.mark.real_computer  # It begins its own simulation.
    def test_failure_when_answers_are_fetched(self, new_pipe):
        """A failure that is reported when results are fetched is the same error."""

        class Lost(TorchFunctionMode):
            def __torch_function__(self, function, _types, args=(), kwargs=None):
                if function is torch.Tensor.cpu:
                    raise RuntimeError("index 99 is out of bounds: the command buffer was aborted")
                return function(*args, **(kwargs or {}))

        pipe = new_pipe()
        with simulated_device(), Lost():
            pipe.device = "mps"
            with pytest.raises(
                DeviceUnavailableError, match="The model could not run on mps:0: index 99 is out of bounds"
            ):
                pipe(sentences(3))
