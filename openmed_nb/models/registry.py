"""Names of models: which files a name stands for. Only names here; nothing is downloaded or loaded."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import UnknownModel, shorten

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

ALIAS_SHAPE = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")
HUB_ID_SHAPE = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


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


def find_model(name: str | os.PathLike[str] | None, default_org: str = "OpenMed") -> ModelReference:
    """Return where the model of a name is, or raise UnknownModel, which offers the nearest names.

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
    if ALIAS_SHAPE.fullmatch(text):
        location = openmed_aliases().get(text, "")
    else:
        location = text if "/" in text else f"{default_org}/{text}"
    if not HUB_ID_SHAPE.fullmatch(location) or text.startswith("."):
        raise unknown_model(text)
    return ModelReference(text, location, on_hub=True)


def unknown_model(name: str, hint: str = "") -> UnknownModel:
    """Return the error for a name that stands for no model, with the nearest names that do, and perhaps a hint."""
    aliases = {**ALIASES, **openmed_aliases()}
    known = {one.lower(): one for one in ("bundled_small", *aliases, *aliases.values())}
    nearest = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.75)
    offered = "".join(f"{known[one]!r}, " for one in nearest) + ("or " if nearest else "")
    what = f"There is no model named {shorten(name)!r}: no folder, alias or hub id."
    return UnknownModel(what, f"{hint} Use {offered}'bundled', which works offline.".strip())


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
