"""What of two logbooks must be the same before their figures may be compared, and what is only worth knowing: a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...devices.request import kind_of

if TYPE_CHECKING:
    from .logbook import Logbook

FINGERPRINT = 12
"""How many characters of a fingerprint are shown."""

UNKNOWN = "not known"
NOT_TOLD = "not told"
SLOW_PRESSURE = ("warning", "critical")


@dataclass(frozen=True)
class Compared:
    """Something that two logbooks say.

    Attributes:
        name: What it is.
        reads: Returns it; ``None`` where it is not known.
        why: Why figures must not be compared where it differs; empty where they may.
        needed: Whether it must be known before figures are compared: what neither logbook says may differ.
    """

    name: str
    reads: Callable[[Logbook], Any]
    why: str = ""
    needed: bool = False


OTHER_DEVICE = "figures are of one device"
OTHER_CODE = "other versions compute in other ways"
OTHER_WORK = "that is other work, and takes another time"
OTHER_POWER = "the computer does not run at the same speed"
OTHER_MODE = "torch was asked for something else"
CANNOT_BE_TOLD = "neither says it, so it cannot be told"
ONE_SAYS = "only one of them says it"


def _model(book: Logbook) -> str | None:
    model = book.model
    if model is None:
        return None
    parts = (model.weights, model.settings, model.tokenizer or "")
    return f"{model.source} " + " ".join(part[:FINGERPRINT] for part in parts)


def _dataset(book: Logbook) -> str | None:
    return f"{book.dataset.kind} {book.dataset.checksum[:FINGERPRINT]}" if book.dataset else None


def of_run(book: Logbook, name: str) -> Any:
    """Return what reports say of their run, each its own where they differ; and what the logbook says where none does.

    Args:
        book: The logbook.
        name: A field of :class:`.Run`.
    """
    told = {one.key: getattr(one.run, name) for one in book.figures}
    known = sorted({(report, value) for (report, *_), value in told.items() if value is not None})
    if len({value for _, value in known}) > 1:
        return ", ".join(f"{report} {value}" for report, value in known)
    return known[0][1] if known else getattr(book.run, name)


def _dtype(book: Logbook) -> str | None:
    return of_run(book, "dtype") or (book.model.dtype if book.model else None)


def _batch(book: Logbook) -> Any:
    return of_run(book, "batch_size") or (book.loader.batch_size if book.loader else None)


def _cudnn_benchmark(book: Logbook) -> bool | None:
    return book.randomness.cudnn_benchmark if kind_of(book.hardware.device) == "cuda" else False


def _heat(book: Logbook) -> str:
    return "limited" if book.conditions.heat == "limited" else "not limited"


def _pressure(book: Logbook) -> str:
    pressure = book.conditions.memory_pressure
    return str(pressure) if pressure in SLOW_PRESSURE else "none reported"


REFUSING = (
    Compared(
        "simulation",
        lambda book: "simulated" if book.simulated else "real",
        "nothing simulated is a figure of a device",
    ),
    Compared("device", lambda book: book.hardware.device, OTHER_DEVICE),
    Compared("name of the device", lambda book: book.hardware.name, OTHER_DEVICE),
    Compared("chip", lambda book: book.hardware.chip, OTHER_DEVICE),
    Compared("threads", lambda book: book.hardware.threads, OTHER_MODE),
    Compared("torch", lambda book: book.software.torch, OTHER_CODE),
    Compared("transformers", lambda book: book.software.transformers, OTHER_CODE),
    Compared("model", _model, OTHER_WORK, needed=True),
    Compared("type of the weights", _dtype, OTHER_WORK),
    Compared("dataset", _dataset, OTHER_WORK, needed=True),
    Compared("task", lambda book: of_run(book, "task"), OTHER_WORK),
    Compared("batch", _batch, OTHER_WORK),
    Compared("length", lambda book: of_run(book, "length"), OTHER_WORK),
    Compared("shape of a row", lambda book: of_run(book, "row_shape") or NOT_TOLD, OTHER_WORK),
    Compared("workers", lambda book: of_run(book, "workers"), OTHER_WORK),
    Compared("loader workers", lambda book: book.loader and book.loader.workers, OTHER_WORK),
    Compared("batch of the loader", lambda book: book.loader and book.loader.batch_size, OTHER_WORK),
    Compared("power source", lambda book: book.conditions.power_source, OTHER_POWER),
    Compared("power mode", lambda book: book.conditions.power_mode, OTHER_POWER),
    Compared("heat", _heat, OTHER_POWER),
    Compared("memory pressure", _pressure, OTHER_POWER),
    Compared("deterministic algorithms", lambda book: book.randomness.deterministic_algorithms, OTHER_MODE),
    Compared("cuDNN benchmark", _cudnn_benchmark, OTHER_MODE),
    Compared("precision of products", lambda book: book.randomness.matmul_precision, OTHER_MODE),
)
"""Where one of these differs, is known to one logbook alone, or is needed and not known, figures must not be compared."""

LISTED = (
    Compared("openmed_nb", lambda book: book.software.openmed_nb),
    Compared("Python", lambda book: book.software.python),
    Compared("system", lambda book: book.software.system),
    Compared("architecture", lambda book: book.software.architecture),
    Compared("commit", lambda book: book.code.commit and book.code.commit[:FINGERPRINT]),
    Compared("changed since the commit", lambda book: book.code.dirty),
    Compared("memory of the computer", lambda book: book.hardware.memory_bytes),
    Compared("memory limit", lambda book: book.hardware.memory_limit),
    Compared(
        "seeds",
        lambda book: ", ".join(f"{name} {seed}" for name, seed in sorted(book.randomness.seeds.items())) or None,
    ),
    Compared("cuDNN deterministic", lambda book: book.randomness.cudnn_deterministic),
    Compared("seeding of workers", lambda book: book.loader and book.loader.worker_seeding),
    Compared("pinned memory", lambda book: book.loader and book.loader.pin_memory),
    Compared("batches read ahead", lambda book: book.loader and book.loader.prefetch_factor),
    Compared("workers that live on", lambda book: book.loader and book.loader.persistent_workers),
    Compared("start of workers", lambda book: book.loader and book.loader.start_method),
    Compared("heat as reported", lambda book: book.conditions.heat),
    Compared("speed limit in percent", lambda book: book.conditions.speed_limit),
    Compared("conditions read", lambda book: book.conditions.moment),
    Compared("storage", lambda book: ", ".join(f"{one.what} {one.kind}" for one in book.storage) or None),
)
"""Where these differ, it is said."""

MAPPINGS: tuple[tuple[str, Callable[[Logbook], dict[str, str]]], ...] = (
    ("package", lambda book: book.software.packages),
    ("variable", lambda book: book.environment),
    ("MPS variable", lambda book: {one.name: f"{one.value}, {one.effect}" for one in book.mps_variables}),
)
"""Names and values, of which each that differs is said."""

MOMENTARY = (
    Compared("busy programs", lambda book: book.background.busy),
    Compared("share of the processors that others took", lambda book: book.background.share),
    Compared("available memory in bytes", lambda book: book.conditions.memory_available),
    Compared("swap in bytes", lambda book: book.conditions.swap_used),
    Compared("battery in percent", lambda book: book.conditions.battery),
    Compared("seconds to the artifact store", lambda book: book.network and book.network.median_seconds),
)
"""What differs from moment to moment; it stands among the figures."""
