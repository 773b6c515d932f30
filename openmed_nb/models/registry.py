"""From the name of a model to a folder with its files.

huggingface_hub retries an unreachable hub for 24 to 48 seconds, so a plain connection is tried before; and with the
files in a folder, loading needs no network at all.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import socket
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .._utils.text import describe_error, describe_value
from ..devices.request import mask_secrets
from ..errors import ModelDownloadError, ModelError, UnknownModelError
from .config import OpenMedConfig

# The models inside this package; they work offline.
BUNDLED_FOLDER = Path(__file__).parent / "bundled"
BUNDLED = {"bundled": BUNDLED_FOLDER / "disease", "bundled_small": BUNDLED_FOLDER / "disease_small"}

# The aliases that work where the openmed package, with its far longer registry, is not installed.
ALIASES = {
    "anatomy_detection_electramed": "OpenMed/OpenMed-NER-AnatomyDetect-ElectraMed-109M",
    "blood_cancer_detection": "OpenMed/OpenMed-NER-BloodCancerDetect-SuperClinical-434M",
    "chemical_detection_pubmed": "OpenMed/OpenMed-NER-ChemicalDetect-PubMed-335M",
    "disease_detection_superclinical": "OpenMed/OpenMed-NER-DiseaseDetect-SuperClinical-434M",
    "disease_detection_tiny": "OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-135M",
    "dna_detection_supermedical": "OpenMed/OpenMed-NER-DNADetect-SuperMedical-125M",
    "genome_detection_bioclinical": "OpenMed/OpenMed-NER-GenomeDetect-BioClinical-108M",
    "oncology_detection_superclinical": "OpenMed/OpenMed-NER-OncologyDetect-SuperClinical-434M",
    "oncology_detection_tiny": "OpenMed/OpenMed-NER-OncologyDetect-TinyMed-65M",
    "pathology_detection_modern": "OpenMed/OpenMed-NER-PathologyDetect-ModernClinical-395M",
    "pharma_detection_superclinical": "OpenMed/OpenMed-NER-PharmaDetect-SuperClinical-434M",
    "pii_detection": "OpenMed/OpenMed-PII-SuperClinical-Small-44M-v1",
    "privacy_filter": "openai/privacy-filter",
    "protein_detection_pubmed": "OpenMed/OpenMed-NER-ProteinDetect-PubMed-109M",
    "species_detection_bioclinical": "OpenMed/OpenMed-NER-SpeciesDetect-BioClinical-108M",
}

ALIAS_PATTERN = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
HUB_ID_PATTERN = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)

CONNECT_TIMEOUT = 1.5

MODEL_FILES = ("*.json", "*.txt", "*.model", "model.safetensors", "model-*-of-*.safetensors")

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS)
DISK_REMEDY = "Make room in the cache of huggingface_hub, or name another folder with cache_dir."
OFFLINE_REMEDY = "Connect and try again, or use 'bundled', which works offline."


@dataclass(frozen=True)
class ModelReference:
    """Where a model is: a folder, or an id on the hub; two names for one place are the same reference."""

    name: str = field(compare=False)
    location: str
    on_hub: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """What the model can be called."""
        return self.name, self.location


def is_model_name(model: Any) -> bool:
    """Tell whether a model is given by its name, ``None`` being the bundled one's, and not as a model."""
    return model is None or isinstance(model, (str, os.PathLike))


def find_model(name: str | os.PathLike[str] | None, default_org: str = "OpenMed") -> ModelReference:
    """Return where the model of a name is, or raise UnknownModelError, which offers the nearest names.

    A name is ``None`` or ``"bundled"`` for the bundled model, a folder, a hub id (``org/name``), an alias of the
    openmed package (``disease_detection_tiny``), or a bare name of the default organisation.
    """
    text = "bundled" if name is None else str(name)
    if text in BUNDLED:
        return ModelReference(text, str(BUNDLED[text]))
    with contextlib.suppress(ValueError):  # No user's name has a NUL in it.
        folder = os.path.expanduser(text)
        if os.path.isdir(folder):
            return ModelReference(text, os.path.abspath(folder))
    if text in ALIASES:
        return ModelReference(text, ALIASES[text], on_hub=True)
    if ALIAS_PATTERN.fullmatch(text):
        location = openmed_aliases().get(text, "")
    else:
        location = text if "/" in text else f"{default_org}/{text}"
    if not HUB_ID_PATTERN.fullmatch(location) or text.startswith("."):
        raise unknown_model_error(text)
    return ModelReference(text, location, on_hub=True)


