"""The house: a floor imports only from the floors below it, and no heavy package while it is being imported."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "openmed_nb"

HEAVY = {
    *("torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "huggingface_hub", "safetensors"),
    *("tokenizers", "openmed", "ipywidgets", "matplotlib", "numpy", "psutil"),
    *("dask", "distributed", "asyncssh", "pandas"),
}
FLOORS = (
    "_utils.lazy",
    "_utils.clock",
    "_utils.text",
    "errors",
    "_utils",
    "_render",
    "_utils.plain",
    "_events",
    "devices",
    "simulation",
    "models",
    "session",
    "annotation",
    "distributed",
    "_annotate",
    "training",
    "runbook",
    "notebook",
    "openmed_nb",
)
"""From the ground up; ``_annotate`` is above the workers that may do its work. The last is the package's own face."""


def module_of(file):
    """Return the dotted name of a file inside the package, empty for the package itself."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def floor_of(module):
    """Return the number of the floor on which a module stands, the most specific name counting."""
    homes = [floor for floor in FLOORS if module == floor or module.startswith(f"{floor}.")]
    return FLOORS.index(max(homes, key=len, default="openmed_nb"))


@cache
def tree_of(file):
    """Return the syntax tree of a file."""
    return ast.parse(file.read_text("utf-8"))


def package_imports(file):
    """Yield the modules of this package that a file imports anywhere, also inside functions."""
    module = module_of(file)
    package = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = [part for part in package if part][: len(package) - node.level + 1]
            origin = [*base, *(node.module.split(".") if node.module else [])]
            yield from (resolve([*origin, alias.name]) for alias in node.names)


def resolve(parts):
    """Return the module that a dotted path means: the path itself, or without its last part, which is then a name."""
    path = PACKAGE.joinpath(*parts)
    return ".".join(parts if path.is_dir() or path.with_suffix(".py").is_file() else parts[:-1])


def import_time_names(node):
    """Yield the packages that are imported while a file is imported: outside of functions and of TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.split(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and not child.level:
            yield (child.module or "").split(".")[0]
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (name for other in child.orelse for name in import_time_names(other))
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from import_time_names(child)


def test_imports_go_down():
    """A file imports from its own floor and those below it, never from one above, not even inside a function."""
    upwards = [
        (module, imported)
        for module, file in MODULES.items()
        for imported in package_imports(file)
        if floor_of(imported) > floor_of(module)
    ]

    assert upwards == []


def test_no_cycles():
    """No file imports itself by way of others, not even inside functions or for types."""
    imports = {module: set(package_imports(file)) - {module} for module, file in MODULES.items()}

    TopologicalSorter(imports).prepare()


ALLOWED = {
    "annotation": {"numpy"},
    "annotation.pipeline": {"numpy", "torch", "transformers"},
    "notebook.panel.view": {"ipywidgets"},
    "runbook.checks.doctor.silent_errors": {"torch"},
    "runbook.checks.operators.recorders": {"torch"},
    "runbook.checks.precision.rounding": {"torch"},
    "runbook.bench.profile_watch": {"torch"},
    "simulation.device": {"torch"},
    "simulation.modes": {"torch"},
    "training.live": {"ipywidgets"},
    "training.plot": {"matplotlib"},
}
"""What may be imported by files that are themselves imported only in functions: arrays, and a subclass's base class."""


def test_nothing_heavy_at_import_time():
    """Importing a file imports no heavy package, but for the floor that computes on arrays."""
    heavy = {
        module: set(import_time_names(tree_of(file))) & HEAVY - allowed_in(module) for module, file in MODULES.items()
    }

    assert {module: names for module, names in heavy.items() if names} == {}


def allowed_in(module):
    """Return the heavy packages that a module may import: its own, or else those of its folder."""
    return ALLOWED.get(module, ALLOWED.get(module.partition(".")[0], set()))


def test_ground_floor_imports_nothing():
    """Errors and pictures import nothing of the package, and the rendering only these."""
    assert list(package_imports(PACKAGE / "_utils" / "text.py")) == []
    assert set(package_imports(PACKAGE / "errors.py")) == {"_utils.text"}
    assert list(package_imports(PACKAGE / "_render" / "drawing.py")) == []
    assert set(package_imports(PACKAGE / "_render" / "display.py")) == {"_render.drawing", "_utils.text"}


def test_package_is_imported_relatively():
    """No file imports the package by its full name, so that every import shows its floor."""
    absolute = [module for module, file in MODULES.items() if "openmed_nb" in import_time_names(tree_of(file))]

    assert absolute == []


def test_floor_of_a_module():
    """Every module stands on the floor that its folder names."""
    floors = {
        "errors": "errors",
        "_render.display": "_render",
        "devices.choice": "devices",
        "models": "models",
        "session": "session",
        "notebook.magics": "notebook",
        "__main__": "openmed_nb",
        "": "openmed_nb",
    }

    assert {module: FLOORS[floor_of(module)] for module in floors} == floors


def test_imports_are_seen():
    """The check sees an import from above that hides in a function."""
    session = [file for module, file in MODULES.items() if FLOORS[floor_of(module)] == "session"]

    assert {"devices.backend", "errors", "models.store"} <= {
        module for file in session for module in package_imports(file)
    }
    assert list(import_time_names(ast.parse("try:\n import torch.nn\nexcept ImportError:\n pass"))) == ["torch"]
