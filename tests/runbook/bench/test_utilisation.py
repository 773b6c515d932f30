"""How busy a device is while it works: asked in a thread that always ends with the work."""

import sys
import threading
import time
import traceback

import pytest

from openmed_nb._utils.clock import use_clock
from openmed_nb.runbook.bench.comparison import Utilization, samples_during, utilization_during


def sampling_threads():
    """Return the threads that ask and are alive."""
    return [thread for thread in threading.enumerate() if thread.name == "openmed_nb utilization"]


@pytest.mark.parametrize(
    ("idle", "busy", "net"), [(0.125, 0.625, 0.5), (0.5, 0.25, 0.0), (None, 0.6, None), (0.1, None, None)]
)
def test_net_utilization(idle, busy, net):
    """What the work took is the mean while it ran less the mean before, at least 0; it is not known without one of them."""
    assert Utilization(idle, busy, 5).to_dict() == {"idle": idle, "busy": busy, "samples": 5, "net": net}


def test_idle_and_busy_are_told_apart():
    """Nothing is done while the idle mean is taken; then the work is done again and again for the busy mean."""
    test = threading.current_thread()
    done, begun, answers = [], [], 0

    def read():
        nonlocal answers
        if threading.current_thread() is test:  # Each phase begins with a question that is not counted.
            begun.append(len(done))
        answers += 1
        return (0.25, 0.75)[len(begun) - 1]

    with use_clock(lambda: answers):
        load = utilization_during(read, 6, lambda: done.append(1), interval=0.001)

    assert begun == [0, 0]
    assert done
    assert (load.idle, load.net) == (0.25, 0.5)
    assert load.samples >= 5
    assert sampling_threads() == []


def test_nothing_is_done_without_a_reader():
    assert utilization_during(None, 1.0, pytest.fail) == Utilization()


@pytest.mark.parametrize(("answer", "steps"), [(0.5, 6), (None, 12)])
def test_slow_answers_are_waited_for(answer, steps):
    """A device is watched until there are enough answers for a mean, at most twice as long; what cannot be read is left out."""
    done, asked = [], []

    def read():
        asked.append(1)
        return answer

    def step():
        while len(asked) < 8:  # The answers to all questions but the last are there.
            time.sleep(0.001)
        done.append(1)

    with use_clock(lambda: len(done)):
        answers = samples_during(step, read, 6, interval=0.001)

    assert len(done) == steps
    assert set(answers) == ({answer} - {None})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_thread_ends_with_work_that_fails(error):
    def fail():
        assert len(sampling_threads()) == 1
        raise error

    with pytest.raises(error):
        samples_during(fail, lambda: 0.5, 1, interval=0.001)
    assert sampling_threads() == []


def test_answer_that_comes_after_the_work_is_left_out():
    """What was asked during the work and answered after it may be about the time after it."""
    test, asked = threading.current_thread(), threading.Event()

    def waits_for_the_thread():
        stack = traceback.walk_stack(sys._current_frames()[test.ident])
        return any(frame.f_code.co_name == "join" for frame, _line in stack)

    def read():
        if threading.current_thread() is not test:
            asked.set()
            while not waits_for_the_thread():
                time.sleep(0.001)
        return 1.0

    assert samples_during(lambda: asked.wait(60), read, 0.001, interval=0.001) == []