def unknown_model_error(name: str, hint: str = "") -> UnknownModelError:
    """Return the error for a name that stands for no model, with the nearest names that do, and perhaps a hint."""
    aliases = all_aliases()
    known = {one.lower(): one for one in ("bundled_small", *aliases, *aliases.values())}
    nearest = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.75)
    offered = "".join(f"{known[one]!r}, " for one in nearest) + ("or " if nearest else "")
    what = f"There is no model named {describe_value(name)}: no folder, alias or hub id."
    return UnknownModelError(what, f"{hint} Use {offered}'bundled', which works offline.".strip())


def all_aliases() -> dict[str, str]:
    """Return every alias that works here, and the hub id that it stands for."""
    return {**ALIASES, **openmed_aliases()}


def openmed_aliases() -> dict[str, str]:
    """Return the aliases of the openmed package, where it is installed, for plain PyTorch token classification.

    Importing its registry takes about a second and loads neither torch nor transformers.
    """
    try:
        from openmed.core.model_registry import OPENMED_MODELS
    except ImportError:
        return {}  # It is not installed, or a file of the person's has its name.
    return {
        alias: info.model_id
        for alias, info in OPENMED_MODELS.items()
        if getattr(info, "task", None) == "token-classification"
        and "pytorch" in (getattr(info, "formats", None) or [])
        and not any(converted in info.model_id.lower() for converted in ("mlx", "onnx"))
    }


def download_model(repo_id: str, config: OpenMedConfig, code: bool = False) -> Path:
    """Return the folder of a model in the cache of huggingface_hub, downloaded with or without its Python files.

    Where the hub has no such model that is an UnknownModelError, where it cannot be asked a ModelDownloadError, after three
    seconds at most without a network.
    """
    from huggingface_hub import constants, snapshot_download

    if config.local_only:
        offline = "local_only=True switches the network off"
    elif constants.is_offline_mode():
        offline = "HF_HUB_OFFLINE switches the network off"
    else:
        offline = "" if is_reachable(constants.ENDPOINT) else "the model hub cannot be reached"
    patterns = [*MODEL_FILES]
    if config.allow_pickle:
        patterns.append("pytorch_model*.bin")
    if code:
        patterns.append("*.py")
    try:
        folder = snapshot_download(
            repo_id,
            revision=config.revision,
            cache_dir=config.cache_dir,
            token=config.hf_token,
            local_files_only=bool(offline),
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        # A broken connection is an error of the HTTP library below, which differs between releases of huggingface_hub.
        raise hub_error(error, repo_id, config.revision, offline) from error
    return Path(folder)


def hub_error(error: Exception, repo_id: str, revision: str | None, offline: str) -> ModelError:
    """Return the error to raise for one of huggingface_hub; ``offline`` tells why the network was left alone."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        what = f"The model {describe_value(repo_id)} is gated."
        return ModelDownloadError(what, "Ask for access at its page on the hub, then run: hf auth login.")
    if isinstance(error, errors.RevisionNotFoundError):
        return UnknownModelError(
            f"The model {describe_value(repo_id)} has no revision {describe_value(revision)}.",
            "Use a branch, tag or commit.",
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return unknown_model_error(repo_id, "If it is private, run: hf auth login.")
    if offline:
        what = f"The model {describe_value(repo_id)} is not on this computer, neither as a folder nor downloaded, and {offline}."
        return ModelDownloadError(what, OFFLINE_REMEDY)
    full = isinstance(error, OSError) and error.errno in DISK_ERRORS
    first: BaseException = error
    while first.__cause__ is not None:
        first = first.__cause__
    status = getattr(getattr(first, "response", None), "status_code", None)
    answer = "" if status is None else f" (HTTP {status})"
    what = f"The model {describe_value(repo_id)} could not be downloaded{answer}: {mask_secrets('', describe_error(first))}."
    return ModelDownloadError(what, DISK_REMEDY if full else OFFLINE_REMEDY)


def is_reachable(endpoint: str, seconds: float = CONNECT_TIMEOUT) -> bool:
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
