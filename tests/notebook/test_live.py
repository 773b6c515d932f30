"""The live curve: one widget whose value changes in place, with a text form that stays."""

import pytest

import openmed_nb as nb
from openmed_nb._render.display import escape
from openmed_nb.training import MemoryCurve, MemorySample
from openmed_nb.training.live import LiveMemoryCurve, render_curve

EVIL = 'mps"><script>alert(1)</script>'


def curve_of(*sizes, device="mps"):
    """Return a curve from what tensors use, in MiB."""
    return MemoryCurve(
        device, tuple(MemorySample(epoch, epoch, 1.0, allocated=size << 20) for epoch, size in enumerate(sizes, 1))
    )


def test_live_curve_changes_in_place():
    """Each curve becomes the value of the same widget, whose observers are notified."""
    live, values = LiveMemoryCurve(), []
    live.observe(lambda change: values.append(change["new"]), "value")
    waiting = live.value
    live(curve_of(50))
    live(curve_of(50, 60, 90, 120))

    assert waiting != ""
    assert len(values) == 2
    assert live.value == values[-1] == render_curve(curve_of(50, 60, 90, 120))
    assert "growing" in live.value
    live(MemoryCurve("cpu"))
    assert live.value == waiting


def test_live_curve_has_a_stable_text_form():
    """The text form does not change with the value, so that a notebook that is run again stays the same."""
    live = LiveMemoryCurve()
    before = repr(live)
    live(curve_of(50, 60))

    assert repr(live) == str(live) == before
    assert live._repr_mimebundle_()["text/plain"] == before


def test_live_curve_escapes_names():
    """Whatever the names are, the picture has no script in it, and a screen reader is read the verdict alone."""
    shown = render_curve(curve_of(50, 60, 90, 120, device=EVIL))
    _, said = shown.split('<div role="status">')

    assert "<script" not in shown
    assert escape(EVIL) in said
    assert "growing" in said
    assert "<img" not in said


def test_hooks_update_the_live_curve(capsys):
    """With live=True a widget is shown, and is drawn again after each epoch."""
    loop = nb.epochs(2, "cpu", live=True)
    live = loop.live_curve
    values = []
    live.observe(lambda change: values.append(change["new"]), "value")
    list(loop)

    assert len(values) == 2
    assert "Memory on cpu" in live.value
    assert repr(live) in capsys.readouterr().out


def test_bad_arguments_show_no_widget(capsys):
    """Where the hooks are refused, nothing is shown."""
    with pytest.raises(nb.OpenMedError):
        nb.training.EpochHooks("cpu", live=True, every_n_steps=0)

    assert capsys.readouterr().out == ""


def test_live_curve_is_one_output_of_a_kernel(kernel):
    """In a notebook the widget is one output, with nothing that is cleared or updated, and the curve is in it."""
    reply = kernel.run("import openmed_nb as nb\nloop = nb.epochs(2, 'cpu', live=True)\nfor epoch in loop:\n    pass\n")

    assert reply.status == "ok"
    assert [message["text/plain"] for message in reply.shown] == [repr(LiveMemoryCurve())]
    assert reply.streams == {}
    assert "image/svg+xml" in kernel.value("loop.live_curve.value")


FORKED = """
import openmed_nb as nb

def train():
    from accelerate import Accelerator
    epochs = nb.epochs(2, Accelerator(cpu=True), live=True)
    list(epochs)
    process = epochs.curve.process
    print(f"This is process {process.rank} of {process.world_size}. It has {len(epochs.curve.epoch_samples)} epochs.")

from accelerate import debug_launcher
debug_launcher(train, num_processes=2)
"""


@pytest.mark.slow  # training/test_processes forks two processes without a notebook.
def test_processes_of_a_notebook_launcher(run_ipython):
    """Of two processes that a notebook forks, as Accelerate's launcher does, the first shows its curve, and it alone."""
    done = run_ipython(FORKED)

    lines = sorted(filter(None, done.stdout.splitlines()))
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 3
    assert repr(LiveMemoryCurve()) in lines
    for index in range(2):
        assert [line for line in lines if f"rocess {index} of 2" in line and line.endswith("It has 2 epochs.")]
