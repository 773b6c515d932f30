"""``nb.handoff``: files and pins of a bundle, invalid arguments, and its smoke test with changes to the bundle."""

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import load_file

import openmed_nb as nb
from helpers import tiny_models as tiny
from helpers.logbooks import COMPLETE
from openmed_nb._render.display import FAILED, NOT_APPLICABLE, OK, WARNING
from openmed_nb.errors import ConfigurationError, ModelError, UntrustedModelError
from openmed_nb.models.files import hash_model_files
from openmed_nb.runbook.bench.timing import Disturbance
from openmed_nb.runbook.records import handoff as bundles
from openmed_nb.runbook.records.smoke import (
    EntitySpan,
    SmokeBenchmark,
    check_entities,
    check_memory,
    check_throughput,
    main,
    run_smoke_test,
)
from openmed_nb.training.curve import MemoryCurve, MemorySample

pytestmark = pytest.mark.real_computer

NOTE = "the patient has diabetes mellitus , says John Smith ."


def change(bundle, name, edit):
    """Change a JSON file of a bundle."""
    content = json.loads((bundle / name).read_text("utf-8"))
    edited = edit(content)
    (bundle / name).write_text(json.dumps(content if edited is None else edited), "utf-8")


@pytest.fixture(scope="module")
def keyword_handoff(tmp_path_factory, keyword_model):
    """Bundle of the keyword model. The throughput in its logbook is so low that load on the machine is not a regression."""
    folder = tmp_path_factory.mktemp("handoff") / "bundle"
    trace = tmp_path_factory.mktemp("profile") / "mine.json.gz"
    trace.write_bytes(b"a trace")
    handoff = nb.handoff(
        folder, keyword_model, ["the patient has diabetes"], owner="The <b>team", trace=trace, device="cpu"
    )

    def reduce_throughput(book):
        book["metrics"][-1]["values"]["texts_per_second"] *= 0.001

    change(folder, "logbook.json", reduce_throughput)
    return handoff


@pytest.fixture
def bundle(keyword_handoff, tmp_path):
    """Copy of that bundle in another directory."""
    return Path(shutil.copytree(keyword_handoff.folder, tmp_path / "copied"))


def test_readme_names_all_files_of_the_bundle(keyword_handoff):
    names = {name.partition("/")[0] for name in keyword_handoff.files}
    readme = (keyword_handoff.folder / "README.md").read_text("utf-8")

    assert names == {
        "README.md",
        "run.sh",
        "smoke.py",
        "golden.json",
        "logbook.json",
        "texts.json",
        "model",
        "openmed_nb",
        f"openmed_nb-{nb.__version__}.dist-info",
        "requirements.txt",
        "SHA256SUMS",
        "trace.json.gz",
        "openmed_nb.service",
        "openmed_nb.plist",
    }
    assert all(f"`{name}" in readme for name in names if not name.endswith("-info"))
    assert [item.name for item in keyword_handoff.folder.parent.iterdir()] == ["bundle"]
    assert (keyword_handoff.folder / "trace.json.gz").read_bytes() == b"a trace"
    assert keyword_handoff.golden.owner == "The <b>team"
    assert "golden command: The &lt;b&gt;team." in readme
    assert json.loads(json.dumps(keyword_handoff.to_dict()))["golden"]["copied"] is True


def test_bundle_contains_checksum_but_no_text_of_the_dataset(keyword_handoff):
    contents = [file.read_bytes() for file in keyword_handoff.folder.rglob("*") if file.is_file()]

    assert not any(b"the patient has diabetes" in content for content in contents)
    assert keyword_handoff.golden.dataset.items == 1
    assert keyword_handoff.golden.dataset.checksum in (keyword_handoff.folder / "README.md").read_text("utf-8")
    assert "synthetic" in str(keyword_handoff)


