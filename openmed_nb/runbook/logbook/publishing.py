"""The published JSON Schema of logbooks, made from the dataclasses; the file beside this one holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .logbook import SCHEMA, Logbook
from .plain_values import schema_of

SCHEMA_FILE = Path(__file__).with_name("logbook.schema.json")


def logbook_schema() -> dict[str, Any]:
    """Return the schema, in the 2020-12 draft of JSON Schema.

    Example:
        >>> logbook_schema()["additionalProperties"]
        False
    """
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{SCHEMA.replace('/', ':')}",
        "title": "A logbook of openmed_nb",
        "description": "What figures were measured with. No text of a note, no secret and no name of a file is in it.",
    }
    return {**head, **schema_of(Logbook)}


def schema_text() -> str:
    """Return the schema as it stands in its file."""
    return json.dumps(logbook_schema(), indent=2, ensure_ascii=False) + "\n"
