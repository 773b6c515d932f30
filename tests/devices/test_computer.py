"""What was done to the environment: told truly whatever a person does between, and taken back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openmed_nb.devices.computer import DeviceManager
from openmed_nb.devices.environment import (
    ACTIVE,
    FALLBACK_VARIABLE,
    HIGH_WATERMARK_VARIABLE,
    LOW_WATERMARK_VARIABLE,
    PENDING,
    TOO_LATE,
    UNKNOWN,
    VARIABLES,
)
from openmed_nb.devices.machine import MachineInfo


class Kernel:
    """A kernel on a Mac with a torch that reads its variables when the real one does, and a person who types."""

    def __init__(self):
        self.environ: dict[str, str] = {}
        self.computer = DeviceManager(self.environ, lambda: MachineInfo("Darwin", "arm64", apple_silicon=True), self)
        self.read: dict[str, str | None] = {}
        self.tensor_lives = False

    def is_torch_imported(self):
        """Tell whether torch was imported."""
        return FALLBACK_VARIABLE in self.read

    def is_mps_allocator_initialized(self):
        """Tell what can be known from outside: a tensor that is gone leaves no trace."""
        return True if self.tensor_lives else None

    def inspect_installed_torch(self):
        """Return what nobody asks for here."""
        raise NotImplementedError

    inspect_imported_torch = inspect_installed_torch

    def probe_device(self, device):
        """Compute nothing."""
        raise NotImplementedError

    def load(self):
        """Type ``import torch``."""
        self.read.setdefault(FALLBACK_VARIABLE, self.environ.get(FALLBACK_VARIABLE))

    def compute(self):
        """Make an MPS tensor and keep it."""
        self.touch()
        self.tensor_lives = True

    def touch(self):
        """Make an MPS tensor and drop it, which leaves no trace."""
        self.load()
        for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE):
            self.read.setdefault(name, self.environ.get(name))

    def drop(self):
        """Delete the tensors."""
        self.tensor_lives = False

    def enter(self):
        """Choose mps."""
        self.computer.apply_mps_variables()

    def leave(self):
        """Choose another device."""
        self.computer.restore_mps_variables()

    def look(self):
        """Ask for the plan."""
        self.computer.mps_environment("mps")

    def type(self, name, value):
        """Look, then set or unset a variable."""
        self.look()
        if value is None:
            self.environ.pop(name, None)
        else:
            self.environ[name] = value

    @property
    def effects(self):
        """What is told of each variable."""
        return {one.name: one.effect for one in self.computer.mps_environment("mps").settings}


VERBS = ("load", "compute", "touch", "drop", "enter", "leave", "look")
NAMES = {"FALLBACK": FALLBACK_VARIABLE, "HIGH": HIGH_WATERMARK_VARIABLE, "LOW": LOW_WATERMARK_VARIABLE}


def play(*steps):
    """Return a kernel in which these steps were done: a verb of it, ``HIGH=0.7``, or ``HIGH=`` to unset."""
    kernel = Kernel()
    for step in steps:
        if step in VERBS:
            getattr(kernel, step)()
        else:
            name, _, value = step.partition("=")
            kernel.type(NAMES[name], value or None)
    return kernel


# What is told of the fallback and of the high watermark -> what a person did before.
TOLD = {
    (PENDING, PENDING): ("enter",),
    (ACTIVE, ACTIVE): (
        *("enter load", "enter load compute", "enter leave enter load"),
        *("enter compute leave enter", "enter compute leave drop enter"),
        *("FALLBACK=1 HIGH=0.7 enter load", "FALLBACK=1 HIGH=0.7 look load enter"),
        *("enter FALLBACK=0 look load", "enter load look FALLBACK= enter"),
    ),
    (ACTIVE, UNKNOWN): ("enter load HIGH=0.7 compute", "enter load leave enter"),
    (ACTIVE, TOO_LATE): ("enter compute look HIGH=0.7",),
    (UNKNOWN, ACTIVE): ("enter FALLBACK=0 load",),
    (TOO_LATE, ACTIVE): ("enter load look FALLBACK=0", "enter FALLBACK= look load FALLBACK=1"),
    (TOO_LATE, UNKNOWN): (
        *("load enter", "load enter compute", "touch enter", "compute drop enter", "enter leave load enter"),
    ),
    (TOO_LATE, TOO_LATE): ("compute enter", "compute look drop enter", "enter leave compute enter"),
}


@pytest.mark.parametrize(("told", "story"), [(told, story) for told, stories in TOLD.items() for story in stories])
def test_story(told, story):
    """After what a person does in a notebook, each variable is told as torch has read it, or as unsure."""
    effects = play(*story.split()).effects

    assert (effects[FALLBACK_VARIABLE], effects[HIGH_WATERMARK_VARIABLE]) == told


def test_person_who_imported_torch_before_the_first_look():
    """What a kernel.json set is kept and told as unsure where torch was imported before anyone looked."""
    kernel = Kernel()
    kernel.environ[FALLBACK_VARIABLE] = "1"
    kernel.load()

    assert kernel.effects == {
        FALLBACK_VARIABLE: UNKNOWN,
        HIGH_WATERMARK_VARIABLE: UNKNOWN,
        LOW_WATERMARK_VARIABLE: UNKNOWN,
    }


CHANGES = [f"{name}={value}" for name in NAMES for value in ("", "0", "1", "1.0", "0.9", "0.5", "2.5")]
STORIES = st.lists(st.sampled_from(VERBS) | st.sampled_from(CHANGES), max_size=12)


@given(STORIES)
def test_every_claim_is_true(story):
    """Whatever is done in which order: "in force" is what torch read, "too late" is not, "in time" is still to come."""
    kernel = play(*story)

    for one in kernel.computer.mps_environment("mps").settings:
        if one.effect == ACTIVE and one.name in kernel.read:
            assert kernel.read[one.name] == one.value
        if one.effect == TOO_LATE:
            assert kernel.read[one.name] != one.value
        if one.effect == PENDING:
            assert one.name not in kernel.read


@given(STORIES)
def test_plan_shows_what_stands_there(story):
    """Once mps is entered, the table shows the values of the environment itself."""
    kernel = play(*story, "enter")

    shown = {one.name: one.value for one in kernel.computer.mps_environment("mps").settings}
    assert shown == {name: kernel.environ.get(name) for name in VARIABLES}


@given(STORIES)
def test_nothing_of_ours_remains(story):
    """After leaving, only what the person set is left, and all of it that differs from what we would have set."""
    kernel = play(*story, "leave")
    alone = play(*(step for step in story if step not in ("enter", "leave")))

    assert kernel.environ.items() <= alone.environ.items()
    assert alone.environ.items() - kernel.environ.items() <= {
        (FALLBACK_VARIABLE, "1"),
        (HIGH_WATERMARK_VARIABLE, "1.0"),
        (LOW_WATERMARK_VARIABLE, "0.9"),
    }


@given(
    st.dictionaries(st.sampled_from(VARIABLES), st.text("0123456789.x", max_size=4)),
    st.dictionaries(st.sampled_from(VARIABLES), st.text("0123456789.x", max_size=4)),
)
def test_leaving_takes_back_only_ours(person, later):
    """Leaving mps keeps what the person had and what they changed since, and nothing of ours."""
    kernel = Kernel()
    kernel.environ.update({"HOME": "/home/me", **person})
    kernel.enter()
    added = kernel.computer.applied_variables
    kernel.environ.update(later)
    kernel.leave()

    kept = {name: value for name, value in later.items() if added.get(name) != value}
    assert kernel.environ == {"HOME": "/home/me", **person, **kept}


def test_failed_step_gives_former_values_back():
    """Going back to what had been applied restores our former values, and keeps the person's."""
    kernel = play("enter", "HIGH=0.5")
    before = kernel.computer.applied_variables
    kernel.enter()
    assert kernel.environ[LOW_WATERMARK_VARIABLE] == "0.45"

    kernel.computer.restore_mps_variables(before)

    assert kernel.environ == {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "0.5", LOW_WATERMARK_VARIABLE: "0.9"}
    kernel.leave()
    assert kernel.environ == {HIGH_WATERMARK_VARIABLE: "0.5"}


