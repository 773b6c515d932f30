"""What the README tells a person to type works as it stands there."""

import pkgutil
import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def cells():
    """Return the cells that the README shows, in their order."""
    start = README.index("<!-- cells -->")
    return re.findall(r"```\n(.*?)\n```", README[start : README.index("More of `%openmed_device`")], flags=re.DOTALL)


def test_cells_of_the_readme(kernel):
    """Each cell of the README runs in a kernel without an error, and the results are those that it promises."""
    replies = [kernel.run(cell) for cell in cells()]

    assert [reply.error[0] for reply in replies] == [""] * 5
    assert replies[1].text.startswith("Device: cpu")
    assert "[type 2 diabetes mellitus](DISEASE)" in replies[2].text
    assert "[asthma](DISEASE)" in replies[4].text


def test_lines_of_the_readme(kernel):
    """Each line of the README's table runs in a kernel without an error."""
    lines = re.findall(r"^\| `(%openmed_device [^`]*)` \|", README, flags=re.MULTILINE)

    assert len(lines) == 5
    for line in (*lines, "%openmed_device --help", "%openmed_ner --help"):
        assert kernel.run(line).status == "ok", line


def test_python_of_the_readme_names_what_there_is():
    """Every name that the README uses from the package is public."""
    import openmed_nb

    names = set(re.findall(r"\bnb\.((?:training\.|runbook\.|compat\.|loader\.)*\w+)", README))

    assert all(pkgutil.resolve_name(f"openmed_nb.{name}") is not None for name in names)
    assert not {name.partition(".")[0] for name in names} - set(openmed_nb.__all__)
    assert {"device", "use", "load_pipeline", "compat.ModelLoader", "OpenMedConfig"} <= names
