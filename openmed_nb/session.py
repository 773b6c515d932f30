"""Session of a kernel: the active device, changes to the environment, and loaded models.

Public functions, magics and the panel use it. A failed operation does not change the session. The end of the module lists the
other state of the process.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ._events.activity import IMPORTING, LOADING, EventDispatcher, ProgressEvent
from ._events.progress import ProgressBar
from ._utils.text import model_label
from ._utils.validation import check_bool, check_names
from .devices import backend
from .devices.backend import TorchBackend
from .devices.choice import DeviceChoice, DeviceList, Explanation
from .devices.computer import DeviceManager
from .devices.environment import VARIABLES
from .devices.machine import DEFAULT_SIMULATED_MEMORY, MachineInfo, parse_memory, read_machine
from .devices.registry import gpu_type
from .devices.request import (
    GPU,
    DeviceRequest,
    DeviceSetting,
    device_type,
    parse_device_argument,
    resolution_order,
    resolve_request,
    visible_variables,
)
from .errors import DeviceUnavailableError, OpenMedError
from .models.config import LOAD_OPTIONS, OpenMedConfig, apply_overrides

if TYPE_CHECKING:
    from .models.loading import LoadedModel, LoadSpec
    from .models.records import DtypeChoice
    from .models.store import LoadedModels, ModelKey, ModelStore
    from .simulation.device import SimulatedMps


class _ActiveSimulation(NamedTuple):
    """Thread that started a simulation, and the callbacks that end it."""

    thread_id: int
    undo: contextlib.ExitStack


@dataclass(frozen=True)
class LoadPlan:
    """Plan of a model load.

    Attributes:
        spec: Specification of the model.
        device: Confirmed device.
        follows: Whether the model follows the session device.
        options: Remaining arguments for the pipeline.
        precision: Choice of the dtype with its reason; ``None`` if only float32 was requested.
    """

    spec: LoadSpec
    device: str
    follows: bool
    options: dict[str, Any]
    precision: DtypeChoice | None


def check_options(
    function: Callable[..., object], arguments: Iterable[str], options: Iterable[str] = LOAD_OPTIONS
) -> None:
    """Raise an error for the first argument that is neither a parameter of a public function nor one of its further options."""
    parameters = inspect.getfullargspec(function)
    valid_names = sorted({*options, *parameters.args, *parameters.kwonlyargs} - {"self"})
    check_names(f"an option of {function.__name__}()", arguments, valid_names, "Options")


class Session:
    """State of one kernel (device, environment and models) and the operations on it.

    Args:
        environ: Environment variables, which operations may change.
        machine: Function that returns the facts of the machine. It is called once, on first use.
        torch_backend: Adapter to torch: the module ``devices.backend``, or a stub of the torch of another machine.
    """

    def __init__(
        self,
        environ: MutableMapping[str, str] = os.environ,
        machine: Callable[[], MachineInfo] = read_machine,
        torch_backend: TorchBackend = backend,
    ) -> None:
        self.device_manager = DeviceManager(environ, machine, torch_backend)  # This machine, or a simulated Mac.
        self.environ = environ
        self.override: DeviceRequest | None = None  # Device request of the user for this session.
        self.active_device: str | None = None  # Name of the active device, or None before the first selection.
        self._simulation: _ActiveSimulation | None = None
        self._models: ModelStore | None = None
        self.lock = backend.fork_safe_lock()
        self._listeners = EventDispatcher(ProgressBar(environ))
        self.notify = self._listeners.notify
        self.track = self._listeners.track
        self.operation = self._listeners.operation
        self.subscribe = self._listeners.subscribe
        self.device_manager.on_torch_import = lambda: self.notify(ProgressEvent(IMPORTING, "torch"))
        # The last run of ``annotate`` that did not finish, for ``resume=True``. It contains words of notes.
        self.interrupted_run: Any = None
        self.should_mark_context = True  # Whether a displayed text marks its context. The magics have a setting for it.

    @property
    def models(self) -> ModelStore:
        """The loaded models. Their code is imported on first use, so that the extension loads quickly."""
        if self._models is None:
            from .models.store import ModelStore

            def on_placement(key: ModelKey, device: str, is_reused: bool) -> None:
                if key.spec.dtype != "float32":
                    from .models.records import warn_unless_validated

                    warn_unless_validated(key, device, self.device_manager, is_reused)

            def tuned_batch_sizes(spec: LoadSpec) -> dict[str, int]:
                from .models.records import load_batch_sizes

                return load_batch_sizes(spec, self.device_manager)

            self._models = ModelStore(self.notify, on_placement, tuned_batch_sizes)
        return self._models

    def device(self, device: object = None, source: str = "argument") -> DeviceChoice:
        """Return the active device with its reason, or the device for a request.

        Args:
            device: Requested device: an accepted spelling, a ``torch.device`` or an ``Accelerator``. If ``None``, return the
                active device.
            source: Origin of the request, which is part of the choice.

        Returns:
            The choice. A GPU is confirmed by a device check, which imports torch. The CPU is confirmed once torch is imported.
            ``tuned_batch_tokens`` contains the loaded models with a tuned batch size on the device.

        Raises:
            UnknownDeviceError: If the device name is not valid, in the argument or in ``OPENMED_TORCH_DEVICE`` or
                ``OPENMED_DEVICE``.
            DeviceUnavailableError: If the requested device cannot be used.
            ConfigurationError: If the value has no device, or if the source is not a string.

        Example:
            >>> device().device in ("mps", "cuda", "cpu")
            True
        """
        with self.transaction():
            settings = self.device_settings(device, source)
            choice = self.device_manager.confirm(resolve_request(settings))
            if not settings[0].is_explicit:
                self._activate(choice)
            tuned = self._models.batch_tokens_by_model(device_type(choice.device)) if self._models else ()
            return replace(choice, tuned_batch_tokens=tuned)

    def use(self, device: object, source: str = "use()") -> DeviceChoice:
        """Override the device for this session, and move the models that follow the session device.

        Args:
            device: ``"auto"`` (the best device, regardless of the environment variables), ``"cpu"``, ``"cuda"``,
                ``"cuda:N"``, ``"mps"``, ``"gpu"``, a ``torch.device`` or an ``Accelerator``.
            source: Origin of the request, which is part of the choice.

        Returns:
            The choice. ``moved_models`` contains the models that were moved.

        Raises:
            UnknownDeviceError: If the device name is not valid.
            DeviceUnavailableError: If the device cannot be used. The session then keeps the previous device.
            ConfigurationError: As for :meth:`device`.

        Example:
            >>> use("cpu").reason
            "'cpu' was requested by use()."
            >>> reset().requested_by == "use()"
            False
        """
        with self.transaction():
            request = DeviceRequest.parse(parse_device_argument(device), source)
            return self._change_device(request, request)

    def reset(self) -> DeviceChoice:
        """Clear the device override of the session, so that the environment variables decide again.

        Returns:
            The choice without the override.

        Raises:
            UnknownDeviceError, DeviceUnavailableError: As for :meth:`device`. The override is then preserved.
        """
        with self.transaction():
            return self._change_device(resolve_request(resolution_order(self.device_manager.user_environ)), None)

    def _change_device(self, request: DeviceRequest, override: DeviceRequest | None) -> DeviceChoice:
        """Confirm a request, move the models that follow the session device, and replace the override."""
        self.device_manager.forget_failed_probes()
        choice = self.device_manager.confirm(request)
        moved = self._models.move_followers(choice.device) if self._models else ()
        self.override = override
        if override is None:
            self.device_manager.restore_device_variable()
        self._activate(choice)
        return replace(choice, moved_models=moved)

    def resolve(self, prefer: object = None) -> str:
        """Return the name of the requested device without checking it, or of the active device if none is requested.

        Raises:
            UnknownDeviceError: If the device name is not valid, in the argument or in a variable.
            DeviceUnavailableError: If no device is requested and none can be used.
        """
        value = resolve_request(self.device_settings(prefer)).value
        if value == "auto":
            return self.device().device
        return gpu_type(self.device_manager.machine) if value == GPU else value

    def device_settings(self, argument: object = None, source: str = "argument") -> tuple[DeviceSetting, ...]:
        """Return the current device settings in resolution order, highest priority first."""
        setting = DeviceSetting(source, None if argument is None else parse_device_argument(argument))
        return resolution_order(self.device_manager.user_environ, setting, self.override)

    def _activate(self, choice: DeviceChoice) -> None:
        """Make a device the active device, and update the environment variables."""
        self.device_manager.enter(choice.device, self.active_device, export=self.override is not None)
        self.active_device = choice.device

    def save_batch_size(self, spec: LoadSpec, device: str, batch_tokens: int | None) -> None:
        """Save the tuned batch size of a model on a device for this and later sessions on this machine.

        Args:
            spec: Specification of the model.
            device: Name of the device.
            batch_tokens: Number of tokens per batch. If ``None``, the saved value is removed.
        """
        from .models.records import save_batch_size

        save_batch_size(spec, device, self.device_manager, batch_tokens)
        self.models.set_batch_tokens(spec, device_type(device), batch_tokens)

    def apply_mps_variables(self) -> dict[str, str]:
        """Set the MPS variables that are not set yet, for any active device, and return all three with their values."""
        with self.operation(), self.lock:
            self.device_manager.apply_mps_variables()
            return {name: self.environ[name] for name in VARIABLES if name in self.environ}

    def is_idle(self) -> bool:
        """Return whether no other thread runs an operation, such as a long load, so that a call returns immediately."""
        acquired = self.lock.acquire(blocking=False)
        if acquired:
            self.lock.release()
        return acquired

    def list_devices(self, confirm: bool = True) -> DeviceList:
        """Return all devices with their status.

        Args:
            confirm: Whether to confirm a planned GPU with a device check, which imports torch.

        Returns:
            The devices, each with ``device``, ``usable`` and ``reason``. ``%openmed_device --list`` displays them.

        Example:
            >>> [status.usable for status in list_devices().devices if status.device == "cpu"]
            [True]
        """
        check_bool("confirm", confirm)
        with self.operation() if confirm else contextlib.nullcontext(), self.lock:
            choice = self.choice_or_error(confirm)
            if isinstance(choice, OpenMedError):
                return DeviceList(self.device_manager.list_devices())
            return DeviceList(self.device_manager.list_devices(choice.device), choice)

    def explain(self, confirm: bool = True) -> Explanation:
        """Return the resolution order, the choice, the rejected devices, and the environment.

        Args:
            confirm: As for :meth:`list_devices`.

        Returns:
            The explanation. ``%openmed_device --explain`` displays it.

        Example:
            >>> explain_device().choice.device == device().device
            True
        """
        check_bool("confirm", confirm)
        with self.operation() if confirm else contextlib.nullcontext(), self.lock:
            choice = self.choice_or_error(confirm)
            device = self.active_device if isinstance(choice, OpenMedError) else choice.device
            torch = self.device_manager.torch
            return Explanation(
                resolution_order=self.device_settings(),
                choice=choice,
                environment=self.device_manager.mps_environment(device or "cpu"),
                variables=visible_variables(self.device_manager.user_environ),
                unreleased=torch.display_version if torch.prerelease_note else "",
            )

    def start(self) -> None:
        """Set the MPS variables if MPS is the planned device, before torch is imported.

        An invalid device request does not raise an error here.
        """
        with self.operation(), self.lock:
            if not self.device_manager.machine.native_apple_silicon:
                return
            with contextlib.suppress(OpenMedError):  # The error is raised when the device is used.
                choice = self.device_manager.plan(resolve_request(self.device_settings()))
                self.device_manager.enter(choice.device)
                self.active_device = choice.device

    def stop(self) -> None:
        """Clear the override and the interrupted run, and restore the environment variables that the package has set."""
        with self.operation(), self.lock:
            self.end_simulation()
            self.interrupted_run = None
            self.should_mark_context = True
            self.override = self.active_device = None
            self.device_manager.restore_device_variable()
            self.device_manager.restore_mps_variables()

    def simulate(
        self,
        memory: str | int,
        fallback: bool | None = None,
        source: str = "simulated_mps()",
        defects: str | Iterable[str] = (),
    ) -> SimulatedMps:
        """Run the session on a simulated Mac until :meth:`end_simulation`; see :func:`simulated_mps`."""
        with self.operation(), self.lock, contextlib.ExitStack() as undo:
            installed = parse_memory(memory)  # Reject an invalid size before torch is imported, which takes seconds.
            self.device_manager.load_torch()
            device = undo.enter_context(self._on_simulated_mac(installed, fallback, defects))
            self.use("auto" if device.defects else "mps", source)  # A defective device may fail its device check.
            self._simulation = _ActiveSimulation(threading.get_ident(), undo.pop_all())
            return device

    def end_simulation(self) -> None:
        """Stop the simulation if there is one. The models are moved to a device of this machine.

        Raises:
            DeviceUnavailableError: If the simulation was started in another thread, because the modes of torch apply to one
                thread.
        """
        with self.operation(), self.lock:
            if self._simulation is None:
                return
            if threading.get_ident() != self._simulation.thread_id:
                raise DeviceUnavailableError(
                    "The simulated MPS device was started in another thread.", "Stop the simulation in that thread."
                )
            self._simulation.undo.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Run an operation under the lock. If it fails, restore the MPS variables and the active device."""
        with self.operation(), self.lock:
            device_manager = self.device_manager
            applied_variables = device_manager.applied_variables
            active_device = self.active_device
            try:
                yield
            except BaseException:  # Including an interrupt during the import of torch.
                device_manager.restore_mps_variables(applied_variables)
                self.active_device = active_device
                raise

    @contextlib.contextmanager
    def _on_simulated_mac(
        self, installed: int, fallback: bool | None, defects: str | Iterable[str]
    ) -> Iterator[SimulatedMps]:
        """Run the session on a simulated Mac, and restore device manager, override and active device afterwards."""
        from .simulation.device import simulated_computer

        device_manager = self.device_manager
        override = self.override
        active_device = self.active_device
        had_variables = bool(device_manager.applied_variables)  # They can be applied for any active device.
        self._restore_models()
        device_manager.restore_device_variable()
        device_manager.restore_mps_variables()
        try:
            with simulated_computer(installed, fallback, self.environ, defects) as (simulated_manager, device):
                self.device_manager = simulated_manager
                self.override = None
                self.active_device = None
                try:
                    yield device
                finally:
                    self.device_manager = device_manager
                    self.override = override
                    self.active_device = active_device
                    self._simulation = None
                    self._restore_models()
        finally:
            if had_variables:
                device_manager.apply_mps_variables()
            if self.active_device is not None and self.override is not None:
                device_manager.enter(self.active_device, export=True)
            self._restore_models(self.active_device or "cpu")
            if self._models is not None:
                self._models.recheck_followers()

    def _restore_models(self, device: str = "cpu") -> None:
        """Move the models that follow the session device, and unload those that were loaded for MPS explicitly."""
        if self._models is not None:
            self._models.move_followers(device, skip_checks=True)
            self._models.unload_device("mps")

    def choice_or_error(self, confirm: bool) -> DeviceChoice | OpenMedError:
        """Return the device choice, or the error if there is none."""
        try:
            return self.device() if confirm else self.device_manager.plan(resolve_request(self.device_settings()))
        except OpenMedError as error:
            return error

    def load_model(
        self, name: str | None, config: OpenMedConfig, /, force_reload: bool = False, **arguments: Any
    ) -> LoadedModel:
        """Return a model on the device of the configuration or the session."""
        check_bool("force_reload", force_reload)
        with self.transaction():
            plan = self.load_plan(name, config, arguments)
            check_names("an option of load_model()", plan.options, ["model", *sorted(LOAD_OPTIONS)], "Options")
            return self.models.get(plan.spec, plan.device, plan.follows, force_reload)

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Unload the models with a name, or all models, release their memory, and return their names."""
        with self.operation(), self.lock:
            return self.models.unload(name)

    def inventory(self) -> LoadedModels:
        """Return the loaded models with device, dtype and size."""
        from .models.store import LoadedModels

        with self.lock:
            return self._models.inventory() if self._models else LoadedModels(())

    def load_plan(self, name: str | None, config: OpenMedConfig, arguments: Mapping[str, Any]) -> LoadPlan:
        """Return the plan of a load: model, device and dtype."""
        from .models.loading import INT8, LoadSpec, check_int8

        arguments = dict(arguments)
        device = arguments.pop("device", None)
        remote_code = arguments.pop("trust_remote_code", False)
        check_bool("trust_remote_code", remote_code)
        requested = config.device if device is None else parse_device_argument(device)
        config, options = apply_overrides(config, arguments)
        source = "argument" if device is not None else "OpenMedConfig"
        choice = self.device(requested, source)
        spec = LoadSpec.from_name(name, config, remote_code)
        precision = None
        check_int8(spec.dtype, choice.device)
        if spec.dtype != "float32":
            from .models.records import select_dtype

            spec = replace(spec, folder=self.models.model_folder(spec))
            spec, precision = select_dtype(spec, choice.device, self.device_manager)
        self.device_manager.load_torch()  # The load would import torch without a progress event.
        follows = not DeviceSetting(source, requested).is_explicit and spec.dtype != INT8
        return LoadPlan(spec, choice.device, follows, options, precision)

    def load_spec(self, name: object, arguments: Mapping[str, object]) -> tuple[LoadSpec, str]:
        """Return the specification and the device for a model that is loaded outside the session, and download its files.

        The caller checks the names of the arguments with :func:`check_options`.
        """
        from .models.loading import model_folder

        with self.transaction():
            model_name = "bundled" if name is None else str(name)
            self.notify(ProgressEvent(LOADING, model_label(model_name)))
            plan = self.load_plan(model_name, OpenMedConfig(), arguments)
            return replace(plan.spec, folder=model_folder(plan.spec)), plan.device


# The session of this process, with all choices, changes and models of the user.
#
# Other state of the process is stored in these places:
#
# - models that guards watch (``training.guards.WATCHED_MODELS``, weakly), the last memory curve
#   (``training.epochs.EpochHooks.last_curve``), and open panels (``notebook.panel.OPEN_PANELS``, weakly);
# - reported conversions (``devices.moving.REPORTED_CONVERSIONS``), and the faster library for linear layers
#   (``devices.linear.LINEAR_TUNING``);
# - the active simulated MPS device, of which torch supports one (``devices.machine.ACTIVE_SIMULATIONS``);
# - the locks for tensor work and tokenization (``devices.backend.TENSOR_LOCK`` and ``TOKENIZER_LOCK``);
# - the thread that imports torch in the background (``notebook.preload``);
# - cached facts of torch, signatures and files (``functools.cache`` in ``devices.linear``, ``devices.registry``,
#   ``annotation.forward``, ``models.files``, ``training.epochs``, ``runbook.bench.profile_watch`` and ``runbook.checks.forecast``);
# - cached results for words and labels (in ``annotation.boundaries``, ``annotation.context``, ``annotation.decoding`` and
#   ``annotation.tokens``), and open browsers of notes (``annotation.browsing.OPEN_VIEWS``);
# - changes of clusters to the process while they run (``distributed.starting``), and in a worker the model of the last run
#   and the partitions that were read last (``distributed.worker``, ``distributed.columns``).
SESSION = Session()

device = SESSION.device
use = SESSION.use
reset = SESSION.reset
list_devices = SESSION.list_devices
explain_device = SESSION.explain


@contextlib.contextmanager
def simulated_mps(
    memory: str | int = DEFAULT_SIMULATED_MEMORY, fallback: bool | None = None, defects: str | Iterable[str] = ()
) -> Iterator[SimulatedMps]:
    """Run this session on a simulated Mac, on which torch, transformers and Accelerate find an MPS device.

    The simulated device computes on the CPU. It raises the errors of MPS for float64, for tensors on different devices, for
    unsupported operators, for invalid watermarks, and if the memory of the Mac would be exhausted. It counts memory and
    caches like MPS. Its speed and its numerical results do not represent MPS, so all output is labeled SIMULATED.

    The simulation applies to the thread that starts it. Tensors of other threads remain CPU tensors, and at the end all
    tensors become CPU tensors. The rules and texts are those of torch 2.13 (``MPSAllocator.mm``, ``MPSFallback.mm``,
    ``EmptyTensor.cpp``).

    Args:
        memory: RAM of the Mac, such as ``"8 GiB"``, or a number of bytes. Metal recommends two thirds of it, and three
            quarters above 32 GiB.
        fallback: Whether unsupported operators fall back to the CPU. If ``None``, the environment decides, in which
            openmed_nb enables the fallback by default.
        defects: Issues of silent errors of real MPS devices to simulate, such as ``"pytorch#177116"``, for teaching and to
            test that :func:`openmed_nb.doctor` detects them. As on a real Mac, the session uses the CPU if linear layers are
            incorrect.

    Returns:
        A context manager whose ``as`` variable is the device, with its memory, ``fallbacks`` (number of fallbacks per
        operator), ``copies``, ``call_counts`` and ``cache_clears``.

    Raises:
        ConfigurationError: If the memory size is not valid, or if an issue cannot be simulated. The message lists the issues
            that can. The session is not changed.
        DeviceUnavailableError: If a simulation is already active.

    Example:
        >>> import torch
        >>> with simulated_mps(memory="8 GiB", fallback=False) as mps:
        ...     print(device().device, torch.ones(2, device="mps").device)
        ...     torch.ones(2, device="mps").double()
        Traceback (most recent call last):
        ...
        TypeError: Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. Please use \
float32 instead.
        >>> device().simulated
        False
    """
    device = SESSION.simulate(memory, fallback, defects=defects)
    try:
        yield device
    finally:
        SESSION.end_simulation()
