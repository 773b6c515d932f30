"""Import of the parts of transformers that a load needs, without work that no load needs.

transformers 5 does two things during its import that take a tenth of the time to the first entities each:

- It reads all files of its models twice to list their classes: for ``transformers`` and for ``transformers.models``.
- If scipy is installed, it imports ``scipy.optimize`` for the losses of object detection.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_SOLVER_MODULE = "scipy.optimize"


def import_model_code() -> None:
    """Import the classes that load any model, and the lists of the classes of all models."""
    import transformers

    if "transformers.models" not in sys.modules:
        with _reuse_import_structure(transformers):
            importlib.import_module("transformers.models")
    if "transformers.loss.loss_utils" not in sys.modules:
        with _defer_scipy():
            importlib.import_module("transformers.loss.loss_utils")
    importlib.import_module("transformers.modeling_utils")
    from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer  # noqa: F401


@contextlib.contextmanager
def _reuse_import_structure(transformers: ModuleType) -> Iterator[None]:
    """Let ``transformers.models`` use the list of classes that ``transformers`` has cached, instead of reading all files again."""
    from transformers.utils import import_utils

    models = Path(str(transformers.__file__)).parent / "models"
    define = import_utils.define_import_structure

    def define_from_cache(path: str, prefix: str | None = None) -> object:
        if Path(path) != models / "__init__.py" or prefix is not None:
            return define(path, prefix)
        structure = define(models, prefix="models")  # The arguments with which transformers has called it.
        return {
            backends: {
                module.removeprefix("models."): names
                for module, names in modules.items()
                if module.startswith("models.")  # transformers adds its other modules.
            }
            for backends, modules in structure.items()
        }

    import_utils.define_import_structure = define_from_cache
    try:
        yield
    finally:
        import_utils.define_import_structure = define


class _DeferredSolver(ModuleType):
    """Stands in for ``scipy.optimize`` until anything but its solver of assignment problems is used."""

    @staticmethod
    def linear_sum_assignment(*arguments: object, **options: object) -> object:
        """Call the function of scipy, which is imported on the first call."""
        return importlib.import_module(_SOLVER_MODULE).linear_sum_assignment(*arguments, **options)

    def __init__(self) -> None:
        super().__init__(_SOLVER_MODULE)
        self.thread_id = threading.get_ident()

    def __getattr__(self, name: str) -> object:
        if name == "__path__" and threading.get_ident() == self.thread_id:  # The import system looks for it.
            raise AttributeError(name)
        # Another release of transformers uses more of scipy, or another thread imports scipy at the same time.
        _remove_stand_in(self)
        return getattr(importlib.import_module(_SOLVER_MODULE), name)


def _remove_stand_in(module: ModuleType) -> None:
    if sys.modules.get(_SOLVER_MODULE) is module:
        del sys.modules[_SOLVER_MODULE]


@contextlib.contextmanager
def _defer_scipy() -> Iterator[None]:
    """Defer the import of ``scipy.optimize`` to the first use of a loss of object detection."""
    if _SOLVER_MODULE in sys.modules or importlib.util.find_spec("scipy") is None:
        yield
        return
    stand_in = _DeferredSolver()
    sys.modules[_SOLVER_MODULE] = stand_in
    try:
        yield
    finally:
        _remove_stand_in(stand_in)
