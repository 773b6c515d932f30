"""Adapter to torch: import, facts, device checks and states of random number generators.

The facts are a value, :class:`TorchInfo`. It is read from the files of torch without importing it, or from torch itself
after the import.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import math
import os
import random
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .._events.activity import defer_interrupts
from .._utils.text import describe_error
from .._utils.validation import check_not_shadowed
from ..errors import TorchImportError
from .machine import Version
from .request import device_type, normalize_device

if TYPE_CHECKING:
    from torch import Tensor


MIN_TORCH = (2, 6)  # Oldest release that transformers 5 supports (its requirement is torch>=2.6).


def fork_safe_lock() -> threading.RLock:
    """Return a lock that is free in a forked child, which does not have the thread that would release it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001
    return lock


# Lock for all tensor work of this package: two threads on MPS can crash the process. Reported up to torch 2.14
# (pytorch#197805); the issue is closed, but its fix was reverted on 2026-09-22 (pytorch#197836).
TENSOR_LOCK = fork_safe_lock()

# Lock for tokenization, because truncation and padding are state of a tokenizer. The device can compute concurrently. Code
# that needs both locks acquires the lock of tensors first.
TOKENIZER_LOCK = fork_safe_lock()


@dataclass(frozen=True)
class TorchInfo:
    """Facts of the installed torch; ``None`` means that a fact is not known yet.

    Attributes:
        version: Version such as ``"2.13.0+cpu"``, or ``None`` if torch is not installed.
        is_imported: Whether the facts come from the imported torch.
        gpu_build: GPU platform of the build, such as ``"CUDA 13.0"``; empty for a CPU-only build.
        mps_built: Whether the build contains the MPS backend.
        mps_available: Whether torch finds a Metal device.
        cuda_names: Names of the GPUs that torch finds.
        probes: Pairs of a device and the failure of its device check, empty if the check passed.
        metal_device: Metal device that torch finds, such as ``"Apple M2, 10 GPU cores"``; empty if it is unknown.
    """

    version: str | None
    is_imported: bool = False
    gpu_build: str | None = None
    mps_built: bool | None = None
    mps_available: bool | None = None
    cuda_names: tuple[str, ...] | None = None
    probes: tuple[tuple[str, str], ...] = ()
    metal_device: str = ""

    @functools.cached_property
    def release(self) -> Version:
        """Version as numbers, such as ``(2, 13, 0)``."""
        return parse_release(self.version)

    @property
    def display_version(self) -> str:
        """Version for display, with a note if it is not a release; empty if torch is not installed."""
        return ", ".join(part for part in (self.version, self.prerelease_note) if part)

    @property
    def prerelease_note(self) -> str:
        """Kind of a build that is not a release; empty for a release."""
        match = re.match(r"\d+(?:\.\d+)*(\.dev|a)\d", self.version or "")
        if match is None:
            return ""
        return "a nightly build" if match[1] == ".dev" else "built from source, not released"

    def probe_failure(self, device: str) -> str | None:
        """Return the failure of the device check, ``""`` if it passed, or ``None`` if the device was not checked."""
        return {normalize_device(probed): failure for probed, failure in self.probes}.get(normalize_device(device))


def parse_release(version: str | None) -> Version:
    """Return a torch version as numbers, such as ``(2, 13, 0)`` for ``"2.13.0+cpu"``, or ``(0,)`` if there is none."""
    match = re.match(r"\d+(\.\d+)*", version or "0")
    return tuple(map(int, match.group().split("."))) if match else (0,)


class TorchBackend(Protocol):
    """Interface of a session to torch. This module implements it; tests use a stub of the torch of another machine."""

    def is_torch_imported(self) -> bool: ...
    def inspect_installed_torch(self) -> TorchInfo: ...
    def inspect_imported_torch(self) -> TorchInfo: ...
    def probe_device(self, device: str) -> str: ...
    def is_mps_allocator_initialized(self) -> bool | None: ...


