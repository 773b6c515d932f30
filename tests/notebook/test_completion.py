"""Tests of tab completion after magics, in a real kernel."""

import re

DEVICE_FLAGS = ["--explain", "--help", "--json", "--list", "--memory", "--reset", "--simulate"]
NER_FLAGS = ["--device", "--from", "--help", "--model", "--out", "--strategy"]
PANEL_FLAGS = ["--close", "--help", "--model"]

LINES = [
    ("%openmed_device ", DEVICE_FLAGS),
    ("%openmed_device cpu --li", ["--list"]),
    ("%openmed_device --json --", [flag for flag in DEVICE_FLAGS if flag != "--json"]),
    ("   %openmed_device ", DEVICE_FLAGS),
    ("a, b = %openmed_device --e", ["--explain"]),
    ("x = 1\nif x:\n    choice = %openmed_device ", DEVICE_FLAGS),
    ("%%openmed_ner --model bundled --", [flag for flag in NER_FLAGS if flag != "--model"]),
    ("%openmed_panel ", PANEL_FLAGS),
]


def test_completion_suggests_only_options_of_magic(kernel):
    assert [(code, sorted(kernel.complete(code))) for code, _ in LINES] == LINES


def test_completion_suggests_every_option_in_help(kernel):
    names = ("device", "doctor", "log", "panel", "release", "report", "sweep")
    for magic in (*(f"%openmed_{name}" for name in names), "%%openmed_ner"):
        documented = kernel.run(f"%{magic.lstrip('%')} --help").streams["stdout"]
        assert kernel.complete(f"{magic} -") == sorted(re.findall(r"^ +(?:-h, )?(--[a-z-]+)", documented, re.MULTILINE))


def test_completion_suggests_names_of_magics(kernel):
    assert kernel.complete("%openmed_d") == ["%openmed_device", "%openmed_doctor"]
    assert kernel.complete("%openmed_p") == ["%openmed_panel"]
    assert "%%openmed_ner" in kernel.complete("%%openmed_n")


OTHER_LINES = [
    "%time",
    "%openmed_devices ",
    "%timeit m",
    "x = %who_l",
    "import o",
    "m",
    "len",
    "x == %openmed_device m",
]


def test_completion_of_other_lines_is_unchanged(kernel):
    def complete_other_lines():
        return {code: [name for name in kernel.complete(code) if "openmed" not in name] for code in OTHER_LINES}

    with_extension = complete_other_lines()
    kernel.run("%unload_ext openmed_nb")

    assert with_extension == complete_other_lines()


def test_completion_of_out_suggests_no_options(kernel):
    assert not [name for name in kernel.complete("%%openmed_ner --out ") if name.startswith("--")]
