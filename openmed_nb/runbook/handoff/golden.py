"""What a bundle is held against: checksums as ``sha256sum -c`` reads them, the golden entities, the trial of speed and memory."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ...devices.memory import empty_cache
from ...devices.simulated import active, shows_simulated
from ...display import MARK, Report, Shown, Table
from ...errors import ConfigurationError, UnknownModel, shorten, whole
from ...models.config import OpenMedConfig
from ...models.files import Content
from ...models.loading import LoadSpec
from ...training.curve import MemoryCurve, take_sample
from ..logbook.fingerprints import sha256_of
from ..logbook.sections import Dataset, ReportFigures, Run, numbers
from ..measure.benches import TEXTS as SHORT_TEXTS
from ..measure.timing import now

if TYPE_CHECKING:
    from ..measure.workloads import Bench

SCHEMA: Literal["openmed_nb/golden/1"] = "openmed_nb/golden/1"
SUMS, MODEL, TEXTS, GOLDEN, LOGBOOK = "SHA256SUMS", "model", "texts.json", "golden.json", "logbook.json"
EVIDENCE = "evidence.json"

# Synthetic texts, which every bundle can hold; no real person is described.
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

WARM_UP = 2  # Steps that are not timed: the first one of each shape is slower, most of all on MPS.


def write_checksums(bundle: Path) -> None:
    """Write the checksums of all files that are in a bundle now."""
    files = sorted(file for file in bundle.rglob("*") if file.is_file() and file.name != SUMS)
    lines = (f"{sha256_of(file)}  {file.relative_to(bundle).as_posix()}\n" for file in files)
    (bundle / SUMS).write_text("".join(lines), "utf-8")


def changed_files(bundle: Path, needed: Iterable[str] = ()) -> dict[str, str]:
    """Return which files of a bundle are not as they were: ``"changed"``, ``"missing"`` or ``"without a checksum"``, by name.

    Args:
        bundle: The folder.
        needed: Files that must have a checksum.
    """

    def state(file: Path, checksum: str) -> str:
        try:
            return "" if sha256_of(file) == checksum else "changed"
        except OSError:
            return "missing"

    try:
        text = (bundle / SUMS).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{bundle.name!r} is not a bundle: its {SUMS} cannot be read."
        raise ConfigurationError(what, "Name the folder that nb.handoff() has written.") from error
    wanted = {name: checksum for checksum, name in re.findall(r"([0-9a-f]{64})  (.+)", text)}
    found = {name: state(bundle / name, checksum) for name, checksum in wanted.items()}
    bare = dict.fromkeys((name for name in needed if name not in wanted), "without a checksum")
    return {name: one for name, one in (found | bare).items() if one}


@dataclass(frozen=True)
class Found:
    """An entity that was found: its first character, the character behind it, and its label."""

    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Golden:
    """What a bundle does, and what it must find.

    Attributes:
        schema: The name and the number of this form.
        model: The folder of the model in the bundle; if it was not copied, its id, or the name of its folder without the path.
        copied: Whether the model was copied.
        content: Fingerprints of the model's files.
        dtype: The type of its weights in memory.
        device: Where it ran.
        batch_size: How many texts a step reads.
        rounds: After how many rounds memory is judged; one more goes before them.
        steps: How many steps a round has.
        variables: The environment variables that are set before anything is imported.
        dataset: The dataset that the work is about, by its checksum; null if none was named.
        dataset_copied: Whether the texts of the bundle are that dataset; if not, they are synthetic.
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
        """Return what is loaded without a network: from the bundle, else ``model``, else by its name."""
        name = str(bundle / self.model) if self.copied else model or self.model
        try:
            return LoadSpec.of(name, OpenMedConfig(dtype=self.dtype, local_only=True))
        except UnknownModel as error:
            what = f"The model {shorten(name)!r} is not in the bundle, and not here."
            raise ConfigurationError(what, "Say where it is: --model FOLDER.") from error


def entities_found(bench: Bench, texts: list[Any]) -> tuple[tuple[Found, ...], ...]:
    """Return the entities that a model finds in its texts; a text that cannot be read raises."""
    from ...annotation.results import span_of
    from ...annotation.stream import entities_of

    stream = bench.stream(len(texts))
    answers = stream.run(next(stream.batches()))
    return tuple(tuple(Found(*span_of(entity)) for entity in entities_of(answer)) for answer in answers)


def check_numbers(batch_size: Any, rounds: Any, steps: Any) -> None:
    """Check the numbers of a trial; a bundle comes from somebody else, and its trial has to end."""
    whole("batch_size", batch_size, 1, 4096)
    whole("rounds", rounds, 4, 1000)
    whole("steps", steps, 1, 1000)


@dataclass(frozen=True, repr=False)
class Trial(Shown):
    """What was measured.

    Attributes:
        name: What a person calls the model.
        device: Where it ran, marked if it is simulated.
        batch_size: How many texts a step reads.
        texts_per_second: Of each round.
        curve: The memory after each round, the first one a warm-up.
    """

    name: str
    device: str
    batch_size: int
    texts_per_second: tuple[float, ...]
    curve: MemoryCurve

    HIDDEN, ALSO = ("curve",), ("fastest", "memory")

    @property
    def simulated(self) -> bool:
        """Whether the device was a simulated one."""
        return shows_simulated(self.device)

    @property
    def fastest(self) -> float:
        """Texts a second in the fastest round: what other programs disturb least."""
        return max(self.texts_per_second)

    @property
    def memory(self) -> dict[str, Any]:
        """The curve, ready for JSON."""
        return self.curve.to_dict()

    def logbook_figures(self) -> ReportFigures:
        """Return what a logbook keeps of it."""
        from ..figures import figures_of

        memory, rates = figures_of(self.curve), self.texts_per_second
        values = {"texts_per_second": self.fastest, "texts_per_second_median": median(rates), **memory.values}
        run = Run("annotation", self.batch_size, workers=0, peak_memory_bytes=memory.run.peak_memory_bytes)
        return ReportFigures(
            "trial", "golden texts", self.device, self.curve.verdict, self.simulated, numbers(values), run
        )

    def report(self) -> Report:
        """Return what became of the memory; times stand in the HTML alone."""
        rows = (("fastest round", f"{self.fastest:.1f}"), ("middle round", f"{median(self.texts_per_second):.1f}"))
        return Report(
            f"Trial of {self.name} on {self.device}: memory is {self.curve.verdict}",
            figures=(Table("Texts a second", ("round", "texts a second"), rows), *self.curve.report().tables),
        )


def measure(bench: Bench, batch_size: int, rounds: int, steps: int) -> Trial:
    """Annotate the texts of a bench again and again, and look at times and memory.

    Args:
        bench: The model with its texts.
        batch_size: How many texts a step reads.
        rounds: After how many rounds memory is judged; one more goes before them.
        steps: How many steps a round has.
    """
    stream = bench.stream(batch_size)
    batches, begin = stream.batches(), now()
    for _ in range(WARM_UP):
        stream.run(next(batches))
    curve, rates = MemoryCurve(stream.device), []
    for number in range(1, rounds + 2):
        started = now()
        for _ in range(steps):
            stream.run(next(batches))
        rates.append(batch_size * steps / (now() - started))
        gc.collect()
        empty_cache(stream.device)
        curve = curve.with_sample(take_sample(stream.device, number, number * steps, now() - begin))
    mark = MARK if active() and stream.device.startswith("mps") else ""
    return Trial(stream.name, f"{stream.device}{mark}", batch_size, tuple(rates), curve)
