"""Formats of annotations: the registry, and the functions that write and read files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..._render.display import Displayable, Report, pluralize
from ..._utils.plain import temporary_folder
from ..._utils.text import describe_file, describe_names, describe_value
from ..._utils.validation import check_bool, check_choice, check_folder_of, check_path, suggest
from ..._utils.warning import warn
from ...errors import ConfigurationError, OpenMedError
from ..gold import GoldText, GoldTexts
from ..references import describe_read_error
from . import formats
from .notes import Export, InvalidNoteError, RawNote, create_gold_text, select_version

if TYPE_CHECKING:
    from ..annotated_notes import AnnotatedNotes

ResultT = TypeVar("ResultT")


class Format(NamedTuple):
    """A format of annotations.

    Attributes:
        read: Function that reads a file or folder, or ``None`` for a format that is written only.
        suffixes: Suffixes of the files.
        write: Function for :meth:`Annotations.export`. It returns the configuration of the tool, if there is one.
        save: Function for :meth:`Annotations.save`, which is passed the annotations.
    """

    read: Callable[[Path], Iterable[RawNote]] | None = None
    suffixes: tuple[str, ...] = ()
    write: Callable[[Path, Export], str | None] | None = None
    save: Callable[[Path, AnnotatedNotes], None] | None = None


# Suffixes of the files of tools that export JSON or one JSON object per line.
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

FORMATS: dict[str, Format] = {
    "jsonl": Format(formats.read_json, (".jsonl", ".ndjson"), save=formats.save_jsonl),
    "parquet": Format(suffixes=(".parquet",), save=formats.save_parquet),
    "csv": Format(suffixes=(".csv",), save=formats.save_csv),
    "html": Format(suffixes=(".html",), save=formats.save_html),
    "brat": Format(formats.read_brat, write=formats.write_brat),
    "conll": Format(formats.read_conll, (".conll", ".iob", ".iob2", ".bio", ".tsv"), write=formats.write_conll),
    "label-studio": Format(formats.read_json, _JSON_SUFFIXES, write=formats.write_label_studio),
    "doccano": Format(formats.read_json, _JSON_SUFFIXES, write=formats.write_doccano),
}

# Format of each suffix: the first one in the table that has it.
_NAMES = {suffix: name for name, form in reversed(FORMATS.items()) for suffix in form.suffixes}

# Formats that :func:`read_annotations` reads.
_READABLE = [name for name, form in FORMATS.items() if form.read]

CHECK_REMEDY = "Check the format, and export the file again."


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
        ConfigurationError: If the format is unknown, if there is no path, if its suffix is that of another format, or if the file
            cannot be written.
    """
    if path is None:
        raise ConfigurationError(
            f"export() needs a format and a path, and got only {describe_value(name)}.",
            "Pass both, as in found.export('label-studio', 'tasks.json').",
        )
    writers = {key: form.write for key, form in FORMATS.items() if form.write}
    check_choice("format", name, writers)
    target = check_path(path, "path")
    suffixes = FORMATS[name].suffixes
    if target.suffix and target.suffix.lower() not in suffixes:
        file_remedy = f"Pass a file with the suffix {' or '.join(suffixes)}."
        remedy = file_remedy if suffixes else "Pass a new folder, without a suffix."
        raise ConfigurationError(f"{describe_value(target.suffix)} is not a suffix of {name}.", remedy)
    config = _write_atomically(target, writers[name], export)
    return ExportReport(name, target, export.num_notes, export.num_entities, dict(+export.losses), config)


def save_annotations(path: Any, found: AnnotatedNotes) -> None:
    """Write all results to a file whose suffix selects the format.

    Raises:
        ConfigurationError: If the suffix is unknown, or if the file cannot be written.
    """
    target = check_path(path, "path")
    savers = {suffix: form.save for form in FORMATS.values() if form.save for suffix in form.suffixes}
    suffix = target.suffix.lower()
    if suffix not in savers:
        raise ConfigurationError(
            f"The suffix {describe_value(suffix)} of the file is not a format of save().",
            suggest(suffix, savers, "Suffixes"),
        )
    _write_atomically(target, savers[suffix], found)


def _write_atomically(path: Path, write: Callable[[Path, Any], ResultT], contents: Any) -> ResultT:
    """Write to a temporary folder next to the path, and replace the path at the end. Files are readable by their owner only."""
    check_folder_of(path)
    try:
        with temporary_folder(path.parent) as folder:
            temporary = folder / "export"
            result = write(temporary, contents)
            for file in (temporary, *temporary.glob("*")):
                file.chmod(0o700 if file.is_dir() else 0o600)
            if temporary.is_dir() and path.is_dir():
                path.rmdir()  # Fails if it contains files.
            temporary.replace(path)
            return result
    except UnicodeEncodeError:
        problem = "an id or a label is not valid Unicode"
        remedy = formats.INVALID_UNICODE_REMEDY
    except OSError as error:
        problem = describe_read_error(error)
        remedy = "Use a new file or folder where you can write."
    # Raised outside of the handler, so that the original error, which contains the path, is not the context.
    raise ConfigurationError(f"{describe_file(path)} cannot be written: {problem}.", remedy)


