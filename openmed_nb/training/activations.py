"""Activation checkpointing: less memory for more time, by computing activations again in the backward pass.

On MPS torch does not keep the state of the random numbers for the second time, so that dropout would fall on other
places than in the loss and gradients would be wrong without an error (pytorch#127676, #194478, open in torch 2.14).
Here that state is kept, for models of transformers and for plain modules.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._render.display import Displayable, Report
from .._utils.text import describe_value, short_type_name
from ..devices.backend import get_rng_states, use_rng_states
from ..errors import ConfigurationError

if TYPE_CHECKING:
    import torch

# What is set on a module while its activations are not kept: here, and by transformers.
CHECKPOINTING_ATTRIBUTES = (
    "forward",
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
)
# Under this name a module that is on holds what it had of these: plain values, so that it can be copied and saved.
SAVED_STATE_ATTRIBUTE = "_before_checkpointing"


@dataclass(frozen=True, repr=False)
class ActivationCheckpointing(Displayable):
    """The switch, which is on; ``off``, or the end of a ``with`` block, puts every module back as it was.

    Attributes:
        modules: The names of the modules whose activations are computed again.
    """

    modules: tuple[str, ...]
    _changed: tuple[torch.nn.Module, ...]

    JSON_EXCLUDE = ("_changed",)

    def disable(self) -> None:
        """Keep activations again; a second call changes nothing."""
        _restore_attributes(self._changed)

    def __enter__(self) -> ActivationCheckpointing:  # noqa: PYI034 - Python 3.10 has no Self
        return self

    def __exit__(self, *_error: object) -> None:
        self.disable()

    def to_report(self) -> Report:
        """Return which modules compute their activations again."""
        count = len(self.modules)
        named = ", ".join(self.modules[:3]) + (f" and {count - 3} more" if count > 3 else "")  # noqa: PLR2004
        sentence = "In training their activations are computed again in the backward pass: less memory, more time."
        return Report(f"Activation checkpointing: {named}", (sentence,))


def checkpoint_activations(model: torch.nn.Module, *names: str) -> ActivationCheckpointing:
    """Compute activations again in the backward pass of training, instead of keeping them.

    Gradients stay the same, with dropout too. Modules that are on already stay on once, and the new switch puts back what
    they were before the first, so that a cell can be run again. On MPS torch refuses to compile such a model.

    Args:
        model: A model of transformers, or any module.
        names: Which modules, such as ``"encoder.layers"``; those of a list are taken one by one. Needed for plain
            modules; a model of transformers knows its own.

    Returns:
        The switch, for a ``with`` block or for its ``off()``.

    Raises:
        ConfigurationError: For a value that is not a module, for a name that the model does not have, for a plain module
            without names, for a module inside of one that is on or named, for a model of transformers that cannot do it,
            and for modules with batch normalisation, whose running mean would be updated twice.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> with checkpoint_activations(model, "0", "1") as switch:
        ...     model(torch.ones(4, 2)).sum().backward()
        >>> switch.modules
        ('0', '1')
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{short_type_name(model)} has no modules.", "Pass the model itself, a torch.nn.Module."
        )
    if not names and hasattr(model, "supports_gradient_checkpointing"):
        return _transformers(model)
    chosen = _select_modules(model, names)
    changed = tuple(chosen.values())
    _save_attributes(changed)
    for module in changed:
        module.forward = functools.partial(_in_training, module, module.forward)
    return ActivationCheckpointing(tuple(chosen), changed)


def _transformers(model: Any) -> ActivationCheckpointing:
    """Switch it on the way transformers does; the hooks that this leaves on the embeddings are removed by ``off``."""
    if not model.supports_gradient_checkpointing:
        what = f"{short_type_name(model)} has no activation checkpointing of its own."
        raise ConfigurationError(what, "Name modules of it instead.")
    changed = tuple(model.modules())
    _save_attributes(changed)
    # The new name came within 5, where the old one then warns.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    names = []
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False):
            module._gradient_checkpointing_func = functools.partial(call_checkpointed, model)  # noqa: SLF001
            names.append(name)
    return ActivationCheckpointing(tuple(names), changed)


