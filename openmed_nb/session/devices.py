"""The verbs about the device: which one is in force, what was done to the environment, the simulated Mac, who is told."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..activity import Listener, Listeners
from ..devices import backend
from ..devices.backend import TorchSeam
from ..devices.choice import DeviceChoice, candidates
from ..devices.computer import Computer
from ..devices.environment import VARIABLES, EnvPlan
from ..devices.explanation import DeviceList, Explanation
from ..devices.machine import Machine, read_machine
from ..devices.request import DeviceRequest, decide, precedence
from ..devices.simulation.running import Simulation
from ..devices.state import DeviceState
from ..devices.variables import shown_variables
from ..errors import OpenMedError

if TYPE_CHECKING:
    from ..devices.simulation.device import SimulatedMps
    from ..models.store import ModelKey, ModelStore
    from ..training.curve import MemoryCurve


class DeviceVerbs:
    """The state of a session, and what it can be asked and told about devices.

    Args:
        environ: The environment variables, read and written.
        machine: Reads the facts of this computer; called once, when first needed.
        seam: What answers for torch: the module ``devices.backend``, or a stand-in for a computer that is not here.
    """

    def __init__(
        self,
        environ: MutableMapping[str, str] = os.environ,
        machine: Callable[[], Machine] = read_machine,
        seam: TorchSeam = backend,
    ) -> None:
        self._state = DeviceState(Computer(environ, machine, seam))
        self._environ = environ
        self._simulation: Simulation | None = None
        self._models: ModelStore | None = None
        self._lock = threading.RLock()
        self._listeners = Listeners()
        self.curve: MemoryCurve | None = None

    @property
    def computer(self) -> Computer:
        """The computer that the session runs on: this one, or a simulated Mac."""
        return self._state.computer

    @property
    def models(self) -> ModelStore:
        """The loaded models; their code is imported when first needed, so that loading the extension stays quick."""
        if self._models is None:
            from ..models.store import ModelStore

            self._models = ModelStore(self._listeners.tell, self._warn_of_dtype)
        return self._models

    def device(self, argument: str | None = None, source: str = "argument") -> DeviceChoice:
        """Return the device in force, or the one that an argument asks for.

        A GPU is confirmed by computing on it, which loads torch; a planned CPU is left planned until torch is loaded.

        Raises:
            UnknownDevice: For a bad spelling, in the argument or in a variable.
            DeviceUnavailable: For a device that was asked for and cannot be used.
        """
        with self._unchanged_on_error():
            chain = self._state.chain(argument, source)
            choice = self.computer.confirm(decide(chain))
            if not chain[0].asks:
                self._state.enter(choice)
            return choice

    def use(self, device: str, source: str = "use()") -> DeviceChoice:
        """Override the device for the session, and move the models that follow it.

        Args:
            device: Any accepted spelling; ``"auto"`` takes the best device, whatever the variables say.
            source: Who asks.

        Raises:
            UnknownDevice, DeviceUnavailable: As for :meth:`device`; the session then keeps its former device.
        """
        with self._unchanged_on_error():
            request = DeviceRequest.parse(device, source)
            choice = self.computer.confirm(request)
            moved = self._models.follow(choice.device) if self._models else ()
            self._state.override = request
            self._state.enter(choice)
            return replace(choice, moved=moved)

    def reset(self) -> DeviceChoice:
        """Drop the override, so that the variables and the machine decide again, and give the shell's value back."""
        with self._unchanged_on_error():
            choice = self.computer.confirm(decide(precedence(self.computer.changes.shell)))
            moved = self._models.follow(choice.device) if self._models else ()
            self._state.override = None
            self.computer.changes.unpublish()
            self._state.enter(choice)
            return replace(choice, moved=moved)

    def resolve(self, prefer: str | None = None) -> str:
        """Return the name of the device that is asked for, unchecked, or of the one in force where none is.

        Raises:
            UnknownDevice: For a bad spelling, in the argument or in a variable.
            DeviceUnavailable: Where nothing is asked for and no device can be used.
        """
        request = decide(self._state.chain(prefer))
        return candidates(request, self.computer.machine)[0] if request.asks else self.device().device

    def apply_mps_variables(self) -> dict[str, str]:
        """Set the MPS variables that nobody has set, whatever the device is, and return all three as they stand."""
        with self._listeners.told_after(), self._lock:
            self.computer.prepare("mps")
            environ = self.computer.changes.environ
            return {name: environ[name] for name in VARIABLES if name in environ}

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Tell a function whenever something may have changed, and what takes a while; return what ends that.

        Args:
            listener: Gets an :class:`Activity` while something is under way, and ``None`` when it is time to look again,
                in the thread that called the verb.
        """
        return self._listeners.add(listener)

    def is_free(self) -> bool:
        """Tell whether a question would be answered at once: no other thread is inside a verb, such as a long load."""
        free = self._lock.acquire(blocking=False)
        if free:
            self._lock.release()
        return free

    def told_after(self) -> contextlib.AbstractContextManager[None]:
        """Tell the listeners to look again after a block that changes what is shown of this session."""
        return self._listeners.told_after()

    def devices(self, confirm: bool = True) -> DeviceList:
        """Return every device with whether it can be used, and why not.

        Args:
            confirm: Whether a GPU that is planned is confirmed by computing on it, which loads torch.
        """
        with self._told_if(confirm), self._lock:
            choice = self._choice_or_error(confirm)
            if isinstance(choice, OpenMedError):
                return DeviceList(self.computer.candidates())
            return DeviceList(self.computer.candidates(choice.device), choice)

    def explain(self, confirm: bool = True) -> Explanation:
        """Return the chain of wishes, the choice, what was ruled out, and the environment.

        Args:
            confirm: As for :meth:`devices`.
        """
        with self._told_if(confirm), self._lock:
            choice = self._choice_or_error(confirm)
            device = self._state.in_force if isinstance(choice, OpenMedError) else choice.device
            variables = shown_variables(self.computer.changes.shell)
            return Explanation(self._state.chain(), choice, self.environment(device or "cpu"), variables)

    def environment(self, device: str) -> EnvPlan:
        """Return what became of the MPS variables for a device."""
        return self.computer.environment(device)

    def keep_curve(self, curve: MemoryCurve) -> None:
        """Keep the last memory curve, so that it can be asked for after a loop that named it nowhere."""
        with self._listeners.told_after():
            self.curve = curve

    def start(self) -> None:
        """Apply the MPS variables where MPS is planned, before anything imports torch; never raises for a bad wish."""
        with self._listeners.told_after(), self._lock:
            self._state.start()

    def stop(self) -> None:
        """Drop the override and undo what was done to the environment, where it still has our values."""
        with self._listeners.told_after(), self._lock:
            self.end_simulation()
            self._state.clear()

    def simulate(
        self,
        memory: str | int,
        fallback: bool | None = None,
        source: str = "simulated_mps()",
        defects: str | Iterable[str] = (),
    ) -> SimulatedMps:
        """Let the session run on a simulated Mac until :meth:`end_simulation`; models that follow it move there.

        Args:
            memory: The RAM of the Mac, such as ``"8 GiB"``.
            fallback: Whether operators that MPS does not have fall back to the CPU; ``None`` is as in the environment.
            source: Who asks.
            defects: The issues of silent errors that the device shall have, such as ``"pytorch#177116"``.

        Raises:
            ConfigurationError: For a memory that is none, and for a silent error that cannot be simulated.
            DeviceUnavailable: Where a simulation is on already, or a model does not fit; nothing is changed then.
            TorchUnusable: Where torch does not import.
        """
        with self._listeners.told_after(), self._lock, contextlib.ExitStack() as undo:
            backend.import_torch()
            device = undo.enter_context(self._on_simulated_mac(memory, fallback, defects))
            self.use("mps", source)
            self._simulation = Simulation(device, undo.pop_all())
            return device

    def end_simulation(self) -> None:
        """Come back to this computer, where the session runs on a simulated one; models come along.

        Raises:
            DeviceUnavailable: In another thread than the one that began it.
        """
        with self._listeners.told_after(), self._lock:
            if self._simulation is not None:
                self._simulation.end()

    def _warn_of_dtype(self, key: ModelKey, device: str) -> None:
        """Warn of a model that comes to a device in a reduced type that was not validated there."""
        from ..runbook.precision.dtype_choice import warn_unless_validated

        warn_unless_validated(key, device, self.computer, self._environ)

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Hold the lock, take back what was applied to the environment if the verb fails, and then tell the listeners."""
        with self._listeners.told_after(), self._lock, self._state.unchanged_on_error():
            yield

    @contextlib.contextmanager
    def _on_simulated_mac(
        self, memory: str | int, fallback: bool | None, defects: str | Iterable[str]
    ) -> Iterator[SimulatedMps]:
        """Let the session run on a simulated Mac, with another state in the place of this one."""
        from ..devices.simulation.computer import simulated_computer

        here = self._state
        self._bring_home()
        here.suspend()
        try:
            with simulated_computer(memory, fallback, self._environ, defects) as (computer, device):
                self._state = DeviceState(computer)
                try:
                    yield device
                finally:
                    self._state, self._simulation = here, None
                    self._bring_home()
        finally:
            here.resume()
            self._bring_home(here.in_force or "cpu")
            if self._models is not None:
                self._models.announce()

    def _bring_home(self, device: str = "cpu") -> None:
        """Move the models that follow the session, and forget those that were loaded for the MPS of one computer."""
        if self._models is not None:
            self._models.follow(device, quietly=True)
            self._models.forget_device("mps")

    def _told_if(self, confirm: bool) -> contextlib.AbstractContextManager[None]:
        """Tell the listeners after a look that confirms a GPU; any other look changes nothing, and they look themselves."""
        return self._listeners.told_after() if confirm else contextlib.nullcontext()

    def _choice_or_error(self, confirm: bool) -> DeviceChoice | OpenMedError:
        """Return the choice, or the error that the list and the explanation help to mend."""
        try:
            return self.device() if confirm else self.computer.plan(decide(self._state.chain()))
        except OpenMedError as error:
            return error
