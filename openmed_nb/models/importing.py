"""Importing and using transformers: quickly, quietly, and with an error of ours where it fails."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

from ..devices.backend import import_torch
from ..errors import ModelError, cause


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Keep the garbage collector from running while transformers is imported, which saves a fifth of the time.

    Importing makes some hundred thousand objects that stay, and the collector would look through them again and again;
    the code of a model's family is imported with its load.
    ``benchmarks/startup.py`` measures it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@collector_at_rest()
def import_transformers() -> None:
    """Import torch, and what of transformers a load needs.

    Raises:
        TorchUnusable: Where torch cannot be imported.
        ModelError: Where transformers cannot, for instance because an earlier import was interrupted.
    """
    if sys.flags.optimize > 1:  # transformers' auto_docstring reads the docstrings of its classes while it is imported.
        what = "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), and transformers needs its own."
        raise ModelError(what, "Run Python without that option, or with -O.")
    import_torch()
    try:
        from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer  # noqa: F401
    except Exception as error:
        # A damaged installation, or one that was interrupted while it was imported, fails in any way.
        what = f"transformers cannot be imported: {cause(error)}."
        raise ModelError(what, "Restart the kernel; if it fails again, reinstall transformers.") from error


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bar and warnings during a load, and give them back as they were.

    What its warnings say of missing weights is an error here.
    """
    from transformers.utils import logging

    bar_was_on, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar_was_on:
            logging.enable_progress_bar()


@contextlib.contextmanager
def without_kernels(trusted: bool) -> Iterator[None]:
    """Keep transformers from fetching native code from the hub during the load of a model that was not allowed by name.

    Where the package ``kernels`` is installed, some families ask it for code that no setting names: falcon and gpt_neo
    while they are imported, mra and yoso while they are built. They do without where it cannot be had.
    """
    from transformers.integrations import hub_kernels

    kernels = sys.modules.get("kernels")
    fetch = getattr(kernels, "get_kernel", None)
    if trusted or fetch is None:
        yield
        return
    places = [
        (module, name) for module in (kernels, hub_kernels) for name, value in vars(module).items() if value is fetch
    ]
    for place in places:
        setattr(*place, refuse_kernel)
    try:
        yield
    finally:
        for place in places:
            setattr(*place, fetch)


def refuse_kernel(*_arguments: Any, **_options: Any) -> Any:
    """Refuse to fetch native code.

    Raises:
        ImportError: Always.
    """
    raise ImportError("No code is fetched for a model that is not allowed by name.")
