"""The golden run of a bundle: which model on which texts, and the entities that it found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...annotation.stream import entities_of
from ...errors import ConfigurationError, UnknownModel, shorten
from ...models.config import OpenMedConfig
from ...models.content import Content
from ...models.loading import LoadSpec
from ..logbook.sections import Dataset
from ..workloads.annotating import TEXTS as SHORT_TEXTS

if TYPE_CHECKING:
    from ..workloads.workload import Bench

SCHEMA: Literal["openmed_nb/golden/1"] = "openmed_nb/golden/1"

MODEL, TEXTS, GOLDEN, LOGBOOK, EVIDENCE = "model", "texts.json", "golden.json", "logbook.json", "evidence.json"
"""The names of what is in a bundle."""

SYNTHETIC = (
    *SHORT_TEXTS,
    "Acute myocardial infarction of the inferior wall, treated with a stent on the same day.",
    "Chronic kidney disease stage 3, secondary hyperparathyroidism and anemia of chronic disease.",
    "He was seen for migraine; a brain tumor was ruled out, and there is no epilepsy.",
    "Family history: breast cancer in the mother, Parkinson disease in the father.",
    "Assessment: community-acquired pneumonia, sepsis, acute renal failure.",
    "The rash is consistent with psoriasis; systemic lupus erythematosus is unlikely.",
    "Follow-up of hepatitis C with cirrhosis; no hepatocellular carcinoma on ultrasound.",
    "Normal examination. Appointment in six months.",
)
"""Synthetic texts, which every bundle can hold; no real person is described."""


@dataclass(frozen=True)
class Found:
    """An entity that was found.

    Attributes:
        start: Its first character.
        end: The character behind it.
        label: Its label.
    """

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Golden:
    """What a bundle does, and what it must find.

    Attributes:
        schema: The name and the number of this form.
        model: The folder of the model in the bundle; where it was not copied, its id, or the name of its folder without the path.
        copied: Whether the model was copied.
        content: Fingerprints of the model's files.
        dtype: The type of its weights in memory.
        device: Where it ran.
        batch_size: How many texts a step reads.
        rounds: After how many rounds memory is judged; one more goes before them.
        steps: How many steps a round has.
        variables: The environment variables that are set before anything is imported.
        dataset: The dataset that the work is about, by its checksum; null where nobody said.
        dataset_copied: Whether the texts of the bundle are that dataset; they are synthetic where not.
        entities: The entities of each text.
    """

    schema: Literal["openmed_nb/golden/1"]
    model: str
    copied: bool
    content: Content
    dtype: str
    device: str
    batch_size: int
    rounds: int
    steps: int
    variables: dict[str, str]
    dataset: Dataset | None
    dataset_copied: bool
    entities: tuple[tuple[Found, ...], ...] = ()

    def spec(self, bundle: Path, model: str | None = None) -> LoadSpec:
        """Return what is loaded, from the bundle, from where a person says, or by its name, without a network.

        Args:
            bundle: The folder of the bundle.
            model: Where the model is that was not copied.

        Raises:
            ConfigurationError: Where the model was not copied, and its name is none here.
        """
        name = str(bundle / self.model) if self.copied else model or self.model
        try:
            return LoadSpec.of(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModel as error:
            what = f"The model {shorten(name)!r} is not in the bundle, and not here."
            raise ConfigurationError(what, "Say where it is: --model FOLDER.") from error


def entities_found(bench: Bench, texts: list[Any]) -> tuple[tuple[Found, ...], ...]:
    """Return the entities that a model finds in its texts.

    Args:
        bench: The model with these texts.
        texts: The texts.

    Raises:
        UnreadableText: For the first text that cannot be read.
    """
    stream = bench.stream(len(texts))
    answers = stream.run(next(stream.batches()))
    return tuple(tuple(map(_found, entities_of(answer))) for answer in answers)


def _found(entity: Any) -> Found:
    label = entity.get("entity_group") or entity["entity"]
    return Found(int(entity["start"]), int(entity["end"]), str(label))
