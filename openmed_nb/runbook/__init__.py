"""Measure and judge: is this device right, with figures, as values that can be shown, compared and handed on."""

from .._utils.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
