"""The one mutable object: which device is in force, what was done to the environment, which models are loaded.

Every face (functions, magics, panel) calls these verbs. A verb that fails changes nothing.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .devices import backend
from .devices.backend import TorchSeam
from .devices.choice import DeviceChoice, candidates
from .devices.computer import Computer
from .devices.environment import VARIABLES, EnvPlan
from .devices.explanation import DeviceList, Explanation
from .devices.machine import Machine, read_machine
from .devices.request import DeviceRequest, Wish, canonical, decide, precedence
from .devices.variables import shown_variables
from .errors import ConfigurationError, OpenMedError
from .models.config import OpenMedConfig, check_strategy, check_task, with_arguments

if TYPE_CHECKING:
    from .annotation.annotated import AnnotatedText
    from .annotation.annotations import Annotations
    from .models.loading import LoadedModel, LoadSpec
    from .models.store import ModelStore


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
        self.computer = Computer(environ, machine, seam)
        self._models: ModelStore | None = None
        self._override: DeviceRequest | None = None
        self._in_force: str | None = None
        self._lock = threading.RLock()

    @property
    def models(self) -> ModelStore:
        """The loaded models; their code is imported when first needed, so that loading the extension stays quick."""
        if self._models is None:
            from .models.store import ModelStore

            self._models = ModelStore()
        return self._models

    def device(self, argument: str | None = None, source: str = "argument") -> DeviceChoice:
        """Return the device in force, or the one that an argument asks for.

        A GPU is confirmed by computing on it, which loads torch; a planned CPU is left planned until torch is loaded.

        Raises:
            UnknownDevice: For a bad spelling, in the argument or in a variable.
            DeviceUnavailable: For a device that was asked for and cannot be used.
        """
        with self._unchanged_on_error():
            chain = self._chain(argument, source)
            choice = self.computer.confirm(decide(chain))
            if not chain[0].asks:
                self._enter(choice)
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
            self._override = request
            self._enter(choice)
            return replace(choice, moved=moved)

    def reset(self) -> DeviceChoice:
        """Drop the override, so that the variables and the machine decide again, and give the shell's value back."""
        with self._unchanged_on_error():
            choice = self.computer.confirm(decide(precedence(self.computer.changes.shell)))
            moved = self._models.follow(choice.device) if self._models else ()
            self._override = None
            self.computer.changes.unpublish()
            self._enter(choice)
            return replace(choice, moved=moved)

    def resolve(self, prefer: str | None = None) -> str:
        """Return the name of the device that is asked for, unchecked, or of the one in force where none is.

        Raises:
            UnknownDevice: For a bad spelling, in the argument or in a variable.
            DeviceUnavailable: Where nothing is asked for and no device can be used.
        """
        request = decide(self._chain(prefer))
        return candidates(request, self.computer.machine)[0] if request.asks else self.device().device

    def apply_mps_variables(self) -> dict[str, str]:
        """Set the MPS variables that nobody has set, whatever the device is, and return all three as they stand."""
        with self._lock:
            self.computer.prepare("mps")
            environ = self.computer.changes.environ
            return {name: environ[name] for name in VARIABLES if name in environ}

    def unload(self, name: str | None = None) -> tuple[str, ...]:
        """Forget the models of a name, or all, and hand their memory back; return the names."""
        with self._lock:
            return self.models.unload(name)

    def devices(self) -> DeviceList:
        """Return every device with whether it can be used, and why not."""
        with self._lock:
            choice = self._choice_or_error()
            return DeviceList(self.computer.candidates(), None if isinstance(choice, OpenMedError) else choice)

    def explain(self) -> Explanation:
        """Return the chain of wishes, the choice, what was ruled out, and the environment."""
        with self._lock:
            choice = self._choice_or_error()
            device = self._in_force if isinstance(choice, OpenMedError) else choice.device
            variables = shown_variables(self.computer.changes.shell)
            return Explanation(self._chain(), choice, self.environment(device or "cpu"), variables)

    def environment(self, device: str) -> EnvPlan:
        """Return what became of the MPS variables for a device."""
        return self.computer.environment(device)

    def start(self) -> None:
        """Apply the MPS variables where MPS is planned, before anything imports torch; never raises for a bad wish."""
        if not self.computer.machine.native_apple_silicon:
            return
        with self._lock:
            try:
                choice = self.computer.plan(decide(self._chain()))
            except OpenMedError:
                return  # Loading the extension says nothing; the same wish is reported when the device is asked for.
            self.computer.prepare(choice.device)
            self._in_force = choice.device

    def stop(self) -> None:
        """Drop the override and undo what was done to the environment, where it still has our values."""
        with self._lock:
            self._override = self._in_force = None
            self.computer.changes.unpublish()
            self.computer.leave_mps()

    def load_model(self, name: str | None, config: OpenMedConfig, /, **arguments: Any) -> LoadedModel:
        """Return a model on the device that the configuration or the session says."""
        with self._unchanged_on_error():
            spec, choice, follows, options = self._load_plan(name, config, arguments)
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
        from .annotation.building import pipeline_over

        check_task(task)
        strategy = check_strategy(aggregation_strategy)
        with self._unchanged_on_error():
            spec, choice, follows, options = self._load_plan(name, config, arguments)
            return pipeline_over(self.models.model(spec, choice.device, follows), strategy, options)

    def annotate(self, texts: Any, model: Any, arguments: Mapping[str, Any], /, **running: Any) -> Annotations:
        """Return the entities that a model finds in many texts.

        Args:
            texts: Any series of texts.
            model: The name of a model, ``None`` for the bundled one, or a pipeline of ours.
            arguments: Those of :meth:`create_pipeline`, for a name.
            running: Those of ``annotation.corpus.annotate_texts``.
        """
        from .annotation.corpus import annotate_texts, checked_pipeline

        if model is None or isinstance(model, (str, os.PathLike)):
            name = "bundled" if model is None else str(model)
            return annotate_texts(self.create_pipeline(name, OpenMedConfig(), **arguments), texts, name, **running)
        return annotate_texts(checked_pipeline(model, arguments), texts, type(model.model).__name__, **running)

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

        check_text(text)
        pipe = self.create_pipeline(name, OpenMedConfig(), aggregation_strategy=strategy, device=device)
        return AnnotatedText(text, tuple(pipe(text)), name or "bundled", canonical(str(pipe.device)), show_text)

    def _chain(self, argument: str | None = None, source: str = "argument") -> tuple[Wish, ...]:
        return precedence(self.computer.changes.shell, Wish(source, argument), self._override)

    def _load_plan(
        self, name: str | None, config: OpenMedConfig, arguments: dict[str, Any]
    ) -> tuple[LoadSpec, DeviceChoice, bool, dict[str, Any]]:
        """Return what to load, the device, whether it follows the session, and the arguments left for the pipeline."""
        from .models.loading import LoadSpec

        arguments = dict(arguments)
        device = arguments.pop("device", None)
        remote_code = bool(arguments.pop("trust_remote_code", False))
        wish = config.device if device is None else str(device)
        config, options = with_arguments(config, arguments)
        source = "argument" if device is not None else "OpenMedConfig"
        choice = self.device(wish, source)
        return LoadSpec.of(name, config, remote_code), choice, not Wish(source, wish).asks, options

    def _enter(self, choice: DeviceChoice) -> None:
        """Bring the environment in line with the device that is now in force for the session."""
        if choice.device == "mps":
            self.computer.prepare("mps")
        elif self._in_force == "mps":
            self.computer.leave_mps()
        self._in_force = choice.device
        if self._override is not None:
            self.computer.changes.publish(choice.device)

    @contextlib.contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """Hold the lock, and take back what was applied to the environment if the verb fails."""
        with self._lock:
            applied, in_force = self.computer.changes.applied, self._in_force
            try:
                yield
            except BaseException:  # An interrupted import of torch too.
                self.computer.leave_mps(applied)
                self._in_force = in_force
                raise

    def _choice_or_error(self) -> DeviceChoice | OpenMedError:
        """Return the choice, or the error that the list and the explanation help to mend."""
        try:
            return self.device()
        except OpenMedError as error:
            return error


SESSION = Session()
"""The session of this process; all state of the package is in here."""
