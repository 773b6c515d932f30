"""Activation checkpointing: recompute activations in the backward pass to save memory at the cost of time.

On MPS, torch does not restore the random number state for the recomputation. Dropout would then drop different elements
than in the loss, and gradients would be silently wrong (pytorch#127676, #194478, open in torch 2.14). This module
restores that state, for models of transformers and for plain modules.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from .._render.display import Displayable, Report
from .._utils.text import describe_value, short_type_name
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


def checkpoint_activations(model: torch.nn.Module, *names: str) -> ActivationCheckpointing:
    """Recompute activations in the backward pass of training instead of storing them.

    Gradients are unchanged, including with dropout. A module that is already enabled is not wrapped again, so that a cell
    can be run again. On MPS, torch cannot compile a model with checkpointing.

    Args:
        model: Model of transformers, or any other module.
        names: Names of modules, such as ``"encoder.layers"``. The modules of a list are checkpointed one by one.
            Required for plain modules; a model of transformers defines its own.

    Returns:
        The names of the modules.

    Raises:
        ConfigurationError: If ``model`` is not a module, does not have a named module, or is a plain module without
            names.
            Also if a module is inside another one that is enabled or named, if a model of transformers does not support
            checkpointing, or if a module uses batch normalization. Its running mean would be updated twice.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> checkpoint_activations(model, "0", "1").modules
        ('0', '1')
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{short_type_name(model)} is not a torch.nn.Module.", "Pass the model itself, a torch.nn.Module."
        )
    if not names and hasattr(model, "supports_gradient_checkpointing"):
        return _checkpoint_transformers(model)
    selected = _select_modules(model, names)
    for module in selected.values():
        if not _is_enabled(module):
            module.forward = functools.partial(_forward_in_training, module, module.forward)
    return ActivationCheckpointing(tuple(selected))


def _checkpoint_transformers(model: PreTrainedModel) -> ActivationCheckpointing:
    """Enable checkpointing with the method of transformers."""
    if not model.supports_gradient_checkpointing:
        message = f"{short_type_name(model)} does not support activation checkpointing."
        raise ConfigurationError(message, "Name its modules instead.")
    if not any(map(_is_enabled, model.modules())):
        # transformers 5 added the new name, and from then on the old name warns.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    names = []
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = functools.partial(_call_checkpointed, model)  # noqa: SLF001
            names.append(name)
    return ActivationCheckpointing(tuple(names))


def _select_modules(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Validate the names and return their modules; the modules of a list are returned one by one."""
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    modules = dict(model.named_modules())
    examples = ", ".join(repr(name) for name in modules if name)[:120] or "those of another model"
    selected: dict[str, torch.nn.Module] = {}
    for name in names:
        if not isinstance(name, str) or name not in modules or not name:
            raise ConfigurationError(f"The model has no module {describe_value(name)}.", f"Use some of {examples}.")
        module = modules[name]
        if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            selected.update({f"{name}.{key}": child for key, child in module.named_children()})
        else:
            selected[name] = module
    if not selected:
        raise ConfigurationError("No module was named.", f"Name some, such as {examples}.")
    for name, module in selected.items():
        if any(isinstance(layer, _NormBase) and layer.track_running_stats for layer in module.modules()):
            message = (
                f"Module {name!r} has batch normalization, whose running mean would be updated twice in each step."
            )
            raise ConfigurationError(message, "Name modules without it, or use torch.nn.GroupNorm.")
    enabled = {name for name, module in modules.items() if _is_enabled(module)}
    for inner, outer in itertools.permutations(sorted({*selected, *enabled}), 2):
        if inner.startswith(f"{outer}."):
            message = f"Module {inner!r} is inside {outer!r} and would be computed a third time."
            raise ConfigurationError(message, "Name only one of them.")
    return selected


def _is_enabled(module: torch.nn.Module) -> bool:
    """Return whether the activations of a module are recomputed already."""
    forward = vars(module).get("forward")
    is_wrapped = isinstance(forward, functools.partial) and forward.func is _forward_in_training
    return is_wrapped or bool(getattr(module, "gradient_checkpointing", False))


def _call_checkpointed(model: torch.nn.Module, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function of a model without storing its intermediate activations.

    torch itself restores the random number state of the CPU and of CUDA. Only MPS needs a context function, which
    ``torch.compile`` does not support.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    values = (*itertools.islice(model.parameters(), 1), *args, *kwargs.values())
    # A module without weights, such as dropout, runs on the device of its inputs.
    devices = [get_device(value.device) for value in values if isinstance(value, torch.Tensor)]
    if not all(device.checkpoints_restore_rng for device in devices):
        kwargs["context_fn"] = lambda: (contextlib.nullcontext(), _PreserveRngState("mps"))
    result: Result = checkpoint(function, *args, use_reentrant=False, **kwargs)
    return result


def _forward_in_training(module: torch.nn.Module, forward: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Run the forward method of a module, in training without storing its activations."""
    import torch

    if module.training and torch.is_grad_enabled():
        return _call_checkpointed(module, forward, *args, **kwargs)
    return forward(*args, **kwargs)


class _PreserveRngState(contextlib.ExitStack):
    """Context manager that replays the random numbers that follow its creation; it can be entered repeatedly."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._states = get_rng_states(device)

    def __enter__(self) -> _PreserveRngState:  # noqa: PYI034 - Python 3.10 has no Self
        self.enter_context(use_rng_states(self._states))
        return self
