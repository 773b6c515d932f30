"""Tab behind the magics, asked of a real kernel."""

import re

DEVICES = ["auto", "cpu", "cuda", "gpu", "mps"]
DEVICE_FLAGS = ["--explain", "--help", "--json", "--list", "--memory", "--reset", "--simulate"]
NER_FLAGS = ["--device", "--from", "--help", "--model", "--out", "--strategy"]
PANEL_FLAGS = ["--close", "--help", "--model"]
STRATEGIES = ["average", "first", "max", "none", "simple"]

LINES = [
    ("%openmed_device ", DEVICES),
    ("%openmed_device m", ["mps"]),
    ("%openmed_device --", DEVICE_FLAGS),
    ("%openmed_device cpu ", DEVICE_FLAGS),
    ("%openmed_device --simulate ", ["mps", "off"]),
    ("%openmed_device --json --", [flag for flag in DEVICE_FLAGS if flag != "--json"]),
    ("   %openmed_device ", DEVICES),
    ("choice=%openmed_device m", ["mps"]),
    ("a, b = %openmed_device c", ["cpu", "cuda"]),
    ("x = 1\nif x:\n    choice = %openmed_device ", DEVICES),
    ("%%openmed_ner ", NER_FLAGS),
    ("%%openmed_ner --model bun", ["bundled", "bundled_small"]),
    ("%%openmed_ner --model disease_detection_t", ["disease_detection_tiny"]),
    ("%%openmed_ner --strategy ", STRATEGIES),
    ("%%openmed_ner --device ", DEVICES),
    ("%%openmed_ner --model bundled --", [flag for flag in NER_FLAGS if flag != "--model"]),
    ("%openmed_panel ", PANEL_FLAGS),
    ("%openmed_panel --model bundled --", ["--close", "--help"]),
    ("%openmed_doctor bundled_", ["bundled_small"]),
    ("%openmed_doctor --ops bundled_", ["bundled_small"]),
    ("%openmed_sweep bundled_", ["bundled_small"]),
    ("%openmed_sweep --device c", ["cpu", "cuda"]),
]


def test_values_and_flags_and_nothing_else(kernel):
    """Behind a magic of ours Tab offers its values and flags, and nothing beside them."""
    assert [(code, sorted(kernel.complete(code))) for code, _ in LINES] == LINES


def test_every_flag_that_is_understood_is_offered(kernel):
    """The flags that Tab offers are those that the help of the magic describes."""
    names = ("device", "doctor", "log", "panel", "release", "report", "sweep")
    for magic in (*(f"%openmed_{name}" for name in names), "%%openmed_ner"):
        described = kernel.run(f"%{magic.lstrip('%')} --help").streams["stdout"]
        assert kernel.complete(f"{magic} -") == sorted(re.findall(r"^ +(?:-h, )?(--[a-z-]+)", described, re.MULTILINE))


def test_models_are_the_bundled_ones_and_the_aliases(kernel):
    """Behind --model Tab offers the bundled models and the table of aliases."""
    offered = kernel.complete("%%openmed_ner --model ")

    assert {"bundled", "bundled_small", "disease_detection_tiny", "privacy_filter"} <= set(offered)
    assert not [name for name in offered if name.startswith(("%", "-")) or "/" in name]


def test_the_names_of_the_magics_complete(kernel):
    """Tab completes the names of the magics themselves."""
    assert kernel.complete("%openmed_d") == ["%openmed_device", "%openmed_doctor"]
    assert kernel.complete("%openmed_p") == ["%openmed_panel"]
    assert "%%openmed_ner" in kernel.complete("%%openmed_n")


OTHERS = ["%time", "%openmed_devices ", "%timeit m", "x = %who_l", "import o", "m", "len", "x == %openmed_device m"]


def test_other_lines_are_as_without_the_extension(kernel):
    """What Tab offers elsewhere is the same with and without the extension, but for our magics' names."""

    def offered():
        return {code: [one for one in kernel.complete(code) if "openmed" not in one] for code in OTHERS}

    with_extension = offered()
    kernel.run("%unload_ext openmed_nb")

    assert with_extension == offered()


def test_behind_out_a_name_is_free(kernel):
    """Behind --out, which takes a name, Tab offers variables and none of our flags."""
    offered = kernel.complete("%%openmed_ner --out ")

    assert not [name for name in offered if name.startswith("--")]
