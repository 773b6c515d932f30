"""Commands of the README."""

import re

from helpers import ROOT


def readme_command(name: str) -> str:
    """Return a command of the README by the comment in front of it."""
    found = re.search(rf"<!-- {name} -->\n```sh\n(.*)\n```", (ROOT / "README.md").read_text("utf-8"))
    assert found, f"README.md has no {name}"
    return found[1]
