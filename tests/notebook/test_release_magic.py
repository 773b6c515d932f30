"""``%openmed_release`` in a real kernel: what a notebook keeps alive is freed at once, cause by cause."""

import pytest

PLANT = """
import gc, sys, weakref, torch

def out_of_memory(size=1 << 20):
    activations = torch.zeros(size)
    watched["frame"] = weakref.ref(activations)
    raise RuntimeError(
        "MPS backend out of memory (MPS allocated: 5.21 GiB, other allocations: 384.00 KiB, max allowed: 5.33 GiB). "
        "Tried to allocate 256.00 MiB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit "
        "for memory allocations (may cause system failure)."
    )

def chained():
    try:
        out_of_memory()
    except RuntimeError as error:
        raise ValueError("The step failed.") from error

def step():
    out_of_memory()

watched = {}
"""
ALIVE = "watched['frame']() is not None"
CAUSES = "[one.source for one in report.freed]"


@pytest.fixture
def planted(kernel):
    """A kernel with functions that run out of memory; variables, outputs and errors of other tests are gone."""
    kernel.run("%reset -f")
    kernel.run("%load_ext openmed_nb")
    assert kernel.run(PLANT).status == "ok"
    return kernel


@pytest.mark.parametrize(
    "calls",
    [
        ["step()"],
        ["chained()"],
        ["torch.nn.Identity.__call__(step())"],
        ["step()", "%openmed_release nothing_of_this_name"],
        ["step()", "%openmed_device nonsense"],
    ],
    ids=" and ".join,
)
def test_release_frees_the_frames_of_the_last_error(planted, calls):
    """What a function held that ran out of memory is alive in the next cell, and gone after the magic.

    A magic that was mistyped after the error does not hide its frames.
    """
    assert [planted.run(call).status for call in calls] == ["error"] * len(calls)
    assert planted.value(ALIVE)

    reply = planted.run(f"report = %openmed_release\n{ALIVE}")
    assert (reply.status, reply.text) == ("ok", "False")
    freed = planted.value("{one.source: one.tensors for one in report.freed}")
    assert freed["frames of the last error"] == 4 << 20
    assert "%debug" in planted.value("' '.join(report.notes)")


def test_keep_traceback_keeps_the_frames(planted):
    """With --keep-traceback the frames stay, and the debugger still shows their variables."""
    planted.run("step()")
    planted.run("report = %openmed_release --keep-traceback")

    assert planted.value(ALIVE)
    assert planted.value("report.notes") == ()
    assert "frames of the last error" not in planted.value(CAUSES)
    planted.run("import traceback\nframes = [frame for frame, _ in traceback.walk_tb(sys.last_traceback)]")
    assert planted.value("'activations' in frames[-1].f_locals")
    planted.run("del frames")


def test_outputs_are_freed(planted):
    """Displayed values are released: Out, _, __ and _1."""
    planted.run("shown = torch.zeros(1 << 20)\nwatched['shown'] = weakref.ref(shown)\nshown")
    planted.run("shown")
    planted.run("del shown")
    planted.run("1")
    assert planted.value("watched['shown']() is not None")

    planted.run("report = %openmed_release")
    assert not planted.value("watched['shown']() is not None")
    assert planted.value("{one.source: one.tensors for one in report.freed}['history of outputs']") == 4 << 20
    assert planted.value("list(Out)") == []


def test_outputs_can_be_kept(planted):
    """With --keep-history what cells have shown stays."""
    planted.run("shown = torch.zeros(1 << 20)\nwatched['shown'] = weakref.ref(shown)\nshown")
    planted.run("del shown\nreport = %openmed_release --keep-history")

    assert planted.value("watched['shown']() is not None")
    assert "history of outputs" not in planted.value(CAUSES)


def test_outputs_go_on_after_a_release(planted):
    """After a release cells show and keep their values as before."""
    planted.run("'before'")
    planted.run("%openmed_release ;")
    planted.run("6 * 7")

    assert planted.run("_").text == "42"
    planted.run("'another'")
    assert planted.value("(_, __, 42 in Out.values())") == ("another", 42, True)


def test_totals_are_sums_of_sources(planted):
    """What was freed in all is the sum over the causes, and the mapping has every cause."""
    planted.run("losses = [torch.zeros(1 << 18)]")
    planted.run("shown = torch.zeros(1 << 19)\nshown")
    planted.run("del shown")
    planted.run("step()")
    planted.run("report = %openmed_release losses")

    assert planted.value(CAUSES) == [
        "unused blocks of the device",
        "variables",
        "history of outputs",
        "frames of the last error",
        "interrupted run",
        "loaded models",
    ]
    assert planted.value("[one.tensors for one in report.freed][1:4]") == [1 << 20, 2 << 20, 4 << 20]
    assert planted.value("report.tensors == sum(one.tensors for one in report.freed) == 7 << 20")
    assert planted.value("report.to_dict()['freed'][1]['source']") == "variables"
    assert planted.value("__import__('json').dumps(report.to_dict()).count('source')") == 6


def test_unknown_name_releases_nothing(planted):
    """A misspelt name is one clear line, and neither variables nor outputs nor frames are released."""
    planted.run("losses = [torch.zeros(10)]")
    planted.run("shown = 1\nshown")
    planted.run("step()")
    reply = planted.run("%openmed_release losses lossse")

    assert reply.status == "error"
    # No variable is offered in the place of the other: the same line would delete it.
    (line,) = reply.error[2]
    assert line.startswith("ConfigurationError: ")
    assert "lossse" in line
    assert "losses" not in line
    assert planted.value(f"('losses' in globals(), {ALIVE}, 1 in Out.values())") == (True, True, True)


def test_loaded_models_are_forgotten(planted):
    """Loaded models are released or kept on request; a pipeline in a variable stays usable."""
    planted.run("import openmed_nb as nb\npipe = nb.load_pipeline('bundled_small')")
    planted.run("watched['model'] = weakref.ref(pipe.model)")
    planted.run("kept = %openmed_release --keep-models")
    assert "loaded models" not in planted.value("[one.source for one in kept.freed]")
    planted.run("report = %openmed_release")
    assert planted.value("len(pipe('He has asthma.'))") == 1

    planted.run("pipe = nb.load_pipeline('bundled_small')\nwatched['model'] = weakref.ref(pipe.model)\ndel pipe")
    assert planted.value("watched['model']() is not None")
    planted.run("report = %openmed_release")
    assert planted.value("watched['model']() is None")
    assert planted.value("{one.source: one.tensors for one in report.freed}['loaded models'] > 1 << 20")


def test_completion_offers_variables_and_flags(planted):
    planted.run("losses = []\nlossy = 1")

    assert {"losses", "lossy"} <= set(planted.complete("%openmed_release loss"))
    assert planted.complete("%openmed_release --keep-h") == ["--keep-history"]


def test_release_works_without_a_cache_of_outputs(run_ipython):
    """Where IPython keeps no outputs, a release works."""
    code = "%load_ext openmed_nb\nreport = %openmed_release\nprint([one.source for one in report.freed])"
    process = run_ipython(code, "--cache-size=0", OPENMED_DEVICE="cpu")

    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1].startswith("['unused blocks of the device', 'frames of the last error', ")
