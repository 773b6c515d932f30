"""Resolve the name of a model to a directory with its files.

huggingface_hub retries an unreachable Hub for 24 to 48 seconds, so one short request is sent first. Once the files are
in a directory, loading needs no network access.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from .._utils.text import collapse_whitespace, describe_error, describe_value
from .._utils.validation import invalid_type, suggest_folder, suggest_one
from ..devices.request import mask_secrets
from ..errors import InvalidModelError, ModelDownloadError, ModelError, UnknownModelError
from .config import OpenMedConfig

# The models in this package, which work offline and read English only.
BUNDLED_FOLDER = Path(__file__).parent / "bundled"
BUNDLED = {"bundled": BUNDLED_FOLDER / "disease", "bundled_small": BUNDLED_FOLDER / "disease_small"}

# The aliases that work without the openmed package, whose registry is far longer.
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

CONNECT_TIMEOUT = 1.5  # Seconds.

MODEL_FILES = ("*.json", "*.txt", "*.model", "model.safetensors", "model-*-of-*.safetensors")

OFFLINE_REMEDY = "Check your connection and the space on the disk, or use 'bundled', which works offline."


@dataclass(frozen=True)
class ModelReference:
    """Location of a model: a directory or a Hub id. References with the same location are equal."""

    name: str = field(compare=False)
    location: str
    on_hub: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """The names of the model."""
        return self.name, self.location


def is_model_name(model: object) -> bool:
    """Return whether an argument is the name of a model, including ``None`` for the bundled model."""
    return model is None or isinstance(model, (str, os.PathLike))


def check_model_name(model: object) -> None:
    """Raise a ``ConfigurationError`` if an argument is not the name of a model."""
    if not is_model_name(model):
        raise invalid_type(
            "model", model, "Pass its name, or the folder where save_pretrained() saved it with its tokenizer."
        )


def find_model(name: str | os.PathLike[str] | None, default_org: str = "OpenMed") -> ModelReference:
    """Return the location of a model, or raise an UnknownModelError that suggests a similar name.

    A name is ``None`` or ``"bundled"`` for the bundled model, a directory, a Hub id (``org/name``), an alias of the
    openmed package (``disease_detection_tiny``), or a name in the default organization.
    """
    check_model_name(name)
    text = "bundled" if name is None else str(name)
    if text in BUNDLED:
        return ModelReference(text, str(BUNDLED[text]))
    with contextlib.suppress(ValueError):  # os.path.expanduser raises it for a NUL character.
        folder = os.path.expanduser(text)
        if os.path.isdir(folder):
            return ModelReference(text, os.path.abspath(folder))
        if os.path.isfile(folder) and text not in ALIASES:
            raise InvalidModelError(
                f"{describe_value(text)} is a file.", "Pass the folder with all files of the model."
            )
    if text in ALIASES:
        location = ALIASES[text]
    elif ALIAS_PATTERN.fullmatch(text):
        location = openmed_aliases().get(text, "")
    else:
        location = text if "/" in text else f"{default_org}/{text}"
    if not HUB_ID_PATTERN.fullmatch(location) or text.startswith("."):
        raise unknown_model_error(text)
    return ModelReference(text, location, on_hub=True)


def unknown_model_error(name: str, hint: str = "") -> UnknownModelError:
    """Return the error for an unknown name, with an optional hint and the most similar name or folder."""
    return UnknownModelError(
        f"Model {describe_value(name)} not found: no matching folder, alias or Hub id.",
        collapse_whitespace(f"{hint} {_suggest_model(name)} Use 'bundled', which works offline."),
    )


def _suggest_model(name: str) -> str:
    """Return a question with the most similar name or folder, or an empty string if none is similar or the Hub id is known."""
    aliases = all_aliases()
    if name in aliases.values():
        return ""
    return suggest_one(name, [*BUNDLED, *aliases, *aliases.values()]) or suggest_folder(name)


def all_aliases() -> dict[str, str]:
    """Return the Hub ids of all available aliases."""
    return {**ALIASES, **openmed_aliases()}


def openmed_aliases() -> dict[str, str]:
    """Return the aliases of the openmed package for token classification in PyTorch, if the package is installed.

    Importing its registry takes about a second and loads neither torch nor transformers.
    """
    try:
        from openmed.core.model_registry import OPENMED_MODELS
    except ImportError:
        return {}  # The package is not installed, or a file of the user shadows it.
    return {
        alias: info.model_id
        for alias, info in OPENMED_MODELS.items()
        if getattr(info, "task", None) == "token-classification"
        and "pytorch" in (getattr(info, "formats", None) or [])
        and not any(converted in info.model_id.lower() for converted in ("mlx", "onnx"))
    }


def download_model(repo_id: str, config: OpenMedConfig, code: bool = False) -> Path:
    """Download a model and return its directory in the cache of huggingface_hub.

    Args:
        repo_id: Hub id.
        config: Settings of the loader.
        code: Whether to download Python files.

    Raises:
        UnknownModelError: If the Hub has no such model or revision.
        ModelDownloadError: If the model is gated or the Hub is unreachable, without a network after three seconds at most.
    """
    from huggingface_hub import constants, snapshot_download

    if config.local_only:
        offline = "local_only=True disables network access"
    elif constants.is_offline_mode():
        offline = "HF_HUB_OFFLINE disables network access"
    else:
        offline = "" if is_reachable(constants.ENDPOINT) else "the Hugging Face Hub is not reachable"
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
        # A broken connection raises an error of the HTTP library, which differs between releases of huggingface_hub.
        raise _hub_error(error, repo_id, config.revision, offline) from error
    return Path(folder)


def _hub_error(error: Exception, repo_id: str, revision: str | None, offline: str) -> ModelError:
    """Return the error to raise for an error of huggingface_hub; ``offline`` is the reason for not using the network."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        message = f"The model {describe_value(repo_id)} is gated."
        return ModelDownloadError(message, "Request access on its Hub page, then run: hf auth login.")
    if isinstance(error, errors.RevisionNotFoundError):
        return UnknownModelError(
            f"The model {describe_value(repo_id)} has no revision {describe_value(revision)}.",
            "Use an existing branch, tag or commit.",
        )
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return unknown_model_error(repo_id, "If it is private, run: hf auth login.")
    if offline:
        message = f"The model {describe_value(repo_id)} is neither a folder nor in the cache, and {offline}."
        return ModelDownloadError(message, f"{_suggest_model(repo_id)} {OFFLINE_REMEDY}".lstrip())
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    code = getattr(getattr(root, "response", None), "status_code", None)
    status = "" if code is None else f" (HTTP {code})"
    message = f"The model {describe_value(repo_id)} could not be downloaded{status}: {mask_secrets('', describe_error(root))}."
    return ModelDownloadError(message, OFFLINE_REMEDY)


def is_reachable(endpoint: str) -> bool:
    """Return whether a server, or the proxy for it, answers within a timeout."""
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=CONNECT_TIMEOUT)
    except Exception:  # noqa: BLE001 - the errors of the HTTP library differ between releases of huggingface_hub
        return False
    return True
