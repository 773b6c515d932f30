"""Training without memory leaks: end-of-epoch hooks, memory curve, optimizer steps, guards, loaders, callbacks."""

from .._utils.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
