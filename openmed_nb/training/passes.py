"""The passes of one step, held until their gradients were looked at, so that a pass that went wrong can be repeated."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..devices.random_state import States, random_numbers_from, random_states
from ..devices.request import kind_of
from .nested import with_tensors

if TYPE_CHECKING:
    import torch

HELD = 32
"""The most passes that are held: those of one step with accumulation. What they hold are inputs, no activations."""


@dataclass(frozen=True)
class Pass:
    """What a forward pass was given.

    Attributes:
        args: Its arguments, cut off from any graph.
        kwargs: Its arguments by name.
        states: The random numbers with which it began.
        autocast: The type of numbers that autocast was set to; ``None`` where it was off.
        device: The kind of device, such as ``"mps"``.
        module: The name of the module that was called, in the watched model; empty for the model itself.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    states: States
    autocast: torch.dtype | None
    device: str
    module: str = ""

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name, those without one by their number."""
        return {**{f"argument {number}": value for number, value in enumerate(self.args)}, **self.kwargs}

    @contextmanager
    def conditions(self, model: torch.nn.Module) -> Iterator[None]:
        """Let a pass run as this one did; afterwards, buffers and random numbers are as they were before."""
        import torch

        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        with ExitStack() as stack:
            stack.enter_context(random_numbers_from(self.states))
            stack.enter_context(torch.enable_grad())
            if self.autocast is not None:
                stack.enter_context(torch.autocast(self.device, self.autocast))
            stack.callback(_put_back, buffers)
            yield


class PassRecorder:
    """Holds the passes that a model makes in training, from its hooks; a pass without gradients is none.

    It goes along where a model is copied or saved, and is then one that holds nothing.

    Args:
        device: The device that the model computes on; ``None`` to hold nothing.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self._depth = 0
        self.passes: deque[Pass] = deque(maxlen=HELD)
        self.losses: deque[torch.Tensor] = deque(maxlen=HELD)

    def __reduce__(self) -> tuple[Any, ...]:
        return PassRecorder, (None,)

    def watch(self, model: torch.nn.Module, *inner: str) -> Callable[[], None]:
        """Hold the passes of a model from now on; return what ends that.

        Args:
            model: The model.
            inner: The names of modules in it that may be called by themselves, past the model's own ``forward``.
        """
        hooks = []
        for name in ("", *inner):
            module, called = model.get_submodule(name), PassHooks(self, name)
            hooks.append(module.register_forward_pre_hook(called.before, with_kwargs=True))
            hooks.append(module.register_forward_hook(called.after, always_call=True))  # After an error, too.

        def end() -> None:
            for hook in hooks:
                hook.remove()

        return end

    def before(self, name: str, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hold what a pass is given, if it is not a part of another that is held."""
        import torch

        self._depth += 1
        if self.device is None or self._depth > 1 or not (model.training and torch.is_grad_enabled()):
            return
        kind = kind_of(self.device)
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        states = random_states(self.device)
        self.passes.append(Pass(detached(args), detached(kwargs), states, autocast, kind, name))

    def after(self, model: torch.nn.Module, output: Any) -> None:
        """Hold the loss of a pass, without waiting for it."""
        import torch

        self._depth = max(0, self._depth - 1)  # Where a hook before ours failed, its beginning was not seen.
        loss = None if self.device is None or self._depth else loss_of(output)
        if loss is not None and model.training and torch.is_grad_enabled():
            self.losses.append(loss.detach())

    def clear(self) -> None:
        """Let go of everything."""
        self.passes.clear()
        self.losses.clear()


@dataclass(frozen=True)
class PassHooks:
    """The hooks of a recorder on one module.

    Attributes:
        recorder: The recorder.
        name: The name of the module in the watched model.
    """

    recorder: PassRecorder
    name: str

    def before(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a pass that begins; a forward pre-hook."""
        self.recorder.before(self.name, model, args, kwargs)

    def after(self, model: torch.nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        """Tell of a pass that has ended; a forward hook."""
        self.recorder.after(model, output)


def _put_back(buffers: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    import torch

    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def detached(value: Any) -> Any:
    """Return tensors without the graphs that made them; they share their memory.

    Example:
        >>> import torch
        >>> detached({"inputs_embeds": torch.ones(2, requires_grad=True) * 2})["inputs_embeds"].requires_grad
        False
    """
    return with_tensors(value, lambda tensor: tensor.detach())


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss in what a model returned: its ``loss``, or its first value where that is a single number.

    Example:
        >>> import torch
        >>> loss_of({"loss": torch.tensor(0.5)}), loss_of((torch.zeros(2, 3),))
        (tensor(0.5000), None)
    """
    import torch

    if isinstance(output, Mapping):  # transformers' ModelOutput is one.
        loss = output.get("loss")
    else:
        loss = output[0] if isinstance(output, (tuple, list)) and output else getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None
