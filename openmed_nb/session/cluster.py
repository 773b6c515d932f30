"""A run on the workers of a cluster: they load the model, say who they are, and answer."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..annotation.cluster.clients import ask_all, ask_one, check_sendable, checked_client
from ..annotation.cluster.columns import counted_by, referred
from ..annotation.cluster.members import Members, Ready, check_alike, most_common
from ..annotation.cluster.streaming import ClusterAnnotator
from ..annotation.cluster.work import Work
from ..annotation.corpus import Source
from ..annotation.references import absolute
from ..errors import ConfigurationError, OpenMedWarning
from ..models.registry import BUNDLED
from . import worker

if TYPE_CHECKING:
    from distributed import Client


def source_on_workers(
    client: Any, texts: Any, model: Any, arguments: Mapping[str, Any], batch_tokens: int | None
) -> tuple[str, Any, Source]:
    """Return the name of a model, the texts to send out, and what answers them on the workers of a cluster.

    Raises:
        ConfigurationError: For what is no client, a model that is not named, and an argument that cannot go to workers.
        ClusterError: Where there is no worker, one fails, or one is not like the others.
        OpenMedError: What the model cannot be loaded for on a worker; it names the computer.
    """
    client = checked_client(client)
    name = named(model)
    check_sendable(arguments)
    work = Work(uuid.uuid4().hex, everywhere(name), dict(arguments), batch_tokens)
    ready = ready_workers(client, work)
    terms = most_common(one.terms for one in ready)
    characters = min(one.characters for one in ready)
    settings = ready[0].settings
    split = settings["delimiter"] is not None
    annotator = ClusterAnnotator(client, replace(work, terms=terms), worker.answers_of, characters, split)
    label = Members(tuple(one.member for one in ready)).label
    return name, on_workers(client, texts), Source(annotator.answers, settings, label)


def ready_workers(client: Client, work: Work) -> list[Ready]:
    """Return the workers once all have loaded the model of a run; what they warned of is said once here."""
    ready: list[Ready] = ask_all(client, worker.get_ready, work)
    check_alike(ready)
    for message in sorted({message for one in ready for message in one.warnings}):
        warnings.warn(message, OpenMedWarning, stacklevel=2)
    return ready


def members_of(client: Client, reason: str | None = None) -> Members:
    """Return who takes part in a cluster.

    Args:
        client: A client of it.
        reason: Why the workers have their device, where they were told which; ``None`` leaves it to what they say.

    Raises:
        ClusterError: Where there is no worker, or one fails.
    """
    found = ask_all(client, worker.introduce)
    return Members(tuple(replace(one, reason=one.reason if reason is None else reason) for one in found))


def named(model: Any) -> str:
    """Return the name of a model, by which every worker can load it.

    Raises:
        ConfigurationError: For a pipeline, which is a model in the memory of this process.
    """
    if model is None or isinstance(model, (str, os.PathLike)):
        return "bundled" if model is None else str(model)
    what = (
        f"{type(model).__name__} is no name of a model, and what is in the memory of this process cannot go to workers."
    )
    raise ConfigurationError(what, "Pass the name or the folder of its model, and its arguments to annotate().")


def everywhere(name: str) -> str:
    """Return a name that means the same in another working folder: a folder that is here, from the root.

    What is a folder is told as the registry of models does: not the name of a bundled one, nor one of somebody's home,
    which every worker has itself; and no name is too long to be asked for.

    Example:
        >>> everywhere("bundled"), everywhere(""), everywhere("~")
        ('bundled', '', '~')
    """
    there = name not in BUNDLED and os.path.isdir(name)  # noqa: PTH112 - for Path, "" is the working folder
    return absolute(name) if there else name


def on_workers(client: Client, texts: Any) -> Any:
    """Return texts that workers read themselves where they can: files, and columns of dask.dataframe."""
    return referred(
        texts,
        lambda partitions: counted_by(client, partitions),
        lambda function, *files: ask_one(client, function, *files),
    )
