"""Commands of the README."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def readme_command(name: str) -> str:
    """Return a command of the README by the comment in front of it."""
    found = re.search(rf"<!-- {name} -->\n```sh\n(.*)\n```", README.read_text("utf-8"))
    assert found, f"README.md has no {name}"
    return found.group(1)
