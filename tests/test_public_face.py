"""The public names and their signatures, what they have in common, and how every report is shown."""

import contextlib
import importlib
import inspect
import json
import pkgutil
from pathlib import Path

import openmed_nb as nb
from helpers.public_api import LOADER, PUBLIC
from openmed_nb._render.display import Displayable

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


def test_public_names_and_signatures_stay(request):
    """After a change, rewrite the snapshot with ``--record``; its diff shows what a caller has to change."""
    signatures = {name: signature_of(value) for name, value in sorted(PUBLIC.items())}
    if request.config.getoption("record"):
        SNAPSHOT.write_text(json.dumps(signatures, indent=1, ensure_ascii=False) + "\n", "utf-8")
    assert signatures == json.loads(SNAPSHOT.read_text("utf-8"))


def test_public_names_have_docstrings():
    """Every public name, and every public method and property of a public class, has a docstring."""
    methods = [
        (f"{name}.{member}", value)
        for name, kind in PUBLIC.items()
        if isinstance(kind, type)
        for member, value in inspect.getmembers(kind)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]
    assert [name for name, value in (*PUBLIC.items(), *methods) if not inspect.getdoc(value)] == []


def test_parameters_have_the_same_meaning_everywhere():
    """What is called device, model, texts, training, seconds or progress is the same in every function that takes it."""
    takes = {
        name.rpartition(".")[2]: inspect.signature(value).parameters
        for name, value in {**PUBLIC, **LOADER}.items()
        if not name.startswith("compat.")
        and not (isinstance(value, type) and issubclass(value, (Displayable, Exception)) and value is not nb.Guards)
    }

    def collect(word, what):
        return {name: getattr(parameters[word], what) for name, parameters in takes.items() if word in parameters}

    required = inspect.Parameter.empty
    assert {name for name, default in collect("device", "default").items() if default is not None} == {"use"}
    assert collect("devices", "default") == {"compare": None}
    assert set(collect("training", "default").values()) == {False}
    assert set(collect("seconds", "default").values()) == {30.0}
    assert set(collect("progress", "default").values()) == {True}
    assert set(collect("progress", "kind").values()) == {inspect.Parameter.KEYWORD_ONLY}
    assert set(collect("texts", "annotation").values()) == {"Any", "Iterable[Any] | None"}
    assert set(collect("model", "default").values()) <= {None, required}
    before = {
        name: [*parameters][: [*parameters].index("model")]
        for name, parameters in takes.items()
        if "model" in parameters
    }
    assert {name: names for name, names in before.items() if names} == {
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


def test_long_functions_can_be_silenced():
    """What takes long has ``progress=True``, which one may pass as False; no function that shows a line is without it."""
    functions = {name: value for name, value in {**PUBLIC, **LOADER}.items() if inspect.isfunction(value)}
    shown = {name for name, function in functions.items() if "operation(" in inspect.getsource(function)}
    silenced = {name for name, function in functions.items() if "progress" in inspect.signature(function).parameters}

    assert silenced >= LONG | shown - {"training.limit_memory"}


def test_reports_are_rendered_in_one_place():
    """No report marks or escapes itself: all come from one place. In text gates and lanes fold tables and a note lists its marks."""
    for module in pkgutil.walk_packages(nb.__path__, "openmed_nb."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # Pictures and callbacks need an extra.
                importlib.import_module(module.name)
    forms = ("__str__", "_repr_html_", "marked", "_repr_mimebundle_")
    ours = [kind for kind in subclasses_of(Displayable) if kind.__module__.startswith("openmed_nb.")]
    own = {f"{kind.__name__}.{name}" for kind in ours for name in forms if name in vars(kind)}

    # Pages add a widget to the text and the HTML that the one place renders.
    assert own == {"AnnotatedText.__str__", "Gates.__str__", "Lanes.__str__", "NotePages._repr_mimebundle_"}
