"""Formats of annotations: the registry, and the functions that write and read files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..._render.display import Displayable, Report, pluralize
from ..._utils.text import describe_file
from ..._utils.validation import check_choice, check_path, suggest
from ...errors import ConfigurationError, OpenMedError
from ..gold import GoldText, GoldTexts
from ..references import describe_read_error
from . import brat, conll, doccano, html, jsonl, label_studio, spacy, tables
from .notes import Export, InvalidNoteError, Saveable

ResultT = TypeVar("ResultT")


class Format(NamedTuple):
    """A format of annotations.

    Attributes:
        read: Function that reads a file or folder, or ``None`` for a format that is written only.
        suffixes: Suffixes of the files.
        write: Function for :meth:`Annotations.export`. It returns the configuration of the tool, if there is one.
        save: Function for :meth:`Annotations.save`.
    """

    read: Callable[[Path], Iterable[GoldText]] | None = None
    suffixes: tuple[str, ...] = ()
    write: Callable[[Path, Export], str | None] | None = None
    save: Callable[[Path, Saveable], None] | None = None


FORMATS: Mapping[str, Format] = {
    "jsonl": Format(jsonl.read_jsonl, (".jsonl", ".ndjson"), save=jsonl.save_jsonl),
    "parquet": Format(tables.read_parquet, (".parquet",), save=tables.save_parquet),
    "csv": Format(tables.read_csv, (".csv",), save=tables.save_csv),
    "html": Format(suffixes=(".html",), save=html.save_html),
    "brat": Format(brat.read_brat, write=brat.write_brat),
    "conll": Format(conll.read_conll, (".conll", ".iob", ".iob2", ".bio", ".tsv", ".txt"), write=conll.write_conll),
    "doccano": Format(doccano.read_doccano, write=doccano.write_doccano),
    "label-studio": Format(label_studio.read_label_studio, (".json",), write=label_studio.write_label_studio),
    "spacy": Format(spacy.read_spacy, (".spacy",), write=spacy.write_spacy),
}


@dataclass(frozen=True, repr=False)
class ExportReport(Displayable):
    """Result of an export.

    Attributes:
        format: Name of the format.
        path: File or folder.
        notes: Number of notes.
        entities: Number of entities of these notes.
        losses: Counts of what the format does not contain, by description.
        labeling_config: Configuration of the labels for Label Studio, or ``None`` for another format.
    """

    format: str
    path: Path
    notes: int
    entities: int
    losses: Mapping[str, int]
    labeling_config: str | None = None

    JSON_EXCLUDE = ("path", "labeling_config")

    def to_report(self) -> Report:
        """Return the counts as sentences."""
        entities = pluralize(self.entities, "entity", "entities")
        title = f"Exported {pluralize(self.notes, 'note')} with {entities} to {self.format}"
        losses = tuple(f"{count:,} {description}." for description, count in self.losses.items())
        return Report(title, losses or ("The file contains all of them.",))


def export_notes(name: str, path: Any, export: Export) -> ExportReport:
    """Write notes in the format of another tool.

    Raises:
        ConfigurationError: If the format is unknown, or if the file cannot be written.
    """
    writers = {key: form.write for key, form in FORMATS.items() if form.write}
    check_choice("format", name, writers)
    target = check_path(path, "path")
    config = _write_atomically(target, writers[name], export)
    return ExportReport(name, target, export.num_notes, export.num_entities, dict(+export.losses), config)


def save_annotations(path: Any, found: Saveable) -> None:
    """Write all results to a file whose suffix selects the format.

    Raises:
        ConfigurationError: If the suffix is unknown, or if the file cannot be written.
    """
    target = check_path(path, "path")
    savers = {suffix: form.save for form in FORMATS.values() if form.save for suffix in form.suffixes}
    suffix = target.suffix.lower()
    if suffix not in savers:
        message = "The file name does not have a suffix of a format of save()."
        raise ConfigurationError(message, suggest("", savers))
    _write_atomically(target, savers[suffix], found)


def _write_atomically(path: Path, write: Callable[[Path, Any], ResultT], contents: Any) -> ResultT:
    """Write to a temporary folder next to the path, and replace the path at the end. Files are readable by their owner only."""
    try:
        with tempfile.TemporaryDirectory(prefix=".openmed-", dir=path.parent) as folder:
            temporary = Path(folder) / "export"
            result = write(temporary, contents)
            for file in (temporary, *temporary.glob("*")):
                file.chmod(0o700 if file.is_dir() else 0o600)
            if temporary.is_dir() and path.is_dir():
                path.rmdir()  # Fails if it contains files.
            temporary.replace(path)
            return result
    except UnicodeEncodeError:
        problem = "an id or a label is not valid Unicode"
        remedy = "Pass other ids, or rename files whose names are not UTF-8."
    except OSError as error:
        problem = describe_read_error(error)
        remedy = "Use a new file or folder where you can write."
    # Raised outside of the handler, so that the original error, which contains the path, is not the context.
    message = f"{describe_file(path)} cannot be written: {problem}."
    raise ConfigurationError(message, remedy)


def read_annotations(path: str | os.PathLike[str], format: str | None = None) -> GoldTexts:  # noqa: A002 - public name
    """Read annotations from a file, such as notes that were corrected in an annotation tool.

    All offsets are converted to characters and compared with the text of the note.

    Args:
        path: File, or folder with the files of brat.
        format: ``"jsonl"``, ``"parquet"``, ``"csv"``, ``"brat"``, ``"conll"``, ``"doccano"``, ``"label-studio"`` or ``"spacy"``.
            If ``None``, the suffix selects the format. A ``.jsonl`` file with labels is a file of doccano.

    Returns:
        The notes with their true entities, for :meth:`Annotations.score`: a sequence of ``(id, text, spans)``.

    Raises:
        ConfigurationError: If the format is unknown, the file is not valid, or an entity does not match the text.

    Example:
        >>> import tempfile
        >>> from openmed_nb import annotate
        >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = found.export("label-studio", f"{folder}/tasks.json")
        ...     read_annotations(f"{folder}/tasks.json")[0].spans
        (GoldSpan(start=8, end=14, label='DISEASE'),)
    """
    source = check_path(path, "path")
    if not source.exists():
        raise ConfigurationError("The file of annotations does not exist.", "Pass the path of an existing file.")
    if not (source.is_file() or source.is_dir()):
        raise ConfigurationError(
            "The path of the annotations is not a regular file.", "Pass the path of a file or folder."
        )
    suffix = source.suffix.lower()
    readers = {key: form.read for key, form in FORMATS.items() if form.read}
    detected = "brat" if source.is_dir() else next((key for key in readers if suffix in FORMATS[key].suffixes), "")
    name = detected if format is None else format
    check_choice("format", name, readers)
    if source.is_dir() != (name == "brat"):
        raise ConfigurationError(
            "Annotations of brat are in a folder, others in a file.", "Pass another path or format."
        )
    texts: list[GoldText] = []
    try:
        notes = readers[name](source)
        if isinstance(notes, GoldTexts):
            return notes
        texts.extend(notes)
        return GoldTexts(tuple(texts))
    except OpenMedError:
        raise
    except InvalidNoteError as error:
        problem = str(error)
    except Exception as error:  # noqa: BLE001 - a library may raise anything, with contents of the file
        problem = f"cannot be read: {describe_read_error(error)}"
    remedy = "Check the format and export the file again, in UTF-8."
    raise ConfigurationError(f"Note {len(texts)} of the {name} file {problem}.", remedy)
