"""Dropout that does something else than it seems: in a pass without gradients, and between the layers of an LSTM."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..devices.request import kind_of
from ..errors import OpenMedWarning
from .model_limits import unwrapped

if TYPE_CHECKING:
    import torch

LSTM_REPAIRED = (2, 14)
"""The first release of torch in which MPS computes the gradients of an LSTM with dropout rightly (pytorch#190056)."""

LSTM_REMEDY = "Set its dropout to 0, put nn.Dropout between LSTMs of one layer, or use torch 2.14."

ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
"""The names that configurations of transformers have for dropout in attention."""


def active_dropout(model: torch.nn.Module) -> bool:
    """Tell whether a pass would leave numbers out at random: some layer is in train mode and has dropout.

    Example:
        >>> import torch
        >>> layer = torch.nn.Dropout(0.1)
        >>> active_dropout(layer), active_dropout(layer.eval())
        (True, False)
    """
    from torch.nn.modules.dropout import _DropoutNd

    layers = (layer for layer in model.modules() if isinstance(layer, _DropoutNd) and layer.training)
    return any(layer.p > 0 for layer in layers) or (model.training and attention_dropout(model) > 0)


def attention_dropout(model: Any) -> float:
    """Return how much a model of transformers leaves out in attention."""
    config = getattr(unwrapped(model), "config", None)
    return max((float(getattr(config, name, None) or 0) for name in ATTENTION_DROPOUT), default=0.0)


def without_gradients(device: str, attention: str | None, attention_dropout: float) -> str:
    """Return what to know of a pass in train mode without gradients: what happens, and what to do.

    Example:
        >>> without_gradients("cpu", "sdpa", 0.1).partition(":")[0]
        'A forward pass ran in train mode with dropout and without gradients'
    """
    what = "A forward pass ran in train mode with dropout and without gradients: its results are random."
    if kind_of(device) == "mps" and attention == "sdpa" and attention_dropout > 0:
        what += " On MPS attention raises here: scaled_dot_product_attention for MPS does not support dropout."
        return f"{what} Call model.eval() first; where it is meant, load the model with attn_implementation='eager'."
    meant = "Guards(off=('dropout_without_gradients',))"
    return f"{what} Call model.eval() first; where it is meant, use {meant}."


class DropoutWatch:
    """Warns once of a pass in train mode with dropout and without gradients; a forward pre-hook.

    It goes along where a model is copied or saved, and is then one that never warns.

    Args:
        device: The device that the model computes on; ``None`` never to warn.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device

    def __reduce__(self) -> tuple[Any, ...]:
        return DropoutWatch, (None,)

    def __call__(self, module: torch.nn.Module, _args: Any) -> None:
        """Look at a pass that begins."""
        import torch

        if self.device is None or not module.training or torch.is_grad_enabled() or not active_dropout(module):
            return
        attention = getattr(getattr(unwrapped(module), "config", None), "_attn_implementation", None)
        advice = without_gradients(self.device, attention, attention_dropout(module))
        self.device = None
        warnings.warn(advice, OpenMedWarning, stacklevel=2)


def watch_dropout(model: torch.nn.Module, device: str, *inner: str) -> Callable[[], None]:
    """Warn once of a pass in train mode with dropout and without gradients; return what ends the watch.

    Args:
        model: The model.
        device: The device that it computes on.
        inner: The names of modules in it that may be called by themselves.
    """
    watch = DropoutWatch(device)
    hooks = [model.get_submodule(name).register_forward_pre_hook(watch) for name in ("", *inner)]

    def end() -> None:
        for hook in hooks:
            hook.remove()

    return end


def wrong_lstm(model: torch.nn.Module, device: str, torch_release: tuple[int, ...]) -> str | None:
    """Return the name of the first LSTM whose gradients MPS computes wrongly; ``None`` where there is none.

    Example:
        >>> import torch
        >>> tagger = torch.nn.Sequential(torch.nn.LSTM(4, 4, num_layers=2, dropout=0.1))
        >>> wrong_lstm(tagger, "mps", (2, 13)), wrong_lstm(tagger, "mps", (2, 14)), wrong_lstm(tagger, "cpu", (2, 13))
        ('0', None, None)
    """
    import torch

    if kind_of(device) != "mps" or tuple(torch_release[:2]) >= LSTM_REPAIRED:
        return None
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, torch.nn.LSTM))
    return next((name or "the model" for name, layer in layers if layer.num_layers > 1 and layer.dropout > 0), None)


def lstm_advice(name: str) -> str:
    """Return what to know of that LSTM: what happens, and what to do.

    Example:
        >>> lstm_advice("encoder").partition(":")[0]
        'The gradients of an LSTM with dropout (encoder) will be wrong'
    """
    what = f"The gradients of an LSTM with dropout ({name}) will be wrong: MPS forgets it on the way back (pytorch#190056)."
    return f"{what} {LSTM_REMEDY}"
