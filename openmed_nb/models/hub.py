"""From a hub id to a folder with the model's files: one look at the network first, then one download.

huggingface_hub retries an unreachable hub for 24 to 48 seconds, so a plain connection is tried before; and with the
files in a folder, loading needs no network at all.
"""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

from ..devices.request import masked
from ..errors import ModelError, ModelUnreachable, UnknownModel, cause
from .config import OpenMedConfig
from .registry import unknown_model

CONNECT_SECONDS = 1.5

MODEL_FILES = ("*.json", "*.txt", "*.model", "model.safetensors", "model-*-of-*.safetensors")
PICKLE_FILES = ("pytorch_model*.bin",)
CODE_FILES = ("*.py",)

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)

OFFLINE_REMEDY = "Connect and try again, or use 'bundled', which works offline."
DISK_REMEDY = "Make room in the cache of huggingface_hub, or name another folder with cache_dir."


def fetch_model(repo_id: str, config: OpenMedConfig, code: bool = False) -> Path:
    """Return the folder with the files of a hub model, downloaded or from the cache.

    Args:
        repo_id: The id on the hub, ``org/name``.
        config: Revision, cache, token, and whether the network may be used.
        code: Whether the model's Python files are wanted as well.

    Returns:
        A folder in huggingface_hub's cache.

    Raises:
        UnknownModel: Where the hub has no such model or revision.
        ModelUnreachable: Where the hub does not answer or refuses access, and the cache does not have the model; it
            takes three seconds at most where there is no network.
    """
    from huggingface_hub import snapshot_download

    offline = why_offline(config)
    patterns = MODEL_FILES + (PICKLE_FILES if config.allow_pickle else ()) + (CODE_FILES if code else ())
    try:
        folder = snapshot_download(
            repo_id,
            revision=config.revision,
            cache_dir=config.cache_dir,
            token=config.hf_token,
            local_files_only=bool(offline),
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        # A broken connection is an error of the HTTP library below, which differs between releases of huggingface_hub.
        raise explain(error, repo_id, config.revision, offline) from error
    return Path(folder)


def why_offline(config: OpenMedConfig) -> str:
    """Return why the network is left alone, empty where the hub can be asked."""
    from huggingface_hub import constants

    if config.local_only:
        return "local_only=True switches the network off"
    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE switches the network off"
    return "" if answers(constants.ENDPOINT) else "the model hub cannot be reached"


def explain(error: Exception, repo_id: str, revision: str | None, offline: str) -> ModelError:
    """Return the error of ours for what huggingface_hub raised.

    Args:
        error: What was raised.
        repo_id: The id on the hub.
        revision: The revision that was asked for.
        offline: Why the network was left alone, empty where it was used.
    """
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        what = f"The model {repo_id!r} is gated."
        return ModelUnreachable(what, "Ask for access at its page on the hub, then run: hf auth login.")
    if isinstance(error, errors.RevisionNotFoundError):
        return UnknownModel(f"The model {repo_id!r} has no revision {revision!r}.", "Use a branch, tag or commit.")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return unknown_model(repo_id, "If it is private, run: hf auth login.")
    if offline:
        return ModelUnreachable(
            f"The model {repo_id!r} is not on this computer, neither as a folder nor downloaded, and {offline}.",
            OFFLINE_REMEDY,
        )
    full = isinstance(error, OSError) and error.errno in DISK_ERRORS
    what = f"The model {repo_id!r} could not be downloaded: {masked('', cause(first_cause(error)))}."
    return ModelUnreachable(what, DISK_REMEDY if full else OFFLINE_REMEDY)


def answers(endpoint: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Tell whether a server, or the proxy in front of it, accepts a connection.

    Args:
        endpoint: The address, such as ``"https://huggingface.co"``.
        seconds: How long to wait, in seconds; looking the name up counts.

    Example:
        >>> answers("http://127.0.0.1:1", seconds=0.5)
        False
    """
    connected = threading.Event()
    try:
        address = _address(endpoint)
    except ValueError:
        return False  # a port that is no number, say, in a proxy variable
    thread = threading.Thread(target=_connect, args=(address, seconds, connected), daemon=True)
    thread.start()
    thread.join(seconds)
    return connected.is_set()


def _connect(address: tuple[str, int], seconds: float, connected: threading.Event) -> None:
    try:
        socket.create_connection(address, timeout=seconds).close()
    except (OSError, UnicodeError):
        return
    connected.set()


def _address(endpoint: str) -> tuple[str, int]:
    from urllib.request import getproxies, proxy_bypass

    url = urlsplit(endpoint)
    proxies = {} if proxy_bypass(url.netloc) else getproxies()
    if proxy := proxies.get(url.scheme) or proxies.get("all"):
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return url.hostname or "localhost", url.port or (443 if url.scheme == "https" else 80)


def first_cause(error: BaseException) -> BaseException:
    """Return the error at the start of a chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
