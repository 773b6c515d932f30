"""The Python face of handing over: a folder that proves elsewhere what was measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..session import SESSION
from . import verbs

if TYPE_CHECKING:
    import os

    from ..runbook.handoff.bundle import Handoff
    from ..runbook.logbook.logbook import Logbook


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
