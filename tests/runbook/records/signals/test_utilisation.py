"""How busy a device is: read from recorded outputs, sampled in a thread that always ends, and never guessed."""

import json
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from openmed_nb._utils.clock import timed_by
from openmed_nb.devices.machine import Machine
from openmed_nb.runbook.bench.comparison import Utilisation, sampling, utilisation_during
from openmed_nb.runbook.records.signals import busy_reader, busy_share

RECORDED = Path(__file__).parents[3] / "recorded" / "signals"
MAC = Machine("Darwin", "arm64", apple_silicon=True)
BOX = Machine("Linux", "x86_64", gpu_driver=True)


def sampling_threads():
    """Return the names of the threads of a sampler that are alive."""
    return [thread.name for thread in threading.enumerate() if thread.name == "openmed_nb utilisation"]


def printing(file):
    """Return what stands in for running any command: the recorded output of one."""
    return lambda _command: (RECORDED / file).read_text("utf-8")


@pytest.mark.real_computer
def test_reader_asks_the_command_of_its_device():
    """The share of a GPU is what the command of its kind says; if that is not there, or says something else, there is no reader."""
    cases = [
        ("mps", MAC, "ioreg_m4.txt", 0.3),
        ("mps", MAC, "ioreg_m1.txt", 0.02),
        ("cuda", BOX, "nvidia_h200.txt", 0.0),
    ]
    for device, machine, file, share in cases:
        read = busy_reader(device, machine, printing(file), {})
        assert read is not None, file
        assert read() == pytest.approx(share), file
    for device in ("mps", "cuda", "cuda:1", "lazy:0"):
        assert busy_reader(device, MAC, lambda _command: None, {}) is None, device
        assert busy_reader(device, BOX, lambda _command: "no such thing", {}) is None, device


def test_nothing_is_read_under_a_simulation():
    """Of a simulated computer no command is asked, not even about the CPU."""
    asked: list[object] = []
    for device in ("cpu", "mps", "cuda"):
        assert busy_reader(device, Machine("Darwin", "arm64", simulated=True), asked.append, {}) is None
    assert asked == []


@pytest.mark.real_computer
def test_the_processor_is_read_from_its_counters():
    """The share of the processor is known once its counters have moved, and is a share."""
    read = busy_reader("cpu", BOX)
    answers = []
    while not answers:
        answers += [answer for answer in [read()] if answer is not None]

    assert 0 <= answers[0] <= 1


def test_share_of_the_processor():
    """Idle time and waiting for the disk are no work, what a guest ran counts once, and no time is no share."""
    cases = [
        ({"user": 1, "idle": 1}, {"user": 4, "idle": 2}, 0.75),
        ({"user": 1, "idle": 1, "iowait": 0}, {"user": 2, "idle": 2, "iowait": 2}, 0.25),
        ({"user": 1, "idle": 1, "guest": 0}, {"user": 2, "idle": 2, "guest": 1}, 0.5),
        ({"user": 1, "idle": 5}, {"user": 2, "idle": 4}, 1.0),
        ({"user": 1, "idle": 1}, {"user": 1, "idle": 1}, None),
        ({}, {"user": 1, "idle": 1}, None),
        ({}, {}, None),
    ]
    for before, after, share in cases:
        assert busy_share(before, after) == share, (before, after)


@pytest.mark.parametrize(
    ("idle", "busy", "net"),
    [(0.1, 0.6, 0.5), (0.5, 0.25, 0.0), (None, 0.6, None), (0.1, None, None), (None, None, None)],
)
def test_net_utilisation(idle, busy, net):
    """What the work took is the mean while it ran less the mean before, at least 0; it is not known without one of them."""
    found = Utilisation(idle, busy, 5)

    assert found.net == (None if net is None else pytest.approx(net))
    assert json.loads(json.dumps(found.to_dict()))["samples"] == 5


def test_idle_and_busy_are_told_apart():
    """Nothing is done while the idle mean is taken; then the work is done again and again for the busy mean."""
    test, done, answers = threading.current_thread(), [], 0
    begun: list[int] = []

    def read():
        nonlocal answers
        if threading.current_thread() is test:  # Each phase begins with a question that is not counted.
            begun.append(len(done))
        answers += 1
        return (0.25, 0.75)[len(begun) - 1]

    with timed_by(lambda: answers):
        load = utilisation_during(read, 6, lambda: done.append(1), interval=0.001)

    assert begun == [0, 0]
    assert done
    assert (load.idle, load.net) == (0.25, 0.5)
    assert load.samples >= 5
    assert sampling_threads() == []


def test_what_cannot_be_read():
    """Without a reader, or without a time, nothing is done; a moment that cannot be read is left out."""
    done, asked = [], threading.Event()

    assert utilisation_during(None, 1.0, lambda: done.append(1)) == Utilisation()
    assert utilisation_during(lambda: 0.5, 0, lambda: done.append(1)) == Utilisation()
    assert done == []
    with sampling(asked.set, interval=0.001) as answers:
        assert asked.wait(60)
    assert answers == []


def test_thread_ends_with_a_block_that_fails():
    """An error, or an interrupt, in the block ends the thread and goes on."""
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), sampling(lambda: 0.5, interval=0.001):  # noqa: PT012 - the thread is seen inside
            assert len(sampling_threads()) == 1
            raise error
        assert sampling_threads() == []


def test_answer_that_comes_after_the_block_is_left_out():
    """What was asked in the block and answered after it may be about the time after it."""
    test, asked = threading.current_thread(), threading.Event()

    def waits_for_the_thread():
        stack = traceback.walk_stack(sys._current_frames()[test.ident])
        return any(frame.f_code.co_name == "join" for frame, _line in stack)

    def read():
        asked.set()
        while not waits_for_the_thread():
            time.sleep(0.001)
        return 1.0

    with sampling(read, interval=0.001) as answers:
        assert asked.wait(60)

    assert answers == []
