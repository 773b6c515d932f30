"""Loading of models and pipelines by name, on the session device or on a fixed device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..models.config import PIPELINE_OPTIONS, OpenMedConfig, check_strategy, check_task
from ..session import SESSION, Session, check_options

if TYPE_CHECKING:
    from .pipeline import AnnotationPipeline


def create_pipeline(
    session: Session,
    name: str | None,
    config: OpenMedConfig,
    /,
    task: str = "token-classification",
    aggregation_strategy: str | None = None,
    **arguments: Any,
) -> AnnotationPipeline:
    """Return a token-classification pipeline on the device of the configuration or the session."""
    check_options(load_pipeline, arguments, PIPELINE_OPTIONS)
    with session.transaction():
        check_task(task)
        strategy = check_strategy(aggregation_strategy)
        plan = session.load_plan(name, config, arguments)
        loaded = session.models.get(plan.spec, plan.device, plan.follows)
        from .pipeline import get_pipeline  # After the load, which reports why transformers cannot be imported.

        pipe = get_pipeline(loaded, strategy, plan.options)
        pipe.precision = plan.precision
        pipe.tuned_batch_tokens = loaded.tuned_batch_tokens
        return pipe


def load_pipeline(model: str | None = None, device: str | None = None, **arguments: Any) -> Any:
    """Load a token-classification pipeline on the best available device.

    Args:
        model: Alias, Hugging Face model id, model name or local directory. If ``None``, use the bundled offline disease model.
        device: Fixed device of the model. If ``None``, the model follows the session device.
        arguments: Further options:

            - ``aggregation_strategy``: ``"first"`` (the default, because ``"simple"`` splits words), ``"simple"``, ``"average"``,
              ``"max"`` or ``"none"``.
            - ``batch_tokens``: Maximum number of tokens per batch.
            - ``transformers_boundaries``: Whether to use the word boundaries of transformers.
            - The options of :func:`openmed_nb.load_model`.
            - The options of transformers' pipeline, such as ``ignore_labels``.

    Raises:
        ModelError: If the model cannot be found or loaded.
        DeviceError: If the device is not available. Nothing is loaded in this case.
        ConfigurationError: If the strategy or an option is not valid.

    Example:
        >>> load_pipeline("bundled_small", device="cpu")("No history of asthma.")[0]["word"]
        'asthma'
    """
    with SESSION.operation():
        return create_pipeline(SESSION, model, OpenMedConfig(), device=device, **arguments)


def load_model(model: str | None = None, device: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Load a model on the best available device and return ``{"model", "tokenizer", "config"}``.

    Args:
        model: Alias, Hugging Face model id, model name or local directory. If ``None``, use the bundled model.
        device: Fixed device of the model. If ``None``, the model follows the session device.
        arguments: ``dtype``, ``revision``, ``cache_dir``, ``local_only``, ``allow_pickle`` or ``trust_remote_code``.

    Raises:
        ModelError: If the model cannot be found or loaded. The error suggests an action.
        DeviceError: If the device is not available.
    """
    with SESSION.operation():
        return SESSION.load_model(model, OpenMedConfig(), device=device, **arguments).to_dict()
