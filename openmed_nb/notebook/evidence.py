"""The Python face of the runbook's evidence: what figures were measured with, and a folder that proves them elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..session import SESSION
from . import verbs

if TYPE_CHECKING:
    import os

    from ..runbook.handoff.bundle import Handoff
    from ..runbook.logbook.logbook import Logbook


def logbook(  # noqa: PLR0913 - each is one thing that a person may want to say
    *reports: Any,
    model: Any = None,
    dataset: Any = None,
    batch_size: int | None = None,
    length: int | None = None,
    seeds: Any = None,
    loader: Any = None,
    hypotheses: Any = (),
    applications: bool = False,
    artifact_store: str | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Logbook:
    """Write down what figures are measured with: versions, code, device, model, dataset, settings, power, heat and other programs.

    Called right before a run, it has power and heat of that moment; ``book.with_reports(report)`` adds the figures afterwards.

    Args:
        reports: What :func:`sweep`, :func:`compare`, :func:`parity`, :func:`memory_curve` and the others returned; their
            numbers are kept, and batch, length, workers and peak memory where they have them.
        model: The name of a model, whose files are fingerprinted; a pipeline or a torch module, of which every weight is; the
            one that was loaded last where nobody says.
        dataset: Texts in an order, such as a list, or the path of a file or of a folder with shards; SHA-256 of it is kept.
        batch_size: How many rows a batch has, where no report says it.
        length: How many tokens a row has, where no report says it.
        seeds: A seed, or seeds by name: ``{"torch": 1, "numpy": 2}``.
        loader: The ``DataLoader`` of a training; nothing is read from it.
        hypotheses: Pairs of what was suspected and what rules it out. These words are kept, so no note may be in them.
        applications: Whether the busiest other programs are named; they are counted anyway.
        artifact_store: A host and a port, or an address, to which connections are timed; nothing is sent.
        folder: A folder of your code, of which git tells the commit; the one in which Python runs where nobody says.

    Returns:
        The logbook: ``save("run.json")``, ``save("run.md")``, ``Logbook.read("run.json")``, ``markdown()``, ``to_dict()``, and
        ``diff(other)``, which says first whether the figures of both may be compared at all: only where both are known to be of
        one model, one dataset and one batch. Its text names what it is of; all that it holds stands in its HTML.

    Raises:
        ConfigurationError: For what is no report, dataset, loader, seed or store, and for hypotheses that are long or have
            words of the dataset; for reports of several devices.
        DeviceError: For reports of a device that is not here.
        ModelError: For a model that cannot be had.
        TorchUnusable: Where torch does not import.

    No text, no name of a file and no secret is kept: of environment variables those of an allow list, each if its value looks
    as such a value does (``runbook.logbook.variables``). The form of the JSON is published in
    ``runbook/logbook/logbook.schema.json``.

    Example:
        >>> book = logbook(model="bundled", dataset=["She has asthma."], batch_size=8)
        >>> book.dataset.items, book.run.batch_size, book.diff(book).comparable
        (1, 8, True)
    """
    from ..runbook.logbook.gathering import Said

    said = (dataset, batch_size, length, seeds, loader, hypotheses, applications, artifact_store, folder)
    return verbs.logbook(SESSION, model, Said(reports, *said))


def handoff(  # noqa: PLR0913 - each is one thing that a person may want to say
    folder: str | os.PathLike[str],
    model: str | os.PathLike[str] | None = None,
    dataset: Any = None,
    *,
    logbook: Logbook | None = None,
    copy_model: bool = True,
    copy_dataset: bool = False,
    batch_size: int = 32,
    rounds: int = 10,
    steps: int = 3,
    device: str | None = None,
    **arguments: Any,
) -> Handoff:
    """Write a folder that another computer can run, and that proves there that it does what it does here.

    In it are the locked environment with this version of the toolkit, the model, the golden command line with its environment
    variables, a logbook with its schema, and a smoke test: ``sh run.sh`` checks files, packages, entities, memory and, where
    the logbooks may be compared, speed. Its README.md says how it is run, without a network.

    Args:
        folder: The folder to write; it must not be there, or be empty. It is written whole or not at all.
        model: The name of a model, or a folder; ``None`` for the bundled one.
        dataset: The dataset of the work: texts, or the path of a file or a folder. Only its checksum is handed over.
        logbook: The logbook of the work; it is put beside that of the smoke test.
        copy_model: Whether the model's files are copied; its name, without a path, and its checksum alone where not.
        copy_dataset: Whether the texts are copied and are what the smoke test reads, in the place of synthetic ones.
        batch_size: How many texts a step of the smoke test reads.
        rounds: After how many rounds its memory is judged; one more goes before them.
        steps: How many steps a round has.
        device: The device of the golden run; ``None`` is the session's.
        arguments: Those of :meth:`ModelLoader.load_model`, such as ``dtype``.

    Returns:
        What was written: ``folder``, ``files`` with sizes, ``golden``, ``logbook`` and ``trial``.

    Raises:
        ConfigurationError: For a folder that is not empty, a model that is no name or a pickle, numbers that are none, and
            where a package that is needed is not installed.
        ModelError: Where the model cannot be loaded.
        DeviceError: Where the device cannot be used.

    Packages are pinned without the name of a build, such as ``+cpu``; those that only some computers need keep the marker that
    says which. The model is loaded for it and let go after it; the session stays as it is.
    """
    from ..runbook.handoff.bundle import Order

    named = {"device": device, **arguments}
    given = {name: value for name, value in named.items() if value is not None}
    order = Order(folder, dataset, logbook, copy_model, copy_dataset, batch_size, rounds, steps)
    return verbs.handoff(SESSION, model, order, given)
