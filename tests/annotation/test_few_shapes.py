"""The pipeline on a simulated MPS device: CPU results, few shapes, and no asynchronous copies."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.annotations import on_forward, rounded
from helpers.tiny_models import sentences
from openmed_nb._annotate import annotate
from openmed_nb.simulation.device import simulated_device

pytestmark = pytest.mark.real_computer  # Each test begins its own simulation.

STRATEGIES = ["none", "simple", "first", "average", "max"]


@pytest.fixture
def mps():
    """A simulated MPS device, for this thread and this test."""
    with simulated_device() as device:
        yield device


@pytest.fixture
def mps_pipe(mps, new_pipe):  # noqa: ARG001 - only its setup is needed
    """A function that returns a pipeline on the simulated MPS device."""

    def mps_pipe(*arguments, **options):
        pipe = new_pipe(*arguments, **options)
        pipe.device = "mps"
        return pipe

    return mps_pipe


class TestAnswers:
    """Results do not depend on the device."""

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_same_as_on_the_cpu(self, mps, mps_pipe, new_pipe, strategy):
        """Texts of many lengths, also longer than the model takes and empty, have the answers of the CPU."""
        texts = ["", *sentences(60, longest=150), " "]
        assert mps_pipe(strategy)(texts) == rounded(new_pipe(strategy)(texts))
        assert mps.call_counts["linear"] > 0


class TestCare:
    """Operations that fail silently on MPS are not used."""

    def test_copies_are_blocking(self, mps, mps_pipe):
        """Every copy towards MPS and back waits, for the weights and for the texts."""
        pipe = mps_pipe("average")
        pipe(sentences(100))
        pipe.device = "cpu"
        assert {(copy.source, copy.target) for copy in mps.copies} == {("cpu", "mps"), ("mps", "cpu")}
        assert not any(copy.non_blocking for copy in mps.copies)

    def test_chunk_is_copied_once(self, mps, mps_pipe):
        """The batches of a chunk go to MPS in one copy, because each copy waits for all work before it."""
        pipe, passes = mps_pipe(batch_tokens=100), []
        pipe("asthma")  # Determines whether the model masks padding.
        on_forward(pipe.model, passes.append)
        mps.copies.clear()
        pipe(sentences(40))
        assert len(passes) > 5
        assert sum(copy.target == "mps" for copy in mps.copies) == 1

    def test_mask_check_does_not_synchronize(self, mps_pipe):
        """A model that asks whether its mask is full has the answer from the host, and does not wait for MPS."""
        pipe, passes, computed = mps_pipe(batch_tokens=100), [], set()
        pipe("asthma")  # Determines whether the model masks padding.
        on_forward(pipe.model, passes.append)

        class Operators(TorchDispatchMode):
            """Notes the names of what torch computes."""

            def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
                computed.add(operator.overloadpacket.__name__)
                return operator(*args, **(kwargs or {}))

        with Operators():
            pipe(sentences(40))
        assert len(passes) > 5
        assert "embedding" in computed
        assert "all" not in computed


class TestShapes:
    """MPS compiles for every shape, so it meets few."""

    @pytest.mark.usefixtures("mps")
    def test_at_most_twenty_four(self, new_pipe):
        """Texts of many lengths, in calls of many sizes, meet at most 24 shapes."""
        pipe, shapes, texts = new_pipe(), set(), sentences(300, longest=200)
        pipe.device = "mps"
        on_forward(pipe.model, lambda ids: shapes.add(tuple(ids.shape)))
        annotate(texts, pipe, progress=False)
        assert len(shapes) > 1
        for count in (1, 2, 7, 40):
            pipe(texts[:count])
            pipe(texts[-count:])
        assert len(shapes) <= 24

    def test_single_text_is_one_row(self, mps_pipe):
        """One short text runs as one row, and not as a batch of hundreds."""
        pipe, shapes = mps_pipe(), []
        on_forward(pipe.model, lambda ids: shapes.append(tuple(ids.shape)))
        pipe("asthma")
        assert shapes == [(1, 16)]