def test_requirements_pin_all_dependencies(keyword_handoff):
    lines = (keyword_handoff.folder / "requirements.txt").read_text("utf-8").splitlines()[1:]
    pins = dict(line.split("==") for line in lines)
    direct = [Requirement(text) for text in importlib.metadata.requires("openmed-nb")]
    names = [requirement.name for requirement in direct if requirement.marker is None]
    required = set(map(str.lower, names))
    readme = (keyword_handoff.folder / "README.md").read_text("utf-8")

    assert f"pip install -c requirements.txt {' '.join(names)}\n" in readme
    assert required | {"openmed-nb", "numpy"} <= pins.keys()
    assert pins["torch"] == importlib.metadata.version("torch").partition("+")[0]
    assert not [version for version in pins.values() if "+" in version]


def test_bundle_contains_the_running_package_and_its_license(keyword_handoff):
    package = Path(nb.__file__).parent
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    metadata_folder = f"openmed_nb-{nb.__version__}.dist-info"

    assert {name for name in keyword_handoff.files if name.startswith("openmed_nb/")} == {
        name for name in files if not name.endswith(".pyc")
    }
    assert {f"{metadata_folder}/METADATA", f"{metadata_folder}/licenses/LICENSE"} <= keyword_handoff.files.keys()


def test_handoff_copies_texts_and_omits_path_of_uncopied_model(tmp_path):
    model = tiny.save(tmp_path / "John `Smith` <b>", tiny.keyword_bert())
    (tmp_path / "bundle").mkdir()
    texts = [NOTE, None]
    handoff = nb.handoff(tmp_path / "bundle", model, texts, copy_dataset=True, copy_model=False, device="cpu")
    readme = (handoff.folder / "README.md").read_text("utf-8")

    assert json.loads((handoff.folder / "texts.json").read_text("utf-8")) == [NOTE]
    assert [len(entities) for entities in handoff.golden.entities] == [1]
    assert "contains the texts of the dataset" in readme
    assert "round, with the dataset" in str(handoff)
    assert "Smith" not in str(handoff) + handoff._repr_html_() + json.dumps(handoff.to_dict()["golden"]) + readme
    assert (handoff.golden.model, (handoff.folder / "model").exists()) == ("model", False)
    with pytest.raises(ConfigurationError, match="Copy its folder"):
        run_smoke_test(handoff.folder)
    copied_model = Path(shutil.copytree(model, handoff.folder / "model"))
    assert main(handoff.folder) == 0
    tiny.change_json(copied_model / "config.json", initializer_range=0.5)
    with pytest.raises(ConfigurationError, match="differ from the golden run"):
        run_smoke_test(handoff.folder)


def save_with_index(folder, shard):
    """Save the keyword model with an index that names one file for all weights, and move the weights to that file."""
    weights = tiny.save(folder, tiny.keyword_bert()) / "model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), shard)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / shard).parent.mkdir(exist_ok=True)
    weights.rename(folder / shard)
    return folder


def test_handoff_rejects_weights_outside_the_model_directory(tmp_path):
    model = save_with_index(tmp_path / "model", "../elsewhere.safetensors")

    with pytest.raises(UntrustedModelError):
        nb.handoff(tmp_path / "bundle", model, device="cpu")
    assert not (tmp_path / "bundle").exists()


def test_checksums_are_those_of_all_files_even_in_subdirectories(tmp_path):
    """An existing empty folder is not replaced, because it may be the working directory of a process."""
    model = save_with_index(tmp_path / "model", "parts/one.safetensors")
    (tmp_path / "target").mkdir()
    before = (tmp_path / "target").stat().st_ino
    (tmp_path / "bundle").symlink_to(tmp_path / "target", target_is_directory=True)
    handoff = nb.handoff(tmp_path / "bundle", model, device="cpu")
    lines = (handoff.folder / "SHA256SUMS").read_text("utf-8").splitlines()
    checksums = {name: checksum for checksum, name in (line.split("  ") for line in lines)}

    assert "model/parts/one.safetensors" in handoff.files
    assert checksums == {
        name: hashlib.sha256((handoff.folder / name).read_bytes()).hexdigest()
        for name in handoff.files
        if name != "SHA256SUMS"
    }
    assert main(handoff.folder) == 0
    assert (tmp_path / "target" / "run.sh").is_file()
    assert (tmp_path / "target").stat().st_ino == before


