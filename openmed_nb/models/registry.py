"""Names of models: which files a name stands for. Only names here; nothing is downloaded or loaded."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UnknownModel, shorten

BUNDLED_FOLDER = Path(__file__).parent / "bundled"

BUNDLED = {"bundled": BUNDLED_FOLDER / "disease", "bundled_small": BUNDLED_FOLDER / "disease_small"}
"""The models inside this package; they work offline."""

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
"""The aliases that work where the openmed package, with its far longer registry, is not installed."""

ALIAS_SHAPE = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
HUB_ID_SHAPE = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class ModelReference:
    """Where a model is; two names for one place are the same reference.

    Attributes:
        name: What a person calls it.
        location: The folder, or the id on the hub.
        on_hub: Whether the location is an id on the hub.
    """

    name: str = field(compare=False)
    location: str
    on_hub: bool = False

    @property
    def names(self) -> tuple[str, str]:
        """What the model can be called."""
        return self.name, self.location


def find_model(name: str | os.PathLike[str] | None, default_org: str = "OpenMed") -> ModelReference:
    """Return where the model of a name is.

    Args:
        name: ``None`` or ``"bundled"`` for the bundled model, a folder, a hub id (``org/name``), an alias of the
            openmed package (``disease_detection_tiny``), or a bare name of the default organisation.
        default_org: The organisation of bare names.

    Raises:
        UnknownModel: For an alias that does not exist; it names the nearest ones.

    Example:
        >>> find_model(None).on_hub, find_model("disease_detection_tiny").location
        (False, 'OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-135M')
        >>> find_model("OpenMed-NER-DiseaseDetect-TinyMed-135M").location
        'OpenMed/OpenMed-NER-DiseaseDetect-TinyMed-135M'
    """
    text = "bundled" if name is None else str(name)
    if text in BUNDLED:
        return ModelReference(text, str(BUNDLED[text]))
    if folder := _folder(text):
        return ModelReference(text, folder)
    if location := _hub_id(text, default_org):
        return ModelReference(text, location, on_hub=True)
    raise unknown_model(text)


def unknown_model(name: str, hint: str = "") -> UnknownModel:
    """Return the error for a name that stands for no model, with the nearest names that do, and perhaps a hint.

    Example:
        >>> unknown_model("disease_detection_tinny").remedy.startswith("Use 'disease_detection_tiny'")
        True
    """
    aliases = {**ALIASES, **openmed_aliases()}
    known = {one.lower(): one for one in ("bundled_small", *aliases, *aliases.values())}
    nearest = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.75)
    offered = ", ".join(repr(known[one]) for one in nearest)
    shown = shorten(name)
    remedy = f"Use {offered}, or 'bundled', which works offline." if offered else "Use 'bundled', which works offline."
    return UnknownModel(f"There is no model named {shown!r}: no folder, alias or hub id.", f"{hint} {remedy}".strip())


def openmed_aliases() -> dict[str, str]:
    """Return the aliases of the installed openmed package for plain PyTorch token classification.

    Importing its registry takes about a second and loads neither torch nor transformers; the result is empty where the
    package is not installed.
    """
    try:
        from openmed.core.model_registry import OPENMED_MODELS
    except ImportError:
        return {}  # It is not installed, or a file of yours has its name.
    return {alias: info.model_id for alias, info in OPENMED_MODELS.items() if _is_plain_pytorch(info)}


def _is_plain_pytorch(info: object) -> bool:
    formats = getattr(info, "formats", None) or []
    model_id = str(getattr(info, "model_id", "")).lower()
    converted = any(mark in model_id for mark in ("mlx", "onnx"))
    return getattr(info, "task", None) == "token-classification" and "pytorch" in formats and not converted


def _folder(text: str) -> str | None:
    try:
        path = os.path.expanduser(text)
    except ValueError:
        return None  # no user's name has a NUL in it
    return os.path.abspath(path) if os.path.isdir(path) else None


def _hub_id(text: str, default_org: str) -> str | None:
    if text in ALIASES:
        return ALIASES[text]
    if ALIAS_SHAPE.fullmatch(text):
        return openmed_aliases().get(text)
    location = text if "/" in text else f"{default_org}/{text}"
    return location if HUB_ID_SHAPE.fullmatch(location) and not text.startswith(".") else None
