"""The verbs of the runbook: is this device right for this model?"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..devices import backend
from ..devices.request import device_of
from ..errors import DeviceUnavailable, OpenMedError, check_flag
from ..models.config import OpenMedConfig
from .models import ModelVerbs

if TYPE_CHECKING:
    from ..runbook.comparison.comparison import Comparison
    from ..runbook.doctor.report import DoctorReport
    from ..runbook.handoff.bundle import Handoff
    from ..runbook.handoff.writing import Order
    from ..runbook.logbook.gathering import Said
    from ..runbook.logbook.logbook import Logbook
    from ..runbook.operators.forecast import Forecast
    from ..runbook.precision.dtype_choice import Validation
    from ..runbook.precision.gate import PrecisionVerdict
    from ..runbook.precision.parity import ParityReport
    from ..runbook.signals.values import Signals
    from ..runbook.slices.profile import Profile
    from ..runbook.sweep.report import SweepReport
    from ..runbook.sweep.rules import SweepRules
    from ..runbook.workloads.choosing import Asked
    from ..runbook.workloads.workload import Subject


class RunbookVerbs(ModelVerbs):
    """What a session can be asked about its device and its models."""

    def doctor(self, model: Any = None) -> DoctorReport:
        """Return what is wrong with this computer, its torch, its environment and its models, and what to do about it.

        Args:
            model: The name of a model, a torch module or a pipeline; the loaded models where nobody says.
        """
        from ..runbook.doctor.examination import examine, models_to_look_at
        from ..runbook.doctor.report import diagnose

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
        from ..runbook.sweep.sweeping import sweep_of

        with self._listeners.told_after():
            subject, device = self.subject(asked.in_one_shape())
            self._listeners.tell(Activity("Sweeping", subject.name))
            return sweep_of(subject, device, rules, self.computer.limit(device))

    def compare(self, asked: Asked, devices: Any, /, **measuring: Any) -> Comparison:
        """Return how fast the same work is on each device, and where its time goes.

        Args:
            asked: The model, its data, and how they are used.
            devices: The devices beside the CPU; ``None`` for all that can be used.
            measuring: The fields of ``runbook.comparison.measurement.Plan``.
        """
        from ..runbook.comparison.measurement import Plan, check_comparable, comparison_of, devices_to_compare
        from ..runbook.signals.utilisation import reader_of

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
            measuring: The fields of ``runbook.slices.measurement.Plan``.
        """
        from ..runbook.slices.measurement import Plan, profile_of

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
        from ..runbook.handoff.writing import handed_over

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
        from ..models.loading import model_folder
        from ..runbook.logbook.gathering import gather
        from ..runbook.logbook.models import which_model

        with self._listeners.told_after():
            self._listeners.tell(Activity("Writing", "logbook"))
            self.computer.load_torch()
            device = self.device().device
            found = which_model(model, self.models.named, lambda name: model_folder(self._files(name, {})[0]))
            return gather(said, self.computer, device, *found)

    def _validation(self, model: Any) -> Validation | None:
        """Return what is known of a model in a reduced type, where it was loaded by the session."""
        from ..runbook.precision.dtype_choice import validation_of

        key = self.models.key_of(model)
        return None if key is None else validation_of(key, str(model.device), self.computer, self._environ)

    def signals(self) -> Signals:
        """Return load, memory, power and heat of this computer at this moment; nothing is loaded for that."""
        from ..runbook.doctor.examination import signals_of

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
        from ..runbook.operators.forecast import forecast

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
        from ..annotation.corpus import checked_pipeline
        from ..runbook.precision.inputs import checked_texts
        from ..runbook.precision.measurement import parity_of
        from ..runbook.precision.pairs import pair_of_files, pair_of_pipeline

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
        from ..runbook.precision.certificate_store import certificate_store
        from ..runbook.precision.certificates import identity_of
        from ..runbook.precision.gate import check_named, check_reduced, validate
        from ..runbook.precision.inputs import checked_texts

        with self._listeners.told_after():
            check_named(model)
            read = list(checked_texts(texts))
            spec, device = self._files(model, {**arguments, "dtype": check_reduced(dtype)})
            identity = identity_of(spec, spec.dtype, device, self.computer)
            self._listeners.tell(Activity("Validating", spec.reference.name))
            return validate(spec, device, read, gold, identity, certificate_store(self._environ))
