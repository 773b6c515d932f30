"""The public names and their signatures, what they have in common, and how every report is shown."""

import contextlib
import dataclasses
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import pytest

import openmed_nb as nb
from openmed_nb._render.display import SIMULATION_NOTICE, Displayable, Report

SNAPSHOT = Path(__file__).parent / "recorded" / "public_signatures.json"


def subclasses_of(kind):
    """Yield the classes below a class."""
    for below in kind.__subclasses__():
        yield below
        yield from subclasses_of(below)


def signature_of(public):
    """Return the parameters of a function or class as they are written, with plain defaults; none for errors and reports."""
    if isinstance(public, type) and issubclass(public, (Exception, Displayable)) and public is not nb.Guards:
        return ""
    plain = (bool, int, float, str, type(None), tuple)
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.default if isinstance(parameter.default, (*plain, type)) else ...,
        )
        for parameter in inspect.signature(public).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def face():
    """Return the public functions and classes with their signatures."""
    modules = {"": nb, "training.": nb.training, "runbook.": nb.runbook, "compat.": nb.compat}
    public = {f"{place}{name}": getattr(module, name) for place, module in modules.items() for name in module.__all__}
    return {name: signature_of(value) for name, value in sorted(public.items()) if callable(value)}


def test_public_names_and_signatures_stay(request):
    """After a change, rewrite the snapshot with ``--record``; its diff shows what a caller has to change."""
    if request.config.getoption("record"):
        SNAPSHOT.write_text(json.dumps(face(), indent=1, ensure_ascii=False) + "\n", "utf-8")
    assert face() == json.loads(SNAPSHOT.read_text("utf-8"))


def test_what_is_public_is_described():
    """Every public name, and every public method and property of a public class, has a docstring."""
    faces = (nb, nb.training, nb.runbook, nb.compat)
    public = [(name, one) for face in faces for name in face.__all__ if callable(one := getattr(face, name))]
    methods = [
        (f"{name}.{member}", value)
        for name, kind in public
        if isinstance(kind, type)
        for member, value in inspect.getmembers(kind)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]
    assert [name for name, value in (*public, *methods) if not inspect.getdoc(value)] == []


def test_a_word_means_the_same_everywhere():
    """What is called device, model, texts, training, seconds or progress is the same in every function that takes it."""
    loader = nb.training.loader
    faces = ((face, name) for face in (nb, nb.training, nb.runbook) for name in face.__all__)
    public = {name: getattr(face, name) for face, name in faces if callable(getattr(face, name))}
    others = {"settings": loader.settings, "check": loader.check, "benchmark_workers": loader.benchmark_workers}
    takes = {
        name: inspect.signature(one).parameters
        for name, one in {**public, **others}.items()
        if not (isinstance(one, type) and issubclass(one, (Displayable, Exception)) and one is not nb.Guards)
    }

    def said(word, what):
        return {name: getattr(one[word], what) for name, one in takes.items() if word in one}

    required = inspect.Parameter.empty
    assert {name for name, default in said("device", "default").items() if default is not None} == {"use"}
    assert said("devices", "default") == {"compare": None}
    assert set(said("training", "default").values()) == {False}
    assert set(said("seconds", "default").values()) == {30.0}
    assert set(said("progress", "default").values()) == {True}
    assert set(said("progress", "kind").values()) == {inspect.Parameter.KEYWORD_ONLY}
    assert set(said("texts", "annotation").values()) == {"Any", "Iterable[Any] | None"}
    assert set(said("model", "default").values()) <= {None, required}
    before = {name: [*one][: [*one].index("model")] for name, one in takes.items() if "model" in one}
    assert {name: one for name, one in before.items() if one} == {
        "annotate": ["texts"],
        "handoff": ["folder"],
        "logbook": ["reports"],
    }


LONG = {
    *("annotate", "cluster", "compare", "doctor", "handoff", "load_model", "load_pipeline", "logbook"),
    *("release", "report", "sweep", "training.loader.check", "training.loader.benchmark_workers"),
    *(f"runbook.{name}" for name in ("forecast", "bring_up", "parity", "profile", "validate_precision")),
}
"""The functions that may take longer than half a second; what imports torch alone is switched off by a setting only."""


def test_every_long_function_can_be_silenced():
    """What takes long has ``progress=True``, which one may pass as False; no function that shows a line is without it."""
    faces = {"": nb, "runbook.": nb.runbook, "training.": nb.training, "compat.": nb.compat}
    public = {f"{place}{name}": getattr(face, name) for place, face in faces.items() for name in face.__all__}
    public |= {f"training.loader.{name}": getattr(nb.training.loader, name) for name in ("check", "benchmark_workers", "settings")}
    functions = {name: one for name, one in public.items() if inspect.isfunction(one)}
    shown = {name for name, one in functions.items() if "operation(" in inspect.getsource(one)}
    silenced = {name for name, one in functions.items() if "progress" in inspect.signature(one).parameters}

    assert silenced >= LONG | shown - {"training.limit_memory"}


def test_one_place_renders_every_report():
    """No report marks or escapes itself: all come from one place. In text gates and lanes fold tables and a note lists its marks."""
    for module in pkgutil.walk_packages(nb.__path__, "openmed_nb."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # Pictures and callbacks need an extra.
                importlib.import_module(module.name)
    forms = ("__str__", "_repr_html_", "marked", "_repr_mimebundle_")
    ours = [kind for kind in subclasses_of(Displayable) if kind.__module__.startswith("openmed_nb.")]
    own = {f"{kind.__name__}.{name}" for kind in ours for name in forms if name in vars(kind)}

    assert own == {"AnnotatedText.__str__", "Gates.__str__", "Lanes.__str__"}


@pytest.mark.parametrize("simulated", [False, True])
def test_marks_of_the_simulation(simulated):
    """A report with simulated measurements is marked in its title and first sentence, as text and as HTML."""

    @dataclasses.dataclass(frozen=True, repr=False)
    class Seen(Displayable):
        simulated: bool

        def to_report(self):
            return Report("Seen on mps", ("One row.",))

    seen = Seen(simulated)
    assert str(seen).splitlines()[0] == ("Seen on mps (SIMULATED)" if simulated else "Seen on mps")
    assert [SIMULATION_NOTICE in shown for shown in (str(seen), seen._repr_html_())] == [simulated] * 2
    assert seen.to_dict() == {"simulated": simulated}
