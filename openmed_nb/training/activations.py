"""Activation checkpointing: recompute activations in the backward pass to save memory at the cost of time.

On MPS, torch does not restore the random number state for the recomputation. Dropout would then drop different elements
than in the loss, and gradients would be silently wrong (pytorch#127676, #194478, open in torch 2.14). This module
restores that state.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .._render.display import Displayable, Report
from .._utils.text import short_type_name
from ..devices.backend import get_rng_states, use_rng_states
from ..devices.registry import get_device
from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Result = TypeVar("Result")


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing(Displayable):
    """Result of :func:`checkpoint_activations`.

    Attributes:
        modules: Names of the modules whose activations are recomputed.
    """

    modules: tuple[str, ...]

    def to_report(self) -> Report:
        """Return the names of the modules that recompute their activations."""
        count = len(self.modules)
        named = ", ".join(self.modules[:3]) + (f" and {count - 3} more" if count > 3 else "")  # noqa: PLR2004
        sentence = "Training recomputes their activations in the backward pass, which saves memory but takes more time."
        return Report(f"Activation checkpointing: {named}", (sentence,))


def checkpoint_activations(model: PreTrainedModel) -> ActivationCheckpointing:
    """Recompute activations in the backward pass of training instead of storing them.

    Gradients are unchanged, including with dropout. A cell with this call can be run again. On MPS, torch cannot compile
    a model with checkpointing.

    Args:
        model: Model of transformers, which defines the modules.

    Returns:
        The names of the modules.

    Raises:
        ConfigurationError: If ``model`` is not a model of transformers, or does not support checkpointing.

    Example:
        >>> import openmed_nb as nb
        >>> model = nb.load_model("bundled_small", device="cpu")["model"]
        >>> checkpoint_activations(model).modules[1]
        'bert.encoder.layer.0'
        >>> model.gradient_checkpointing_disable()
    """
    if not getattr(model, "supports_gradient_checkpointing", False):
        message = f"{short_type_name(model)} does not support activation checkpointing."
        remedy = "Pass a model of transformers. In another module, call torch.utils.checkpoint.checkpoint."
        raise ConfigurationError(message, remedy)
    if not any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        # transformers 5 added the new name, and from then on the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    names = []
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = functools.partial(_call_checkpointed, model)  # noqa: SLF001
            names.append(name)
    return ActivationCheckpointing(tuple(names))


def _call_checkpointed(model: torch.nn.Module, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function of a model without storing its intermediate activations.

    torch itself restores the random number state of the CPU and of CUDA. Only MPS needs a context function, which
    ``torch.compile`` does not support.
    """
    from torch.utils.checkpoint import checkpoint

    if not get_device(next(model.parameters()).device).checkpoints_restore_rng:
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _PreserveRngState("mps"))
    result: Result = checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result


class _PreserveRngState(contextlib.ExitStack):
    """Context manager that replays the random numbers that follow its creation; it can be entered repeatedly."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._states = get_rng_states(device)

    def __enter__(self) -> _PreserveRngState:  # noqa: PYI034 - Python 3.10 has no Self
        self.enter_context(use_rng_states(self._states))
        return self
