"""The Python face of models: loading them, and annotating texts with them; each calls one verb of the session."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..annotation.loading import create_pipeline
from ..errors import ConfigurationError
from ..models.config import OpenMedConfig
from ..session import SESSION
from . import verbs

if TYPE_CHECKING:
    from ..annotation.results import Annotations


class ModelLoader:
    """Loads models and builds pipelines on the device of its configuration, or of the session.

    Args:
        config: The settings; ``None`` is ``OpenMedConfig()``.

    Example:
        >>> loader = ModelLoader(OpenMedConfig(device="cpu"))
        >>> pipe = loader.create_pipeline("bundled_small")
        >>> [entity["word"] for entity in pipe("He has type 2 diabetes mellitus.")]
        ['type 2 diabetes mellitus']
    """

    def __init__(self, config: OpenMedConfig | None = None) -> None:
        if not isinstance(config, OpenMedConfig | None):
            raise ConfigurationError(f"A loader cannot be made of {type(config).__name__}.", "Pass an OpenMedConfig.")
        self.config = config or OpenMedConfig()

    def load_model(self, model_name: str | None = None, **arguments: Any) -> dict[str, Any]:
        """Return ``{"model", "tokenizer", "config"}`` of a model, the model on its device and in evaluation mode.

        Args:
            model_name: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
            arguments: ``device``, ``dtype``, ``revision``, ``cache_dir``, ``local_only``, ``allow_pickle`` or
                ``trust_remote_code`` instead of the configuration's.

        Raises:
            ModelError: Where the model cannot be found or loaded; its remedy says what to do.
            DeviceError: Where the device cannot be used.
        """
        return SESSION.load_model(model_name, self.config, **arguments).to_dict()

    def create_pipeline(
        self,
        model_name: str | None = None,
        task: str = "token-classification",
        aggregation_strategy: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Return a drop-in for transformers' token-classification pipeline over a model, with the same answers.

        Args:
            model_name: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
            task: ``"token-classification"`` or ``"ner"``.
            aggregation_strategy: How tokens become entities: ``"first"`` (also the default, because ``"simple"`` breaks
                words), ``"simple"``, ``"average"``, ``"max"`` or ``"none"``.
            arguments: Those of :meth:`load_model`; those of transformers' pipeline such as ``ignore_labels`` or ``stride``;
                ``batch_tokens``, how many tokens run at once; ``truncation``, whether to drop what is longer than the model
                takes; ``compile``, whether to try ``torch.compile`` and keep it where it pays.

        Raises:
            ModelError: Where the model cannot be found or loaded.
            DeviceError: Where the device cannot be used; nothing is loaded then.
            ConfigurationError: For a task, strategy or option that does not exist.
        """
        return create_pipeline(SESSION, model_name, self.config, task, aggregation_strategy, **arguments)

    def unload(self, model_name: str | None = None) -> tuple[str, ...]:
        """Forget a model, or all, and hand the memory back; return the names of those that were loaded."""
        return SESSION.unload(model_name)


def load_pipeline(model: str | None = None, device: str | None = None, **arguments: Any) -> Any:
    """Return a token-classification pipeline on the best device of this computer.

    Args:
        model: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled, offline disease model.
        device: A device to stay on; ``None`` follows the session's.
        arguments: Those of :meth:`ModelLoader.create_pipeline`.

    Raises:
        ModelError, DeviceError, ConfigurationError: As for :meth:`ModelLoader.create_pipeline`.

    Example:
        >>> load_pipeline("bundled_small", device="cpu")("No history of asthma.")[0]["word"]
        'asthma'
    """
    return ModelLoader().create_pipeline(model, device=device, **arguments)


def load_model(model: str | None = None, device: str | None = None, **arguments: Any) -> dict[str, Any]:
    """Return ``{"model", "tokenizer", "config"}`` of a model on the best device of this computer.

    Args:
        model: An alias, a hub id, a bare name, a folder, or ``None`` for the bundled model.
        device: A device to stay on; ``None`` follows the session's.
        arguments: Those of :meth:`ModelLoader.load_model`.

    Raises:
        ModelError, DeviceError: As for :meth:`ModelLoader.load_model`.
    """
    return ModelLoader().load_model(model, device=device, **arguments)


def annotate(  # noqa: PLR0913 - each is one thing that a person may want to say
    texts: Iterable[str],
    model: Any = None,
    *,
    client: Any = None,
    batch_tokens: int | None = None,
    progress: bool = True,
    resume: Any = None,
    on_error: str = "raise",
    show_text: bool = True,
    **arguments: Any,
) -> Annotations:
    """Return the entities that a model finds in many texts, near the speed of the bare model.

    Args:
        texts: A list, a generator, a pandas Series, a column of a ``datasets.Dataset``: anything that gives strings one
            by one. They are read as they are needed; some 40 bytes for each entity are kept, and the first texts. Or the
            ``pathlib.Path`` of files that are a text each, with ``*`` for any name, or a list of such paths. Or a column of
            ``dask.dataframe``, of which a partition is read at a time, after all were read once to count their rows; not as
            it is after ``persist()`` on a cluster. What was no text in it cannot always be told: Dask makes ``"5"`` of a 5
            (its setting ``dataframe.convert-string``), and what is missing, NaN too, is reported as ``NoneType``.
        model: An alias, a hub id, a bare name, a folder, ``None`` for the bundled model, or a pipeline of
            :func:`load_pipeline`.
        client: A ``dask.distributed.Client``: the workers of its cluster do it, each with the model on the best device of
            its computer; see :func:`openmed_nb.cluster`. They then read files, and columns of ``dask.dataframe``, themselves.
            A model is named, and a folder must be there on every computer.
        batch_tokens: How many tokens run at once; ``None`` takes what suits the device.
        progress: Whether to show a bar with texts per second, for what takes more than a second.
        resume: A file that answers are written to as they come, some hundred texts at a time, one line of JSON for each.
            Where it is there already, the run goes on after its last text, also when the process was killed; what was
            under way then is read again. Or the ``annotations`` that an interrupted run has left.
        on_error: ``"raise"`` stops at a text that cannot be read or does not fit in memory; ``"record"`` goes on and notes
            it in ``errors``.
        show_text: Whether texts, and the words in them, are part of what is shown.
        arguments: Those of :meth:`ModelLoader.create_pipeline`, such as ``device`` or ``aggregation_strategy``.

    Returns:
        A sequence with one list of entities for each text, in the order of the texts.

    Raises:
        UnreadableText: For a text that cannot be read, with ``on_error="raise"``.
        DeviceUnavailable: For a text that does not fit in memory alone, and where the device fails.
        ConfigurationError: For what is no series of texts, an option that does not exist, or a file of another run.
        ClusterError: Where workers would give other answers than others, where none is left, and for a text that ends
            every worker that reads it, with ``on_error="raise"``.
        Interrupted: Where the run was stopped, a ``KeyboardInterrupt``. Every error has an attribute ``annotations``
            with what was done until then.

    Example:
        >>> found = annotate(["She has asthma.", "No complaints."], "bundled_small", device="cpu")
        >>> [[entity["word"] for entity in entities] for entities in found]
        [['asthma'], []]
    """
    if client is None:
        elsewhere = None
    else:
        from ..distributed.stream import source_on_workers

        elsewhere = partial(source_on_workers, client)
    return verbs.annotate(
        SESSION,
        texts,
        model,
        arguments,
        elsewhere=elsewhere,
        batch_tokens=batch_tokens,
        progress=progress,
        resume=resume,
        on_error=on_error,
        show_text=show_text,
    )