def is_torch_imported() -> bool:
    """Return whether torch is already imported, without importing it or waiting for a thread that imports it."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return "torch" in sys.modules and not getattr(spec, "_initializing", False)


def inspect_installed_torch() -> TorchInfo:
    """Return the facts from the files of the installed torch, without importing it."""
    import importlib.metadata

    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return TorchInfo(None)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchInfo(version)
    file = Path(spec.origin).with_name("version.py")
    return TorchInfo(version, gpu_build=parse_gpu_build(file.read_text("utf-8")) if file.is_file() else None)


def parse_gpu_build(version_file: str) -> str:
    """Return the GPU platform of a torch build from the text of its ``version.py``."""
    versions = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*'([^']+)'", version_file, flags=re.MULTILINE))
    return gpu_build(versions.get("cuda"), versions.get("hip"))


def gpu_build(cuda: str | None, hip: str | None) -> str:
    """Return the GPU platform from the CUDA and ROCm versions, or an empty string if there is neither."""
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {hip}" if hip else ""


def reinstall_remedy(version: str | None) -> str:
    """Return the remedy for damaged files of torch.

    It installs the same release again, because the newest one may require a newer macOS.
    """
    name = f"torch=={version.partition('+')[0]}" if version else "torch"
    return f"Reinstall it: python -m pip install --force-reinstall {name}."


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection while a library is imported, which saves a fifth of the time.

    An import creates some hundred thousand permanent objects, and each collection would traverse them again. At the end
    they are moved to the oldest generation. ``benchmarks/startup.py`` measures the effect.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # gc.unfreeze would also unfreeze objects that the user froze.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def import_torch() -> ModuleType:
    """Import torch. An interrupt is deferred, because a process cannot import torch again after a partial import."""
    try:
        with ExitStack() as stack:
            if not is_torch_imported():
                stack.enter_context(defer_interrupts())
                stack.enter_context(gc_disabled())
            torch = importlib.import_module("torch")
    except Exception as error:
        # A damaged installation can raise any error: missing libraries, other versions of numpy, incomplete files.
        raise torch_import_error(error) from error
    check_not_shadowed(torch, "Tensor", TorchImportError)
    return torch


def torch_import_error(error: Exception) -> TorchImportError:
    """Return the error for a failed import of torch."""
    return TorchImportError(
        f"torch cannot be imported: {describe_error(error)}.", reinstall_remedy(inspect_installed_torch().version)
    )


def inspect_imported_torch() -> TorchInfo:
    """Import torch and return its facts, without initializing the MPS allocator.

    ``torch.backends.mps.is_available`` does not read the watermarks. Memory queries would (torch's ``MPSAllocator.mm``).
    """
    torch = import_torch()
    cuda_names = [f"GPU {index}" for index in range(torch.cuda.device_count())]
    for index in range(len(cuda_names)):
        with suppress(RuntimeError):  # If the driver does not start, the device check reports why.
            cuda_names[index] = str(torch.cuda.get_device_name(index))
    mps = torch.backends.mps
    metal_device = ""
    # torch reads the number of cores from a driver of Apple, since release 2.9 (pytorch#160414).
    if mps.is_available():
        with suppress(AttributeError, RuntimeError):
            metal_device = f"{mps.get_name()}, {mps.get_core_count()} GPU cores"
    return TorchInfo(
        version=torch.__version__,
        is_imported=True,
        gpu_build=gpu_build(torch.version.cuda, torch.version.hip),
        mps_built=mps.is_built(),
        mps_available=mps.is_available(),
        cuda_names=tuple(cuda_names),
        metal_device=metal_device,
    )


# Start of the failure of a device check with incorrect results.
NUMERICAL_MISMATCH = "results differ from the CPU"


class LinearProbe(NamedTuple):
    """A linear layer with a bias, as in all models, whose results are incorrect on some Macs."""

    input_shape: tuple[int, ...]
    output_size: int
    issue: str


LINEAR_PROBES = (
    LinearProbe((2, 64, 128), 384, "pytorch#192934"),
    LinearProbe((80, 1, 2), 192, "pytorch#188438"),
)


def probe_device(device: str) -> str:
    """Compare small computations on the device with the CPU, and return the failure, or ``""`` if there is none.

    An available device is not always usable. Virtual Macs report MPS and then fail every allocation
    (https://github.com/actions/runner-images/issues/9918, 11899), or ignore the bias of linear layers.

    The inputs are created on the CPU, because a seed produces different numbers on MPS. They are integers so small that
    every sum is exact in 16 bits too, so that autocast does not fail the check of a working GPU.
    """
    torch = import_torch()

    def integers(*shape: int) -> Tensor:
        index = torch.arange(math.prod(shape), device="cpu")
        numbers: Tensor = ((index * 7 // 5) % 3 - 1).to(torch.float32).reshape(shape)
        return numbers

    for shape, output_size, issue in LINEAR_PROBES:
        operands = (integers(*shape), integers(output_size, shape[-1]), integers(output_size) + 3)
        expected = torch.nn.functional.linear(*operands).float()
        try:
            with TENSOR_LOCK:
                computed = torch.nn.functional.linear(*(operand.to(device) for operand in operands)).cpu().float()
        except (RuntimeError, TypeError, AssertionError) as error:
            return describe_error(error)
        if not torch.equal(computed, expected):
            return f"{NUMERICAL_MISMATCH} in a linear layer with a bias and input shape {shape} ({issue})"
    return ""


def is_mps_allocator_initialized() -> bool | None:
    """Return whether the MPS allocator has read its watermarks.

    A query to torch would initialize the allocator, so the live objects are searched instead.

    Returns:
        ``True`` if there is a live MPS tensor, ``False`` if torch is not imported, and otherwise ``None``, because an MPS
        tensor may have existed before.
    """
    if not is_torch_imported():
        return False
    tensor_class: type[Tensor] = sys.modules["torch"].Tensor
    # issubclass and not isinstance, which would call the properties of proxy objects.
    has_mps_tensor = any(issubclass(type(value), tensor_class) and value.is_mps for value in gc.get_objects())
    return True if has_mps_tensor else None


# Pairs of a device and the state of its random number generator, as a copy in host memory.
RngStates = tuple[tuple[str, "Tensor"], ...]


def get_rng_states(*devices: str) -> RngStates:
    """Return the states of the random number generators of the CPU and of devices, without synchronizing them."""
    sources = {name: _rng_module(name) for name in ("cpu", *devices)}
    return tuple((name, module.get_rng_state(*device)) for name, (module, device) in sources.items())


def set_rng_states(states: RngStates) -> None:
    """Set the states of random number generators."""
    for name, state in states:
        module, device = _rng_module(name)
        module.set_rng_state(state, *device)


@contextmanager
def use_rng_states(states: RngStates) -> Iterator[None]:
    """Use states of random number generators in a block, and restore the previous states afterwards."""
    previous = get_rng_states(*(name for name, _ in states))
    set_rng_states(states)
    try:
        yield
    finally:
        set_rng_states(previous)


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Disable the caller's autocast, which reduces the precision, on the CPU and on a device."""
    torch = import_torch()
    with ExitStack() as stack:
        for kind in {"cpu", device_type(device)}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Restore the random number generators of torch on the CPU, of Python and of numpy after a block."""
    numpy = sys.modules.get("numpy")
    restore = ExitStack()
    restore.callback(random.setstate, random.getstate())
    if numpy:
        restore.callback(numpy.random.set_state, numpy.random.get_state())
    with restore, use_rng_states(get_rng_states("cpu")):
        yield


def _rng_module(name: str) -> tuple[ModuleType, tuple[str, ...]]:
    """Return the torch module with the random number generator of a device, and its argument for the device."""
    torch = import_torch()
    kind = device_type(name)
    if kind == "cpu":
        return torch.random, ()
    return torch.get_device_module(kind), () if kind == name else (name,)
