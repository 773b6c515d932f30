"""Lines of JSON with a checksum, in files that a killed process may leave incomplete."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

# A longer line cannot be one of results. A sparse or foreign file must not fill the memory.
MAX_LINE_BYTES = 1 << 28


def to_json_line(value: Mapping[str, Any]) -> bytes:
    """Encode a value as a line of JSON."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def parse_json_line(line: str | bytes) -> Any:
    """Decode a line of JSON, or return ``None`` if it is not valid."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def append_checksum(line: bytes) -> bytes:
    """Return a line of JSON with the checksum of its contents added as the last value."""
    body = line.removesuffix(b"}\n")
    return body + b', "checksum": "%08x"}\n' % zlib.crc32(body)


def parse_checked_line(line: bytes) -> dict[str, Any]:
    """Return the value of a line that :func:`append_checksum` wrote, or an empty mapping for any other line."""
    value = parse_json_line(line)
    if not isinstance(value, dict):
        return {}
    value.pop("checksum", None)
    return value if append_checksum(to_json_line(value)) == line else {}
