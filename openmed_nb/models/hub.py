"""From a hub id to a folder with the model's files: one look at the network first, then one download.

huggingface_hub retries an unreachable hub for 24 to 48 seconds, so a plain connection is tried before; and with the
files in a folder, loading needs no network at all.
"""

from __future__ import annotations

import contextlib
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
DISK_REMEDY = "Make room in the cache of huggingface_hub, or name another folder with cache_dir."
OFFLINE_REMEDY = "Connect and try again, or use 'bundled', which works offline."


def fetch_model(repo_id: str, config: OpenMedConfig, code: bool = False) -> Path:
    """Return the folder of a model in the cache of huggingface_hub, downloaded with or without its Python files.

    Where the hub has no such model that is an UnknownModel, where it cannot be asked a ModelUnreachable, after three
    seconds at most without a network.
    """
    from huggingface_hub import constants, snapshot_download

    if config.local_only:
        offline = "local_only=True switches the network off"
    elif constants.is_offline_mode():
        offline = "HF_HUB_OFFLINE switches the network off"
    else:
        offline = "" if answers(constants.ENDPOINT) else "the model hub cannot be reached"
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
        raise explained(error, repo_id, config.revision, offline) from error
    return Path(folder)


def explained(error: Exception, repo_id: str, revision: str | None, offline: str) -> ModelError:
    """Return the error to raise for one of huggingface_hub; ``offline`` tells why the network was left alone."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        what = f"The model {repo_id!r} is gated."
        return ModelUnreachable(what, "Ask for access at its page on the hub, then run: hf auth login.")
    if isinstance(error, errors.RevisionNotFoundError):
        return UnknownModel(f"The model {repo_id!r} has no revision {revision!r}.", "Use a branch, tag or commit.")
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return unknown_model(repo_id, "If it is private, run: hf auth login.")
    if offline:
        what = f"The model {repo_id!r} is not on this computer, neither as a folder nor downloaded, and {offline}."
        return ModelUnreachable(what, OFFLINE_REMEDY)
    full = isinstance(error, OSError) and error.errno in DISK_ERRORS
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    what = f"The model {repo_id!r} could not be downloaded: {masked('', cause(first))}."
    return ModelUnreachable(what, DISK_REMEDY if full else OFFLINE_REMEDY)


def answers(endpoint: str, seconds: float = CONNECT_SECONDS) -> bool:
    """Tell whether a server, or the proxy in front of it, accepts a connection within some seconds."""
    from urllib.request import getproxies, proxy_bypass

    connected = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError, ValueError):  # A ValueError: a proxy's port that is not a number, say.
            url = urlsplit(endpoint)
            proxies = {} if proxy_bypass(url.netloc) else getproxies()
            if proxy := proxies.get(url.scheme) or proxies.get("all"):
                url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            address = url.hostname or "localhost", url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection(address, timeout=seconds).close()
            connected.set()

    # In a thread, because the timeout of a socket does not cover looking the name up.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return connected.is_set()
