"""Train without memory creeping up: epoch boundaries, the memory curve, steps that fit, guards, loaders, callbacks."""

from .._utils.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
