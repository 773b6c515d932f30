"""Detection of tables that are passed instead of notes, and the pandas code that reads their text column."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The pandas call that reads a table, by file suffix.
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

# Common names of text columns. Error messages quote no other names, because the first line may be data.
_TEXT_COLUMNS = frozenset(
    ("text", "texts", "note", "notes", "note_text", "report", "report_text", "content", "sentence", "document", "body")
)
_COLUMN_NAME = re.compile(r"[A-Za-z_][\w .-]{0,39}")
_TEXT_HEADER = re.compile(
    rf'(^|[,;\t|])\s*"?({"|".join(sorted(_TEXT_COLUMNS))})"?\s*($|[,;\t|])'.encode(), re.IGNORECASE
)
_HEAD_CHARACTERS = 2**16


def reader_by_name(path: str) -> str | None:
    """Return the code that reads the texts of a table, or ``None`` if the file name is not that of a table."""
    stem, _, ending = path.lower().rpartition(".")
    compressed = ending in _COMPRESSED
    reader = _READERS.get(stem.rpartition(".")[2] if compressed else ending)
    if reader is None or not stem:
        return None
    plain = reader.startswith(("read_csv", "read_json")) and not compressed
    head = _read_head(path) if plain else ""
    if reader.startswith("read_json"):
        return _code(reader, _record_text_column(head))
    if head:
        separator = "\t" if "sep=" in reader else ","
        return _csv_code(head, separator)
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
    # Most notes do not start like a table; they are not searched further.
    start = data[:_HEAD_CHARACTERS].removeprefix(b"\xef\xbb\xbf").lstrip()
    first_line = start.partition(b"\n")[0]
    if not first_line.startswith((b"{", b"[")) and not _TEXT_HEADER.search(first_line.strip()):
        return None
    head = start.decode(errors="replace").replace("\0", "")
    lines = head.splitlines()[:2]
    code = None
    if re.match(r'\[\s*\{\s*"', head):
        code = _code("read_json(path)", _record_text_column(head.removeprefix("[")))
    elif len(lines) > 1 and all(isinstance(parse_json_line(line), dict) for line in lines):
        code = _code("read_json(path, lines=True)", _record_text_column(head))
    elif _is_csv(head, len(data) > _HEAD_CHARACTERS):
        code = _csv_code(head, ",")
    return code


def _read_head(path: str) -> str:
    """Return the start of a file, or an empty string if it cannot be read."""
    try:
        if not Path(path).is_file():  # A pipe would block.
            return ""
        with Path(path).open("rb") as file:
            return file.read(_HEAD_CHARACTERS).decode("utf-8-sig", "replace").replace("\0", "")
    except OSError:
        return ""


def _find_separator(head: str, default: str) -> str:
    """Return the most frequent separator of the first line, or a default."""
    first_line = "".join(head.splitlines()[:1])
    separator = max(",;\t|", key=first_line.count)
    return separator if separator in first_line else default


def _is_csv(head: str, is_truncated: bool) -> bool:
    """Return whether a text has a header with a common name of a text column, and rows of the same length."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=_find_separator(head, ","))
    try:
        header = [cell.strip() for cell in next(reader, [])]
        if len(header) != len(set(header)) or not all(map(_COLUMN_NAME.fullmatch, header)):
            return False
        if len(header) == 1 or _TEXT_COLUMNS.isdisjoint(map(str.casefold, header)):
            return False
        rows = [row for row in reader if row]
    except csv.Error:
        return False
    rows = rows[:-1] if is_truncated else rows
    return len(rows) > 1 and all(len(row) == len(header) for row in rows)


def _csv_code(head: str, separator: str) -> str:
    separator = _find_separator(head, separator)
    columns = next(csv.reader(head.splitlines()[:1], delimiter=separator), [])
    reader = "read_csv(path)" if separator == "," else f"read_csv(path, sep={separator!r})"
    return _code(reader, _find_text_column(columns))


def _record_text_column(head: str) -> str:
    """Return the name of the text column in the first record of a JSON table."""
    try:
        record, _ = json.JSONDecoder().raw_decode(head.lstrip())
    except (ValueError, RecursionError):
        return "text"
    return _find_text_column(record if isinstance(record, dict) else ())


def _find_text_column(columns: Iterable[str]) -> str:
    return next((column for column in columns if column.strip().casefold() in _TEXT_COLUMNS), "text")


def parse_json_line(line: str | bytes) -> Any:
    """Decode a line of JSON, or return ``None`` if it is not valid."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _code(reader: str, column: str = "text") -> str:
    return f"pandas.{reader}[{column!r}]"
