"""Write the JSON Schemas of logbooks and reports, in the 2020-12 draft, from their dataclasses and the docstrings of these.

    python scripts/write_schemas.py

Tests compare ``openmed_nb/runbook/records/logbook.schema.json`` and ``openmed_nb/runbook/records/report.schema.json`` with what
this would write.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from openmed_nb._utils.plain import Pattern, field_types
from openmed_nb.runbook.records import logbook, report
from openmed_nb.runbook.records.logbook import SCHEMA_FILE as LOGBOOK_FILE
from openmed_nb.runbook.records.report import SCHEMA_FILE as REPORT_FILE
from openmed_nb.runbook.records.report import DeviceReport

# The names of plain types in JSON Schema.
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(kind: Any) -> dict[str, Any]:
    """Return the schema of a type that ``openmed_nb._utils.plain`` reads."""
    if is_dataclass(kind):
        return schema_of_dataclass(kind)
    origin, kinds = get_origin(kind), get_args(kind)
    if kind is Any:
        return {}
    if origin is Literal:
        return {"enum": list(kinds)}
    inner = schema_of(kinds[origin is dict]) if kinds else {"type": TYPES[kind]}
    if origin in {types.UnionType, Union}:
        return {"anyOf": [inner, {"type": "null"}]}
    if origin is Annotated:
        rule = kinds[1]
        return inner | ({"pattern": rule.expression} if isinstance(rule, Pattern) else {"minimum": rule.number})
    containers = {tuple: {"type": "array", "items": inner}, dict: {"type": "object", "additionalProperties": inner}}
    return containers.get(origin, inner)


def schema_of_dataclass(kind: Any) -> dict[str, Any]:
    """Return the schema of a dataclass: every field is needed, and no other may be there."""
    described = descriptions(kind)
    hints = field_types(kind)  # Including class variables.
    properties = {field.name: schema_of(hints[field.name]) for field in fields(kind)}
    for name in properties.keys() & described.keys():
        properties[name]["description"] = described[name]
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of attributes in the docstring of a class, without code markup."""
    listed = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.split(r"^    (\w+): ", listed, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.replace("``", "").split()) for name, text in zip(found[::2], found[1::2], strict=True)}


def published(kind: type, schema: str, title: str, description: str) -> str:
    """Return the content of a schema file."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{schema.replace('/', ':')}",
        "title": title,
        "description": description,
    }
    return json.dumps({**head, **schema_of(kind)}, indent=2, ensure_ascii=False) + "\n"


def logbook_schema() -> str:
    """Return the schema of a logbook."""
    what = "What figures were measured with. No text of a note, no secret and no name of a file is in it."
    return published(logbook.Logbook, logbook.SCHEMA, "A logbook of openmed_nb", what)


def report_schema() -> str:
    """Return the schema of a report."""
    what = "What nb.report() measured on a computer. No text of a note, no name of a person or a computer, and no home is in it."
    return published(DeviceReport, report.SCHEMA, "A report of openmed_nb", what)


if __name__ == "__main__":
    LOGBOOK_FILE.write_text(logbook_schema(), "utf-8")
    REPORT_FILE.write_text(report_schema(), "utf-8")
