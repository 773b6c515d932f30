"""Layers of the package: a module imports only from its own and lower layers, and no heavy package at import time."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "openmed_nb"

HEAVY = {
    *("torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "huggingface_hub", "safetensors"),
    *("tokenizers", "openmed", "anywidget", "ipywidgets", "numpy", "psutil"),
    *("dask", "distributed", "asyncssh", "pandas"),
}
LAYERS = (
    "_utils.clock",
    "_utils.text",
    "errors",
    "_utils",
    "_utils.lazy",
    "_render",
    "_utils.plain",
    "_events",
    "_utils.child",
    "devices",
    "simulation",
    "models",
    "session",
    "annotation",
    "distributed",
    "_annotate",
    "training",
    "runbook.bench",
    "runbook.checks",
    "runbook.verdict",
    "runbook.records",
    "runbook",
    "notebook",
    "openmed_nb",
)
"""From the lowest to the highest layer. ``_annotate`` is above the workers that may run it. The last layer is the public API."""


def module_name(file):
    """Return the dotted name of a file inside the package; empty for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def layer_of(module):
    """Return the index of the layer of a module, by the most specific name."""
    candidates = [layer for layer in LAYERS if module == layer or module.startswith(f"{layer}.")]
    return LAYERS.index(max(candidates, key=len, default="openmed_nb"))


@cache
def parse_file(file):
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text("utf-8"))


def package_imports(file):
    """Yield the modules of this package that a file imports, including imports inside functions."""
    module = module_name(file)
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(parse_file(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [part for part in package if part][: len(package) - node.level + 1]
            origin = [*base, *(node.module.split(".") if node.module else [])]
            yield from (resolve([*origin, alias.name]) for alias in node.names)


def resolve(parts):
    """Return the module of a dotted path, whose last part may be a name in the module."""
    path = PACKAGE.joinpath(*parts)
    return ".".join(parts if path.is_dir() or path.with_suffix(".py").is_file() else parts[:-1])


def import_time_names(node):
    """Yield the packages that are imported at import time: outside functions and ``TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield (child.module or "").split(".")[0]
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (name for statement in child.orelse for name in import_time_names(statement))
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from import_time_names(child)


def test_imports_point_to_lower_layers():
    upwards = [
        (module, imported)
        for module, file in MODULES.items()
        for imported in package_imports(file)
        if layer_of(imported) > layer_of(module)
    ]

    assert upwards == []


def test_imports_have_no_cycles():

    TopologicalSorter({module: set(package_imports(file)) - {module} for module, file in MODULES.items()}).prepare()


ALLOWED = {
    "annotation": {"numpy"},
    "annotation.browsing": {"anywidget", "numpy"},
    "annotation.pipeline": {"numpy", "torch", "transformers"},
    "notebook.panel.view": {"anywidget", "ipywidgets"},
    "runbook.checks.silent_errors": {"torch"},
    "runbook.checks.operator_tracer": {"torch"},
    "runbook.bench.profile_watch": {"torch"},
    "simulation.device": {"torch"},
    "simulation.modes": {"torch"},
    "simulation.operators": {"torch"},
    "training.live": {"ipywidgets"},
}
"""Imports that are allowed in files that are themselves imported inside functions: arrays, base classes, and what only such files import."""


def test_import_time_is_light():
    heavy = {
        module: set(import_time_names(parse_file(file)))
        & HEAVY - ALLOWED.get(module, ALLOWED.get(module.partition(".")[0], set()))
        for module, file in MODULES.items()
    }

    assert {module: names for module, names in heavy.items() if names} == {}


def test_lowest_layer_imports_nothing():
    assert list(package_imports(PACKAGE / "_utils" / "text.py")) == []
    assert set(package_imports(PACKAGE / "errors.py")) == {"_utils.text"}
    assert list(package_imports(PACKAGE / "_render" / "drawing.py")) == []
    assert set(package_imports(PACKAGE / "_render" / "display.py")) == {
        "_render.drawing",
        "_render.values",
        "_utils.text",
    }
    assert set(package_imports(PACKAGE / "_render" / "values.py")) == {"_render.drawing", "_utils.validation"}


def test_package_is_imported_relatively():

    assert [module for module, file in MODULES.items() if "openmed_nb" in import_time_names(parse_file(file))] == []


def test_layer_of_module():
    layers = {
        "errors": "errors",
        "_render.display": "_render",
        "devices.choice": "devices",
        "models": "models",
        "session": "session",
        "notebook.magics": "notebook",
        "__main__": "openmed_nb",
        "": "openmed_nb",
    }

    assert {module: LAYERS[layer_of(module)] for module in layers} == layers


def test_imports_in_functions_are_checked():
    session = [file for module, file in MODULES.items() if LAYERS[layer_of(module)] == "session"]

    assert {"devices.backend", "errors", "models.store"} <= {
        module for file in session for module in package_imports(file)
    }
    assert list(import_time_names(ast.parse("try:\n import torch.nn\nexcept ImportError:\n pass"))) == ["torch"]