def read_annotations(
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002 - public name
    *,
    annotator: str | int | None = None,
    predictions: bool = False,
) -> GoldTexts:
    """Read annotations from a file, such as notes that were corrected in an annotation tool.

    All offsets are converted to characters, and compared with the texts of the entities if the tool recorded them. Notes without
    an annotation are left out: skipped and rejected notes, and notes with predictions only.

    Args:
        path: File, or folder with the files of brat.
        format: ``"jsonl"``, ``"brat"``, ``"conll"``, ``"doccano"`` or ``"label-studio"``. If ``None``, the
            suffix and the keys of JSON select the format.
        annotator: Number, name or mail of the annotator, for a file in which several annotators have annotated a note.
        predictions: Whether to read the predictions of notes without an annotation.

    Returns:
        The notes with their true entities, for :meth:`Annotations.score`: a sequence of ``(id, text, spans, position)``, with the
        numbers of notes that were left out.

    Raises:
        ConfigurationError: If the format is unknown, the file is not valid, an entity does not match the text, or a note has
            several annotations.

    Example:
        >>> import tempfile
        >>> from openmed_nb import annotate
        >>> found = annotate(["She has asthma."], "bundled_small", device="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = found.export("label-studio", f"{folder}/tasks.json")
        ...     read_annotations(f"{folder}/tasks.json", predictions=True)[0].spans
        (GoldSpan(start=8, end=14, label='DISEASE'),)
    """
    source = check_path(path, "path")
    check_bool("predictions", predictions)
    if not source.exists():
        raise ConfigurationError(
            f"The file of annotations {describe_file(source)} does not exist.", "Pass the path of an existing file."
        )
    if format is not None:
        check_choice("format", format, _READABLE)
    counts: Counter[str] = Counter()
    gold = _read_file(source, format, annotator, predictions, counts)
    if annotator is not None and not gold:
        raise ConfigurationError(
            "The file has no annotation by the annotator.", "Pass an annotator whom the file names, or omit annotator."
        )
    for description, count in (+counts).items():
        warn(f"{count:,} {description}.")
    if not any(text.spans for text in gold):
        warn(" ".join(("No annotated note in the file has an entity.", *gold.to_report().sentences)))
    return gold


def _read_file(
    source: Path, name: str | None, annotator: str | int | None, predictions: bool, counts: Counter[str]
) -> GoldTexts:
    """Return the annotations of a file, or raise an error without its contents.

    ``counts`` are those of :func:`create_gold_text`.
    """
    texts: list[GoldText] = []
    left_out: Counter[str] = Counter()
    try:
        name = _detect_format(source, name)
        read = FORMATS[name].read
        contents = () if read is None else read(source)
        for note in contents:
            version = select_version(note.versions, annotator, predictions)
            if version is not None:
                texts.append(create_gold_text(note, version, counts))
            else:
                left_out["predicted" if any(version.is_prediction for version in note.versions) else "skipped"] += 1
        return GoldTexts(tuple(texts), num_skipped=left_out["skipped"], num_predicted=left_out["predicted"])
    except OpenMedError:
        raise
    except InvalidNoteError as error:
        problem = str(error)
        remedy = error.remedy
    except UnicodeDecodeError:
        problem = "is not encoded in UTF-8"
        remedy = "Export the file again, in UTF-8."
    except KeyError as error:
        problem = f"does not have the key {describe_names(map(str, error.args))}"
        remedy = CHECK_REMEDY
    except Exception as error:  # noqa: BLE001 - a library may raise anything, with contents of the file
        problem = f"cannot be read: {describe_read_error(error)}"
        remedy = CHECK_REMEDY
    number = len(texts) + left_out.total()
    raise ConfigurationError(f"Note {number} of the {name} file {problem}.", remedy)


def _detect_format(source: Path, name: str | None) -> str:
    """Return the format of a file or folder."""
    if source.is_dir():
        name = name or "brat"
    elif name is None:
        name = _NAMES.get(source.suffix.lower())
    if name not in _READABLE:
        raise ConfigurationError(
            "The suffix of the file does not select a format of annotations.",
            f"Pass format, one of {', '.join(_READABLE)}. For a table, pass a DataFrame to score().",
        )
    if source.is_dir() != (name == "brat"):
        raise ConfigurationError(
            "Annotations of brat are in a folder, others in a file.", "Pass another path or format."
        )
    return name