@pytest.mark.parametrize("shell", [None, "cuda:1", "cpu"])
def test_published_device_is_taken_back(shell):
    """The variable of the openmed package gets its former value back, after any number of devices."""
    kernel = Kernel()
    environ, computer = kernel.environ, kernel.computer
    environ.update({} if shell is None else {"OPENMED_TORCH_DEVICE": shell})
    before = dict(environ)
    for device in ("cuda:1", "cpu", "cuda:0"):
        computer.enter(device, export=True)
        assert environ["OPENMED_TORCH_DEVICE"] == device
        assert computer.user_environ == before
    computer.restore_device_variable()
    computer.restore_device_variable()

    assert environ == before


def test_published_device_that_the_person_changed():
    """A value that the person wrote meanwhile is theirs, and stands again after the next device is taken back."""
    kernel = Kernel()
    environ, computer = kernel.environ, kernel.computer
    environ["OPENMED_TORCH_DEVICE"] = "cuda"
    computer.enter("cpu", export=True)
    environ["OPENMED_TORCH_DEVICE"] = "mps"
    assert computer.user_environ == {"OPENMED_TORCH_DEVICE": "mps"}

    computer.enter("cpu", export=True)
    computer.restore_device_variable()

    assert environ == {"OPENMED_TORCH_DEVICE": "mps"}
