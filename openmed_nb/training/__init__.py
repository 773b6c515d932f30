"""Train without memory creeping up: epoch boundaries, the memory curve, steps that fit, guards, loaders, callbacks."""

from .._utils.lazy import face

__getattr__, __dir__, __all__ = face(__name__, __file__)