def test_handoff_rejects_unusable_folders_without_changes(tmp_path, keyword_model):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text(NOTE, "utf-8")
    file = tmp_path / "full" / "notes.txt"

    for folder in (tmp_path / "full", file, file / "bundle", None):
        with pytest.raises(ConfigurationError):
            nb.handoff(folder, keyword_model)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]
    assert file.read_text("utf-8") == NOTE


@pytest.mark.skipif(os.name == "nt", reason="Windows does not have these permissions")
def test_failed_handoff_leaves_no_files(tmp_path, monkeypatch, keyword_model):
    def fail(*_arguments):
        raise OSError

    monkeypatch.setattr(bundles, "file_digest", fail)
    with pytest.raises(ConfigurationError):
        nb.handoff(tmp_path / "new", keyword_model, device="cpu")

    assert list(tmp_path.iterdir()) == []


INVALID_ARGUMENTS = [
    {"model": torch.nn.Linear(1, 1)},
    {"dataset": NOTE},
    {"copy_dataset": True},
    {"dataset": [3]},
    {"owner": " "},
    {"owner": f"The team\n{NOTE}"},
    {"trace": "trace.json"},
    {"no_such_option": 1},
]


def test_invalid_arguments_raise_without_quoting_texts_or_writing_files(tmp_path):
    for arguments in INVALID_ARGUMENTS:
        with pytest.raises(ConfigurationError) as caught:
            nb.handoff(tmp_path / "bundle", **{"model": "bundled_small", "device": "cpu", **arguments})

        assert "Smith" not in str(caught.value), arguments
        assert list(tmp_path.iterdir()) == [], arguments
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    for swapped in (("bundled", "bundle"), ("bundle", [NOTE]), ([NOTE], "bundled"), (tmp_path / "model", "bundle")):
        with pytest.raises(ConfigurationError, match=r"a new folder.* the model"):
            nb.handoff(*swapped, device="cpu")


def test_handoff_rejects_pickles_even_if_loading_is_allowed(tmp_path, keyword_model):
    model = Path(shutil.copytree(keyword_model, tmp_path / "model"))
    weights = nb.load_model(str(keyword_model))["model"].state_dict()
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin")

    with pytest.raises(ConfigurationError):
        nb.handoff(tmp_path / "bundle", model, device="cpu", allow_pickle=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


ENTITY = EntitySpan(0, 6, "DISEASE")


def make_curve(*mebibytes):
    samples = (MemorySample(n, n, 1.0, allocated=size << 20) for n, size in enumerate(mebibytes, 1))
    return MemoryCurve("cpu", tuple(samples))


BENCHMARK = SmokeBenchmark("cpu", (90.0, 100.0), make_curve(*[100] * 7))


def test_smoke_test_of_copied_bundle_passes(bundle, capsys):
    status = main(bundle)
    printed = capsys.readouterr().out

    assert (status, printed.splitlines()[0]) == (0, "Smoke test passed"), printed
    assert re.findall(r"^  (device|entities|memory|throughput)\b", printed, flags=re.MULTILINE) == [
        *("device", "entities", "memory", "throughput")
    ]


def test_smoke_test_rejects_unloadable_model(bundle):
    (bundle / "model" / "model.safetensors").write_bytes(b"no weights")
    hashes = hash_model_files(bundle / "model")
    change(bundle, "golden.json", lambda golden: golden["model_hashes"].update(vars(hashes)))

    with pytest.raises(ModelError):
        run_smoke_test(bundle)


def test_smoke_test_fails_for_other_entities(bundle, capsys):
    change(bundle, "golden.json", lambda golden: golden["entities"][0].append({"start": 0, "end": 1, "label": "X"}))

    assert main(bundle) == 1
    assert capsys.readouterr().out.startswith("Smoke test failed: entities\n")


def test_smoke_test_detects_memory_leak_and_unavailable_device(bundle):
    change(bundle, "golden.json", lambda golden: golden.update(device="cuda:99"))
    leaked = []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda _module, _inputs, _output: leaked.append(torch.zeros(1 << 14))
    )
    try:
        findings = run_smoke_test(bundle)
    finally:
        hook.remove()
    device = next(finding for finding in findings if finding.name == "device")

    assert leaked
    assert [finding.name for finding in findings if finding.status == FAILED] == ["memory"]
    assert (device.status, "cuda:99" in device.evidence) == (WARNING, True)


