"""The one mutable object: which device is in force, what was done to the environment, which models are loaded.

Every face (functions, magics, panel) calls these verbs. A verb that fails changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .activity import Activity, Listener, Listeners
from .devices import backend
from .devices.backend import TorchSeam
from .devices.choice import DeviceChoice, candidates
from .devices.computer import Computer
from .devices.environment import VARIABLES, EnvPlan
from .devices.explanation import DeviceList, Explanation
from .devices.machine import Machine, read_machine
from .devices.request import DeviceRequest, Wish, decide, precedence
from .devices.simulation import shown_device
from .devices.simulation.running import Simulation
from .devices.state import DeviceState
from .devices.variables import shown_variables
from .errors import ConfigurationError, OpenMedError
from .models.config import OpenMedConfig, check_strategy, check_task, with_arguments

if TYPE_CHECKING:
    from .annotation.annotated import AnnotatedText
    from .annotation.annotations import Annotations
    from .devices.simulation.device import SimulatedMps
    from .models.inventory import Inventory
    from .models.loading import LoadedModel, LoadSpec
    from .models.store import ModelKey, ModelStore
    from .runbook.doctor.report import DoctorReport
    from .runbook.dtype_choice import DtypeChoice
    from .runbook.operators.forecast import Forecast
    from .runbook.parity import ParityReport
    from .runbook.precision_gate import PrecisionVerdict
    from .runbook.signals.values import Signals
    from .training.curve import MemoryCurve


class Session:
    """The state of one kernel.

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
            from .models.store import ModelStore

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

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names."""
        with self._listeners.told_after(), self._lock:
            return self.models.unload(name)

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

    def inventory(self) -> Inventory:
        """Return the models that are loaded, with device, type and size."""
        from .models.inventory import Inventory

        with self._lock:
            return self._models.inventory() if self._models else Inventory(())

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

    def load_model(self, name: str | None, config: OpenMedConfig, /, **arguments: Any) -> LoadedModel:
        """Return a model on the device that the configuration or the session says."""
        with self._unchanged_on_error():
            spec, choice, follows, options, _ = self._load_plan(name, config, arguments)
            if options:
                unknown = ", ".join(sorted(options))
                raise ConfigurationError(f"load_model() has no option {unknown}.", "Leave it out.")
            return self.models.model(spec, choice.device, follows)

    def create_pipeline(
        self,
        name: str | None,
        config: OpenMedConfig,
        /,
        task: str = "token-classification",
        aggregation_strategy: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a token-classification pipeline on the device that the configuration or the session says."""
        with self._unchanged_on_error():
            from .annotation.building import pipeline_over

            check_task(task)
            strategy = check_strategy(aggregation_strategy)
            spec, choice, follows, options, precision = self._load_plan(name, config, arguments)
            pipe = pipeline_over(self.models.model(spec, choice.device, follows), strategy, options)
            pipe.precision = precision
            return pipe

    def annotate(self, texts: Any, model: Any, arguments: Mapping[str, Any], /, **running: Any) -> Annotations:
        """Return the entities that a model finds in many texts.

        Args:
            texts: Any series of texts.
            model: The name of a model, ``None`` for the bundled one, or a pipeline of ours.
            arguments: Those of :meth:`create_pipeline`, for a name.
            running: Those of ``annotation.corpus.annotate_texts``.
        """
        from .annotation.corpus import annotate_texts, checked_pipeline

        with self._listeners.told_after():
            if model is None or isinstance(model, (str, os.PathLike)):
                name = "bundled" if model is None else str(model)
                pipe = self.create_pipeline(name, OpenMedConfig(), **arguments)
            else:
                pipe, name = checked_pipeline(model, arguments), type(model.model).__name__
            self._listeners.tell(Activity("Annotating", name))
            return annotate_texts(pipe, texts, name, **running)

    def doctor(self, model: Any = None) -> DoctorReport:
        """Return what is wrong with this computer, its torch, its environment and its models, and what to do about it.

        Args:
            model: The name of a model, a torch module or a pipeline; the loaded models where nobody says.
        """
        from .runbook.doctor.examination import examine, models_to_look_at
        from .runbook.doctor.report import diagnose

        with self._unchanged_on_error():
            models = models_to_look_at(model, self.models.named, lambda name: self.load_model(name, OpenMedConfig()))
            return diagnose(examine(self.computer, lambda: self._choice_or_error(confirm=True), models))

    def signals(self) -> Signals:
        """Return load, memory, power and heat of this computer at this moment; nothing is loaded for that."""
        from .runbook.doctor.examination import signals_of

        with self._lock:
            choice = self._choice_or_error(confirm=False)
            return signals_of(self.computer.machine, "cpu" if isinstance(choice, OpenMedError) else choice.device)

    def forecast(self, model: Any, example_inputs: Any = None, training: bool = True) -> Forecast:
        """Return which operators of a model would leave MPS; no model is changed.

        Args:
            model: The name of a model, ``None`` for the bundled one, a torch module, or a pipeline.
            example_inputs: What the model is called with; a synthetic batch where nobody says.
            training: Whether to look at one training step too.
        """
        from .runbook.operators.forecast import forecast

        with self._listeners.told_after():
            if model is None or isinstance(model, (str, os.PathLike)):
                model = self.create_pipeline("bundled" if model is None else str(model), OpenMedConfig())
            self._listeners.tell(Activity("Forecasting", type(model).__name__))
            return forecast(model, example_inputs, training)

    def parity(self, model: Any, texts: Any, arguments: Mapping[str, Any], /, **measuring: Any) -> ParityReport:
        """Return how far a model on a device, in a type, is from the CPU in float32; no model of the session is used.

        Args:
            model: The name of a model, ``None`` for the bundled one, or a pipeline of ours, compared as it is.
            texts: Any series of texts.
            arguments: Those of :meth:`load_model`, for a name.
            measuring: Those of ``runbook.measurement.parity_of``.
        """
        from .annotation.corpus import checked_pipeline
        from .runbook.measurement import checked_texts, parity_of
        from .runbook.pairs import pair_of_files, pair_of_pipeline

        with self._listeners.told_after():
            read = checked_texts(texts)
            if model is None or isinstance(model, (str, os.PathLike)):
                pair = pair_of_files(*self._files(model, arguments))
            else:
                pair = pair_of_pipeline(checked_pipeline(model, arguments))
            self._listeners.tell(Activity("Comparing", pair.name))
            return parity_of(pair, read, **measuring)

    def validate_precision(
        self, model: Any, texts: Any, dtype: str, arguments: Mapping[str, Any], gold: Any = None
    ) -> PrecisionVerdict:
        """Return whether a model keeps its entities in a reduced type, and store the certificate where it does.

        Args:
            model: The name of a model, ``None`` for the bundled one.
            texts: Any series of texts.
            dtype: The reduced type.
            arguments: Those of :meth:`load_model`.
            gold: The gold entities of each text, where there are some.
        """
        from .runbook.certificate_store import certificate_store
        from .runbook.certificates import identity_of
        from .runbook.measurement import checked_texts
        from .runbook.precision_gate import check_named, check_reduced, validate

        with self._listeners.told_after():
            check_named(model)
            read = list(checked_texts(texts))
            spec, device = self._files(model, {**arguments, "dtype": check_reduced(dtype)})
            identity = identity_of(spec, spec.dtype, device, self.computer)
            self._listeners.tell(Activity("Validating", spec.reference.name))
            return validate(spec, device, read, gold, identity, certificate_store(self._environ))

    def annotate_text(
        self,
        text: str,
        name: str | None = None,
        device: str | None = None,
        strategy: str | None = None,
        show_text: bool = True,
    ) -> AnnotatedText:
        """Return the entities that a model finds in one text; ``show_text`` tells whether the result may show it."""
        from .annotation.annotated import AnnotatedText
        from .annotation.texts import check_text

        with self._listeners.told_after():
            check_text(text)
            pipe = self.create_pipeline(name, OpenMedConfig(), aggregation_strategy=strategy, device=device)
            model = name or "bundled"
            self._listeners.tell(Activity("Annotating", model))
            return AnnotatedText(text, tuple(pipe(text)), model, shown_device(str(pipe.device)), show_text)

    def _load_plan(
        self, name: str | None, config: OpenMedConfig, arguments: dict[str, Any]
    ) -> tuple[LoadSpec, DeviceChoice, bool, dict[str, Any], DtypeChoice | None]:
        """Return what to load, the device, whether it follows the session, the arguments left, and why that type."""
        from .models.loading import LoadSpec
        from .models.quantization import INT8, check_int8
        from .runbook.dtype_choice import in_chosen_dtype

        arguments = dict(arguments)
        device = arguments.pop("device", None)
        remote_code = bool(arguments.pop("trust_remote_code", False))
        wish = config.device if device is None else str(device)
        config, options = with_arguments(config, arguments)
        source = "argument" if device is not None else "OpenMedConfig"
        choice = self.device(wish, source)
        spec, precision = LoadSpec.of(name, config, remote_code), None
        check_int8(spec.dtype, choice.device)
        if spec.dtype != "float32":
            spec = replace(spec, folder=self.models.folder(spec))
            spec, precision = in_chosen_dtype(spec, choice.device, self.computer, self._environ)
        follows = not Wish(source, wish).asks and spec.dtype != INT8
        return spec, choice, follows, options, precision

    def _warn_of_dtype(self, key: ModelKey, device: str) -> None:
        """Warn of a model that comes to a device in a reduced type that was not validated there."""
        from .runbook.dtype_choice import warn_unless_validated

        warn_unless_validated(key, device, self.computer, self._environ)

    def _files(self, name: Any, arguments: Mapping[str, Any]) -> tuple[LoadSpec, str]:
        """Return a model to be loaded beside those of the session, with its files here, and the device for it."""
        from .models.loading import model_folder

        with self._unchanged_on_error():
            named = "bundled" if name is None else str(name)
            spec, choice, _, options, _ = self._load_plan(named, OpenMedConfig(), dict(arguments))
            if options:
                raise ConfigurationError(f"There is no option {', '.join(sorted(options))}.", "Leave it out.")
            return replace(spec, folder=model_folder(spec)), choice.device

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
        from .devices.simulation.computer import simulated_computer

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


SESSION = Session()
"""The session of this process: the one place of what a person chose, did and loaded.

Beside it stands what is of the process and no choice of anybody: which models are watched by guards
(``training.guards.WATCHED``, weakly, so that the next training lets go what a failed one left), which conversions were
reported once (``devices.conversion.REPORTED``), whether the one simulated MPS device is on, which torch knows only once
(``devices.simulation._ACTIVE``), which panels are open (``interface.panel.opening.OPEN``, weakly), the lock of all tensor
work (``devices.backend.TENSOR_LOCK``), and what was learnt once of torch, of signatures and of files (``functools.cache``
in ``devices.linear``, ``annotation.forward``, ``models.content`` and ``runbook.operators.table``).
"""
