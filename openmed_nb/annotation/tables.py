"""Tables passed in the place of a note: how to tell, and the line of code that reads their column of texts."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

# The call of pandas that reads a table, by the suffix of its file.
_READERS = {
    "csv": "read_csv(path)",
    "tsv": r"read_csv(path, sep='\t')",
    "tab": r"read_csv(path, sep='\t')",
    "parquet": "read_parquet(path)",
    "pq": "read_parquet(path)",
    "feather": "read_feather(path)",
    "orc": "read_orc(path)",
    "xlsx": "read_excel(path)",
    "xlsm": "read_excel(path)",
    "xls": "read_excel(path)",
    "ods": "read_excel(path)",
    "jsonl": "read_json(path, lines=True)",
    "ndjson": "read_json(path, lines=True)",
    "dta": "read_stata(path)",
    "sas7bdat": "read_sas(path)",
    "sav": "read_spss(path)",
}
_COMPRESSED = {"gz", "bz2", "xz", "zst", "zip"}  # pandas decompresses these.

# Usual names of a column of texts. Only these are quoted: the first line of a table without a header is data.
_TEXT_COLUMNS = frozenset(
    ("text", "texts", "note", "notes", "note_text", "report", "report_text", "content", "sentence", "document", "body")
)
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w .-]{0,39}")
_TEXT_HEADER = re.compile(
    rf'(^|[,;\t|])\s*"?({"|".join(sorted(_TEXT_COLUMNS))})"?\s*($|[,;\t|])'.encode(), re.IGNORECASE
)
_HEAD_CHARACTERS = 2**16


def reader_by_name(path: str) -> str | None:
    """Return the code that reads the texts of a table, or ``None`` if the name is not that of a table."""
    stem, _, ending = path.lower().rpartition(".")
    compressed = ending in _COMPRESSED
    reader = _READERS.get(stem.rpartition(".")[2] if compressed else ending)
    if reader is None or not stem:
        return None
    plain = reader.startswith(("read_csv", "read_json")) and not compressed
    head = _head_of(path) if plain else ""
    if reader.startswith("read_json"):
        return _code(reader, _column_of_record(head))
    if head:
        separator = "\t" if "sep=" in reader else ","
        return _code_of_csv(head, separator)
    return _code(reader)


def reader_by_content(data: bytes) -> str | None:
    """Return the code that reads the texts of a table, or ``None`` if the bytes are not clearly a table."""
    reader = None
    if data.startswith(b"PAR1"):
        reader = "read_parquet(path)"
    elif data.startswith(b"ARROW1"):
        reader = "read_feather(path)"
    elif data.startswith(b"PK\x03\x04") and b"xl/workbook" in data:
        reader = "read_excel(path)"
    if reader is not None:
        return _code(reader)
    # Most notes do not begin like a table, and are not searched any further.
    beginning = data[:_HEAD_CHARACTERS].removeprefix(b"\xef\xbb\xbf").lstrip()
    first = beginning.partition(b"\n")[0]
    if not first.startswith((b"{", b"[")) and not _TEXT_HEADER.search(first.strip()):
        return None
    head = beginning.decode(errors="replace").replace("\0", "")
    lines = head.splitlines()[:2]
    code = None
    if re.match(r'\[\s*\{\s*"', head):
        code = _code("read_json(path)", _column_of_record(head.removeprefix("[")))
    elif len(lines) > 1 and all(isinstance(_value_of(line), dict) for line in lines):
        code = _code("read_json(path, lines=True)", _column_of_record(head))
    elif _is_csv(head, len(data) > _HEAD_CHARACTERS):
        code = _code_of_csv(head, ",")
    return code


def _head_of(path: str) -> str:
    """Return the beginning of a file; empty where it cannot be read as text."""
    try:
        if not Path(path).is_file():  # A pipe would block.
            return ""
        with Path(path).open("rb") as file:
            return file.read(_HEAD_CHARACTERS).decode("utf-8-sig", "replace").replace("\0", "")
    except OSError:
        return ""


def _separator_of(head: str, otherwise: str) -> str:
    """Return the separator that is most frequent in the first line."""
    first = "".join(head.splitlines()[:1])
    best = max(",;\t|", key=first.count)
    return best if best in first else otherwise


def _is_csv(head: str, is_cut: bool) -> bool:
    """Return whether a text has a header with a usual name of a column of texts, and rows of its length."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=_separator_of(head, ","))
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if len(header) != len(set(header)) or not all(map(_COLUMN_NAME.fullmatch, header)):
            return False
        if len(header) == 1 or _TEXT_COLUMNS.isdisjoint(map(str.casefold, header)):
            return False
        rows = [row for row in reader if row]
    except csv.Error:
        return False
    rows = rows[:-1] if is_cut else rows
    return len(rows) > 1 and all(len(row) == len(header) for row in rows)


def _code_of_csv(head: str, separator: str) -> str:
    separator = _separator_of(head, separator)
    columns = next(csv.reader(head.splitlines()[:1], delimiter=separator), [])
    reader = "read_csv(path)" if separator == "," else f"read_csv(path, sep={separator!r})"
    return _code(reader, next((column for column in columns if column.strip().casefold() in _TEXT_COLUMNS), "text"))


def _column_of_record(head: str) -> str:
    """Return the name of the column of texts in the first record of a JSON table."""
    try:
        record, _ = json.JSONDecoder().raw_decode(head.lstrip())
    except (ValueError, RecursionError):
        return "text"
    columns = record if isinstance(record, dict) else ()
    return next((column for column in columns if column.strip().casefold() in _TEXT_COLUMNS), "text")


def _value_of(line: str) -> object:
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value


def _code(reader: str, column: str = "text") -> str:
    return f"pandas.{reader}[{column!r}]"
