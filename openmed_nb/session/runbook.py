"""The verbs of the runbook: is this device right for this model?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..activity import Activity
from ..errors import OpenMedError
from ..models.config import OpenMedConfig
from .models import ModelVerbs

if TYPE_CHECKING:
    from ..runbook.doctor.report import DoctorReport
    from ..runbook.operators.forecast import Forecast
    from ..runbook.precision.dtype_choice import Validation
    from ..runbook.precision.gate import PrecisionVerdict
    from ..runbook.precision.parity import ParityReport
    from ..runbook.signals.values import Signals
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
            subject = asked.subject(
                lambda: self._files(name, given)[0], lambda: self.create_pipeline(name, OpenMedConfig(), **given)
            )
            return subject, self.device(given.get("device")).device

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
