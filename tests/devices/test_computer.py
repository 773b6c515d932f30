"""Device manager: MPS variables in the environment, and the effect that is reported for them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.simulated_computers import BOX, BOX_TORCH, MAC, MAC_TORCH
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
from openmed_nb.devices.request import DeviceRequest
from openmed_nb.session import Session


class Kernel:
    """A kernel on a Mac with a stub of torch, and the actions of a user. The stub reads variables at the same time as torch."""

    def __init__(self):
        self.environ: dict[str, str] = {}
        self.computer = DeviceManager(self.environ, lambda: MachineInfo("Darwin", "arm64", apple_silicon=True), self)
        self.read: dict[str, str | None] = {}
        self.tensor_lives = False

    def is_torch_imported(self):
        """Return whether torch is imported."""
        return FALLBACK_VARIABLE in self.read

    def is_mps_allocator_initialized(self):
        """Return the observable state: a deleted tensor cannot be detected."""
        return True if self.tensor_lives else None

    def inspect_installed_torch(self):
        """Return facts that these tests do not use."""
        raise NotImplementedError

    inspect_imported_torch = inspect_installed_torch

    def probe_device(self, device):
        """Return a passed device check."""
        raise NotImplementedError

    def load(self):
        """Import torch."""
        self.read.setdefault(FALLBACK_VARIABLE, self.environ.get(FALLBACK_VARIABLE))

    def compute(self):
        """Create an MPS tensor and keep a reference."""
        self.touch()
        self.tensor_lives = True

    def touch(self):
        """Create an MPS tensor and delete it."""
        self.load()
        for name in (HIGH_WATERMARK_VARIABLE, LOW_WATERMARK_VARIABLE):
            self.read.setdefault(name, self.environ.get(name))

    def drop(self):
        """Delete the tensors."""
        self.tensor_lives = False

    def enter(self):
        """Activate mps."""
        self.computer.apply_mps_variables()

    def leave(self):
        """Activate another device."""
        self.computer.restore_mps_variables()

    def look(self):
        """Read the plan."""
        self.computer.mps_environment("mps")

    def type(self, name, value):
        """Read the plan, then set or unset a variable."""
        self.look()
        if value is None:
            self.environ.pop(name, None)
        else:
            self.environ[name] = value

    @property
    def effects(self):
        """Reported effect of each variable."""
        return {setting.name: setting.effect for setting in self.computer.mps_environment("mps").settings}


VERBS = ("load", "compute", "touch", "drop", "enter", "leave", "look")
NAMES = {"FALLBACK": FALLBACK_VARIABLE, "HIGH": HIGH_WATERMARK_VARIABLE, "LOW": LOW_WATERMARK_VARIABLE}


def play(*steps):
    """Return a kernel after actions: the name of a method, ``HIGH=0.7``, or ``HIGH=`` to unset a variable."""
    kernel = Kernel()
    for step in steps:
        if step in VERBS:
            getattr(kernel, step)()
        else:
            name, _, value = step.partition("=")
            kernel.type(NAMES[name], value or None)
    return kernel


# Effects of the fallback and of the high watermark -> actions of the user.
ACTIONS_BY_EFFECTS = {
    (PENDING, PENDING): ("enter",),
    (ACTIVE, ACTIVE): (
        "enter load",
        "enter load compute",
        "enter leave enter load",
        "enter compute leave enter",
        "enter compute leave drop enter",
        "FALLBACK=1 HIGH=0.7 enter load",
        "FALLBACK=1 HIGH=0.7 look load enter",
        "enter FALLBACK=0 look load",
        "enter load look FALLBACK= enter",
    ),
    (ACTIVE, UNKNOWN): ("enter load HIGH=0.7 compute", "enter load leave enter"),
    (ACTIVE, TOO_LATE): ("enter compute look HIGH=0.7",),
    (UNKNOWN, ACTIVE): ("enter FALLBACK=0 load",),
    (TOO_LATE, ACTIVE): ("enter load look FALLBACK=0", "enter FALLBACK= look load FALLBACK=1"),
    (TOO_LATE, UNKNOWN): (
        "load enter",
        "load enter compute",
        "touch enter",
        "compute drop enter",
        "enter leave load enter",
    ),
    (TOO_LATE, TOO_LATE): ("compute enter", "compute look drop enter", "enter leave compute enter"),
}


@pytest.mark.parametrize(
    ("expected", "story"), [(expected, story) for expected, stories in ACTIONS_BY_EFFECTS.items() for story in stories]
)
def test_effects_of_event_sequence(expected, story):
    effects = play(*story.split()).effects

    assert (effects[FALLBACK_VARIABLE], effects[HIGH_WATERMARK_VARIABLE]) == expected


def test_effects_after_earlier_torch_import():
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
def test_reported_effects_are_true(story):
    kernel = play(*story)

    for setting in kernel.computer.mps_environment("mps").settings:
        if setting.effect == ACTIVE and setting.name in kernel.read:
            assert kernel.read[setting.name] == setting.value
        if setting.effect == TOO_LATE:
            assert kernel.read[setting.name] != setting.value
        if setting.effect == PENDING:
            assert setting.name not in kernel.read


@given(STORIES)
def test_plan_has_values_of_environment(story):
    kernel = play(*story, "enter")

    shown = {setting.name: setting.value for setting in kernel.computer.mps_environment("mps").settings}
    assert shown == {name: kernel.environ.get(name) for name in VARIABLES}


@given(STORIES)
def test_restore_removes_all_package_values(story):
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
def test_restore_preserves_user_values(user_variables, later):
    kernel = Kernel()
    kernel.environ.update({"HOME": "/home/me", **user_variables})
    kernel.enter()
    added = kernel.computer.applied_variables
    kernel.environ.update(later)
    kernel.leave()

    kept = {name: value for name, value in later.items() if added.get(name) != value}
    assert kernel.environ == {"HOME": "/home/me", **user_variables, **kept}


def test_restore_previous_variables():
    kernel = play("enter", "HIGH=0.5")
    before = kernel.computer.applied_variables
    kernel.enter()
    assert kernel.environ[LOW_WATERMARK_VARIABLE] == "0.45"

    kernel.computer.restore_mps_variables(before)

    assert kernel.environ == {FALLBACK_VARIABLE: "1", HIGH_WATERMARK_VARIABLE: "0.5", LOW_WATERMARK_VARIABLE: "0.9"}
    kernel.leave()
    assert kernel.environ == {HIGH_WATERMARK_VARIABLE: "0.5"}


@pytest.mark.parametrize("shell", [None, "cuda:1", "cpu"])
def test_device_variable_is_restored(shell):
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


def test_device_variable_of_user_is_restored():
    kernel = Kernel()
    environ, computer = kernel.environ, kernel.computer
    environ["OPENMED_TORCH_DEVICE"] = "cuda"
    computer.enter("cpu", export=True)
    environ["OPENMED_TORCH_DEVICE"] = "mps"
    assert computer.user_environ == {"OPENMED_TORCH_DEVICE": "mps"}

    computer.enter("cpu", export=True)
    computer.restore_device_variable()

    assert environ == {"OPENMED_TORCH_DEVICE": "mps"}


class TorchOf:
    """The torch of a machine, and what happened to it."""

    def __init__(self, imported, failures=None):
        self.imported = imported
        self.failures = failures or {}
        self.events = []

    def is_torch_imported(self):
        """Return whether torch is imported."""
        return "import" in self.events

    def is_mps_allocator_initialized(self):
        """Return that there is no tensor."""

    def inspect_installed_torch(self):
        """Return the facts of the files."""
        self.events.append("read files")
        return replace(self.imported, is_imported=False, cuda_names=None, mps_available=None)

    def inspect_imported_torch(self):
        """Import torch and return its facts."""
        self.events.append("import")
        return replace(self.imported, is_imported=True)

    def probe_device(self, device):
        """Return the failure of a device."""
        self.events.append(f"probe {device}")
        return self.failures.get(device, "")


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("cpu", ["mps", "cuda", "cpu"]),
        ("cuda", ["mps", "cuda", "cpu"]),
        ("cuda:0", ["mps", "cuda", "cpu"]),
        ("cuda:1", ["mps", "cuda", "cuda:1", "cpu"]),
    ],
)
def test_list_has_the_chosen_device_before_torch_reports_gpus(chosen, names):
    computer = DeviceManager({}, lambda: BOX, TorchOf(BOX_TORCH))
    assert [status.device for status in computer.list_devices(chosen)] == names
    computer.load_torch()
    assert [status.device for status in computer.list_devices(chosen)] == ["mps", "cuda:0", "cuda:1", "cpu"]


@pytest.mark.parametrize(
    ("machine", "torch", "failures", "spelling", "device", "events"),
    [
        (BOX, BOX_TORCH, {}, "cpu", "cpu", ["read files"]),
        (BOX, BOX_TORCH, {}, "cuda:1", "cuda:1", ["read files", "announce", "import", "probe cuda:1"]),
        (BOX, BOX_TORCH, {"cuda": "no kernel"}, "auto", "cpu", ["read files", "announce", "import", "probe cuda"]),
        (MAC, MAC_TORCH, {}, "auto", "mps", ["read files", "announce", "import", "probe mps"]),
        (MAC, MAC_TORCH, {"mps": "no memory"}, "auto", "cpu", ["read files", "announce", "import", "probe mps"]),
    ],
)
def test_confirm_probes_a_gpu_once(machine, torch, failures, spelling, device, events):  # noqa: PLR0913, PLR0917
    stub = TorchOf(torch, failures)
    environ = {}
    computer = DeviceManager(environ, lambda: machine, stub)
    computer.on_torch_import = lambda: stub.events.append("announce")
    request = DeviceRequest.parse(spelling, "argument")

    assert [computer.confirm(request).device for _ in range(2)] == [device, device]
    assert stub.events == events
    assert (FALLBACK_VARIABLE in environ) == (device == "mps") == bool(computer.applied_variables)
    assert computer.plan(request).confirmed == (device != "cpu" or "import" in events)


def test_failed_probe_is_repeated_on_request():
    """The memory of a GPU may have been full at the time of the first check."""
    failures = {"cuda": "CUDA out of memory"}
    session = Session({}, lambda: BOX, TorchOf(BOX_TORCH, failures))

    assert session.device().device == "cpu"
    failures.clear()
    assert (session.device().device, session.use("auto").device) == ("cpu", "cuda")


def test_memory_fraction_is_the_limit_or_the_watermark():
    computer = DeviceManager({}, lambda: MAC, TorchOf(MAC_TORCH))
    assert [computer.memory_fraction(name) for name in ("cpu", "mps")] == [None, 1.0]
    computer.limit_memory("cpu", 0.5)
    assert [computer.memory_fraction(name) for name in ("cpu", "cpu:0", "cuda")] == [0.5, 0.5, None]
    unlimited = DeviceManager({HIGH_WATERMARK_VARIABLE: "0"}, lambda: MAC, TorchOf(MAC_TORCH))
    assert unlimited.memory_fraction("mps") is None