CORRUPTIONS = {
    "no golden run": ("golden.json", lambda _golden: {"schema": "openmed_nb/golden/1"}),
    "no logbook": ("logbook.json", lambda _book: {}),
}


@pytest.mark.parametrize(("name", "edit"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_main_reports_corrupt_files(bundle, capsys, name, edit):
    change(bundle, name, edit)

    assert main(bundle) == 1
    assert name in capsys.readouterr().err


OTHER = EntitySpan(8, 9, "DISEASE")
# Entities of two texts in a golden run with two entities in the first text.
ENTITIES = {
    "same in another order": (((OTHER, ENTITY), ()), "the same 2 entities in 2 texts"),
    "missing": (((ENTITY,), ()), "1 text (0): 1 missing, 0 additional"),
    "other boundary": (((EntitySpan(0, 5, "DISEASE"), OTHER), ()), "1 text (0): 1 missing, 1 additional"),
    "additional": (((ENTITY, OTHER), (ENTITY,)), "1 text (1): 0 missing, 1 additional"),
}


@pytest.mark.parametrize(("entities", "evidence"), ENTITIES.values(), ids=ENTITIES)
def test_check_entities_requires_equal_entities(entities, evidence):
    finding = check_entities(((ENTITY, OTHER), ()), entities)

    assert evidence in finding.evidence
    assert finding.status == (OK if "same" in evidence else FAILED)


CURVES = {
    "stable": (make_curve(*[100] * 7), OK),
    "leak": (make_curve(*range(100, 170, 10)), FAILED),
    "sawtooth": (make_curve(100, 100, 180, 100, 180, 100, 100), WARNING),
}


@pytest.mark.parametrize(("memory", "status"), CURVES.values(), ids=CURVES)
def test_check_memory_requires_stable_memory(memory, status):
    assert check_memory(memory).status == status


# Logbook without metrics.
BOOK = replace(COMPLETE, hardware=replace(COMPLETE.hardware, device="cpu"), metrics=())


@pytest.mark.parametrize(
    ("golden_disturbance", "rate", "disturbance", "status"),
    [
        (None, 80.0, None, OK),
        (None, 70.0, None, FAILED),
        (Disturbance("busy"), 80.0, None, WARNING),
        (None, 70.0, Disturbance("hot"), WARNING),
    ],
)
def test_check_throughput_requires_undisturbed_runs(golden_disturbance, rate, disturbance, status):
    golden = BOOK.with_reports(replace(BENCHMARK, disturbance=golden_disturbance))
    benchmark = replace(BENCHMARK, texts_per_second=(rate,), disturbance=disturbance)
    finding = check_throughput(golden, BOOK.with_reports(benchmark))

    assert (finding.status, "not checked" in finding.evidence) == (status, status == WARNING)


def test_check_throughput_requires_comparable_logbooks():
    battery = replace(BOOK, conditions=replace(BOOK.conditions, power_source="battery"))
    finding = check_throughput(BOOK.with_reports(BENCHMARK), battery.with_reports(BENCHMARK))

    assert (finding.status, "power_source" in finding.evidence) == (NOT_APPLICABLE, True)


NO_NETWORK = """
import socket
def fail(*_arguments, **_named):
    raise OSError("the network is disabled")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = fail
"""


@pytest.mark.slow
def test_smoke_script_passes_in_a_new_environment(tmp_path, bundle):
    """The script imports the package of the bundle, which is not installed. The other packages are those of this environment."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(venv), "platbase": str(venv)}))
    (site / "outside.pth").write_text(sysconfig.get_path("purelib"), "utf-8")
    (site / "no_network.py").write_text(NO_NETWORK, "utf-8")
    (site / "no_network.pth").write_text("import no_network", "utf-8")
    removed_prefixes = ("PYTHON", "OPENMED", "HF_", "TRANSFORMERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(removed_prefixes)}
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    command = [str(python), str(bundle / "smoke.py")]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.startswith("Smoke test passed")
    assert (bundle / "openmed_nb" / "__pycache__").is_dir()