def _select_modules(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.nn.Module]:
    """Return the modules of these names, those of lists one by one; none may be computed wrongly or a third time."""
    import torch
    from torch.nn.modules.batchnorm import _NormBase

    known = dict(model.named_modules())
    some = ", ".join(repr(name) for name in known if name)[:120] or "those of another model"
    chosen: dict[str, torch.nn.Module] = {}
    for name in names:
        if not isinstance(name, str) or name not in known or not name:
            raise ConfigurationError(f"The model has no module {describe_value(name)}.", f"Use some of {some}.")
        listed = isinstance(known[name], (torch.nn.ModuleList, torch.nn.ModuleDict))
        chosen |= {f"{name}.{key}": one for key, one in known[name].named_children()} if listed else {name: known[name]}
    if not chosen:
        raise ConfigurationError("No module was named.", f"Name some, such as {some}.")
    for name, module in chosen.items():
        if any(isinstance(part, _NormBase) and part.track_running_stats for part in module.modules()):
            what = f"Module {name!r} has batch normalisation, whose running mean would be updated twice in each step."
            raise ConfigurationError(what, "Name modules without it, or use torch.nn.GroupNorm.")
    on = {
        name
        for name, module in known.items()
        if SAVED_STATE_ATTRIBUTE in vars(module)
        and ("forward" in vars(module) or getattr(module, "gradient_checkpointing", False))
    }
    for inner, outer in itertools.permutations(sorted({*chosen, *on}), 2):
        if inner.startswith(f"{outer}."):
            what = f"Module {inner!r} is a part of {outer!r}, and would be computed a third time."
            raise ConfigurationError(what, "Name one of them, and switch the other off where it is on.")
    return chosen


def _save_attributes(modules: tuple[Any, ...]) -> None:
    """Let modules hold what they had of their own before the first switch."""
    _restore_attributes(modules)
    for module in modules:
        vars(module)[SAVED_STATE_ATTRIBUTE] = {
            name: vars(module)[name] for name in CHECKPOINTING_ATTRIBUTES if name in vars(module)
        }


def _restore_attributes(modules: Iterable[Any]) -> None:
    """Give the modules that are on what they had of their own before."""
    for module in modules:
        own = vars(module)
        if (former := own.pop(SAVED_STATE_ATTRIBUTE, None)) is None:
            continue
        if own.get("_require_grads_hook") is not former.get("_require_grads_hook"):
            module.disable_input_require_grads()
        for name in CHECKPOINTING_ATTRIBUTES:
            own.pop(name, None)
        own.update(former)


def call_checkpointed(model: torch.nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of a model returns, without keeping what it computes on the way.

    torch keeps the random numbers of the CPU and of CUDA itself; only MPS gets a context, with which ``torch.compile``
    refuses the call.
    """
    from torch.utils.checkpoint import checkpoint

    again = functools.partial(checkpoint, function, *args, use_reentrant=False, **kwargs)
    # A module without weights, such as dropout, computes where its inputs are.
    values = (*itertools.islice(model.parameters(), 1), *args, *kwargs.values())
    if any(getattr(getattr(value, "device", None), "type", None) == "mps" for value in values):
        return again(context_fn=_contexts_of_mps)
    return again()


def _contexts_of_mps() -> tuple[contextlib.AbstractContextManager[Any], ...]:
    """Return the contexts of the first pass and of its repetition."""
    return contextlib.nullcontext(), PreserveRngState("mps")


def _in_training(module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a module's forward, in training without keeping what it computes on the way."""
    import torch

    if module.training and torch.is_grad_enabled():
        return call_checkpointed(module, forward, *args, **kwargs)
    return forward(*args, **kwargs)


class PreserveRngState(contextlib.ExitStack):
    """A context in which random numbers are those that follow now; entered again for every backward pass of a graph."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._states = get_rng_states(device)

    def __enter__(self) -> PreserveRngState:  # noqa: PYI034 - Python 3.10 has no Self
        self.enter_context(use_rng_states(self._states))
        return self
