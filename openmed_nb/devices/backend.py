"""The seam to torch: how it is imported, what is known of it, its probes and random numbers.

What is known of torch is a value, :class:`TorchInfo`, in two grades: what its files say, without importing it, and
what it says itself once it is loaded.
"""

from __future__ import annotations

import contextlib
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .._events.activity import defer_interrupts
from .._utils.text import describe_error
from .._utils.validation import check_not_shadowed
from ..errors import TorchImportError
from .request import device_type, normalize_device

if TYPE_CHECKING:
    import torch


MINIMUM_TORCH = (2, 6)  # The oldest torch that transformers 5 runs on (its own torch>=2.6).

# Held around all tensor work of this package: two threads on MPS can crash the process (pytorch#197805).
TENSOR_LOCK = threading.RLock()

# Held while a tokenizer cuts texts, because truncation and padding are its state; the device may compute meanwhile. Whoever
# needs both locks takes that of tensors first.
TOKENIZER_LOCK = threading.RLock()

if hasattr(os, "register_at_fork"):  # A forked child has no thread that could release what another one held.
    for lock in (TENSOR_LOCK, TOKENIZER_LOCK):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]  # noqa: SLF001


@dataclass(frozen=True)
class TorchInfo:
    """What is known of the installed torch; ``None`` means not known yet."""

    version: str | None  # Such as ``"2.13.0+cpu"``; ``None`` where torch is not installed.
    is_imported: bool = False  # Whether torch is imported and spoke for itself.
    # What the build computes on besides the CPU, such as ``"CUDA 13.0"``; empty for a CPU build.
    gpu_build: str | None = None
    mps_built: bool | None = None  # Whether the build has the MPS backend.
    mps_available: bool | None = None  # Whether torch finds a Metal device.
    cuda_names: tuple[str, ...] | None = None  # One name for each GPU that torch finds.
    # Pairs of a device and why a tiny computation on it failed, empty where it did not.
    probes: tuple[tuple[str, str], ...] = ()
    metal_device: str = (
        ""  # The Metal device that torch finds, such as ``"Apple M2, 10 GPU cores"``; empty where it is not known.
    )

    @functools.cached_property
    def release(self) -> tuple[int, ...]:
        """The version as numbers: ``(2, 13, 0)``."""
        return parse_release(self.version)

    @property
    def display_version(self) -> str:
        """The version as people read it: one that is no release says what it is; empty where torch is not installed."""
        return ", ".join(part for part in (self.version, self.prerelease_note) if part)

    @property
    def prerelease_note(self) -> str:
        """What a torch is that is no release; empty for a release."""
        made = re.match(r"\d+(?:\.\d+)*(\.dev|a)\d", self.version or "")
        return {None: "", ".dev": "a nightly build", "a": "built from source, not released"}[made and made[1]]

    def probe_failure(self, device: str) -> str | None:
        """Return why computing on the device failed, ``""`` where it worked, ``None`` where it was not tried."""
        return {normalize_device(probed): failure for probed, failure in self.probes}.get(normalize_device(device))


def parse_release(version: str | None) -> tuple[int, ...]:
    """Return a version of torch as numbers, such as ``(2, 13, 0)`` for ``"2.13.0+cpu"``; ``(0,)`` where there is none."""
    match = re.match(r"\d+(\.\d+)*", version or "0")
    return tuple(int(part) for part in match.group().split(".")) if match else (0,)


class TorchBackend(Protocol):
    """What a session asks of torch; this module answers, and so can a stand-in for a computer that is not here."""

    def is_torch_imported(self) -> bool: ...
    def inspect_installed_torch(self) -> TorchInfo: ...
    def inspect_imported_torch(self) -> TorchInfo: ...
    def probe_device(self, device: str) -> str: ...
    def is_mps_allocator_initialized(self) -> bool | None: ...


def is_torch_imported() -> bool:
    """Tell whether someone imported torch already; this looks and does not import."""
    return "torch" in sys.modules


def inspect_installed_torch() -> TorchInfo:
    """Return what the files of the installed torch say, without importing it."""
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
    """Return what a torch build computes on besides the CPU, from the text of its ``version.py``."""
    found = dict(re.findall(r"^(cuda|hip)\b[^=\n]*=\s*'([^']+)'", version_file, flags=re.MULTILINE))
    return gpu_build(found.get("cuda"), found.get("hip"))


def gpu_build(cuda: str | None, hip: str | None) -> str:
    """Return the name of a build from its CUDA and ROCm versions; empty where it has neither."""
    if cuda:
        return f"CUDA {cuda}"
    return f"ROCm {hip}" if hip else ""


def reinstall_remedy(version: str | None) -> str:
    """Return the remedy for damaged files of torch: the same release again, because the newest may want a newer macOS."""
    name = f"torch=={version.partition('+')[0]}" if version else "torch"
    return f"Reinstall it: python -m pip install --force-reinstall {name}."


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Keep the garbage collector from running while a library is imported, which saves a fifth of the time.

    Importing makes some hundred thousand objects that stay, and the collector would look through them again and again. At the
    end they are old at once. ``benchmarks/startup.py`` measures it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # What the person froze would thaw as well.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def import_torch() -> Any:
    """Import torch; an interrupt waits until it is there, because no process can import it again after half of it."""
    try:
        with contextlib.ExitStack() as during:
            if not is_torch_imported():
                during.enter_context(defer_interrupts())
                during.enter_context(gc_disabled())
            torch = importlib.import_module("torch")
    except Exception as error:
        # A damaged installation fails in any way: missing libraries, other versions of numpy, half-written files.
        what = f"torch cannot be imported: {describe_error(error)}."
        raise TorchImportError(what, reinstall_remedy(inspect_installed_torch().version)) from error
    check_not_shadowed(torch, "Tensor", TorchImportError)
    return torch


