"""What comes with the ``cluster`` extra alone, and may not be installed."""

from __future__ import annotations

import importlib

from ...errors import ConfigurationError, cause


def import_extra(name: str, what: str) -> None:
    """Check that a package of the ``cluster`` extra is installed.

    Args:
        name: The package.
        what: What cannot be had without it, in words.

    Raises:
        ConfigurationError: Where it is not installed.

    Example:
        >>> import_extra("no_such_package", "A cluster needs it")
        Traceback (most recent call last):
        ...
        openmed_nb.errors.ConfigurationError: A cluster needs it: No module named 'no_such_package'. Install it: python -m pip install 'openmed-nb[cluster]'.
    """
    try:
        importlib.import_module(name)
    except ImportError as error:
        remedy = "Install it: python -m pip install 'openmed-nb[cluster]'."
        raise ConfigurationError(f"{what}: {cause(error)}.", remedy) from error
