"""Public API: names, signatures, parameters that functions share, and the rendering of reports."""

import contextlib
import importlib
import inspect
import pkgutil

import openmed_nb as nb
from helpers.public_api import LOADER, PUBLIC
from openmed_nb._render.display import Displayable, JsonMixin


def subclasses_of(cls):
    """Yield all direct and indirect subclasses of a class."""
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses_of(subclass)


def signature_of(obj):
    """Return the signature of a function or class without annotations and with simple defaults, empty for errors and reports."""
    if isinstance(obj, type) and issubclass(obj, (Exception, JsonMixin)):
        return ""
    simple_types = (bool, int, float, str, type(None), tuple)
    parameters = [
        parameter.replace(
            annotation=parameter.empty,
            default=parameter.default if isinstance(parameter.default, (*simple_types, type)) else ...,
        )
        for parameter in inspect.signature(obj).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def test_public_signatures_are_unchanged(as_recorded):
    """After a change, rewrite the snapshot with ``--record``; its diff shows what a caller has to change."""
    signatures = {name: signature_of(value) for name, value in sorted(PUBLIC.items())}
    as_recorded("public_signatures.json", signatures)


def test_public_names_have_docstrings():
    """Every public name, and every public method and property of a public class, has a docstring."""
    methods = [
        (f"{name}.{member}", value)
        for name, cls in PUBLIC.items()
        if isinstance(cls, type)
        for member, value in inspect.getmembers(cls)
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property))
    ]
    assert [name for name, value in (*PUBLIC.items(), *methods) if not inspect.getdoc(value)] == []


def test_parameters_have_the_same_meaning_everywhere():
    """device, model, texts, training and seconds have the same default and kind in every function."""
    parameters_by_function = {
        name.rpartition(".")[2]: inspect.signature(value).parameters
        for name, value in {**PUBLIC, **LOADER}.items()
        if not name.startswith("compat.")
        and not (isinstance(value, type) and issubclass(value, (JsonMixin, Exception)))
    }

    def collect(parameter_name, attribute):
        return {
            name: getattr(parameters[parameter_name], attribute)
            for name, parameters in parameters_by_function.items()
            if parameter_name in parameters
        }

    required = inspect.Parameter.empty
    assert {name for name, default in collect("device", "default").items() if default is not None} == {"use"}
    assert collect("devices", "default") == {"compare": None}
    assert set(collect("training", "default").values()) == {False}
    assert set(collect("seconds", "default").values()) == {30.0}
    assert set(collect("texts", "annotation").values()) == {"Any", "Iterable[Any] | None"}
    assert set(collect("model", "default").values()) <= {None, required}
    parameters_before_model = {
        name: [*parameters][: [*parameters].index("model")]
        for name, parameters in parameters_by_function.items()
        if "model" in parameters
    }
    assert {name: names for name, names in parameters_before_model.items() if names} == {
        "annotate": ["texts"],
        "handoff": ["folder"],
        "logbook": ["reports"],
        "report": ["folder"],
    }


def test_reports_are_rendered_in_one_place():
    """Reports do not implement rendering or escaping, except for the text of annotated notes and a widget."""
    for module in pkgutil.walk_packages(nb.__path__, "openmed_nb."):
        if not module.name.endswith("__main__"):
            with contextlib.suppress(ModuleNotFoundError):  # Charts and callbacks require optional dependencies.
                importlib.import_module(module.name)
    rendering_methods = ("__str__", "_repr_html_", "marked", "_repr_mimebundle_")
    package_classes = [cls for cls in subclasses_of(Displayable) if cls.__module__.startswith("openmed_nb.")]
    overridden_methods = {
        f"{cls.__name__}.{name}" for cls in package_classes for name in rendering_methods if name in vars(cls)
    }

    # LiveNotes adds a widget to the text and the HTML that Displayable renders.
    assert overridden_methods == {
        "AnnotatedText.__str__",
        "LiveNotes._repr_mimebundle_",
    }
