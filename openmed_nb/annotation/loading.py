"""Models and pipelines by name, on the device of a session or of their own."""

from __future__ import annotations

from typing import Any

from .._utils.validation import check_bool
from ..models.config import OpenMedConfig, check_strategy, check_task
from ..session import SESSION, Session


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
    with session.transaction():
        check_task(task)
        strategy = check_strategy(aggregation_strategy)
        check_bool("compile", arguments.get("compile", False))
        plan = session.load_plan(name, config, arguments)
        loaded = session.models.get(plan.spec, plan.device, plan.follows)
        from .pipeline import get_pipeline  # After the load, which tells why transformers cannot be imported.

        pipe = get_pipeline(loaded, strategy, plan.options)
        pipe.precision, pipe.tuned_batch_tokens = plan.precision, loaded.tuned_batch_tokens
        return pipe


def load_pipeline(
    model: str | None = None, device: str | None = None, *, progress: bool = True, **arguments: Any
) -> Any:
    """Return a token-classification pipeline on the best device of this computer.

    Args:
        model: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled, offline disease model.
        device: A device to stay on; ``None`` follows the session's.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: ``aggregation_strategy``, how tokens become entities: ``"first"`` (also the default, because ``"simple"``
            breaks words), ``"simple"``, ``"average"``, ``"max"`` or ``"none"``; ``batch_tokens``, how many tokens run at once;
            ``truncation``, whether to drop what is longer than the model takes; ``transformers_boundaries``, whether words
            start where transformers has them start; ``compile``, whether to try ``torch.compile`` and keep it if it pays;
            those of :func:`openmed_nb.load_model`; and those of transformers' pipeline, such as ``ignore_labels`` or ``stride``.

    Raises:
        ModelError: If the model cannot be found or loaded.
        DeviceError: If the device cannot be used; nothing is loaded then.
        ConfigurationError: For a strategy or an option that does not exist.

    Example:
        >>> load_pipeline("bundled_small", device="cpu")("No history of asthma.")[0]["word"]
        'asthma'
    """
    with SESSION.operation(progress):
        return create_pipeline(SESSION, model, OpenMedConfig(), device=device, **arguments)


def load_model(
    model: str | None = None, device: str | None = None, *, progress: bool = True, **arguments: Any
) -> dict[str, Any]:
    """Return ``{"model", "tokenizer", "config"}`` of a model on the best device of this computer.

    Args:
        model: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
        device: A device to stay on; ``None`` follows the session's.
        progress: Whether to show what is under way, where it takes longer than half a second.
        arguments: ``dtype``, ``revision``, ``cache_dir``, ``local_only``, ``allow_pickle`` or ``trust_remote_code``.

    Raises:
        ModelError: If the model cannot be found or loaded; its remedy says what to do.
        DeviceError: If the device cannot be used.
    """
    with SESSION.operation(progress):
        return SESSION.load_model(model, OpenMedConfig(), device=device, **arguments).to_dict()
