"""The one mutable object: which device is in force, what was done to the environment, which models are loaded.

Every face (functions, magics, panel) calls these verbs. A verb that fails changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .activity import Activity, Listener, Listeners
from .devices import backend
from .devices.backend import TorchSeam
from .devices.choice import DeviceChoice, DeviceList, Explanation, candidates
from .devices.computer import Computer
from .devices.environment import VARIABLES, EnvPlan
from .devices.machine import Machine, read_machine
from .devices.request import DeviceRequest, Wish, decide, device_of, precedence, shown_variables
from .devices.simulated import shown_device
from .errors import ConfigurationError, DeviceUnavailable, OpenMedError, check_flag
from .models.config import OpenMedConfig, check_strategy, check_task, with_arguments
from .simulation import Simulation

if TYPE_CHECKING:
    from .annotation.corpus import Source
    from .annotation.results import AnnotatedText, Annotations
    from .models.dtypes import DtypeChoice, Validation
    from .models.loading import LoadedModel, LoadSpec
    from .models.store import Inventory, ModelKey, ModelStore
    from .runbook.comparison import Comparison
    from .runbook.doctor.report import DoctorReport
    from .runbook.handoff.bundle import Handoff, Order
    from .runbook.logbook.gathering import Said
    from .runbook.logbook.logbook import Logbook
    from .runbook.measure.benches import Asked
    from .runbook.measure.workloads import Subject
    from .runbook.operators.forecast import Forecast
    from .runbook.precision.gate import PrecisionVerdict
    from .runbook.precision.parity import ParityReport
    from .runbook.profile import Profile
    from .runbook.signals.values import Signals
    from .runbook.sweep import SweepReport
    from .runbook.sweep_search import SweepRules
    from .simulation.device import SimulatedMps
    from .training.curve import MemoryCurve

    FindSource = Callable[[Any, Any, Mapping[str, Any], int | None], tuple[str, Any, Source]]


class DeviceState:
    """The device in force on one computer; a session that goes to another computer takes another state, and comes back.

    Args:
        computer: The computer.

    Attributes:
        override: What was chosen for the session by hand; ``None`` where nothing was.
        in_force: The name of the device in force; ``None`` before the first.
    """

    def __init__(self, computer: Computer) -> None:
        self.computer = computer
        self.override: DeviceRequest | None = None
        self.in_force: str | None = None
        self._had_variables = False

    def chain(self, argument: str | None = None, source: str = "argument") -> tuple[Wish, ...]:
        """Return the wishes that count now, the strongest first."""
        return precedence(self.computer.changes.shell, Wish(source, argument), self.override)

    def start(self) -> None:
        """Apply the MPS variables where MPS is planned on a Mac, before anything imports torch."""
        if not self.computer.machine.native_apple_silicon:
            return
        try:
            choice = self.computer.plan(decide(self.chain()))
        except OpenMedError:
            return  # Loading the extension says nothing; the same wish is reported when the device is asked for.
        self.computer.prepare(choice.device)
        self.in_force = choice.device

    def enter(self, choice: DeviceChoice) -> None:
        """Bring the environment in line with the device that is now in force."""
        if choice.device == "mps":
            self.computer.prepare("mps")
        elif self.in_force == "mps":
            self.computer.leave_mps()
        self.in_force = choice.device
        if self.override is not None:
            self.computer.changes.publish(choice.device)

    def suspend(self) -> None:
        """Take back what was done to the environment, until :meth:`resume`."""
        self._had_variables = bool(self.computer.changes.applied)
        self.computer.changes.unpublish()
        self.computer.leave_mps()

    def resume(self) -> None:
        """Do again to the environment what was taken back; the MPS variables may have been asked for on any device."""
        if self._had_variables:
            self.computer.prepare("mps")
        if self.in_force is not None and self.override is not None:
            self.computer.changes.publish(self.in_force)

    def clear(self) -> None:
        """Forget the device and the override, and take back what was done to the environment."""
        self.override = self.in_force = None
        self.suspend()

    @contextlib.contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Take back what was applied to the environment meanwhile if there is an error."""
        applied, in_force = self.computer.changes.applied, self.in_force
        try:
            yield
        except BaseException:  # An interrupted import of torch too.
            self.computer.leave_mps(applied)
            self.in_force = in_force
            raise