def inspect_imported_torch() -> TorchInfo:
    """Import torch and return what it says of itself; this does not touch the MPS allocator.

    ``torch.backends.mps.is_available`` reads no watermark; memory queries would (torch's ``MPSAllocator.mm``).
    """
    torch = import_torch()
    mps = torch.backends.mps
    return TorchInfo(
        version=torch.__version__,
        is_imported=True,
        gpu_build=gpu_build(torch.version.cuda, getattr(torch.version, "hip", None)),
        mps_built=mps.is_built(),
        mps_available=mps.is_available(),
        cuda_names=tuple(_gpu_name(torch, index) for index in range(torch.cuda.device_count())),
        metal_device=_metal_name(mps) if mps.is_available() else "",
    )


def _gpu_name(torch: Any, index: int) -> str:
    """Return the name of a GPU; one whose driver does not start has none, and its probe will say why."""
    try:
        return str(torch.cuda.get_device_name(index))
    except RuntimeError:
        return f"GPU {index}"


def _metal_name(mps: Any) -> str:
    """Return the name and the cores of the Metal device; the allocator is not touched."""
    try:
        return f"{mps.get_name()}, {mps.get_core_count()} GPU cores"
    except (
        AttributeError,
        RuntimeError,
    ):  # The cores are asked for since torch 2.9 (pytorch#160414), of a driver of Apple's.
        return ""


# How the probe of a device begins to say that it computes, and computes wrongly.
NUMERICAL_MISMATCH = "it gave other numbers than the CPU"

# Linear layers with a bias, as all models have, that some Macs get wrong: the shape of the input, the outputs, the issue.
LINEAR_PROBES = (((2, 64, 128), 384, "pytorch#192934"), ((80, 1, 2), 192, "pytorch#188438"))


def probe_device(device: str) -> str:
    """Compute a little on the device and compare with the CPU; return why that failed, empty where it worked.

    "Available" is not "usable": virtual Macs report MPS and then fail every allocation
    (https://github.com/actions/runner-images/issues/9918, 11899), or leave the bias of linear layers out. The inputs are
    made on the CPU: a seed gives other numbers on MPS. They are whole and so small that every sum is exact in 16 bits too,
    so that autocast cannot fail a good GPU.
    """
    torch = import_torch()

    def numbers(*shape: int) -> Any:
        place = torch.arange(math.prod(shape), device="cpu")
        return ((place * 7 // 5) % 3 - 1).to(torch.float32).reshape(shape)

    for shape, outputs, issue in LINEAR_PROBES:
        operands = (numbers(*shape), numbers(outputs, shape[-1]), numbers(outputs) + 3)
        expected = torch.nn.functional.linear(*operands).float()
        try:
            with TENSOR_LOCK:
                computed = torch.nn.functional.linear(*(operand.to(device) for operand in operands)).cpu().float()
        except (RuntimeError, TypeError, AssertionError) as error:
            return describe_error(error)
        if not torch.equal(computed, expected):
            return f"{NUMERICAL_MISMATCH} in a linear layer over {shape} with a bias ({issue})"
    return ""


def is_mps_allocator_initialized() -> bool | None:
    """Tell whether the MPS allocator has read its watermarks: ``True`` where an MPS tensor lives, ``None`` if unknown.

    Asking torch would start the allocator, so living objects are looked at instead; a tensor that is gone leaves no
    trace, hence ``None``.
    """
    if not is_torch_imported():
        return False
    tensor: type[torch.Tensor] = sys.modules["torch"].Tensor
    return True if any(issubclass(type(thing), tensor) and thing.is_mps for thing in gc.get_objects()) else None


# Pairs of a device and the state of its random numbers, a copy in the memory of the host.
RngStates = tuple[tuple[str, "torch.Tensor"], ...]


def get_rng_states(*devices: str) -> RngStates:
    """Return the states of the CPU's random numbers and of those of devices; no device is waited for."""
    sources = {name: _rng_module(name) for name in ("cpu", *devices)}
    return tuple((name, source.get_rng_state(*which)) for name, (source, which) in sources.items())


def set_rng_states(states: RngStates) -> None:
    """Let random numbers go on from these states."""
    for name, state in states:
        source, which = _rng_module(name)
        source.set_rng_state(state, *which)


@contextmanager
def use_rng_states(states: RngStates) -> Iterator[None]:
    """Let random numbers go on from these states for a while, and then from where they were before."""
    before = get_rng_states(*(name for name, _ in states))
    set_rng_states(states)
    try:
        yield
    finally:
        set_rng_states(before)


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Compute without the caller's autocast, which would round, on the CPU and on a device."""
    torch = import_torch()
    with ExitStack() as stack:
        for kind in {"cpu", device_type(device)}:
            if torch.amp.is_autocast_available(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def preserve_rng_states() -> Iterator[None]:
    """Let the random numbers of the CPU, of Python and of numpy go on afterwards from where they were."""
    numpy = sys.modules.get("numpy")
    undo = contextlib.ExitStack()
    undo.callback(random.setstate, random.getstate())
    if numpy:
        undo.callback(numpy.random.set_state, numpy.random.get_state())
    with undo, use_rng_states(get_rng_states("cpu")):
        yield


def _rng_module(name: str) -> tuple[Any, tuple[str, ...]]:
    """Return the module of torch that has a device's random numbers, and what tells it which device."""
    torch = import_torch()
    kind = device_type(name)
    if kind == "cpu":
        return torch.random, ()
    return torch.get_device_module(kind), () if kind == name else (name,)
