"""The one mutable object: which device is in force, what was done to the environment, which models are loaded.

Public functions, magics and the panel ask it. What fails changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ._events.activity import IMPORTING, LOADING, EventDispatcher, ProgressEvent
from ._events.progress import ProgressBar
from ._utils.text import describe_names, model_label
from ._utils.validation import check_bool
from .devices import backend
from .devices.backend import TorchBackend
from .devices.choice import DeviceChoice, DeviceList, Explanation
from .devices.computer import DeviceManager
from .devices.environment import VARIABLES
from .devices.machine import DEFAULT_SIMULATED_MEMORY, MachineInfo, parse_memory, read_machine
from .devices.request import (
    DeviceRequest,
    DeviceSetting,
    device_type,
    parse_device_argument,
    resolution_order,
    resolve_request,
    visible_variables,
)
from .errors import ConfigurationError, DeviceUnavailableError, OpenMedError
from .models.config import OpenMedConfig, apply_overrides

if TYPE_CHECKING:
    from .models.loading import LoadedModel, LoadSpec
    from .models.records import DtypeChoice
    from .models.store import LoadedModels, ModelKey, ModelStore
    from .simulation.device import SimulatedMps


@dataclass(frozen=True)
class LoadPlan:
    """What a load will do."""

    spec: LoadSpec  # What is loaded.
    device: str  # The device, confirmed.
    follows: bool  # Whether the model follows the session.
    options: dict[str, Any]  # The arguments that are left for the pipeline.
    precision: DtypeChoice | None  # Why the model has that type; ``None`` where nothing but float32 was asked for.


class Session:
    """What holds in one kernel, and what a face may ask of it.

    ``machine`` reads the facts of this computer once, when they are first needed. ``seam`` answers for torch: the module
    ``devices.backend``, or a stand-in for a computer that is not here.
    """

    def __init__(
        self,
        environ: MutableMapping[str, str] = os.environ,
        machine: Callable[[], MachineInfo] = read_machine,
        torch_backend: TorchBackend = backend,
    ) -> None:
        self.device_manager = DeviceManager(environ, machine, torch_backend)  # This computer, or a simulated Mac.
        self.environ = environ
        self.override: DeviceRequest | None = None  # What was chosen for the session by hand.
        self.active_device: str | None = None  # The name of the device in force; None before the first.
        self._simulation: tuple[int, contextlib.ExitStack] | None = None  # The thread that began it, and what ends it.
        self._models: ModelStore | None = None
        self.lock = threading.RLock()
        listeners = self._listeners = EventDispatcher(ProgressBar(environ))
        self.notify, self.track, self.operation = listeners.notify, listeners.track, listeners.operation
        self.subscribe = listeners.subscribe
        self.device_manager.on_torch_import = lambda: listeners.notify(ProgressEvent(IMPORTING, "torch"))
        self.curve: Any = None  # The last memory curve; its class stands above the session.

    @property
    def models(self) -> ModelStore:
        """The loaded models; their code is imported when first needed, so that loading the extension stays quick."""
        if self._models is None:
            from .models.store import ModelStore

            def arriving(key: ModelKey, device: str) -> None:
                if key.spec.dtype != "float32":
                    from .models.records import warn_unless_validated

                    warn_unless_validated(key, device, self.device_manager, self.environ)

            def learned(spec: LoadSpec) -> dict[str, int]:
                from .models.records import load_batch_sizes

                return load_batch_sizes(spec, self.device_manager, self.environ)

            self._models = ModelStore(self.notify, arriving, learned)
        return self._models

    def device(self, device: Any = None, source: str = "argument") -> DeviceChoice:
        """Return the device in force and why, or the one that an argument asks for.

        Args:
            device: Any accepted spelling, a ``torch.device`` or an ``Accelerator``, to learn what would be chosen for it;
                ``None`` for the device in force.
            source: Who asks; the choice names it.

        Returns:
            The choice. A GPU is confirmed by a tiny computation, which loads torch; a CPU is planned until torch is loaded.
            ``learned`` names the loaded models whose batches were measured on that device.

        Raises:
            UnknownDeviceError: For a bad spelling, here or in ``OPENMED_TORCH_DEVICE`` or ``OPENMED_DEVICE``.
            DeviceUnavailableError: For a device that was asked for and cannot be used.
            ConfigurationError: For a value that has no device, and for a source that is not a text.

        Example:
            >>> device().device in ("mps", "cuda", "cpu")
            True
        """
        with self.transaction():
            wishes = self.device_settings(device, source)
            choice = self.device_manager.confirm(resolve_request(wishes))
            if not wishes[0].is_explicit:
                self._activate(choice)
            return replace(
                choice,
                tuned_batch_tokens=self._models.batch_tokens_by_model(device_type(choice.device))
                if self._models
                else (),
            )

    def use(self, device: Any, source: str = "use()") -> DeviceChoice:
        """Override the device for this session, and move the models that follow it.

        Args:
            device: ``"auto"`` (the best device, whatever the variables say), ``"cpu"``, ``"cuda"``, ``"cuda:N"``, ``"mps"``
                or ``"gpu"``; or a ``torch.device`` or an ``Accelerator``.
            source: Who asks; the choice names it.

        Returns:
            The choice; its ``moved`` names the models that moved.

        Raises:
            UnknownDeviceError: For any other spelling.
            DeviceUnavailableError: For a device that cannot be used; the session then keeps its former one.
            ConfigurationError: As for :meth:`device`.

        Example:
            >>> use("cpu").reason
            "'cpu' was asked for by use()."
            >>> reset().requested_by == "use()"
            False
        """
        with self.transaction():
            request = DeviceRequest.parse(parse_device_argument(device), source)
            choice = self.device_manager.confirm(request)
            moved = self._models.move_followers(choice.device) if self._models else ()
            self.override = request
            self._activate(choice)
            return replace(choice, moved_models=moved)

    def reset(self) -> DeviceChoice:
        """Drop the session's override, so that the variables and the machine decide again.

        Returns:
            The choice that is in force without the override.

        Raises:
            UnknownDeviceError, DeviceUnavailableError: As for :meth:`device`; the override then stays.
        """
        with self.transaction():
            choice = self.device_manager.confirm(resolve_request(resolution_order(self.device_manager.user_environ)))
            moved = self._models.move_followers(choice.device) if self._models else ()
            self.override = None
            self.device_manager.restore_device_variable()
            self._activate(choice)
            return replace(choice, moved_models=moved)

    def resolve(self, prefer: Any = None) -> str:
        """Return the name of the device that is asked for, unchecked, or of the one in force where none is.

        Raises:
            UnknownDeviceError: For a bad spelling, in the argument or in a variable.
            DeviceUnavailableError: Where nothing is asked for and no device can be used.
        """
        value = resolve_request(self.device_settings(prefer)).value
        return self.device().device if value == "auto" else self.device_manager.machine.gpu if value == "gpu" else value

    def device_settings(self, argument: Any = None, source: str = "argument") -> tuple[DeviceSetting, ...]:
        """Return the wishes for a device that count now, the strongest first."""
        wish = DeviceSetting(source, None if argument is None else parse_device_argument(argument))
        return resolution_order(self.device_manager.user_environ, wish, self.override)

    def _activate(self, choice: DeviceChoice) -> None:
        """Bring the environment in line with the device that is now in force."""
        self.device_manager.enter(choice.device, self.active_device, self.override is not None)
        self.active_device = choice.device

    def save_batch_size(self, spec: LoadSpec, device: str, batch_tokens: int | None, by: str = "") -> None:
        """Let a model take a batch on a device, now and in later sessions on this computer; ``None`` forgets it."""
        from .models.records import save_batch_size

        save_batch_size(spec, device, self.device_manager, self.environ, batch_tokens, by)
        self.models.set_batch_tokens(spec, device_type(device), batch_tokens)

    def apply_mps_variables(self) -> dict[str, str]:
        """Set the MPS variables that nobody has set, whatever the device is, and return all three as they stand."""
        with self.operation(), self.lock:
            self.device_manager.apply_mps_variables()
            return {name: self.environ[name] for name in VARIABLES if name in self.environ}

    def is_idle(self) -> bool:
        """Tell whether a question would be answered at once: no other thread is inside a verb, such as a long load."""
        free = self.lock.acquire(blocking=False)
        if free:
            self.lock.release()
        return free

    def list_devices(self, confirm: bool = True) -> DeviceList:
        """Return every device with whether it can be used, and why not.

        Args:
            confirm: Whether a GPU that is planned is confirmed by computing on it, which loads torch.

        Returns:
            A sequence of devices, each with ``device``, ``usable`` and why; ``%openmed_device --list`` shows it.

        Example:
            >>> [one.usable for one in list_devices().devices if one.device == "cpu"]
            [True]
        """
        check_bool("confirm", confirm)
        with self.operation() if confirm else contextlib.nullcontext(), self.lock:
            choice = self.choice_or_error(confirm)
            if isinstance(choice, OpenMedError):
                return DeviceList(self.device_manager.list_devices())
            return DeviceList(self.device_manager.list_devices(choice.device), choice)

    def explain(self, confirm: bool = True) -> Explanation:
        """Return the chain of wishes, the choice, what was ruled out, and the environment.

        Args:
            confirm: As for :meth:`devices`.

        Returns:
            The explanation; ``%openmed_device --explain`` shows it.

        Example:
            >>> explain_device().choice.device == device().device
            True
        """
        check_bool("confirm", confirm)
        with self.operation() if confirm else contextlib.nullcontext(), self.lock:
            choice = self.choice_or_error(confirm)
            device = self.active_device if isinstance(choice, OpenMedError) else choice.device
            environment, torch = self.device_manager.mps_environment(device or "cpu"), self.device_manager.torch
            variables, unreleased = (
                visible_variables(self.device_manager.user_environ),
                torch.display_version if torch.prerelease_note else "",
            )
            return Explanation(self.device_settings(), choice, environment, variables, unreleased)

    def set_last_curve(self, curve: Any) -> None:
        """Keep the last memory curve, so that it can be asked for after a loop that named it nowhere."""
        with self.operation():
            self.curve = curve

    def start(self) -> None:
        """Apply the MPS variables where MPS is planned, before anything imports torch; never raises for a bad wish."""
        with self.operation(), self.lock:
            if not self.device_manager.machine.native_apple_silicon:
                return
            with contextlib.suppress(OpenMedError):  # The same wish is reported when the device is asked for.
                choice = self.device_manager.plan(resolve_request(self.device_settings()))
                self.device_manager.enter(choice.device)
                self.active_device = choice.device

    def stop(self) -> None:
        """Drop the override and undo what was done to the environment, where it still has our values."""
        with self.operation(), self.lock:
            self.end_simulation()
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
        """Let the session run on a simulated Mac, as :func:`simulated_mps` does, until :meth:`end_simulation`."""
        with self.operation(), self.lock, contextlib.ExitStack() as undo:
            parse_memory(memory)  # Torch, which takes seconds to import, is not needed to refuse it.
            self.device_manager.load_torch()
            device = undo.enter_context(self._on_simulated_mac(memory, fallback, defects))
            self.use("auto" if device.defects else "mps", source)  # A device that fails its probe is not used.
            self._simulation = threading.get_ident(), undo.pop_all()
            return device

    def end_simulation(self) -> None:
        """Come back to this computer, where the session runs on a simulated one; models come along.

        Raises:
            DeviceUnavailableError: In another thread than the one that began it, in which alone torch's modes count.
        """
        with self.operation(), self.lock:
            if self._simulation is None:
                return
            thread, undo = self._simulation
            if threading.get_ident() != thread:
                what = "The simulated MPS device belongs to the thread that began it, and this is another one."
                raise DeviceUnavailableError(what, "End it there.")
            undo.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold the lock, take back what was applied to the environment if the verb fails, and then tell the listeners."""
        with self.operation(), self.lock:
            computer, applied, in_force = self.device_manager, self.device_manager.applied_variables, self.active_device
            try:
                yield
            except BaseException:  # An interrupted import of torch too.
                computer.restore_mps_variables(applied)
                self.active_device = in_force
                raise

    @contextlib.contextmanager
    def _on_simulated_mac(
        self, memory: str | int, fallback: bool | None, defects: str | Iterable[str]
    ) -> Iterator[SimulatedMps]:
        """Let the session run on a simulated Mac, and put its own computer, override and device aside until then."""
        from .simulation.device import simulated_computer

        here = self.device_manager, self.override, self.active_device
        had_variables = bool(self.device_manager.applied_variables)  # They may have been asked for on any device.
        self._restore_models()
        self.device_manager.restore_device_variable()
        self.device_manager.restore_mps_variables()
        try:
            with simulated_computer(memory, fallback, self.environ, defects) as (computer, device):
                self.device_manager, self.override, self.active_device = computer, None, None
                try:
                    yield device
                finally:
                    self.device_manager, self.override, self.active_device = here
                    self._simulation = None
                    self._restore_models()
        finally:
            if had_variables:
                self.device_manager.apply_mps_variables()
            if self.active_device is not None and self.override is not None:
                self.device_manager.enter(self.active_device, published=True)
            self._restore_models(self.active_device or "cpu")
            if self._models is not None:
                self._models.recheck_followers()

    def _restore_models(self, device: str = "cpu") -> None:
        """Move the models that follow the session, and forget those that were loaded for the MPS of one computer."""
        if self._models is not None:
            self._models.move_followers(device, skip_checks=True)
            self._models.unload_device("mps")

    def choice_or_error(self, confirm: bool) -> DeviceChoice | OpenMedError:
        """Return the choice, or the error that the list and the explanation help to mend."""
        try:
            return self.device() if confirm else self.device_manager.plan(resolve_request(self.device_settings()))
        except OpenMedError as error:
            return error

    def load_model(
        self, name: str | None, config: OpenMedConfig, /, force_reload: bool = False, **arguments: Any
    ) -> LoadedModel:
        """Return a model on the device that the configuration or the session says."""
        check_bool("force_reload", force_reload)
        with self.transaction():
            plan = self.load_plan(name, config, arguments)
            if plan.options:
                unknown = describe_names(plan.options)
                raise ConfigurationError(f"load_model() has no option {unknown}.", "Leave it out.")
            return self.models.get(plan.spec, plan.device, plan.follows, force_reload)

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names."""
        with self.operation(), self.lock:
            return self.models.unload(name)

    def inventory(self) -> LoadedModels:
        """Return the models that are loaded, with device, type and size."""
        from .models.store import LoadedModels

        with self.lock:
            return self._models.inventory() if self._models else LoadedModels(())

    def load_plan(self, name: str | None, config: OpenMedConfig, arguments: dict[str, Any]) -> LoadPlan:
        """Return what to load, where, and in which type."""
        from .models.loading import INT8, LoadSpec, check_int8

        arguments = dict(arguments)
        device = arguments.pop("device", None)
        remote_code = bool(arguments.pop("trust_remote_code", False))
        wish = config.device if device is None else parse_device_argument(device)
        config, options = apply_overrides(config, arguments)
        source = "argument" if device is not None else "OpenMedConfig"
        choice = self.device(wish, source)
        spec, precision = LoadSpec.from_name(name, config, remote_code), None
        check_int8(spec.dtype, choice.device)
        if spec.dtype != "float32":
            from .models.records import select_dtype

            spec = replace(spec, folder=self.models.model_folder(spec))
            spec, precision = select_dtype(spec, choice.device, self.device_manager, self.environ)
        self.device_manager.load_torch()  # The load would import it too, and say nothing of that.
        follows = not DeviceSetting(source, wish).is_explicit and spec.dtype != INT8
        return LoadPlan(spec, choice.device, follows, options, precision)

    def load_spec(self, name: Any, arguments: Mapping[str, Any]) -> tuple[LoadSpec, str]:
        """Return a model to be loaded beside those of the session, with its files here, and the device for it."""
        from .models.loading import model_folder

        with self.transaction():
            named = "bundled" if name is None else str(name)
            self.notify(ProgressEvent(LOADING, model_label(named)))
            plan = self.load_plan(named, OpenMedConfig(), dict(arguments))
            if plan.options:
                raise ConfigurationError(f"There is no option {describe_names(plan.options)}.", "Leave it out.")
            return replace(plan.spec, folder=model_folder(plan.spec)), plan.device


# The session of this process: the one place of what a person chose, did and loaded.
#
# What belongs to the process and is not a person's choice stands elsewhere:
#
# - which models guards watch (``training.guards.WATCHED``, weakly), and which panels are open (``notebook.panel.OPEN``,
#   weakly);
# - which conversions were reported once (``devices.moving.REPORTED``);
# - whether the one simulated MPS device is on, which torch knows only once (``devices.machine.ACTIVE_SIMULATIONS``);
# - the lock of all tensor work (``devices.backend.TENSOR_LOCK``);
# - what was learnt once of torch, of signatures and of files (``functools.cache`` in ``devices.linear``,
#   ``annotation.forward``, ``models.files``, ``training.epochs``, ``runbook.profile_watch`` and
#   ``runbook.checks.operators.table``);
# - what clusters change of the process while they live (``distributed.starting``, ``distributed.ssh``), and in a worker
#   the model of the last run and the partitions that were read last (``distributed.worker``, ``distributed.columns``).
SESSION = Session()

device, use, reset = SESSION.device, SESSION.use, SESSION.reset
list_devices, explain_device = SESSION.list_devices, SESSION.explain


class SimulationContext(contextlib.ContextDecorator):
    """A simulated Mac that :func:`simulated_mps` describes, and that begins with ``with``."""

    def __init__(self, memory: str | int, fallback: bool | None, defects: str | Iterable[str]) -> None:
        self._asked = memory, fallback, defects

    def __repr__(self) -> str:
        return (
            'A simulated Mac that has not begun: write "with nb.simulated_mps() as mps:" and your code below it, '
            "or %openmed_device --simulate mps."
        )

    def __enter__(self) -> SimulatedMps:
        memory, fallback, defects = self._asked
        return SESSION.simulate(memory, fallback, defects=defects)

    def __exit__(self, *_failure: object) -> None:
        SESSION.end_simulation()


def simulated_mps(
    memory: str | int = DEFAULT_SIMULATED_MEMORY, fallback: bool | None = None, defects: str | Iterable[str] = ()
) -> SimulationContext:
    """Let this session run on a simulated Mac: torch, transformers and Accelerate find an MPS device that is not there.

    It computes on the CPU, and raises what MPS raises: for float64, for tensors of two devices, for operators that MPS
    does not have, for bad watermarks, and where the memory of the Mac would not suffice. It counts memory and caches
    like MPS. It has neither the speed nor the numbers of MPS: everything shown under it says SIMULATED.

    Args:
        memory: The RAM of the Mac, such as ``"8 GiB"``, or a number of bytes; two thirds of it are what Metal
            recommends, three quarters above 32 GiB.
        fallback: Whether operators that MPS does not have fall back to the CPU; ``None`` is as in the environment,
            where openmed_nb switches it on unless the person said otherwise.
        defects: The issues of silent errors of real MPS devices that this one shall have too, such as
            ``"pytorch#177116"``, for teaching and for testing that :func:`openmed_nb.doctor` finds them. As on a real Mac,
            the session computes on the CPU where linear layers are wrong.

    Returns:
        What begins with ``with`` and ends with its block; ``as`` gives the device: its memory,
        ``fallbacks`` (how often each operator fell back), ``copies``, ``called`` and ``emptied``.

    Raises:
        ConfigurationError: For a memory that is none, and for an issue of which no error can be simulated (the message
            lists those that can); nothing is changed then.
        DeviceUnavailableError: Where a simulation is on already.

    It counts in the thread that enters it: tensors of other threads stay plain CPU tensors. When it ends, all tensors are.
    The rules and texts are those of torch 2.13 (``MPSAllocator.mm``, ``MPSFallback.mm``, ``EmptyTensor.cpp``).

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
    return SimulationContext(memory, fallback, defects)
