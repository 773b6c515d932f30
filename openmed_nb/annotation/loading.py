"""Pipelines by the name of a model, on the device of a session."""

from __future__ import annotations

from typing import Any

from ..models.config import OpenMedConfig, check_strategy, check_task
from ..session import Session


def create_pipeline(
    session: Session,
    name: str | None,
    config: OpenMedConfig,
    /,
    task: str = "token-classification",
    aggregation_strategy: str | None = None,
    **arguments: Any,
) -> Any:
    """Return a token-classification pipeline on the device that the configuration or the session says."""
    with session.unchanged_on_error():
        from .pipeline import pipeline_over

        check_task(task)
        strategy = check_strategy(aggregation_strategy)
        plan = session.load_plan(name, config, arguments)
        pipe = pipeline_over(session.models.model(plan.spec, plan.device, plan.follows), strategy, plan.options)
        pipe.precision = plan.precision
        return pipe