@dataclass(frozen=True)
class LoadPlan:
    """What a load will do.

    Attributes:
        spec: What is loaded.
        device: The device, confirmed.
        follows: Whether the model follows the session.
        options: The arguments that are left for the pipeline.
        precision: Why the model has that type; ``None`` where nothing but float32 was asked for.
    """

    spec: LoadSpec
    device: str
    follows: bool
    options: dict[str, Any]
    precision: DtypeChoice | None


class Session:
    """What holds in one kernel, and what a face may ask of it.

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
        from .models.dtypes import warn_unless_validated

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
        from .simulation.device import simulated_computer

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

    def load_model(self, name: str | None, config: OpenMedConfig, /, **arguments: Any) -> LoadedModel:
        """Return a model on the device that the configuration or the session says."""
        with self._unchanged_on_error():
            plan = self._load_plan(name, config, arguments)
            if plan.options:
                unknown = ", ".join(sorted(plan.options))
                raise ConfigurationError(f"load_model() has no option {unknown}.", "Leave it out.")
            return self.models.model(plan.spec, plan.device, plan.follows)

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
            from .annotation.pipeline import pipeline_over

            check_task(task)
            strategy = check_strategy(aggregation_strategy)
            plan = self._load_plan(name, config, arguments)
            pipe = pipeline_over(self.models.model(plan.spec, plan.device, plan.follows), strategy, plan.options)
            pipe.precision = plan.precision
            return pipe

    def annotate(
        self,
        texts: Any,
        model: Any,
        arguments: Mapping[str, Any],
        /,
        elsewhere: FindSource | None = None,
        batch_tokens: int | None = None,
        **running: Any,
    ) -> Annotations:
        """Return the entities that a model finds in many texts.

        Args:
            texts: Any series of texts, or the paths of files of text.
            model: The name of a model, ``None`` for the bundled one, or a pipeline of ours.
            arguments: Those of :meth:`create_pipeline`, for a name.
            elsewhere: Finds what answers the texts, such as the workers of a cluster; ``None`` does it here.
            batch_tokens: How many tokens run at once; ``None`` takes what suits the device.
            running: Those of ``annotation.corpus.annotate_from``.
        """
        from .annotation.corpus import NothingLost, annotate_from, check_running

        check_running(**running)
        with self._listeners.told_after(), NothingLost(running.get("resume")):
            name, texts, source = (elsewhere or self._source)(texts, model, arguments, batch_tokens)
            self._listeners.tell(Activity("Annotating", name))
            return annotate_from(source, texts, name, **running)

    def _source(
        self, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
    ) -> tuple[str, Any, Source]:
        """Return the name of a model, the texts to read, and what answers them here."""
        from .annotation.corpus import Source, check_series, checked_pipeline
        from .distributed.columns import counted_here, referred

        found = referred(texts, counted_here, lambda function, *files: function(*files))
        check_series(found)
        if model is None or isinstance(model, (str, os.PathLike)):
            name = "bundled" if model is None else str(model)
            pipe = self.create_pipeline(name, OpenMedConfig(), **arguments)
        else:
            pipe, name = checked_pipeline(model, arguments), type(model.model).__name__
        return name, found, Source.of(pipe, batch_tokens)

    def annotate_text(
        self,
        text: str,
        name: str | None = None,
        device: str | None = None,
        strategy: str | None = None,
        show_text: bool = True,
    ) -> AnnotatedText:
        """Return the entities that a model finds in one text; ``show_text`` tells whether the result may show it."""
        from .annotation.results import AnnotatedText
        from .annotation.stream import check_text

        with self._listeners.told_after():
            check_text(text)
            pipe = self.create_pipeline(name, OpenMedConfig(), aggregation_strategy=strategy, device=device)
            model = name or "bundled"
            self._listeners.tell(Activity("Annotating", model))
            return AnnotatedText(text, tuple(pipe(text)), model, shown_device(str(pipe.device)), show_text)

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names."""
        with self._listeners.told_after(), self._lock:
            return self.models.unload(name)

    def inventory(self) -> Inventory:
        """Return the models that are loaded, with device, type and size."""
        from .models.store import Inventory

        with self._lock:
            return self._models.inventory() if self._models else Inventory(())

    def _load_plan(self, name: str | None, config: OpenMedConfig, arguments: dict[str, Any]) -> LoadPlan:
        """Return what to load, where, and in which type."""
        from .models.dtypes import in_chosen_dtype
        from .models.loading import LoadSpec
        from .models.quantization import INT8, check_int8

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
        return LoadPlan(spec, choice.device, follows, options, precision)

    def _files(self, name: Any, arguments: Mapping[str, Any]) -> tuple[LoadSpec, str]:
        """Return a model to be loaded beside those of the session, with its files here, and the device for it."""
        from .models.loading import model_folder

        with self._unchanged_on_error():
            named = "bundled" if name is None else str(name)
            plan = self._load_plan(named, OpenMedConfig(), dict(arguments))
            if plan.options:
                raise ConfigurationError(f"There is no option {', '.join(sorted(plan.options))}.", "Leave it out.")
            return replace(plan.spec, folder=model_folder(plan.spec)), plan.device

    def doctor(self, model: Any = None) -> DoctorReport:
        """Return what is wrong with this computer, its torch, its environment and its models, and what to do about it.

        Args:
            model: The name of a model, a torch module or a pipeline; the loaded models where nobody says.
        """
        from .runbook.doctor.report import diagnose, examine, models_to_look_at

        with self._unchanged_on_error():
            models = models_to_look_at(model, self.models.named, lambda name: self.load_model(name, OpenMedConfig()))
            return diagnose(
                examine(self.computer, lambda: self._choice_or_error(confirm=True), models, self._validation)
            )

    def subject(self, asked: Asked) -> tuple[Subject, str]:
        """Return what a person wants measured, and the device for it.

        Args:
            asked: The model, its data, and how they are used.
        """
        with self._listeners.told_after():
            asked.check()
            name, given = "bundled" if asked.model is None else str(asked.model), dict(asked.arguments)
            given |= {} if asked.device is None else {"device": asked.device}
            subject = asked.subject(lambda: self._files(name, given)[0])
            return subject, self.device(given.get("device")).device

    def sweep(self, asked: Asked, rules: SweepRules) -> SweepReport:
        """Return throughput and memory over batch sizes, with the knee; what a person passed stays as it is.

        Args:
            asked: What is measured.
            rules: How.
        """
        from .runbook.sweep import sweep_of

        with self._listeners.told_after():
            subject, device = self.subject(asked.in_one_shape())
            self._listeners.tell(Activity("Sweeping", subject.name))
            return sweep_of(subject, device, rules, self.computer.limit(device))

    def compare(self, asked: Asked, devices: Any, /, **measuring: Any) -> Comparison:
        """Return how fast the same work is on each device, and where its time goes.

        Args:
            asked: The model, its data, and how they are used.
            devices: The devices beside the CPU; ``None`` for all that can be used.
            measuring: The fields of ``runbook.comparison.Plan``.
        """
        from .runbook.comparison import Plan, check_comparable, comparison_of, devices_to_compare, reader_of

        with self._listeners.told_after():
            plan = Plan(**measuring)
            check_comparable(asked)
            subject, device = self.subject(asked)
            others = (device, *self._usable_devices()) if devices is None else self._confirmed(devices)
            names, machine = devices_to_compare(*others), self.computer.machine
            return comparison_of(
                subject,
                names,
                plan,
                lambda name: reader_of(name, machine, environ=self._environ, uuid=backend.gpu_uuid(name)),
                lambda name: self._listeners.tell(
                    Activity(f"Comparing on {name}", subject.name, names.index(name), len(names))
                ),
            )

    def profile(self, asked: Asked, /, **measuring: Any) -> Profile:
        """Return where the time of some steps goes, and what holds them up.

        Args:
            asked: The model, its data, and how they are used.
            measuring: The fields of ``runbook.profile.Plan``.
        """
        from .runbook.profile import Plan, profile_of

        with self._listeners.told_after():
            plan = Plan(**measuring)
            subject, device = self.subject(asked)
            self._listeners.tell(Activity("Profiling", subject.name))
            return profile_of(subject, device, plan)

    def _confirmed(self, devices: Any) -> tuple[str, ...]:
        """Return the devices that a person names, as torch spells them."""
        named = list(devices) if isinstance(devices, Iterable) and not isinstance(devices, str) else [devices]
        return tuple(self.device(device_of(one)).device for one in named)

    def _usable_devices(self) -> tuple[str, ...]:
        """Return the devices that compute, the best first."""
        usable = []
        for one in self.devices().candidates:
            if one.usable is not False:
                with contextlib.suppress(DeviceUnavailable):  # A GPU that nobody has tried yet, and that fails.
                    usable.append(self.device(one.device).device)
        return tuple(usable)

    def handoff(self, model: Any, order: Order, arguments: Mapping[str, Any]) -> Handoff:
        """Write a folder that another computer can run, and return what was written.

        Args:
            model: The name of a model, ``None`` for the bundled one.
            order: What a person wants handed over.
            arguments: Those of :meth:`load_model`.
        """
        from .runbook.handoff.bundle import handed_over

        with self._listeners.told_after():
            order.check(model)
            spec, device = self._files(model, arguments)
            self._listeners.tell(Activity("Handing over", spec.reference.name))
            return handed_over(order, spec, device, self.computer)

    def logbook(self, model: Any, said: Said) -> Logbook:
        """Return what figures are measured with, as it is now.

        Args:
            model: The name of a model, a pipeline, a torch module, or ``None`` for the one that was loaded last.
            said: What a person says of the run.
        """
        from .models.loading import model_folder
        from .runbook.logbook.fingerprints import which_model
        from .runbook.logbook.gathering import gather

        with self._listeners.told_after():
            self._listeners.tell(Activity("Writing", "logbook"))
            self.computer.load_torch()
            device = self.device().device
            found = which_model(model, self.models.named, lambda name: model_folder(self._files(name, {})[0]))
            return gather(said, self.computer, device, *found)

    def _validation(self, model: Any) -> Validation | None:
        """Return what is known of a model in a reduced type, where it was loaded by the session."""
        from .models.dtypes import validation_of

        key = self.models.key_of(model)
        return None if key is None else validation_of(key, str(model.device), self.computer, self._environ)

    def signals(self) -> Signals:
        """Return load, memory, power and heat of this computer at this moment; nothing is loaded for that."""
        from .runbook.doctor.report import signals_of

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

        check_flag("training", training)
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
            measuring: Those of ``runbook.precision.measurement.parity_of``.
        """
        from .annotation.corpus import checked_pipeline
        from .runbook.precision.measurement import checked_texts, pair_of_files, pair_of_pipeline, parity_of

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
        from .models.certificates import certificate_store, identity_of
        from .runbook.precision.gate import check_named, check_reduced, validate
        from .runbook.precision.measurement import checked_texts

        with self._listeners.told_after():
            check_named(model)
            read = list(checked_texts(texts))
            spec, device = self._files(model, {**arguments, "dtype": check_reduced(dtype)})
            identity = identity_of(spec, spec.dtype, device, self.computer)
            self._listeners.tell(Activity("Validating", spec.reference.name))
            return validate(spec, device, read, gold, identity, certificate_store(self._environ))


SESSION = Session()
"""The session of this process: the one place of what a person chose, did and loaded.

Beside it stands what is of the process and no choice of anybody: which models are watched by guards
(``training.guards.WATCHED``, weakly, so that the next training lets go what a failed one left), which conversions were
reported once (``devices.moving.REPORTED``), whether the one simulated MPS device is on, which torch knows only once
(``devices.simulated._ACTIVE``), which panels are open (``notebook.panel.opening.OPEN``, weakly), the lock of all tensor
work (``devices.backend.TENSOR_LOCK``), and what was learnt once of torch, of signatures and of files (``functools.cache``
in ``devices.linear``, ``annotation.forward``, ``models.files`` and ``runbook.operators.table``; in a worker of a cluster
also the model of the last run, in ``distributed.worker``), and which partitions of a column were read last
(``distributed.columns``), and what clusters change of the process while they live
(``distributed.starting``).
"""
