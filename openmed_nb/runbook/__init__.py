"""Benchmarks, checks and reports that evaluate a device."""

from .._utils.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
